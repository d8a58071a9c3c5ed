"""The command `mlhpc tournament`: a contest of configurations on one system, with equal budgets and a stated chance of error."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from suite.cli.group import Subcommands
from suite.cli.options import JSON, format_option, output_option, settings_options, size_option
from suite.cli.options import settings as config_name
from suite.config import default_data_root
from suite.descriptor import descriptor
from suite.errors import InputError
from suite.exit_codes import ExitCode
from suite.files import print_line, print_progress, printable, write_whole
from suite.log.reader import read_events

if TYPE_CHECKING:
    from analysis.tournament.outcome import Outcome

Objective = Literal["time_to_train", "cpu_seconds"]
_FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc tournament new contest moe_lm --size smoke --system my-machine
  mlhpc tournament enter contest default --size smoke
  mlhpc tournament enter contest small-batch --size smoke --set global_batch_size=8
  mlhpc tournament run contest
  mlhpc tournament rank contest
""",
)
def tournament() -> None:
    """Let configurations compete on one system: equal budgets, paired runs, a stated chance of a wrong answer.

    A tournament is a folder. Every run that is started counts, and "no winner" is an answer.
    """


@tournament.command()
@_FOLDER
@click.argument("workload")
@size_option()
@click.option("--system", required=True, metavar="NAME", help="Name of the machine; stated in every log.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="MPI ranks of every run.")
@click.option(
    "--objective",
    type=click.Choice(["time_to_train", "cpu_seconds"]),
    default="time_to_train",
    show_default=True,
    help="What is compared. cpu_seconds: CPU time of the ranks, for a machine that others load.",
)
@click.option(
    "--error", type=click.FloatRange(0.001, 0.5), default=0.05, show_default=True, help="Chance of a wrong answer."
)
@click.option(
    "--blocks", type=click.IntRange(1, 1000), default=16, show_default=True, help="The most runs that an entry gets."
)
@click.option(
    "--run-limit-s",
    type=click.FloatRange(0, 1e7, min_open=True),
    default=3600.0,
    show_default=True,
    help="Seconds that a run may take from run_start to run_stop.",
)
@click.option(
    "--tuning-runs",
    type=click.IntRange(0, 100_000),
    default=0,
    show_default=True,
    help="Runs that found an entry, at most.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Of orders and runs. [from the system]")
@click.option("--data", type=click.Path(path_type=Path), help="Data root. [data/<workload>-<size>]")
def new(
    folder: Path, workload: str, size: str, system: str, ranks: int, objective: Objective, error: float, blocks: int,
    run_limit_s: float, tuning_runs: int, seed: int | None, data: Path | None,
) -> None:  # fmt: skip
    """Begin a tournament of WORKLOAD in FOLDER, which must not exist.

    What is stated here is the same for all entries and is never changed.
    """
    from analysis.tournament.folder import Settings, write_settings

    descriptor(workload).code()
    descriptor(workload).card().size(size)
    made = Settings(
        workload=workload,
        size=size,
        system=system,
        ranks=ranks,
        objective=objective,
        error=error,
        blocks=blocks,
        run_limit_s=run_limit_s,
        tuning_runs=tuning_runs,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        data=str((data or default_data_root(workload, size)).absolute()),
    )
    write_settings(folder, made)
    print_line(
        f"{folder}: {workload} {size}, up to {blocks} runs of each entry; next: mlhpc tournament enter {folder} NAME"
    )


@tournament.command()
@_FOLDER
@click.argument("name")
@settings_options
@click.option(
    "--package", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Results package to enter."
)
@click.option(
    "--tuning",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Run folder that was used to find this entry; repeatable.",
)
def enter(
    folder: Path, name: str, size: str | None, config: str | None, overrides: tuple[str, ...],
    package: Path | None, tuning: tuple[Path, ...],
) -> None:  # fmt: skip
    """Enter a configuration into the tournament in FOLDER: a size's own, a file, or that of a results package.

    The configuration is copied. Of a package only its config.yaml is read, as data: nothing in it is run. All runs that were used
    to find the configuration are stated with --tuning; no entry may have more of them than the tournament allows.
    """
    from analysis.tournament.folder import Tuning, read_config, read_tournament, write_entry
    from analysis.tournament.packages import find_config

    contest = read_tournament(folder)
    known = descriptor(contest.settings.workload)
    if package is not None and (size or config):
        raise click.UsageError("--package and --size or --config: give one")
    if package is not None:
        resolved = find_config(package, contest.settings, overrides)
        origin = f"package {package.name}"
    else:
        chosen = config_name(size, config) or contest.settings.size
        resolved = read_config(known, chosen, overrides, contest.settings)
        origin = Path(chosen).name
    stated = [Tuning(run=run.name, sha256=_log_sum(run)) for run in tuning]
    source = ", ".join([origin, *(f"--set {text}" for text in overrides)])
    made = write_entry(contest, name, resolved, source, stated)
    print_line(f"{made}: entered ({source}); {len(contest.entries) + 1} entries")


@tournament.command()
@_FOLDER
def run(folder: Path) -> None:
    """Run the tournament in FOLDER to its end, or go on with it.

    In each block every entry that is left runs once, with one seed, in a drawn order. Every run that is started counts; one that
    does not reach the target within its budget is slower than all that do. Ctrl-C ends the tournament after the present run.

    Exit code 0: it is over; 1: it was stopped and can go on; 2: usage, or a run could not begin.
    """
    from analysis.tournament.runner import run_tournament

    race, count = run_tournament(folder, _tell)
    if race is None:
        print_line(f"{folder}: stopped after {count} run{'s' * (count != 1)}; to go on: mlhpc tournament run {folder}")
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    print_line(f"{folder}: over after {len(race.blocks)} blocks; next: mlhpc tournament rank {folder}")


def _tell(outcome: Outcome) -> None:
    result = f"{outcome.value:.4g} s" if outcome.finished else f"did not finish: {outcome.why}"
    print_progress(f"block {outcome.turn.block}: {outcome.turn.entry}: {result}")


def _log_sum(run: Path) -> str:
    """The sha256 of the log of a tuning run. InputError if it left none."""
    logs: Sequence[Path] = sorted(
        path for path in run.iterdir() if path.name.startswith("result_") and path.suffix == ".txt"
    )
    if not logs:
        raise InputError(f"{run}: no result_*.txt: expected a run folder")
    total = hashlib.sha256()
    for path in logs:
        if path.is_symlink():
            raise InputError(f"{path}: is a symbolic link, which is not followed")
        read_events(path, steps=False, seen=total.update)
    return total.hexdigest()


@tournament.command()
@_FOLDER
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="SYSTEM=NUMBER UNIT/h",
    help="Price of an hour of one compute unit; adds the cost.",
)
@output_option("File of the ranking, for mlhpc report.", "none")
@format_option()
def rank(folder: Path, prices: tuple[str, ...], output: Path | None, style: str) -> None:
    """Rank the entries of the tournament in FOLDER from its logs, with intervals; also while it is not over.

    Every run that was started is looked at first: whether it is there, unchanged, no copy, of its entry, with its block's seed,
    with the data and on the machine of all others. While anything is found, there is no verdict.

    Exit code 0: a winner, no winner, or not over; 1: findings; 2: usage.
    """
    from analysis.results.prices import read_prices
    from analysis.tournament.ranking import as_data, lines, read_ranking

    ranking = read_ranking(folder, read_prices(prices))
    document = json.dumps(as_data(ranking), indent=1)
    if output is not None:
        write_whole(output, document + "\n")
    print_line(document if style == JSON else "\n".join(map(printable, lines(ranking))))
    if ranking.findings:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


@tournament.command()
@_FOLDER
@click.option("--level", type=click.IntRange(3, 4), default=3, show_default=True, help="Level of mlhpc reproduce.")
@output_option("New folder for packages and reproductions.", "FOLDER-finals")
def finals(folder: Path, level: int, output: Path | None) -> None:
    """Run who is left in the tournament in FOLDER again: package its runs and give the package to `mlhpc reproduce`.

    These runs decide nothing in the race. Exit code 0: every finalist was reproduced; 1: one was not; 2: usage.
    """
    from analysis.tournament.finals import run_finals
    from analysis.tournament.ranking import read_ranking

    done = run_finals(read_ranking(folder), level, output or folder.with_name(f"{folder.name}-finals"))
    words = {True: "reproduced", False: "not reproduced", None: "not judged"}
    for final in done:
        print_line(printable(f"{final.entry}: level {level}: {words[final.reproduced]} ({final.reason})"))
    if not all(final.reproduced for final in done):
        raise click.exceptions.Exit(ExitCode.FINDINGS)
