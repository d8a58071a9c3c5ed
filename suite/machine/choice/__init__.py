"""Chooses what is fastest on this machine: measured before a run, cached, the same on all ranks, logged."""
