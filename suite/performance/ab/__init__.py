"""Compares A with B in interleaved blocks: steps of two sides in one job, or whole runs of several configurations."""
