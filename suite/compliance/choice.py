"""Which ruleset judges a result. Whoever checks decides, by the folder that holds the package; a log decides nothing but mlhpc-*.

A package in a round's folder is judged by that round, whatever its logs and systems are called. Elsewhere logs of this suite are
judged by the mlhpc ruleset they name, which is the strictest, and all others by the newest round of the suite whose benchmark they
run: a time stamp is no choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from suite import RULESET
from suite.compliance.rules.base import OURS, Rule
from suite.compliance.ruleset import LAST_ROUND, newest_training, ruleset, ruleset_names, ruleset_of_round
from suite.log.limits import HEAD_BYTES
from suite.log.reader import read_events
from suite.log.record import RunRecord, summarise
from suite.log.results_tree import Group, round_of

RULES: tuple[Rule, ...] = (
    Rule("round-agrees", "a folder that gives a package its round is in no other round and in no other package", OURS),
    Rule("ruleset-assumed", "a round's folder or the logs tell which rules hold; else the newest do", OURS),
)

Breach = tuple[str, Path, str]  # rule, path, message


@dataclass(frozen=True)
class Choice:
    """The name of the ruleset, and what is to be said about how it was found."""

    ruleset: str
    breaches: tuple[Breach, ...] = ()


def choose(groups: Sequence[Group], root: Path) -> Choice:
    """Choose the ruleset of the results of one package, or of one folder of logs. ``root`` is the path that is checked."""
    if not groups:
        return Choice(RULESET)
    group = groups[0]
    where = group.package or group.folder
    by_folder = ruleset_of_round(group.round)
    if by_folder is not None:
        return Choice(by_folder, tuple(_other_rounds(group, where, root)))
    firsts = [first for item in groups if item.logs and (first := next(_beginnings(item), None)) is not None]
    named = [name for first in firsts if (name := _named(first)) is not None]
    if named or not firsts:
        return Choice(max(named, key=ruleset_names().index, default=RULESET))
    why = f"there is no ruleset of round {group.round}" if group.round else "no folder of a round holds these results"
    training = [name for first in firsts if (name := newest_training(first.benchmark)) is not None]
    newest = max(training, key=ruleset_names().index) if len(training) == len(firsts) else LAST_ROUND
    if all(ruleset(newest).other_suite(first.benchmark) for first in firsts):
        return Choice(newest)  # each log is told that it is not judged
    message = f"{why} and no log names mlhpc-*: judged by {newest}, the newest round; --ruleset chooses another"
    return Choice(newest, (("ruleset-assumed", where, message),))


def _named(record: RunRecord) -> str | None:
    """The ruleset of this suite that a log names; of other names, and of MLPerf's rounds, none. Only our logs have a size."""
    if record.ruleset is not None and record.ruleset.startswith("mlhpc-"):
        return record.ruleset if record.ruleset in ruleset_names() else RULESET
    return RULESET if record.size is not None and record.ruleset is None else None


def _other_rounds(group: Group, where: Path, root: Path) -> Iterator[Breach]:
    """A round's folder that somebody put into his package, or into another round, decides nothing without being said.

    The folder that is checked, and what lies above it, are the checker's own choice: there only names like hpc_results_v3.0 count.
    """
    depth, (chosen, *above) = len(root.absolute().parts), where.absolute().parents
    for folder in above if len(chosen.parts) > depth else ():
        stated = len(folder.parts) >= depth or "results" in folder.name
        other = round_of(folder) if stated else None
        if other is not None and other != group.round:
            yield "round-agrees", where, f"lies in a folder of round {group.round} within {folder}, of round {other}"
        elif (folder / "systems").is_dir() and (folder / "results").is_dir():
            yield "round-agrees", where, f"lies in a folder of round {group.round} within the package {folder}"


def _beginnings(group: Group) -> Iterator[RunRecord]:
    """Records of the beginnings of a group's logs. Logs that died before run_start, and do not say all, come last."""
    short = []
    for path in group.logs:
        with suppress(OSError):
            record = summarise(read_events(path, steps=False, first_bytes=HEAD_BYTES))
            if record.benchmark is not None and record.run_start_s is not None:
                yield record
            else:
                short.append(record)
    yield from sorted(short, key=lambda record: (record.size is None, record.benchmark is None))
