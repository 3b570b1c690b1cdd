"""Errors, quantities and names that every layer shares. Imports no torch."""
