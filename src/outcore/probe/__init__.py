"""How fast this machine is: measured in seconds, kept, and read by whoever plans."""
