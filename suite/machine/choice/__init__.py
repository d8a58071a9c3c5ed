"""What is fastest on this machine: measured before a run, kept for the next one, the same on all ranks, logged."""
