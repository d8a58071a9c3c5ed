"""`mlhpc reproduce`: judges by levels whether a package's results can be reproduced here. Runs nothing of it."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlhpc.suite import VERSION
from mlhpc.suite.cli.options import (
    JSON,
    FiniteRange,
    IntegerRange,
    PercentRange,
    card_option,
    format_option,
    output_option,
    ranks_option,
    runs_option,
)
from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import PART_SUFFIX, make_folder, print_line, print_progress, quote_path, write_file_atomically
from mlhpc.suite.log.results_tree import MANIFEST
from mlhpc.suite.package.reproduction.judge import (
    LEVELS,
    Difference,
    LevelOutcome,
    LevelVerdict,
    Reproduction,
    ResultVerdict,
    is_reproduced,
    make_level_verdict,
    render_table,
    write_reproduction,
)
from mlhpc.suite.package.reproduction.original import Original, judge_log, list_changes, read_originals

if TYPE_CHECKING:
    from mlhpc.suite.package.reproduction.rerun import Rerun

LOCK = "reproduction.lock"  # there while a reproduction runs, and if it was killed
_RESULT_NAME = re.compile(r"result_\d+")  # what was made for a result


@dataclass(frozen=True)
class _Options:
    """The options of the command. ``beside`` is the run folder of --with, ``margin`` a fraction."""

    output: Path
    level: int
    run: bool
    data: Path | None
    beside: Path | None
    ranks: int | None
    seed: int | None
    runs: int
    pairs: int
    margin: float
    limit_s: float | None
    overrides: tuple[str, ...]


@click.command(
    epilog="""\b
Levels:
  0 log          the files are intact; scores recomputed from the logs equal the stated ones
  1 data         the data made again here, or those of --data, have the same sha256
  2 numerics     with the same settings, seed and ranks the first 20 losses and the evaluations agree
  3 convergence  epochs to the target lie within the interval of the reference points
  4 time         with --set and without it the times of paired runs here differ by less than --margin
\b
Examples:
  mlhpc reproduce submissions/ACME                          levels 0 and 1
  mlhpc reproduce submissions/ACME --run -o again           levels 0 to 3: one run of each result
  mlhpc reproduce submissions/ACME --run --level 4 --set hyperparameters.width=128
  mlhpc reproduce submissions/ACME --with runs/mine         compare with a run that exists already
  mlhpc reproduce submissions/ACME --requirements requirements.txt
