"""The order of a step on paper: the weights in each slot, and a list of all operations."""
