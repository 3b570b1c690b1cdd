"""Recompute: puts back arguments, random numbers, attributes and modes of forward, and checks that results agree."""
