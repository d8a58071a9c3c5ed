"""Holds the public MLPerf HPC rounds: scores recomputed from the logs, and minutes stated elsewhere."""
