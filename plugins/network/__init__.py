"""Wing: fits a machine's links to all-to-all sweeps and predicts more ranks (docs/network.md).

`mlhpc moe fit` prints the fits. A report with a sweep among its paths has four figures of them.
"""

USES = (
    "mlhpc.analysis.drawing.charts",
    "mlhpc.analysis.drawing.view",
    "mlhpc.analysis.study",
    "mlhpc.suite.cli.options",
    "mlhpc.suite.errors",
    "mlhpc.suite.files",
    "mlhpc.suite.log.reader",
    "mlhpc.suite.performance.cost_model",
)
