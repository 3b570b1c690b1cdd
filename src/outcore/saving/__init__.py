"""Weights in and out: first values from a checkpoint or an initialiser, export in Hugging Face's format, one tensor at a time."""
