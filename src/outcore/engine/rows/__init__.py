"""A batch in pieces: units and what is outside of them run its rows a few at a time."""
