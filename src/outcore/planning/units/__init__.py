"""Cutting a model into units. Looks at structure alone."""
