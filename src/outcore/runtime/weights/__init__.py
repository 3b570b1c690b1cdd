"""Weights: brought to compute in time, and taken away again."""