"""
)
@click.argument("package", type=click.Path(exists=True, file_okay=False, path_type=Path))
@card_option
@click.option(
    "--result",
    metavar="FOLDER",
    help="Judge only this result, named by the end of its folder's path, such as strong/cosmoflow. [all]",
)
@click.option(
    "--level", type=IntegerRange(0, 4), help="Highest level to judge, see below. [3 with --run or --with, else 1]"
)
@click.option("--run", is_flag=True, help="Train with the package's settings and compare with its logs.")
@click.option(
    "--with", "beside", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Compare with this run folder instead of a new run.",
)  # fmt: skip
@click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Data set on this machine to use and verify. [generated in the output folder]",
)  # fmt: skip
@ranks_option(None, "Number of MPI ranks to start here. [as in the package]")
@click.option("--seed", type=IntegerRange(0), help="Seed of the first run. [the package's]")
@runs_option(text="Number of runs for level 3.")
@click.option(
    "--pairs", type=IntegerRange(2), default=5, show_default=True, help="Number of pairs of runs for level 4."
)
@click.option(
    "--margin", type=PercentRange(0.1, 100, fraction=False), default="5%", show_default=True, metavar="PERCENT",
    help="Level 4: times that differ by less than this percentage count as equal.",
)  # fmt: skip
@click.option(
    "--limit-minutes",
    type=FiniteRange(0, min_open=True),
    metavar="N",
    help="Stop a run after N minutes; what it did not reach is inconclusive. "
    "[ten times the package's longest run; at least 10, at most 120]",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Level 4: setting to change in one run of each pair; repeatable. [the installed suite's settings of the size]",
)  # fmt: skip
@click.option(
    "--requirements",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Only write the Python packages of the package's runs to FILE, for pip or uv.",
)
@output_option(
    "New folder for the verdict (reproduction.json), data and runs.",
    "reproduction/<package>-<time>",
)
@format_option()
def reproduce(
    package: Path,
    result: str | None,
    level: int | None,
    run: bool,
    beside: Path | None,
    data: Path | None,
    ranks: int | None,
    seed: int | None,
    runs: int,
    pairs: int,
    margin: float,
    limit_minutes: float | None,
    overrides: tuple[str, ...],
    requirements: Path | None,
    output: Path | None,
    style: str,
) -> None:
    """Judge whether the results of a package can be reproduced here, and name the first cause if not.

    No code of the package is executed. With --run the installed suite trains with the package's settings.

    Exit code 0: every level that was asked for is reproduced with the package's settings. Exit code 1: one is not,
    cannot be, or the measurements do not decide. Exit code 2: usage.
    """
    if requirements is not None:
        _write_requirements(package, requirements)
        return
    level = _choose_highest_level(level, beside, overrides, run=run)
    if beside is not None and not any(beside.glob("result_*.txt")):
        raise InputError(f"{beside}: not a run folder (no result_*.txt); --with compares with one")
    stamp = datetime.now(UTC)
    root = output or Path("reproduction") / f"{package.resolve().name}-{stamp:%Y%m%dT%H%M%SZ}"
    if root.exists() and any(root.iterdir()) and not _is_unfinished(root):
        raise click.UsageError(f"-o {root}: exists already; choose another folder with -o")
    limit_s = None if limit_minutes is None else limit_minutes * 60.0
    asked = _Options(root, level, run, data, beside, ranks, seed, runs, pairs, margin / 100.0, limit_s, overrides)
    root_was_there = root.exists()
    make_folder(root)
    with ExitStack() as stack:
        stack.callback(_remove_empty, root, kept=root_was_there)  # of a package that has no result
        # A second reproduction in this folder would move the files of the first one aside.
        stack.enter_context(create_lock(root / LOCK, "this reproduction"))
        _move_killed_aside(root)
        results = _judge_results(package, result, asked)
        document = Reproduction(
            package=package.resolve().name,
            manifest_sha256=_compute_manifest_digest(package),
            made=f"{stamp:%Y-%m-%dT%H:%M:%SZ}",
            suite_version=VERSION,
            asked=tuple(range(level + 1)),
            reproduced=is_reproduced(results),
            results=results,
        )
        path = write_reproduction(root, document)
    print_line(
        document.text().rstrip() if style == JSON else f"{render_table(document)}\n{path}: {_render_summary(document)}"
    )
    if not document.reproduced:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _is_unfinished(root: Path) -> bool:
    """Return True for a reproduction that was ended or still runs: its folder has its files, but no verdict."""
    paths = [path for path in root.iterdir() if path.suffix != PART_SUFFIX]
    return all(path.name == LOCK or _RESULT_NAME.fullmatch(path.name) for path in paths)


def _move_killed_aside(root: Path) -> None:
    """Move the runs and logs of a killed attempt to ``killed_<k>`` in the same folder.

    The attempt's data stay: they are continued, or are complete.
    """
    for folder in sorted(root.glob("result_*")):
        number = 1 + len(list(folder.glob("killed_*")))
        for path in sorted(folder.iterdir()):
            if path.name != "data" and not path.name.startswith("killed_"):
                make_folder(folder / f"killed_{number}")
                path.rename(folder / f"killed_{number}" / path.name)


def _remove_empty(root: Path, *, kept: bool) -> None:
    if not kept:
        with suppress(OSError):  # not empty
            root.rmdir()


def _choose_highest_level(level: int | None, beside: Path | None, overrides: tuple[str, ...], *, run: bool) -> int:
    """Return the highest level to judge. UsageError for options that contradict each other."""
    if run and beside is not None:
        raise click.UsageError("--run makes a new run, --with RUN takes one that exists: give one of the two")
    if level is None:
        level = 3 if run or beside is not None else 1
    if overrides and level < 4:
        raise click.UsageError("--set changes a setting for level 4: give --level 4 too")
    return level


def _write_requirements(package: Path, path: Path) -> None:
    """Write the Python environment of the package's runs, and print how to install it."""
    from mlhpc.suite.package.implementation import find_environment, render_requirements

    environment = find_environment(package)
    write_file_atomically(path, render_requirements(environment))
    # Wheels only: nothing of a stranger's choice is built, so none of its code runs while it is installed.
    install = f"python -m pip install --no-deps --only-binary :all: -r {quote_path(path)}"
    print_line(f"{path}: {environment.python}, {len(environment.distributions)} distributions")
    print_line(f"install: {install}    (offline: --no-index --find-links WHEELHOUSE)")


def _judge_results(package: Path, result: str | None, asked: _Options) -> tuple[ResultVerdict, ...]:
    """Judge all results of a package, or one of them. InputError if it neither has nor had any."""
    originals = read_originals(package, result)
    changes = list_changes(package, originals)
    if not originals and not changes:
        raise InputError(
            f"{package}: no result below it; expected results/<system>/<scenario>/<benchmark>/result_*.txt"
        )
    make_folder(asked.output)
    if not originals:
        return (_make_lost_verdict(changes),)
    return tuple(_judge(each, changes, asked, asked.output / f"result_{n}") for n, each in enumerate(originals))


def _compute_manifest_digest(package: Path) -> str | None:
    """Return the digest of the package's manifest. A link is not followed: it may lead out of the package."""
    manifest = package / MANIFEST
    return compute_sha256(manifest) if manifest.is_file() and not manifest.is_symlink() else None


