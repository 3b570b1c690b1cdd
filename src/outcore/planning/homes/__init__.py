"""What a plan takes on each tier: homes, slots, room for second homes, and whether it can be obeyed."""
