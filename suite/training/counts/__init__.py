"""What torch code computes and holds, counted while it runs: FLOPs and bytes. Imports nothing of the suite."""
