"""`python -m suite` is `mlhpc`."""

import sys
from pathlib import Path

if not sys.flags.safe_path and sys.path[:1] == [str(Path.cwd())]:
    del sys.path[0]  # put there by -m: a user's folder workloads/ or analysis/ is not ours

from suite.cli.main import main

main()
