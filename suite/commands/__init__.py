"""One module per `mlhpc` command: the thin edge that touches files, clocks, environment and the terminal."""
