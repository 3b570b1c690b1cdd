"""Files that outlive a run: weights and checkpoints, written durably under locks that a killed process cannot keep."""
