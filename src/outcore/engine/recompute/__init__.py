"""Recompute: arguments, random numbers, attributes and modes as forward saw them, and checks that results agree."""
