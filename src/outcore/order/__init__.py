"""The order of a step: what is submitted, and after what. Runs and schedules share this code."""
