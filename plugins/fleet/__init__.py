"""The wing `fleet`: `mlhpc preflight` measures the nodes of a job and names those that are slow or compute wrong.

It also finds workers that become slower, and says which checks before a job pay (docs/fleet.md).
"""

USES = (
    "mlhpc.analysis.drawing.view",
    "mlhpc.suite.cli.group",
    "mlhpc.suite.cli.options",
    "mlhpc.suite.config",
    "mlhpc.suite.descriptor",
    "mlhpc.suite.documents",
    "mlhpc.suite.errors",
    "mlhpc.suite.exit_codes",
    "mlhpc.suite.files",
    "mlhpc.suite.launch.command_on_ranks",
    "mlhpc.suite.launcher",
    "mlhpc.suite.log.reader",
    "mlhpc.suite.machine.facts",
    "mlhpc.suite.machine.probes.allowance",
    "mlhpc.suite.machine.probes.processor",
    "mlhpc.suite.node_list",
    "mlhpc.suite.performance.ceilings.collectives",
    "mlhpc.suite.performance.ceilings.compute",
    "mlhpc.suite.performance.ceilings_file",
    "mlhpc.suite.performance.ceilings.memory",
    "mlhpc.suite.performance.ceilings.samples",
    "mlhpc.suite.performance.ceilings.sizes",
    "mlhpc.suite.performance.ceilings.storage",
    "mlhpc.suite.training.devices",
    "mlhpc.suite.workload",
    "mlhpc.suite.world",
    "mlhpc.suite.statistics.power",
)
