"""What no legal order of a step beats."""
