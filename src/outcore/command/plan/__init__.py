"""``outcore plan``: questions, answers, and how they are shown."""
