"""Implements the command line `mlhpc`."""
