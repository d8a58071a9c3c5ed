"""Starts trials: `local` runs mpiexec on this machine, `script` renders a job script for a scheduler. Nothing here trains."""
