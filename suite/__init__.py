"""The harness: runs any workload, logs it, packages it, judges it. It knows no workload by name."""

from __future__ import annotations

VERSION = "1.0.0.dev0"
RULESET = "mlhpc-1.0"
REDACTED = "REDACTED"  # stands in a package for words that are nobody's business
LAUNCH = "MLHPC_LAUNCH"  # environment variable: the token of the `mlhpc run` that started this process
