"""Lists the commands of `mlhpc`, in the order of its first page. To add one, write its module and an entry here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command. ``entry`` names what to import for it, as ``module:function``.

    ``summary`` is the first sentence of its docstring (a test compares): `mlhpc --help` imports no command. A command
    of a ``wing`` has no ``entry`` here: it is found by its entry point.
    """

    name: str
    entry: str
    summary: str
    wing: str = ""


# Only texts: with imports the first page would wait for every command's libraries.
SECTIONS: dict[str, tuple[Command, ...]] = {
    "Run": (
        Command(
            "demo",
            "mlhpc.suite.commands.demo:demo",
            "Run a benchmark end to end on this machine, from making data to a report",
        ),
        Command(
            "doctor",
            "mlhpc.suite.commands.machine.doctor:doctor",
            "Check this machine for local, multi-node and Slurm runs; say what is missing and how to get it",
        ),
        Command(
            "workload",
            "mlhpc.suite.commands.workload:workload",
            "List workloads with sizes and targets, or create one of your own",
        ),
        Command("data", "mlhpc.suite.commands.data:data", "Generate, convert and check data sets"),
        Command(
            "run",
            "mlhpc.suite.commands.run:run",
            "Train a workload to its target, N times, and write a log of each run",
        ),
        Command(
            "submit",
            "mlhpc.suite.commands.submit:submit",
            "Submit runs of a workload to a scheduler: one job and one run folder per node count",
        ),
        Command(
            "plan",
            "",
            "Predict memory, messages and time of a step under a parallel plan; check that the plan is valid",
            wing="axes",
        ),
        Command(
            "status",
            "mlhpc.suite.commands.status:status",
            "Show state, epoch, last evaluation and time left of runs; with --goodput, where their time went",
        ),
    ),
    "Judge": (
        Command(
            "package", "mlhpc.suite.commands.package:package", "Build a submitter's results package from run folders"
        ),
        Command(
            "check",
            "mlhpc.suite.commands.check:check",
            "Check logs, packages or a whole round against the rules, and list what breaks them",
        ),
        Command(
            "score",
            "mlhpc.suite.commands.score:score",
            "Compute scores by the MLPerf HPC rules: olympic mean of time to train, or throughput of instances",
        ),
        Command(
            "reproduce",
            "mlhpc.suite.commands.reproduce:reproduce",
            "Judge whether the results of a package can be reproduced here, and name the first cause if not",
        ),
    ),
    "Compare": (
        Command(
            "compare",
            "mlhpc.suite.commands.compare:compare",
            "Say whether results are faster or slower than a baseline of the same benchmark and size",
        ),
        Command(
            "report",
            "mlhpc.analysis.commands.report:report",
            "Write one HTML page that compares run folders, packages and published rounds",
        ),
        Command(
            "history",
            "mlhpc.analysis.commands.history:history",
            "Keep results of a machine in a folder, show them over time, and say whether it became slower",
        ),
        Command(
            "ab",
            "",
            "Compare plans or settings by running them in turn: steps in one job, or whole runs",
            wing="tune",
        ),
        Command(
            "tune",
            "",
            "Find the fastest setting of a workload on this machine",
            wing="tune",
        ),
        Command(
            "numerics",
            "",
            "Say whether a difference is rounding or a fault, and what a change of the deployment costs",
            wing="numerics",
        ),
        Command("offload", "", "Simulate caches of experts that lie in a slower memory", wing="offload"),
    ),
    "Machine": (
        Command(
            "ceilings",
            "mlhpc.suite.commands.machine.ceilings:ceilings",
            "Measure peak rates of this machine: GEMM, memory levels, host link, storage, all-reduce, all-to-all",
        ),
        Command(
            "profile",
            "mlhpc.suite.commands.machine.profile:profile",
            "Profile a few training steps with torch: time by layer and phase, and the slowest rank",
        ),
        Command(
            "moe",
            "mlhpc.workloads.commands.moe:moe",
            "Time the phases of a mixture-of-experts layer, and compare it with a dense FFN of equal FLOPs",
        ),
        Command(
            "dispatch",
            "",
            "Measure how long a computation must be, so that a controller does not slow it",
            wing="dispatch",
        ),
        Command(
            "preflight",
            "",
            "Find slow nodes before a run: measure each node, then judge them at a stated false-alarm rate",
            wing="fleet",
        ),
    ),
}
