"""Axes whose ranks share samples (spatial, axial, tensor, pipeline), and the compression of gradients.

`mlhpc plan` predicts what any plan costs, by a dry run of a step. The core applies plans and finds the axes by entry
points.
"""

USES = (
    "mlhpc.plugins.offload.measure",
    "mlhpc.suite.cli.options",
    "mlhpc.suite.cli.progress",
    "mlhpc.suite.config",
    "mlhpc.suite.data.sampling",
    "mlhpc.suite.descriptor",
    "mlhpc.suite.documents",
    "mlhpc.suite.errors",
    "mlhpc.suite.exit_codes",
    "mlhpc.suite.files",
    "mlhpc.suite.performance.ceilings_file",
    "mlhpc.suite.performance.cost_model",
    "mlhpc.suite.plugins",
    "mlhpc.suite.training.batch_loading",
    "mlhpc.suite.training.counts.flops",
    "mlhpc.suite.training.counts.memory",
    "mlhpc.suite.training.instrument",
    "mlhpc.suite.training.loop",
    "mlhpc.suite.training.parallel.apply",
    "mlhpc.suite.training.parallel.batch_norm",
    "mlhpc.suite.training.parallel.clipping",
    "mlhpc.suite.training.parallel.ddp",
    "mlhpc.suite.training.parallel.exchange",
    "mlhpc.suite.training.parallel.fsdp",
    "mlhpc.suite.training.parallel.layout",
    "mlhpc.suite.training.parallel.mesh",
    "mlhpc.suite.training.parallel.meta_init",
    "mlhpc.suite.training.parallel.parallel_dims",
    "mlhpc.suite.training.parallel.plan",
    "mlhpc.suite.training.parallel.recompute",
    "mlhpc.suite.workload",
)
