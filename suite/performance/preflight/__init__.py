"""Measures the nodes of an allocation before a job: each node alone, then the links between them. docs/fleet.md describes it."""
