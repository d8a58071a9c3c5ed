"""`mlhpc ab runs`: compares configurations by whole runs, with equal budgets and a stated error rate."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from suite.cli.group import Subcommands
from suite.cli.options import JSON, Finite, Whole, format_option, output_option, settings, settings_options, size_option
from suite.config import default_data_root
from suite.descriptor import descriptor
from suite.exit_codes import ExitCode
from suite.files import duration_text, print_line, print_progress, printable, write_whole

if TYPE_CHECKING:
    from suite.performance.ab.runner import RunResult

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
    """Compare configurations by whole runs: equal budgets, paired blocks, a stated chance of a wrong answer.

    A contest is a folder. Every run that is started counts, and "no winner" is an answer.
    """


@runs.command()
@_FOLDER
@click.argument("workload")
@size_option()
@click.option("--system", required=True, metavar="NAME", help="Name of the machine; stated in every log.")
@click.option("--ranks", type=Whole(1), default=1, show_default=True, help="MPI ranks of every run.")
@click.option(
    "--objective",
    type=click.Choice(["time_to_train", "cpu_seconds"]),
    default="time_to_train",
    show_default=True,
    help="What is compared. cpu_seconds: CPU time of the ranks, for a machine that others load.",
)
@click.option("--error", type=Finite(0.001, 0.5), default=0.05, show_default=True, help="Chance of a wrong answer.")
@click.option("--blocks", type=Whole(1, 1000), default=16, show_default=True, help="The most runs that an entry gets.")
@click.option(
    "--run-limit-s",
    type=Finite(0, 1e7, min_open=True),
    default=3600.0,
    show_default=True,
    help="Seconds that a run may take from run_start to run_stop.",
)
@click.option("--seed", type=Whole(0, 2**31 - 1), help="Of orders and runs. [from the system]")
@click.option("--data", type=click.Path(path_type=Path), help="Data root. [data/<workload>-<size>]")
def new(folder: Path, workload: str, size: str, seed: int | None, data: Path | None, **same_for_all: Any) -> None:
    """Begin a contest of WORKLOAD in FOLDER, which must not exist.

    What is stated here is the same for all entries and is never changed.
    """
    from suite.performance.ab.contest import Settings, write_settings

    descriptor(workload).code()
    descriptor(workload).card().size(size)
    seed = secrets.randbelow(2**31) if seed is None else seed
    root = (data or default_data_root(workload, size)).absolute()
    made = Settings(workload=workload, size=size, seed=seed, data=str(root), **same_for_all)
    write_settings(folder, made)
    print_line(
        f"{folder}: {workload} {size}, up to {made.blocks} runs of each entry; "
        f"next: mlhpc ab runs enter {shlex.quote(str(folder))} NAME"
    )


@runs.command()
@_FOLDER
@click.argument("name")
@settings_options
def enter(folder: Path, name: str, size: str | None, config: str | None, overrides: tuple[str, ...]) -> None:
    """Enter a configuration into the contest in FOLDER: a size's own, or a file, such as the config.yaml of a package.

    The configuration is copied. It is read as data: nothing in it is run.
    """
    from suite.performance.ab.contest import read_config, read_contest, write_entry

    contest = read_contest(folder)
    chosen = settings(size, config) or contest.settings.size
    made = write_entry(contest, name, read_config(chosen, overrides, contest.settings))
    print_line(f"{made}: entered; {len(contest.entries) + 1} entries")


@runs.command()
@_FOLDER
def run(folder: Path) -> None:
    """Run the contest in FOLDER to its end, or go on with it.

    In each block every entry that is left runs once, with one seed, in a drawn order. Every run that is started counts;
    one that does not reach the target within its budget is slower than all that do. Ctrl-C ends the contest after the
    present run.

    Exit code 0: it is over; 1: it was stopped and can go on; 2: usage, or a run could not begin.
    """
    from suite.performance.ab.runner import run_contest

    race, count = run_contest(folder, _tell)
    if race is None:
        way_on = f"mlhpc ab runs run {shlex.quote(str(folder))}"
        print_line(f"{folder}: stopped after {count} run{'s' * (count != 1)}; to go on: {way_on}")
        raise click.exceptions.Exit(ExitCode.FAILED)
    print_line(f"{folder}: over after {len(race.blocks)} blocks; next: mlhpc ab runs show {shlex.quote(str(folder))}")


def _tell(done: RunResult) -> None:
    result = duration_text(done.value) if done.finished else f"did not finish: {done.why}"
    print_progress(f"block {done.turn.block}: {done.turn.entry}: {result}")


@runs.command()
@_FOLDER
@output_option("File of the ranking, for mlhpc report.", "none")
@format_option()
def show(folder: Path, output: Path | None, style: str) -> None:
    """Show who wins the contest in FOLDER, with intervals; also while it is not over.

    Every run that was started is looked at first: whether its log is there and unchanged, and compliant. While anything
    is found, there is no verdict.

    Exit code 0: a winner, no winner, or not over; 1: findings; 2: usage.
    """
    import msgspec

    from suite.performance.ab.ranking import lines, read_ranking

    ranking = read_ranking(folder)
    document = msgspec.json.format(msgspec.json.encode(ranking), indent=1).decode()
    if output is not None:
        write_whole(output, document + "\n")
    print_line(document if style == JSON else "\n".join(map(printable, lines(ranking))))
    if ranking.findings:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
