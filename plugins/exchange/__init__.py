"""Writes and reads what other tools have.

It writes series for MLflow, TensorBoard and Prometheus, a data set as Croissant, a package as RO-Crate. It reads CSV of
power meters and of profilers. The core finds each by its entry point in the group ``mlhpc.exports``.
"""

USES = (
    "mlhpc.suite.cli.options",
    "mlhpc.suite.data.shards",
    "mlhpc.suite.data.manifest",
    "mlhpc.suite.descriptor",
    "mlhpc.suite.documents",
    "mlhpc.suite.errors",
    "mlhpc.suite.files",
    "mlhpc.suite.log.energy.power_log",
    "mlhpc.suite.log.mllog",
    "mlhpc.suite.log.reader",
    "mlhpc.suite.log.record",
    "mlhpc.suite.log.results_tree",
    "mlhpc.suite.machine.facts",
    "mlhpc.suite.performance.ceilings_file",
)
