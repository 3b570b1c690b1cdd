"""outcore inside other libraries' training loops."""
