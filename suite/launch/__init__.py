"""How a trial is started: `local` by mpiexec on this machine, `slurm` by a script that sbatch takes. Neither trains."""
