"""Weights in and out, one tensor at a time: first values from a checkpoint or an initialiser, export."""
