"""Describes the machine: facts of its nodes, probes, the system's description, energy counters, page caches."""
