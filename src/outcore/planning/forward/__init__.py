"""A forward followed on shapes alone: what its calls save, and what a step has alive."""
