"""Power and energy of a node: its counters, and a process that samples them beside a run."""
