"""`mlhpc demo`: data, runs, package, both checkers, the machine's roofs and the report, by the commands that a person types."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

from suite.descriptor import descriptor, descriptors
from suite.errors import InputError

ALL = "all"
ORG = "demo"
SYSTEM = "this-machine"
INTERRUPTED = 130  # exit code of a command that Ctrl-C stopped


@dataclass(frozen=True)
class Step:
    """One command of the demo. ``required`` False: if it fails, the demo goes on and names it at the end."""

    title: str
    arguments: tuple[str, ...]
    required: bool = True
    optional_inputs: tuple[Path, ...] = ()  # appended to the arguments if an earlier step wrote them

    def command(self) -> list[str]:
        """The arguments, and the optional inputs that exist now."""
        return [*self.arguments, *(str(path) for path in self.optional_inputs if path.exists())]


HELP_GROUP = "Run"
HELP_ORDER = 1


@click.command(
    epilog="""\b
Examples:
  mlhpc demo                          CosmoFlow mini, the required number of runs, 2 ranks
  mlhpc demo --size smoke --runs 2    a minute; too few runs for a score, and the checkers say so
  mlhpc demo all --size smoke --runs 1    every workload once, one report with all their rooflines
"""
)
@click.argument("workload", default="cosmoflow", metavar="[WORKLOAD|all]")
@click.option("--size", default="mini", show_default=True, help="A size of the workload that fits this machine.")
@click.option("--runs", type=click.IntRange(1), help="Scored runs. Default: what the size requires.")
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="MPI ranks.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="New folder. [demo/<workload>-<size>-<time>]")
def demo(workload: str, size: str, runs: int | None, ranks: int, output: Path | None) -> None:
    """Run a benchmark, or all, end to end on this machine: data, training runs, package, checks, ceilings, report."""
    names = sorted(descriptors()) if workload == ALL else [workload]
    counts = {name: runs or descriptor(name).card().size(size).required_runs for name in names}
    root = output or Path("demo") / f"{workload}-{size}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    if root.exists():
        raise InputError(f"{root}: exists already; the demo never writes into an earlier one (choose another -o)")
    root.mkdir(parents=True)
    began = time.monotonic()
    try:
        failed = [step for step in steps(counts, size, ranks, root) if not _run(step)]
    finally:
        shutil.rmtree(root / "node-local", ignore_errors=True)  # the staged copies
    _summary(root, workload, size, time.monotonic() - began, failed)
    sys.exit(1 if failed else 0)


def steps(runs: Mapping[str, int], size: str, ranks: int, root: Path) -> Sequence[Step]:
    """The steps of the demo. ``runs`` is the number of runs by workload."""
    packages, ceilings = str(root / "submissions" / ORG), root / "ceilings.json"
    folders = {name: str(root / ("run" if len(runs) == 1 else f"run-{name}")) for name in runs}
    made = [step for name in runs for step in _made(name, size, runs[name], ranks, root, folders[name])]
    return (
        *made,
        Step("package", ("package", *folders.values(), "--system", SYSTEM, "--submitter", ORG, "-o", packages)),
        Step("check", ("check", packages, "--official"), required=False),
        Step("score", ("score", packages), required=False),
        Step(
            "ceilings",
            (
                *("ceilings", "--quick", "--ranks", str(ranks), "--system", SYSTEM),
                *("--directory", str(root), "-o", str(ceilings)),
            ),
            required=False,
        ),
        Step("report", ("report", packages, "-o", str(root / "report")), optional_inputs=(ceilings,)),
    )


def _made(workload: str, size: str, runs: int, ranks: int, root: Path, run: str) -> tuple[Step, Step]:
    """The data and the runs of one workload."""
    data = f"data/{workload}-{size}"
    sets = (f"data={data}", f"staging.directory={root}/node-local/{{node}}-{{trial}}", f"submission.org={ORG}")
    return (
        Step(f"{workload}: data", ("data", "generate", workload, "--size", size, "--ranks", str(ranks), "-o", data)),
        Step(
            f"{workload}: runs",
            (
                *("run", workload, "--config", size, "--ranks", str(ranks), "--runs", str(runs), "-o", run),
                *(part for text in sets for part in ("--set", text)),
            ),
            required=False,
        ),
    )


def _run(step: Step) -> bool:
    """Print and run one step; True if it exits with 0. Ctrl-C or a required step that fails ends the demo."""
    arguments = step.command()
    click.echo(f"\n--- {step.title}: mlhpc {' '.join(arguments)}")
    code = subprocess.run([sys.executable, "-m", "suite", *arguments]).returncode
    if code in (INTERRUPTED, -signal.SIGINT) or (code != 0 and step.required):
        click.echo(f"mlhpc: demo stopped: step {step.title!r} ended with exit code {code}", err=True)
        sys.exit(1)
    return code == 0


def _summary(root: Path, workload: str, size: str, seconds: float, failed: Sequence[Step]) -> None:
    click.echo(f"\n--- {workload} {size} in {seconds / 60:.1f} min; everything is in {root}/")
    for name, meaning in (
        ("run*/result_*.txt", "event logs, MLPerf format: the only source of every number"),
        (f"submissions/{ORG}", "results package in the MLPerf HPC layout, with sha256 manifest"),
        ("ceilings.json", "this machine's measured roofs, for the report's rooflines"),
        ("report/report.html", "open this in a browser; tables beside it"),
    ):
        if any(root.glob(name)):
            click.echo(f"  {root / name}  {meaning}")
    for step in failed:
        click.echo(f"  failed: `mlhpc {step.arguments[0]}` ({step.title}); its output above says why")
