"""Measures power and energy of a node: its counters, and a process that samples them during a run."""
