"""A person's own training loop as a run: `mlhpc.Run`, its run folder, its epochs and steps."""
