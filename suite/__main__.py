"""`python -m suite` is `mlhpc`."""

from suite.cli import main

main()
