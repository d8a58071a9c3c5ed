"""Power and energy of a node: its counters, a process that samples them beside a run, files of other meters."""
