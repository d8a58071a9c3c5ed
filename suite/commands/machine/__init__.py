"""The commands that look at a machine: what it is, what it can do, where a step's time goes."""
