"""What a run trains on: from files or the hub to checked rows."""
