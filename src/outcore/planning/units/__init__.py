"""Cutting a model into units, and what their forwards save. Looks at structure and shapes alone."""
