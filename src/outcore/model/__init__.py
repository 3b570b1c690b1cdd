"""Cutting a model into units, by its structure alone."""
