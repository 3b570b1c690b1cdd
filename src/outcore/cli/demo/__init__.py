"""``outcore demo``: the plain loop, the streamed one, and what sizes they have."""
