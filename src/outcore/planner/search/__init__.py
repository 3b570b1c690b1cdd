"""The search for the plan with the shortest step."""
