"""Single parameters and states on any tier: reading, writing, first values, and edits by the user."""
