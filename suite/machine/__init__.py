"""The machine: facts of its nodes and the probes for them, its description as a system, energy counters, page caches."""
