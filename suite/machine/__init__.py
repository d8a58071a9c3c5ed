"""What a machine is and consumes: facts of its nodes, its description as a system, its energy counters."""
