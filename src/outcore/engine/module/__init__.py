"""Blocks inside autograd: how they are called, kept or recomputed, and walked in backward."""
