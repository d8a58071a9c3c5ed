"""Says whether a difference between two systems is rounding or a fault, and what a change of the deployment costs.

`mlhpc numerics reproduce` judges one training step against float64; `mlhpc numerics deploy` evaluates trained models
(docs/numerics.md).
"""

USES = (
    "mlhpc.analysis.drawing.charts",
    "mlhpc.analysis.drawing.view",
    "mlhpc.analysis.study",
    "mlhpc.suite.cli.group",
    "mlhpc.suite.cli.options",
    "mlhpc.suite.config",
    "mlhpc.suite.data.build",
    "mlhpc.suite.data.manifest",
    "mlhpc.suite.descriptor",
    "mlhpc.suite.documents",
    "mlhpc.suite.errors",
    "mlhpc.suite.exit_codes",
    "mlhpc.suite.files",
    "mlhpc.suite.launch.command_on_ranks",
    "mlhpc.suite.launcher",
    "mlhpc.suite.log.run_folder",
    "mlhpc.suite.log.score",
    "mlhpc.suite.machine.choice.layout",
    "mlhpc.suite.statistics.comparison",
    "mlhpc.suite.statistics.sessions",
    "mlhpc.suite.training.agreement",
    "mlhpc.suite.training.checkpoint",
    "mlhpc.suite.training.devices",
    "mlhpc.suite.training.loop",
    "mlhpc.suite.training.parallel.ddp",
    "mlhpc.suite.training.parallel.recompute",
    "mlhpc.suite.training.state",
    "mlhpc.suite.training.statement",
    "mlhpc.suite.workload",
    "mlhpc.suite.world",
)
