"""Updates of parameters: after backward, inside it, on host and device."""
