"""A against B in interleaved blocks: steps of two plans or settings in one job, or whole runs of several configurations."""
