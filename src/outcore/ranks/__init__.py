"""Processes that train one model together: who they are, what they agree on, how bytes go between them."""
