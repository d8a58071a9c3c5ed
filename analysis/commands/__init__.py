"""One module per `mlhpc` command of the analysis."""
