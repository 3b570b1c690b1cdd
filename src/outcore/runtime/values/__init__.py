"""Single values, wherever they live: read, written, edited by the user."""
