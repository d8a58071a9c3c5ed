"""The command `mlhpc history`: keeps results over time, shows them, and checks whether the machine is slower."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from mlhpc.analysis.history import record, verdict
from mlhpc.analysis.history.verdict import SeriesVerdict
from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import JSON, PercentRange, busy_option, format_option, output_option, tolerance_option
from mlhpc.suite.compliance.check import check as check_paths
from mlhpc.suite.compliance.verdict import MOST_DISTURBED
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, render_printable
from mlhpc.suite.statistics import Outcome

DEFAULT_FOLDER = Path("history")

_FOLDER = click.argument("folder", required=False, type=click.Path(path_type=Path))
_OUTPUT = output_option("Folder of the history, instead of FOLDER.", str(DEFAULT_FOLDER))
_SINCE = click.option(
    "--since",
    metavar="DATE",
    help="Ignore results of runs before this date, such as 2026-09-21: for example after an accepted change.",
)
_RATE = click.option(
    "--false-alarms",
    "rate",
    type=PercentRange(0.01, 20),
    default="1%",
    metavar="PERCENT",
    show_default=True,
    help="Probability that one check of an unchanged machine says `slower` or `faster`, over all its series.",
)


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc history add runs/nightly -o history
  mlhpc history show history
  mlhpc history check history || test $? = 4       in CI: fails if the machine became slower
""",
)
def history() -> None:
    """Keep results of a machine in a folder, show them over time, and say whether it became slower.

    A history is a folder with one JSON file for each result. Files are added, never changed.
    """


@history.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--any",
    "any_runs",
    is_flag=True,
    help="Also add results without a score, such as those of too few runs.",
)
@output_option("Folder of the history, new or existing.", str(DEFAULT_FOLDER))
def add(paths: tuple[Path, ...], any_runs: bool, output: Path | None) -> None:
    """Add results to a history: run folders, results folders or packages. Results it has already are left as they are.

    Exit code 0: the history has all of them; 1: something could not be read; 2: usage; 3: one is not a score of a
    compliant result and was not added.
    """
    folder = output or DEFAULT_FOLDER
    # A new folder is an empty history; another command on a missing folder is an error
    known = record.read_history(folder) if folder.exists() else []
    judged = check_paths(list(paths))
    scored, unread = judged.results, judged.print_unread()
    if not scored:
        raise InputError(
            f"{', '.join(map(str, paths))}: no result_*.txt, so there is nothing to add; expected run folders or"
            " packages"
        )
    refused = [item for item in scored if not item.valid and not any_runs]
    for item in scored:
        if item in refused:
            reason = item.score.reason or item.verdict
            print_line(f"{item.group.folder}: {reason}; not added (with --any it is added all the same)", error=True)
            continue
        made = record.compute_record(item, datetime.now(UTC))
        path = record.write_record(folder, made, known)
        print_line(f"{path}: added" if path else f"{folder / made.name}: there already")
        # Two of the paths may have logs in common
        known.append(made)
    if unread:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if refused:
        raise click.exceptions.Exit(ExitCode.NO_SCORE)


@history.command()
@_FOLDER
@_OUTPUT
@_SINCE
@tolerance_option()
@_RATE
@busy_option()
@format_option()
def show(
    folder: Path | None, output: Path | None, since: str | None, tolerance: float, rate: float, busy: bool, style: str
) -> None:
    """Show the results of a history over time, with trend, changes, and what else changed with them."""
    verdicts = _judge(_read(_resolve_folder(folder, output), since), rate, tolerance, busy, style)
    if style == JSON:
        return
    for number, each in enumerate(verdicts):
        # An empty line between two series
        print_line("\n" * (number > 0) + "\n".join(map(render_printable, verdict.render_table(each, rate))))


@history.command()
@_FOLDER
@_OUTPUT
@_SINCE
@tolerance_option()
@_RATE
@busy_option()
@format_option()
def check(
    folder: Path | None, output: Path | None, since: str | None, tolerance: float, rate: float, busy: bool, style: str
) -> None:
    """Say whether the machine is slower now than at its best.

    Prints each change of the time to train and of the time of an epoch, and which facts of the machine changed near it.
    The newest level is compared with the best earlier one. --false-alarms holds for all series and both times
    together, also if neighbouring results correlate by as much as the text says. A slow change counts too: "times grow
    by 11 % in 30 days".

    Exit code 0: no change, or the newest level is faster or equivalent. 1: the newest level of a series is slower than
    the best one by more than --tolerance. 2: usage. 4: inconclusive; the text says why.
    """
    verdicts = _judge(_read(_resolve_folder(folder, output), since), rate, tolerance, busy, style)
    if style != JSON:
        print_line(
            "\n".join(render_printable(line) for each in verdicts for line in verdict.render_verdict(each, rate))
        )
    code = _code(verdicts)
    if code:
        raise click.exceptions.Exit(code)


def _judge(
    records: Sequence[record.Record], rate: float, tolerance: float, busy: bool, style: str
) -> list[SeriesVerdict]:
    """Judge the results of quiet machines, and print JSON or how many results were left out."""
    kept = [each for each in records if busy or each.disturbed <= MOST_DISTURBED]
    verdicts = verdict.judge_all(kept, rate, tolerance / 100.0)
    left_out = len(records) - len(kept)
    if style == JSON:
        document = verdict.convert_verdicts_to_dict(verdicts, rate, tolerance) | {"left_out": left_out}
        print_line(json.dumps(document, indent=1))
    elif left_out:
        share = max(each.disturbed for each in records)
        many = f"{left_out} result{'s' if left_out > 1 else ''}"
        print_line(f"{many} left out: other programs used up to {100 * share:.0f} % of the CPUs; --busy takes them in")
    return verdicts


def _code(verdicts: Sequence[SeriesVerdict]) -> int:
    """Return the exit code of the most urgent verdict."""
    # Slower before inconclusive: a regression that was found must not be hidden by another series
    words = {each.word for each in verdicts} or {Outcome.INCONCLUSIVE}
    if Outcome.SLOWER in words:
        return ExitCode.FINDINGS
    return ExitCode.INCONCLUSIVE if Outcome.INCONCLUSIVE in words else ExitCode.OK


def _resolve_folder(folder: Path | None, output: Path | None) -> Path:
    """Return the folder that a person named in one of two ways. UsageError for both."""
    if folder is not None and output is not None:
        raise click.UsageError("FOLDER and -o both name the folder of the history: give one of them")
    return folder or output or DEFAULT_FOLDER


def _read(folder: Path, since: str | None) -> list[record.Record]:
    records = record.read_history(folder)
    if since is not None:
        try:
            begin = datetime.fromisoformat(since)
        except ValueError:
            raise InputError(f"--since {since!r}: expected a date, for example 2026-09-21") from None
        # Records have a zone, and Python compares no date without one with them
        begin = begin if begin.tzinfo else begin.replace(tzinfo=UTC)
        records = [each for each in records if datetime.fromisoformat(each.date) >= begin]
    if not records:
        raise InputError(
            f"{folder}: the history has no result{f' since {since}' if since else ''}; add some: mlhpc history add RUNS"
        )
    return records
