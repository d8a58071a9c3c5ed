"""Builds results packages, in the MLPerf HPC tree, from run folders. Logs are copied and never edited."""
