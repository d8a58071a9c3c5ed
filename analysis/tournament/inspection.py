"""What forbids to trust a tournament: runs deleted, added, edited or copied, or made otherwise than its settings say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from analysis.history.record import facts_of_nodes
from analysis.tournament.folder import Entry, Tournament, logged
from analysis.tournament.journal import ENDED, Journal, changed
from analysis.tournament.outcome import Outcome
from analysis.tournament.race import Turn, replay
from suite import RULESET
from suite.compliance.check import judge_log
from suite.compliance.forensics.likeness import DURATIONS, Runs, series_of
from suite.compliance.ruleset import ruleset
from suite.descriptor import descriptor
from suite.errors import InputError
from suite.files import brief
from suite.log.results_tree import list_files
from suite.machine.facts import read_facts

SHOWN = 6  # facts that differ which a finding names
FEWEST = 2  # durations to the millisecond that two runs of different seeds do not have in common by chance


@dataclass(frozen=True)
class Finding:
    """Something that must not be, and where: a path in the tournament's folder."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} ({self.rule})"


def inspect(tournament: Tournament, journal: Journal, outcomes: Mapping[Turn, Outcome]) -> list[Finding]:
    """List all findings. ``outcomes`` are those of every run that ended."""
    return [
        *_journal(tournament, journal, outcomes),
        *_folders(tournament, journal.started()),
        *(finding for outcome in outcomes.values() for finding in _run(tournament, outcome)),
        *_alike(tournament, outcomes),
        *_times(tournament, outcomes),
        *_copies(tournament, outcomes),
    ]


def _journal(tournament: Tournament, journal: Journal, outcomes: Mapping[Turn, Outcome]) -> Iterator[Finding]:
    for text in journal.broken:
        yield Finding("journal-whole", *text.split(": ", 1))
    if journal.notes:
        for text in changed(journal.digests, tournament.digests()):
            yield Finding("as-it-began", tournament.root.resolve().name, text)
    started = journal.started()
    expected = _expected(tournament, outcomes, len(started))
    for turn, wanted in zip(started, expected, strict=False):
        if turn != wanted:
            where = _where(tournament, turn)
            yield Finding(
                "turns-as-drawn", where, f"was run where block {wanted.block}, entry {wanted.entry!r} had its turn"
            )
            break
    for turn in started[len(expected) :]:
        yield Finding("turns-as-drawn", _where(tournament, turn), "was run though the race was over")
    ended = dict(journal.turns(ENDED))
    for turn in [turn for turn in started[:-1] if turn not in ended]:
        yield Finding("journal-whole", _where(tournament, turn), "was started and never ended, though others followed")
    for turn, note in ended.items():
        if turn not in outcomes:
            yield Finding("journal-whole", _where(tournament, turn), "ended, but was never started")
        elif note.log_sha256 != outcomes[turn].log_sha256:
            what = "is gone" if outcomes[turn].log_sha256 is None else "was changed after the run ended"
            yield Finding("log-unchanged", _where(tournament, turn), f"its log {what}")


def _expected(tournament: Tournament, outcomes: Mapping[Turn, Outcome], most: int) -> list[Turn]:
    """The turns in the order in which the race demands them, as far as the runs that were started decide it."""
    race, missing = replay(tournament.plan, {turn: outcome.value for turn, outcome in outcomes.items()})
    found = [
        Turn(number, name)
        for number, times in enumerate(race.blocks, 1)
        for name in tournament.plan.order(number, list(times))
    ]
    return [*found, *missing][:most]


def _folders(tournament: Tournament, started: Sequence[Turn]) -> Iterator[Finding]:
    """Run folders that nobody started, more logs than one in a run folder, and links."""
    known = {tournament.run(turn.block, turn.entry).root for turn in started}
    for top in (tournament.runs, tournament.root / "entries"):
        if top.is_symlink():
            yield Finding("links-none", _short(tournament, top), "is a symbolic link, which is not followed")
            continue
        for path in list_files(top) if top.is_dir() else []:
            if path.is_symlink():
                yield Finding("links-none", _short(tournament, path), "is a symbolic link, which is not followed")
    if not tournament.runs.is_dir() or tournament.runs.is_symlink():
        return
    for block in sorted(tournament.runs.iterdir()):
        for folder in sorted(block.iterdir()) if block.is_dir() and not block.is_symlink() else []:
            if folder not in known:
                yield Finding(
                    "runs-as-started",
                    _short(tournament, folder),
                    "no run was started here: a run that does not count was put here",
                )
    for turn in started:
        run = tournament.run(turn.block, turn.entry)
        logs = [*run.results(), *run.resumed(), *run.failed()] if run.root.is_dir() else []
        if more := [path.name for path in logs if path != run.result(0)]:
            yield Finding(
                "runs-as-started",
                _short(tournament, run.root),
                f"has more logs than that of its run: {', '.join(more[:SHOWN])}",
            )


