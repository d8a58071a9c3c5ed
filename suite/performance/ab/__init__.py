"""Compares A with B in interleaved blocks. Blocks are steps of two sides in one job, or whole runs."""
