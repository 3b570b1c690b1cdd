"""The page of a plan: one file that a browser shows without a network."""
