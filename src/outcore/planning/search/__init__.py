"""Finding the plan whose step is the shortest."""