def _make_lost_verdict(changes: list[Difference]) -> ResultVerdict:
    """Make the verdict of a package that has lost all its results."""
    why = f"the package has no result any more: {changes[0].kind} {changes[0].what} and {len(changes) - 1} more"
    lost = make_level_verdict(0, LevelOutcome.NOT_REPRODUCED, why, changes[0])
    return ResultVerdict(result="results", workload=None, size=None, levels=(lost,), differences=tuple(changes[:20]))


def _refuse_other_data(root: Path | None, original: Original) -> None:
    """Raise InputError if --data holds another workload or size: no difference of it would be a finding."""
    from mlhpc.suite.data.manifest import MANIFEST_NAME, read_manifest

    if root is None or not (root / MANIFEST_NAME).exists():
        return
    held, expected = read_manifest(root), (original.info.get("workload"), original.info.get("size"))
    if (held.workload, held.size) != expected:
        raise InputError(
            f"--data {root}: holds data of {held.workload} {held.size}; {original.name} needs {expected[0]} {expected[1]}; "
            "--result chooses one of several results"
        )


def _judge(original: Original, changes: list[Difference], asked: _Options, folder: Path) -> ResultVerdict:
    """Judge all levels of one result that were asked for."""
    record = original.records[0]
    levels = [judge_log(original, changes)]  # level 0 needs the package alone
    _print_level(original, levels[0])
    # A stranger's package may differ in any number of files.
    differences: tuple[Difference, ...] = tuple(changes[:20])
    against: str | None = None
    settings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    if asked.level >= 1:
        # The data of a submitter's own loop can be compared although the loop is never run.
        why = original.cannot_run() if original.info.get("loop") is None else None
        if why is not None:
            levels += [make_level_verdict(number, LevelOutcome.CANNOT, why) for number in range(1, asked.level + 1)]
        else:
            from mlhpc.suite.package.reproduction.rerun import Rerun

            _refuse_other_data(asked.data, original)
            rerun = Rerun(original, folder, asked.ranks, asked.seed, asked.data, asked.beside, may_run=asked.run)
            rerun.limit_s = asked.limit_s
            levels.append(rerun.judge_data())
            _print_level(original, levels[-1])
            levels += _judge_runs(original, rerun, levels[-1], asked)
            differences += rerun.differences()
            settings = tuple(each.what for each in rerun.settings())
            against, left_out = rerun.against, rerun.left_out
    workload = original.info.get("workload")
    return ResultVerdict(
        result=original.name,
        workload=workload if isinstance(workload, str) else record.benchmark,
        size=record.size,
        levels=tuple(levels),
        differences=differences,
        against=against,
        settings=settings,
        left_out=left_out,
    )


def _judge_runs(original: Original, rerun: Rerun, data: LevelVerdict, asked: _Options) -> list[LevelVerdict]:
    """Judge levels 2 to 4, for which a run is needed, as far as they were asked for."""
    numbers = range(2, asked.level + 1)
    if not numbers:
        return []
    why = original.cannot_run() or rerun.cannot_run()
    if why is not None:
        return [make_level_verdict(number, LevelOutcome.CANNOT, why) for number in numbers]
    # A run that exists has read its data already; a new one would waste hours on other data.
    if asked.beside is None:
        cause = None
        if data.verdict == LevelOutcome.NOT_REPRODUCED:
            why, cause = "no run was made: the data are not those of the package (level 1)", data.cause
        elif not asked.run:
            why = "no run was made: --run makes one, --with RUN names one"
        if why is not None:
            return [make_level_verdict(number, LevelOutcome.INCONCLUSIVE, why, cause) for number in numbers]
    found = []
    for number in numbers:
        found.append(_judge_level(number, rerun, asked))
        _print_level(original, found[-1])
    return found


def _judge_level(number: int, rerun: Rerun, asked: _Options) -> LevelVerdict:
    if number == 2:
        return rerun.judge_numerics()
    if number == 3:
        return rerun.judge_convergence(asked.runs)
    if asked.beside is not None:
        # One run has no partner on this machine, and another machine's times say nothing.
        why = "times are compared in pairs on one machine: give --run, not --with"
        return make_level_verdict(number, LevelOutcome.INCONCLUSIVE, why)
    return rerun.judge_time(asked.overrides, asked.pairs, asked.margin)


def _print_level(original: Original, level: LevelVerdict) -> None:
    """Say on stderr how far the command is: stdout is the table, or JSON."""
    print_progress(f"{original.name}: level {level.level} {level.name}: {level.verdict}", error=True)


def _render_summary(document: Reproduction) -> str:
    counts = [level.verdict for result in document.results for level in result.levels]
    said = ", ".join(f"{counts.count(each)} {each}" for each in LevelOutcome if each in counts)
    many = f"{len(document.results)} result{'s' * (len(document.results) > 1)}"
    return f"{many}, levels 0 to {document.asked[-1]} ({LEVELS[document.asked[-1]]}): {said}"
