"""Lists the commands of `mlhpc`, in the order of its first page. To add one, write its module and an entry here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command. ``entry`` names what to import for it, as ``module:function``.

    ``summary`` is the first sentence of its docstring (a test compares): `mlhpc --help` imports no command.
    """

    name: str
    entry: str
    summary: str


SECTIONS: dict[str, tuple[Command, ...]] = {
    "Run": (
        Command("demo", "suite.commands.demo:demo", "Run a benchmark, or all, end to end on this machine"),
        Command(
            "doctor",
            "suite.commands.machine.doctor:doctor",
            "Show what is missing for runs on this machine, on several nodes and through Slurm, and how to get it",
        ),
        Command(
            "workload",
            "suite.commands.workload:workload",
            "List workloads with their sizes and targets, or make one of your own",
        ),
        Command("data", "suite.commands.data:data", "Make, convert and check data sets"),
        Command("run", "suite.commands.run:run", "Train a workload to its target, N times, and log each run"),
        Command(
            "submit",
            "suite.commands.submit:submit",
            "Submit scored runs of a workload to Slurm: one job and one run folder per node count",
        ),
        Command(
            "plan",
            "suite.commands.plan:plan",
            "Show what each rank holds, sends and reads in a step under a plan; check that the plan is legal",
        ),
        Command(
            "status",
            "suite.commands.status:status",
            "Show runs and jobs: state, epoch, last evaluation, time left; with --goodput, where their time went",
        ),
    ),
    "Judge": (
        Command(
            "package", "suite.commands.package:package", "Build the results package of a submitter from run folders"
        ),
        Command("check", "suite.commands.check:check", "Check logs, results folders, packages or a whole round"),
        Command(
            "score",
            "suite.commands.score:score",
            "Score runs by the MLPerf HPC rules: olympic mean of time to train, or throughput of concurrent instances",
        ),
        Command(
            "reproduce",
            "suite.commands.reproduce:reproduce",
            "Judge whether the results of a package can be reproduced here, and name the first cause if not",
        ),
    ),
    "Compare": (
        Command(
            "compare",
            "suite.commands.compare:compare",
            "Compare results with a baseline: run folders, results folders or packages that share a benchmark and size",
        ),
        Command(
            "report",
            "analysis.commands.report:report",
            "Compare results: one self-contained HTML page from run folders and results packages",
        ),
        Command(
            "history",
            "analysis.commands.history:history",
            "Follow a machine over time: add results to a folder, show them, check whether it is slower",
        ),
        Command(
            "ab",
            "suite.commands.machine.ab:ab",
            "Compare in interleaved blocks: steps of two plans or settings in one job, or whole runs of configurations",
        ),
    ),
    "Machine": (
        Command(
            "ceilings",
            "suite.commands.machine.ceilings:ceilings",
            "Measure the roofs of this machine: GEMM, memory levels, host link, storage, all-reduce, all-to-all",
        ),
        Command(
            "profile",
            "suite.commands.machine.profile:profile",
            "Find the layer the time goes to, and the slow rank: a few steps under the torch profiler",
        ),
        Command(
            "moe",
            "workloads.commands.moe:moe",
            "Time a mixture-of-experts layer, phase by phase, beside a dense FFN of equal FLOPs in the same run",
        ),
        Command(
            "preflight",
            "analysis.commands.preflight:preflight",
            "Find slow nodes before they cost a run: measure each, and judge with a promised rate of false alarms",
        ),
    ),
}
