"""Compares what a step asks of each resource with what the machine gives, and derives bounds on its time."""
