"""Results packages: the MLPerf HPC tree built from run folders. It reads what runs left and never edits a log."""
