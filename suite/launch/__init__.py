"""Starts trials: `local` runs mpiexec on this machine, `slurm` renders a script for sbatch. Nothing here trains."""
