"""What a recompute needs: arguments, random numbers, attributes and modes of its forward, and whether it repeats it."""
