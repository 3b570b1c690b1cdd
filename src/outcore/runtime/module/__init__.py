"""A block inside autograd: called, recomputed or kept, and walked in backward."""
