"""The harness: runs any workload, logs it, packages it, judges it. It knows no workload by name."""

from __future__ import annotations

import time

FIRST_LINE_S = time.perf_counter()  # when this process came to the suite: what it took before is the interpreter's
VERSION = "1.0.0.dev0"
RULESET = "mlhpc-1.0"
REDACTED = "REDACTED"  # stands in a package for words that are nobody's business
NO_SUBMITTER = "unknown"  # submission_org of a run whose submitter nobody stated
LAUNCH = "MLHPC_LAUNCH"  # environment variable: the token of the `mlhpc run` that started this process
LARGEST_NUMBER = 1e100  # of what comes in: a product with a unit or another number is finite too
MOST_RUNS = 10_000  # of one run folder; a command looks at some files of each
