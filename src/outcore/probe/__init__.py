"""How fast this machine is. Measuring takes seconds; the result is kept, and the planner reads it."""
