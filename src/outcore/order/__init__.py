"""The order of a step: what is submitted, and after what. Written once, for the run and for the schedule."""
