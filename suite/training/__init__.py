"""One trial: worker process, data, training loop, checkpoints, and what a rank measures of itself."""
