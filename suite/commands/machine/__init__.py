"""The commands about a machine: what it has, how fast it is, where a step's time goes."""
