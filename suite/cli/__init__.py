"""The command line `mlhpc`."""
