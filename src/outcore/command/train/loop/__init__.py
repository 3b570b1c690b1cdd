"""What a run does while it trains: its Trainers, when they save and stop, and what they do with nonfinite steps."""
