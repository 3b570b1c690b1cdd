"""What runs: lanes, units, gradients, updates."""
