"""What ``prepare`` does before a run: arguments, ranks, forecast, choice of a plan."""
