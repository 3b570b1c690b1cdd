"""Processes that train one model together: their groups, what they must agree on, and how bytes go between them."""
