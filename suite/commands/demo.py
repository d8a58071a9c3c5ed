"""`mlhpc demo`: data, runs, package, both checkers and the report, by ordinary commands."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import click

from mlhpc.suite.cli.options import output_option, ranks_option, runs_option, size_option
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import make_folder, print_line, print_progress, render_duration, write_file_atomically
from mlhpc.suite.launch.local import make_suite_command
from mlhpc.suite.launcher import refuse_several_ranks
from mlhpc.suite.log.run_folder import choose_default_folder
from mlhpc.suite.stopping import compute_exit_code

ALL = "all"  # in place of a workload
SHORTEST = "swinv2_moe"  # of the workloads at size smoke: two results of it take as long as one of another
# What the demo compares: of a small model half a batch takes nearly as long as a whole one, and less memory
BATCHES = {"whole-batch": "gradient_accumulation_steps=1", "half-batches": "gradient_accumulation_steps=2"}
THIS_MACHINE = "this-machine"  # the system of a demo that compares nothing
ORG = "demo"  # the submitter of the package
STEPS = "steps.json"  # what became of each step, for the report
STEPS_VERSION = 1
CEILINGS_LIMIT_S = 120.0  # twice what --quick is bound to: only a file system or a network that hangs takes longer


@dataclass(frozen=True)
class DemoStep:
    """One command of the demo.

    ``inputs`` are alternatives: the first with existing paths is appended to the arguments. Without any the step is
    left out. ``extras`` are appended if they exist. ``limit_s``: seconds after which the step is stopped; None: never.
    """

    title: str
    arguments: tuple[str, ...]
    inputs: tuple[tuple[Path, ...], ...] = ()
    extras: tuple[Path, ...] = ()
    limit_s: float | None = None

    def command(self) -> list[str] | None:
        """Return the arguments with the inputs that exist now. None if the step needs an input and there is none."""
        chosen = next((found for paths in self.inputs if (found := [path for path in paths if path.exists()])), [])
        if self.inputs and not chosen:
            return None
        name, *options = self.arguments
        return [name, *map(str, chosen), *options, *(str(path) for path in self.extras if path.exists())]


@dataclass(frozen=True)
class StepResult:
    """The result of a step. ``exit_code`` is None if it was left out; ``reason`` is one line, "" if all went well."""

    title: str
    command: str
    exit_code: int | None
    seconds: float
    reason: str


@click.command(
    epilog="""\b
Examples:
  mlhpc demo                          SwinV2-MoE smoke: each batch at once or in halves: which is faster?
  mlhpc demo --runs 2                 takes a minute; too few runs for a score, so exit code 1
  mlhpc demo cosmoflow                one result, and how far it is from the ceilings of this machine
  mlhpc demo all --size smoke --runs 1    every workload once, and one report of all
