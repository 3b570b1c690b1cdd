"""Gradients: collected in backward, sent home, and looked at through handles."""
