"""Selects the ruleset that judges a result, from the folder that is checked. A log can select only a ruleset mlhpc-*.

A package in a round's folder is judged by that round, whatever its logs and systems are called. Elsewhere a log of this
suite is judged by the ruleset mlhpc-* that it names. That is stricter than any round. All other logs are judged by the
newest round of the suite that has their benchmark. A time stamp selects nothing, because anybody can write one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite import RULESET
from mlhpc.suite.compliance.rules.base import Rule
from mlhpc.suite.compliance.ruleset import (
    LAST_ROUND,
    find_newest_training_ruleset,
    find_round_ruleset,
    list_rulesets,
    list_training_rounds,
    read_ruleset,
)
from mlhpc.suite.files import render_repr
from mlhpc.suite.log.reader import HEAD_BYTES, read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.results_tree import Group, parse_round, parse_suite

SELECTION_RULES: tuple[Rule, ...] = (
    Rule("round-agrees", "a folder that gives a package its round is in no other round and in no other package"),
    Rule("ruleset-assumed", "a round's folder or the logs tell which rules hold; else the newest do"),
    Rule("round-known", "there are rules for the round and the benchmark: without them nothing is judged"),
)

Breach = tuple[str, Path, str]  # rule, path, message


@dataclass(frozen=True)
class SelectedRuleset:
    """The name of a ruleset, and the breaches of the rules above that its selection found.

    ``name`` is None if no ruleset has the round or the benchmark.
    """

    name: str | None
    breaches: tuple[Breach, ...] = ()


def select_ruleset(groups: Sequence[Group], root: Path) -> SelectedRuleset:
    """Select the ruleset for the results of one package, or of one folder of logs. ``root`` is the path to check."""
    if not groups:
        return SelectedRuleset(RULESET)
    group = groups[0]
    where = group.package or group.folder
    folder = group.round_folder
    suite = parse_suite(folder) if folder is not None else None
    by_folder = find_round_ruleset(group.round, suite)
    if by_folder is not None:
        return SelectedRuleset(by_folder, tuple(_check_other_rounds(group, where, root)))

    # One readable log of each result is enough: a result that mixes rulesets breaks rule ruleset-agrees.
    firsts = [record for record in map(_summarise_first_log, groups) if record is not None]
    named = [name for name in map(_find_log_ruleset, firsts) if name is not None]
    if named or not firsts:
        return SelectedRuleset(max(named, key=list_rulesets().index, default=RULESET))
    if folder is not None and suite == "training":
        return _refuse_training(folder, f"MLPerf Training {group.round} has no ruleset here")

    training = [
        name for name in (find_newest_training_ruleset(first.benchmark) for first in firsts) if name is not None
    ]
    newest = max(training, key=list_rulesets().index) if len(training) == len(firsts) else LAST_ROUND
    others = [read_ruleset(newest).other_suite(first.benchmark) for first in firsts]
    if all(others):
        return _refuse_training(where, f"a log of {others[0]} ({render_repr(firsts[0].benchmark)}): no ruleset has it")
    why = f"there is no ruleset of round {group.round}" if group.round else "no folder of a round holds these results"
    message = f"{why} and no log names mlhpc-*: judged by {newest}, the newest round; --ruleset chooses another"
    return SelectedRuleset(newest, (("ruleset-assumed", where, message),))


def _refuse_training(where: Path, why: str) -> SelectedRuleset:
    known = f"rounds of MLPerf Training with rules: {', '.join(list_training_rounds())}"
    message = f"{why}, nothing below is judged; {known}; --ruleset judges by another"
    return SelectedRuleset(None, (("round-known", where, message),))


def _find_log_ruleset(record: RunRecord) -> str | None:
    """Return the ruleset of this suite that a log names. None for other names, and for MLPerf's rounds."""
    if record.ruleset is not None and record.ruleset.startswith("mlhpc-"):
        return record.ruleset if record.ruleset in list_rulesets() else RULESET
    # Only logs of this suite have a size, so such a log is ours although its ruleset is missing.
    return RULESET if record.size is not None and record.ruleset is None else None


def _check_other_rounds(group: Group, where: Path, root: Path) -> Iterator[Breach]:
    """Yield a breach for each folder above a round's folder that is another round or a package.

    A submitter could put a folder v0.7 into his package to select older rules. The folder to check and those above it
    are the checker's own. Only names such as hpc_results_v3.0 count.
    """
    depth, (chosen, *above) = len(root.absolute().parts), where.absolute().parents
    if len(chosen.parts) <= depth:
        return
    for folder in above:
        inside = len(folder.parts) >= depth
        other = parse_round(folder) if inside or "results" in folder.name else None
        if other is not None and other != group.round:
            yield "round-agrees", where, f"lies in a folder of round {group.round} within {folder}, of round {other}"
        elif (folder / "systems").is_dir() and (folder / "results").is_dir():
            yield "round-agrees", where, f"lies in a folder of round {group.round} within the package {folder}"


def _summarise_first_log(group: Group) -> RunRecord | None:
    """Summarise the head of the first log that reached run_start. If none did, take the log that states most."""
    short = []
    for path in group.logs:
        with suppress(OSError):
            record = summarise_log(read_events(path, steps=False, first_bytes=HEAD_BYTES))
            if record.benchmark is not None and record.run_start_s is not None:
                return record
            short.append(record)
    return min(short, key=lambda record: (record.size is None, record.benchmark is None), default=None)
