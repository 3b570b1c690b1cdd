"""Everything of a run in one checkpoint, beside training: written, found, loaded, exported."""
