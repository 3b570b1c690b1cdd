"""The order of a step on paper: which weights stand where, and every operation in a row."""
