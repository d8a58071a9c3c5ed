"""Makes a person's own training loop a run: `mlhpc.Run`, its run folder, its epochs and steps."""
