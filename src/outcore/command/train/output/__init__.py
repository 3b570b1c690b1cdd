"""What a run writes and says."""
