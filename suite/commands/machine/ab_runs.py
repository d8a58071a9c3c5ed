"""`mlhpc ab runs`: compares configurations by whole runs, with equal budgets and a stated error rate."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import (
    JSON,
    FiniteRange,
    IntegerRange,
    choose_config_name,
    format_option,
    output_option,
    settings_options,
    size_option,
)
from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import ExitCode
from mlhpc.suite.files import print_line, print_progress, render_duration, render_printable, write_file_atomically

if TYPE_CHECKING:
    from mlhpc.suite.performance.ab.runner import RunResult

_FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc ab runs new contest moe_lm --size smoke --system my-machine
  mlhpc ab runs enter contest default
  mlhpc ab runs enter contest small-batch --set global_batch_size=8
  mlhpc ab runs run contest
  mlhpc ab runs show contest
""",
)
def runs() -> None:
    """Find the fastest of several configurations by whole runs, with a stated probability of a wrong winner.

    A contest is a comparison of variants in one folder. An entry is one variant: a configuration with a name. Every run
    that starts counts. A contest may end without a winner.
    """


@runs.command()
@_FOLDER
@click.argument("workload")
@size_option()
@click.option("--system", required=True, metavar="NAME", help="Name of the machine, for the logs.")
@click.option("--ranks", type=IntegerRange(1), default=1, show_default=True, help="Number of MPI ranks of every run.")
@click.option(
    "--objective",
    type=click.Choice(["time_to_train", "cpu_seconds"]),
    default="time_to_train",
    show_default=True,
    help="What to compare. cpu_seconds, the CPU time of the ranks, suits a machine that other programs use too.",
)
@click.option(
    "--error",
    type=FiniteRange(0.001, 0.5),
    default=0.05,
    show_default=True,
    help="Largest probability of naming a wrong winner.",
)
@click.option(
    "--blocks",
    type=IntegerRange(1, 1000),
    default=16,
    show_default=True,
    help="Largest number of runs of each entry (variant).",
)
@click.option(
    "--run-limit-s",
    type=FiniteRange(0, 1e7, min_open=True),
    default=3600.0,
    show_default=True,
    help="Time budget of a run in seconds, from run_start to run_stop.",
)
@click.option(
    "--seed", type=IntegerRange(0, 2**31 - 1), help="Seed of the runs and of the order in which entries run. [random]"
)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data set. [data/<workload>-<size>]")
def new(folder: Path, workload: str, size: str, seed: int | None, data: Path | None, **same_for_all: Any) -> None:
    """Create a contest, a comparison of variants of WORKLOAD, in the new folder FOLDER.

    These options hold for all entries (variants) and cannot be changed later.
    """
    from mlhpc.suite.performance.ab.contest import ContestSettings, write_settings

    # A card without code, or a size that it lacks, is refused before the folder is made.
    load_descriptor(workload).code()
    load_descriptor(workload).card().size(size)
    seed = secrets.randbelow(2**31) if seed is None else seed
    # Later commands of the contest may run in another working directory.
    root = (data or choose_default_data_root(workload, size)).absolute()
    made = ContestSettings(workload=workload, size=size, seed=seed, data=str(root), **same_for_all)
    write_settings(folder, made)
    print_line(
        f"{folder}: {workload} {size}, a comparison of up to {made.blocks} runs of each variant; "
        f"next: add each variant with: mlhpc ab runs enter {shlex.quote(str(folder))} NAME"
    )


@runs.command()
@_FOLDER
@click.argument("name")
@settings_options
def enter(folder: Path, name: str, size: str | None, config: str | None, overrides: tuple[str, ...]) -> None:
    """Add a variant NAME to the contest in FOLDER: the settings of a size or a file.

    --config may name the config.yaml of a package. The configuration is copied, and no code in it is run.
    """
    from mlhpc.suite.performance.ab.contest import read_config, read_contest, write_entry

    contest = read_contest(folder)
    chosen = choose_config_name(size, config) or contest.settings.size
    made = write_entry(contest, name, read_config(chosen, overrides, contest.settings))
    number = len(contest.entries) + 1
    print_line(f"{made}: entered; the contest has {number} variant{'s' * (number != 1)}")


@runs.command()
@_FOLDER
def run(folder: Path) -> None:
    """Run the contest in FOLDER to its end, or continue it.

    In each block every remaining entry runs once, in random order and with the same seed. A run that misses the target
    within its time budget counts as slower than all others. Ctrl-C stops the contest after the current run.

    Exit code 0: the contest is finished. Exit code 1: it was stopped and can be continued. Exit code 2: usage, or a run
    could not start.
    """
    from mlhpc.suite.performance.ab.runner import run_contest

    race, count = run_contest(folder, _print_run)
    if race is None:
        way_on = f"mlhpc ab runs run {shlex.quote(str(folder))}"
        print_line(f"{folder}: stopped after {count} run{'s' * (count != 1)}; to go on: {way_on}")
        raise click.exceptions.Exit(ExitCode.FAILED)
    print_line(f"{folder}: over after {len(race.blocks)} blocks; next: mlhpc ab runs show {shlex.quote(str(folder))}")


def _print_run(done: RunResult) -> None:
    result = render_duration(done.value) if done.finished else f"did not finish: {done.why}"
    print_progress(f"block {done.turn.block}: {done.turn.entry}: {result}")


@runs.command()
@_FOLDER
@output_option("File for the ranking, which `mlhpc report` reads.", "none")
@format_option()
def show(folder: Path, output: Path | None, style: str) -> None:
    """Show which entry (variant) is fastest in the contest in FOLDER, with intervals; also before its end.

    First the log of every run is checked: it must exist, be unchanged and be compliant. If a log fails, there is no
    verdict.

    Exit code 0: a winner, no winner, or not finished. Exit code 1: findings. Exit code 2: usage.
    """
    import msgspec

    from mlhpc.suite.performance.ab.ranking import read_ranking, render_ranking

    ranking = read_ranking(folder)
    document = msgspec.json.format(msgspec.json.encode(ranking), indent=1).decode()
    if output is not None:
        write_file_atomically(output, document + "\n")
    print_line(document if style == JSON else "\n".join(map(render_printable, render_ranking(ranking))))
    if ranking.findings:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
