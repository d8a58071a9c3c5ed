"""Keeps the weights, gradients and states of experts in the host's memory or in files (docs/offload.md).

A layer's experts are loaded when its router has chosen them. `mlhpc offload simulate` compares policies of caches.
"""

USES = (
    "mlhpc.suite.cli.group",
    "mlhpc.suite.cli.options",
    "mlhpc.suite.config",
    "mlhpc.suite.data.lock",
    "mlhpc.suite.documents",
    "mlhpc.suite.errors",
    "mlhpc.suite.files",
    "mlhpc.suite.log.mllog",
    "mlhpc.suite.log.reader",
    "mlhpc.suite.training.devices",
    "mlhpc.suite.training.parallel.layout",
    "mlhpc.suite.training.parallel.meta_init",
    "mlhpc.suite.workload",
    "mlhpc.suite.world",
    "mlhpc.workloads.moe.config",
    "mlhpc.workloads.moe.layer",
    "mlhpc.workloads.moe.router",
)
