"""The bound of a step: the seconds that no legal order of its operations beats."""
