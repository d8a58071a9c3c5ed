"""The wing `dispatch`: `mlhpc dispatch` measures how long a computation must be, so that a controller does not slow it.

Controllers are our own on rank 0, Ray and Monarch (docs/dispatch.md). A report draws what was measured.
"""

USES = (
    "mlhpc.analysis.drawing.charts",
    "mlhpc.analysis.drawing.view",
    "mlhpc.analysis.figures.time_split",
    "mlhpc.analysis.study",
    "mlhpc.plugins.network.fit",
    "mlhpc.plugins.network.intervals",
    "mlhpc.suite.cli.options",
    "mlhpc.suite.documents",
    "mlhpc.suite.errors",
    "mlhpc.suite.exit_codes",
    "mlhpc.suite.files",
    "mlhpc.suite.launch.command_on_ranks",
    "mlhpc.suite.launcher",
    "mlhpc.suite.machine.probes.allowance",
    "mlhpc.suite.machine.probes.processor",
    "mlhpc.suite.plugins",
    "mlhpc.suite.statistics.sessions",
    "mlhpc.suite.world",
)
