"""Decisions made before the run: pure functions from specs to specs. No device, no disk, no clock."""
