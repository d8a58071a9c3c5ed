"""Counts FLOPs and bytes of torch code while it runs. Imports nothing of the suite."""
