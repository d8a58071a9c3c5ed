"""Rooflines: what a step asks of each resource, what the machine gives, and what follows."""
