"""Checkpoints of a whole run: written beside training, found, loaded, exported."""
