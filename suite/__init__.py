"""The harness: runs any workload, logs it, packages it, judges it. It knows no workload by name."""

VERSION = "1.0.0.dev0"
RULESET = "mlhpc-1.0"
LAUNCH = "MLHPC_LAUNCH"  # environment variable: the token of the `mlhpc run` that started this process
