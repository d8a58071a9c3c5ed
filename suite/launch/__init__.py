"""Starts trials: `local` runs mpiexec here, `script` renders a job script for a scheduler. Nothing here trains."""
