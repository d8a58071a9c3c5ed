"""Measures the nodes of an allocation before a job: each node alone, then the links (docs/fleet.md)."""
