"""What a plan takes on each tier: homes, slots and second homes; and whether it can be obeyed."""