"""
)
@click.argument("workload", required=False, metavar="[WORKLOAD|all]")
@size_option("smoke", "Size of the workload; choose one that fits this machine (mlhpc workload list).")
@runs_option(None, "Number of runs. [as many as a score of this size needs]")
@ranks_option()
@output_option("New folder for data, runs, package and report.", "demo/<workload>-<size>-<time>")
def demo(workload: str | None, size: str, runs: int | None, ranks: int, output: Path | None) -> None:
    """Run a benchmark end to end on this machine, from making data to a report.

    The steps: make the data, train with each batch at once and in halves, build a package, check and score it, write a
    report that says which is faster. With a WORKLOAD there is one result of it, and the ceilings of this machine.

    Exit code 0 if every step succeeded, else 1. Fewer --runs than the size requires give no score, so exit code 1.
    """
    refuse_several_ranks("the demo starts its own ranks: run it once, outside of srun and mpiexec")
    compared: tuple[str, ...] = () if workload else tuple(BATCHES)
    workload = workload or SHORTEST
    names = sorted(load_descriptors()) if workload == ALL else [workload]
    counts = {name: runs or load_descriptor(name).card().size(size).required_runs for name in names}
    root = output or choose_default_folder(workload, size, datetime.now(UTC), under="demo")
    if root.exists():
        raise InputError(f"{root}: exists already; choose another folder with -o")
    make_folder(root)
    began = time.monotonic()
    outcomes: list[StepResult] = []
    try:
        for step in list_steps(counts, size, ranks, root, compared):
            outcomes = add_outcome(outcomes, _run_step(step))
            # After every step: the report, which is the last one, reads the file.
            _write_steps(root / STEPS, outcomes)
    finally:
        shutil.rmtree(root / "node-local", ignore_errors=True)  # the staged copies
    failed = [outcome for outcome in outcomes if outcome.reason]
    _print_summary(root, workload, size, time.monotonic() - began, failed)
    sys.exit(ExitCode.FAILED if failed else ExitCode.OK)


def list_steps(
    runs: Mapping[str, int], size: str, ranks: int, root: Path, compared: Sequence[str] = ()
) -> Sequence[DemoStep]:
    """List the steps. ``runs`` is the number of runs by workload. Without a package, its readers take run folders.

    There is a result of each of ``compared``, keys of BATCHES. Without them the ceilings of the machine are measured.
    """
    package, ceilings = root / "submissions" / ORG, root / "ceilings.json"
    systems = compared or (THIS_MACHINE,)
    folders = {
        (name, system): root / "-".join(["run", *([name] if len(runs) > 1 else []), *([system] if compared else [])])
        for name in runs
        for system in systems
    }
    made = [step for name in runs for step in _list_run_steps(name, size, runs[name], ranks, root, folders)]
    packages = [
        DemoStep(
            f"package of {system}" if compared else "package",
            ("package", "--system", system, "--submitter", ORG, "-o", str(package)),
            (tuple(folder for (_, of), folder in folders.items() if of == system),),
        )
        for system in systems
    ]
    results = ((package,), tuple(folders.values()))
    measure = ("ceilings", "--quick", "--ranks", str(ranks), "--system", THIS_MACHINE, "--directory", str(root))
    return (
        *made,
        *packages,
        DemoStep("check", ("check", "--official"), results),
        DemoStep("score", ("score",), results),
        *([] if compared else [DemoStep("ceilings", (*measure, "-o", str(ceilings)), limit_s=CEILINGS_LIMIT_S)]),
        DemoStep("report", ("report", "-o", str(root / "report")), results, (ceilings, root / STEPS)),
    )


def _list_run_steps(
    workload: str, size: str, runs: int, ranks: int, root: Path, folders: Mapping[tuple[str, str], Path]
) -> list[DemoStep]:
    """Make the steps for data and runs of one workload, on each system of ``folders``."""
    data = f"data/{workload}-{size}"
    sets = (f"data={data}", f"staging.directory={root}/node-local/{{node}}-{{trial}}", f"submission.org={ORG}")
    make = ("data", "generate", workload, "--size", size, "--ranks", str(ranks), "-o", data)
    steps = [DemoStep(f"{workload}: data", make)]
    for system in [of for name, of in folders if name == workload]:
        stated = (BATCHES[system],) if system in BATCHES else ()
        options = [part for text in (*sets, *stated) for part in ("--set", text)]
        # One run of SwinV2-MoE smoke in ten misses its target; a demo should show the same each time.
        run = ("run", workload, "--size", size, "--ranks", str(ranks), "--runs", str(runs), "--seed", "0")
        title = f"{workload}: runs" + (f" ({system})" if stated else "")
        steps.append(DemoStep(title, (*run, "-o", str(folders[workload, system]), *options)))
    return steps


def _run_step(step: DemoStep) -> StepResult:
    """Print and run one step. Ctrl-C ends the demo; a step that fails or has nothing to read does not."""
    arguments = step.command()
    if arguments is None:
        print_progress(f"\n--- {step.title}: left out, no earlier step left what it reads")
        return StepResult(
            step.title, f"mlhpc {step.arguments[0]}", None, 0.0, "left out: no earlier step left what it reads"
        )
    print_progress(f"\n--- {step.title}: mlhpc {shlex.join(arguments)}")
    begin = time.monotonic()
    code, last = _execute(make_suite_command(*arguments), step.limit_s)
    if code in (ExitCode.INTERRUPTED, -signal.SIGINT):
        print_line(f"mlhpc: demo stopped: step {step.title!r} was interrupted", error=True)
        sys.exit(compute_exit_code())
    reason = "" if code == 0 else last or f"exit code {code}; its output says why"
    if code == ExitCode.TIMED_OUT and step.limit_s:
        reason = f"stopped after {render_duration(step.limit_s)}"
    return StepResult(step.title, f"mlhpc {step.arguments[0]}", code, time.monotonic() - begin, reason)


def add_outcome(before: Sequence[StepResult], outcome: StepResult) -> list[StepResult]:
    """Add the result of a step. One run of a result may miss its target: where the checker accepts it, none failed."""
    packaged = not any(each.reason for each in before if each.command == "mlhpc package")
    if outcome.command == "mlhpc check" and not outcome.reason and packaged:
        before = [replace(each, reason="" if each.command == "mlhpc run" else each.reason) for each in before]
    return [*before, outcome]


def _execute(command: Sequence[str], limit_s: float | None) -> tuple[int, str]:
    """Run a command and pass its standard error on. Return its exit code and the last line of that."""
    last, late = "", threading.Event()
    # mpiexec reads standard input, and with it what a person types for the next command.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:

        def stop() -> None:
            late.set()
            process.terminate()

        timer = threading.Timer(limit_s or 0, stop)
        if limit_s:
            timer.start()
        try:
            for line in process.stderr or ():
                print_line(line, end="", error=True)
                last = line.strip() or last
            code = process.wait()
        except KeyboardInterrupt:  # a terminal sent Ctrl-C to the command as well, kill(1) sent SIGTERM only here
            process.terminate()
            process.wait()
            return ExitCode.INTERRUPTED, ""
        finally:
            timer.cancel()
    # A command that ended with 0 at the last moment has done its work.
    return (ExitCode.TIMED_OUT if late.is_set() and code != 0 else code), last.removeprefix("mlhpc: ")


def _write_steps(path: Path, outcomes: Sequence[StepResult]) -> None:
    document = {"version": STEPS_VERSION, "kind": "steps", "steps": [vars(outcome) for outcome in outcomes]}
    write_file_atomically(path, json.dumps(document, indent=1) + "\n")


def _print_summary(root: Path, workload: str, size: str, seconds: float, failed: Sequence[StepResult]) -> None:
    print_line(
        f"\n--- {workload} {size} in {render_duration(seconds)}; its data are in data/, everything else in {root}/"
    )
    for name, meaning in (
        ("run*/result_*.txt", "event logs, MLPerf format: the only source of every number"),
        (f"submissions/{ORG}", "results package in the MLPerf HPC layout, with sha256 manifest"),
        ("ceilings.json", "this machine's measured ceilings, for the report's rooflines"),
        ("report/report.html", "open this in a browser; tables beside it"),
    ):
        if any(root.glob(name)):
            print_line(f"  {root / name}  {meaning}")
    for outcome in failed:
        print_line(f"  failed: `{outcome.command}` ({outcome.title}): {outcome.reason}")
