"""Parity: whatever the plan, training ends in the bits of the plain loop."""
