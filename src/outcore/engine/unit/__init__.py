"""A unit at run time, the memory of a run, and the port that carries out operations."""