def _run(tournament: Tournament, outcome: Outcome) -> Iterator[Finding]:
    """What the log of one run says that it must not say."""
    record, log, settings = outcome.record, outcome.log, tournament.settings
    if record is None or log is None or record.run_start_s is None:
        return
    where = _where(tournament, outcome.turn)
    entry = next((each for each in tournament.entries if each.name == outcome.turn.entry), None)
    card = descriptor(settings.workload).card()
    for name, found, wanted in (
        ("benchmark", record.benchmark, card.mlperf_name),
        ("size", record.size, settings.size),
        ("seed", record.seed, tournament.plan.run_seed(outcome.turn.block)),
        ("ranks", record.ranks, settings.ranks),
        ("platform", record.platform, settings.system),
        ("mode", record.mode, "strong"),
    ):
        if found != wanted:
            yield Finding("run-as-stated", where, f"its log says {name} {brief(found)}; expected {wanted!r}")
    if entry is not None and (difference := _difference(entry, record.config or {})):
        yield Finding("run-as-entered", where, f"its log has another configuration than the entry: {difference}")
    if outcome.finished:
        checked = judge_log(log, ruleset(RULESET), where)
        for finding in checked.findings:
            if finding.severity == "error":
                line = f"line {finding.line}: " if finding.line else ""
                yield Finding(finding.rule, where, f"{line}{finding.message}")


def _difference(entry: Entry, config: Mapping[str, object]) -> str:
    """The first setting of a log that is not the entry's; empty if there is none."""
    for key, wanted in logged(entry.config).items():
        if key not in config:
            return f"no {key}"
        if (found := config[key]) != wanted:
            if isinstance(found, dict) and isinstance(wanted, dict):
                key, found, wanted = next(
                    (f"{key}.{name}", found.get(name), wanted.get(name))
                    for name in sorted({*found, *wanted})
                    if found.get(name) != wanted.get(name)
                )
            return f"{key} is {brief(found)}, not {brief(wanted)}"
    return ""


def _alike(tournament: Tournament, outcomes: Mapping[Turn, Outcome]) -> Iterator[Finding]:
    """Runs of another version of the suite, over other data, or on another machine than the first run."""
    first: dict[str, tuple[str, object]] = {}
    for outcome in outcomes.values():
        if outcome.record is None or outcome.record.run_start_s is None:
            continue
        where = _where(tournament, outcome.turn)
        found: dict[str, object] = {
            "suite version": outcome.record.suite_version,
            "data": outcome.record.data_manifest,
            "nodes": outcome.record.nodes,
        }
        try:
            paths = [
                path
                for path in tournament.run(outcome.turn.block, outcome.turn.entry).node_facts()
                if not path.is_symlink()
            ]
            found |= facts_of_nodes([read_facts(path) for path in paths])
        except InputError as error:
            yield Finding("same-machine", where, str(error).replace(f"{tournament.root}/", ""))
        if not first:
            first = {name: (where, value) for name, value in found.items()}
            origin = where
            continue
        unlike = [
            f"{name}: {brief(found.get(name))}, there {brief(first[name][1] if name in first else None)}"
            for name in sorted(found.keys() | first.keys())
            if found.get(name) != (first[name][1] if name in first else None)
        ]
        if unlike:
            yield Finding("same-machine", where, f"was not made as {origin}: {'; '.join(unlike[:SHOWN])}")


def _times(tournament: Tournament, outcomes: Mapping[Turn, Outcome]) -> Iterator[Finding]:
    """Runs of one tournament follow each other: none begins before the one before it has ended."""
    for before, after in pairwise(outcomes.values()):
        if before.record is None or after.record is None:
            continue
        begin, end = after.record.run_start_s, before.record.run_stop_s or before.record.run_start_s
        if begin is not None and end is not None and begin < end:
            yield Finding(
                "one-at-a-time",
                _where(tournament, after.turn),
                f"began {end - begin:.3g} s before the run before it had ended",
            )


def _copies(tournament: Tournament, outcomes: Mapping[Turn, Outcome]) -> Iterator[Finding]:
    """Runs that are copies of others. Runs of one block share a seed and may have equal evaluations, but never equal times."""
    seen: Runs[Turn] = Runs()
    exact: dict[tuple[tuple[float, ...], ...], Turn] = {}
    for turn, outcome in outcomes.items():
        if outcome.record is None:
            continue
        curves = series_of(outcome.record)

        def telling(other: Turn, what: str, turn: Turn = turn) -> bool:
            return what == DURATIONS or other.block != turn.block

        course = tuple(series.numbers for series in curves)
        twin = exact.setdefault(course, turn)
        found = seen.find(curves, telling)
        if twin.block != turn.block and len(course[1]) >= FEWEST:
            where = _where(tournament, twin)
            yield Finding(
                "run-repeated", _where(tournament, turn), f"has the evaluations and durations of {where}: a copy"
            )
        elif found is not None:
            other, likeness = found
            yield Finding(
                "run-repeated",
                _where(tournament, turn),
                f"has of {_where(tournament, other)} {likeness.text()}: a copy",
            )
        seen.add(turn, curves)


def _where(tournament: Tournament, turn: Turn) -> str:
    return _short(tournament, tournament.run(turn.block, turn.entry).root)


def _short(tournament: Tournament, path: Path) -> str:
    """A path without the place of the tournament: reports name no place on a machine."""
    return path.relative_to(tournament.root).as_posix()
