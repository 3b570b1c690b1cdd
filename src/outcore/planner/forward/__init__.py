"""A forward followed on shapes alone: what its calls save, and what is alive during a step."""
