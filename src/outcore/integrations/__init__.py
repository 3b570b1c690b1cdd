"""Runs outcore inside the training loops of other libraries."""
