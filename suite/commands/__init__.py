"""One module per `mlhpc` command: argument parsing and output. Arithmetic belongs to the other rooms."""
