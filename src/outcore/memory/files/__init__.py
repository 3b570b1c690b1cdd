"""Files that outlive a run: weights and checkpoints, written durably, under locks that end with their process."""
