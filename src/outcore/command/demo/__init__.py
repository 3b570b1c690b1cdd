"""``outcore demo``: the plain loop, the streamed one, and the sizes of their model."""
