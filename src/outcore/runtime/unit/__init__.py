"""A unit at run time, the memory of a run, and what all trades share."""
