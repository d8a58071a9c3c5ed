"""Ranks the entries of a contest: winner and differences. Findings say why they must not be trusted.

`Ranking` is the JSON document of `mlhpc ab runs show`, which `mlhpc report` reads. A number that is unknown or infinite
is null.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from mlhpc.plugins.tune.contest import Contest, Journal, RunResult, StartedRun, read_contest, read_result
from mlhpc.plugins.tune.race import MedianRatio, Race, Turn, build_race, compute_median_ratio
from mlhpc.suite import RULESET
from mlhpc.suite.compliance.check import judge_log
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.files import align_columns, render_repr
from mlhpc.suite.log.score import compute_olympic_mean
from mlhpc.suite.statistics import Outcome

KIND: Literal["ab-runs"] = "ab-runs"
# MLPerf's score drops the fastest and the slowest run, so one must be left.
SCORED_RUNS = 3
UNITS = {"time_to_train": "time to train, s", "cpu_seconds": "CPU time of the ranks, s"}


class Finding(Struct, frozen=True):
    """A defect of a contest. ``where`` is a path in the contest's folder."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} ({self.rule})"


class RankedEntry(Struct, frozen=True, kw_only=True):
    """An entry and its verdict: faster than all others, slower than the best, or inconclusive.

    ``dropped_p``: the chance that the best entry ever looks this bad. ``mean``: the geometric mean of its finished runs
    in complete blocks. ``spread_factor``: the standard deviation of log time as a factor. ``score``: the mean of the
    same runs by the MLPerf rules, without the fastest and the slowest. ``score_to_leader``: its ratio to the leader's
    score in the blocks that both ran. It is 0 if the leader has no score: several of its runs did not finish. The
    leader has neither ratio.
    """

    entry: str
    verdict: Outcome
    dropped_after_block: int | None
    dropped_p: float | None
    runs: int
    finished: int
    mean: float | None
    spread_factor: float | None
    score: float | None
    score_to_leader: float | None
    ratio_to_leader: MedianRatio | None


class Ranking(Struct, frozen=True, kw_only=True):
    """The present ranking of a contest. Do not trust it while there are findings.

    ``by_score`` names the entries that the MLPerf score puts before the winner; empty if there are none.
    """

    version: Literal[1] = 1
    kind: Literal["ab-runs"] = KIND
    name: str
    settings: dict[str, Any]
    objective: str
    verdict: str
    by_score: str
    winner: str | None
    over: bool
    error: float
    blocks: int
    runs: int
    findings: list[Finding]
    entries: list[RankedEntry]


def read_ranking(root: Path) -> Ranking:
    """Read and judge a contest. InputError if the folder is not one."""
    contest = read_contest(root)
    settings = contest.settings
    journal = contest.read_journal()
    results = {noted.turn: read_result(contest, noted.turn) for noted in journal.runs if noted.ended}
    race, demanded = build_race(contest.rules, {turn: result.value for turn, result in results.items()})
    findings = list(_check_folder(contest, journal, results, demanded))

    def last_block(name: str) -> int:
        return race.dropped[name].block if name in race.dropped else len(race.blocks) + 1

    # Entries that stayed longer come first; the name makes the order stable among equals.
    ranked = sorted(race.rules.entries, key=lambda name: (-last_block(name), -race.points[name], name))
    stated = msgspec.to_builtins(settings)
    entries = [_build_ranked_entry(name, ranked[0], race) for name in ranked]
    return Ranking(
        name=root.resolve().name,
        settings={key: value for key, value in stated.items() if key not in ("version", "data")},
        objective=UNITS[settings.objective],
        verdict=_render_contest_verdict(race, len(findings)),
        by_score=_describe_score_order(entries) if race.winner else "",
        # A winner from runs that were edited or are incomplete would be believed.
        winner=None if findings else race.winner,
        over=race.over,
        error=settings.error,
        blocks=len(race.blocks),
        runs=len(results),
        findings=findings,
        entries=entries,
    )


def _render_contest_verdict(race: Race, findings: int) -> str:
    """Render the verdict in one sentence: the winner, no winner, not over, or not to be trusted."""
    error, left, done = f"{100 * race.rules.error:g} %", ", ".join(race.survivors), len(race.blocks)
    if findings:
        return f"no verdict: {findings} finding{'s' * (findings > 1)}; the runs are not those of a fair contest"
    if race.winner is not None:
        return f"{race.winner} wins; the chance that the best entry was dropped is at most {error}"
    if race.over:
        return f"no winner: {left} are inconclusive after {done} block{'s' * (done != 1)} at an error of {error}"
    return f"not over: {done} of at most {race.rules.blocks} blocks; in the race: {left}"


def _describe_score_order(entries: list[RankedEntry]) -> str:
    """Name the entries that the MLPerf score puts before the winner, who is first. Empty if there are none."""
    before = [
        f"{entry.entry} ({entry.score_to_leader:.3g} of the winner's)" if entry.score_to_leader else entry.entry
        for entry in entries
        if entry.score_to_leader is not None and entry.score_to_leader < 1.0
    ]
    if not before:
        return ""
    winner = entries[0]
    none = "" if winner.score else f"; {winner.entry} has no score, because several of its runs did not finish"
    return (
        f"the MLPerf score differs: it puts {', '.join(before)} before {winner.entry}{none}; "
        "the verdict counts blocks won, the score averages seconds"
    )


def _compute_score(times: list[float]) -> float | None:
    """Compute the MLPerf score, infinite if more than one run did not finish; None for too few runs."""
    return compute_olympic_mean(times) if len(times) >= SCORED_RUNS else None


def _compute_score_ratio(common: list[tuple[float, float]]) -> float | None:
    """Compute a score over the leader's, from both times in the same blocks. 0 if only the leader has none."""
    mine, leading = _compute_score([own for own, _ in common]), _compute_score([other for _, other in common])
    if mine is None or leading is None or math.isinf(mine):
        return None
    return mine / leading


def _build_ranked_entry(name: str, leader: str, race: Race) -> RankedEntry:
    times = [block[name] for block in race.blocks if name in block]
    logs = [math.log(seconds) for seconds in times if math.isfinite(seconds)]
    common = [(block[name], block[leader]) for block in race.blocks if name in block and leader in block]
    score = _compute_score(times)
    dropped = race.dropped.get(name)
    verdict = Outcome.FASTER if race.winner == name else Outcome.INCONCLUSIVE
    return RankedEntry(
        entry=name,
        verdict=verdict if dropped is None else Outcome.SLOWER,
        dropped_after_block=None if dropped is None else dropped.block,
        dropped_p=None if dropped is None else dropped.p,
        runs=len(times),
        finished=len(logs),
        mean=math.exp(statistics.fmean(logs)) if logs else None,
        spread_factor=math.exp(statistics.stdev(logs)) if len(logs) > 1 else None,
        score=score if score is not None and math.isfinite(score) else None,
        score_to_leader=None if name == leader else _compute_score_ratio(common),
        ratio_to_leader=None if name == leader else compute_median_ratio(common),
    )


def _check_folder(
    contest: Contest, journal: Journal, results: Mapping[Turn, RunResult], demanded: list[Turn]
) -> Iterator[Finding]:
    """Yield a finding for everything in a contest's folder that was deleted, added or edited.

    The journal has the digest of each log at the end of its run.
    """
    for text in journal.changed(contest.digests()):
        yield Finding("as-it-began", contest.root.resolve().name, text)
    for number, noted in enumerate(journal.runs):
        if number >= len(demanded) or noted.turn != demanded[number]:
            # A run that was taken out of the journal shows here: without it the race demands its turn again.
            yield Finding("turns-as-drawn", _render_run_path(contest, noted.turn), "was run out of its turn")
            break
    yield from _check_foreign_runs(contest, journal)
    first: tuple[str, object] | None = None
    for noted in journal.runs:
        if not noted.ended:
            continue
        result, where = results[noted.turn], _render_run_path(contest, noted.turn)
        yield from _check_logs(contest, noted, result)
        record = result.record
        if record is None or record.run_start_s is None:
            continue
        made_by = record.suite_version, record.data_manifest, record.nodes
        first = first or (where, made_by)
        if made_by != first[1]:
            message = f"suite version, data or nodes are {render_repr(made_by)}; those of {first[0]} are {render_repr(first[1])}"
            yield Finding("same-for-all", where, message)
        if result.finished and result.log is not None:
            for finding in judge_log(result.log, read_ruleset(RULESET), where).findings:
                if finding.severity == "error":
                    yield Finding(finding.rule, where, finding.message)


def _render_run_path(contest: Contest, turn: Turn) -> str:
    """Return the run folder of a turn, relative to the contest: reports name no place on a machine."""
    return contest.run(turn).root.relative_to(contest.root).as_posix()


def _check_foreign_runs(contest: Contest, journal: Journal) -> Iterator[Finding]:
    """Yield a finding for each run folder that is not in the journal."""
    known = {contest.run(noted.turn).root for noted in journal.runs}
    runs = contest.root / "runs"
    if runs.is_symlink():  # not followed: every log in it counts as gone
        return
    for path in sorted(runs.glob("*/*")):
        if path not in known:
            where = path.relative_to(contest.root).as_posix()
            yield Finding("runs-as-started", where, "no run was started here: a run that does not count was put here")


def _check_logs(contest: Contest, noted: StartedRun, result: RunResult) -> Iterator[Finding]:
    """Yield a finding for a run's log that is gone or changed, and for extra logs next to it."""
    folder, where = contest.run(noted.turn), _render_run_path(contest, noted.turn)
    if noted.log_sha256 != result.log_sha256:
        what = "is gone" if result.log_sha256 is None else "was changed after the run ended"
        yield Finding("log-unchanged", where, f"its log {what}")
    logs = [*folder.results(), *folder.resumed(), *folder.failed()] if folder.root.is_dir() else []
    more = [path.name for path in logs if path != folder.result(0)]
    if more:
        yield Finding("runs-as-started", where, f"has more logs than that of its run: {', '.join(more[:6])}")


def render_ranking(ranking: Ranking) -> list[str]:
    """Render the ranking as text."""
    stated = ranking.settings
    return [
        f"{stated['workload']} {stated['size']} on {stated['system']}: {len(ranking.entries)} entries, "
        f"{ranking.blocks} complete blocks, {ranking.runs} run{'s' * (ranking.runs != 1)} ended; {ranking.objective}",
        ranking.verdict,
        *([ranking.by_score] if ranking.by_score else []),
        *(f"  {finding}" for finding in ranking.findings),
        "",
        *align_columns(
            [
                ("entry", "verdict", "finished", "mean", "spread", "score", "time / leader [95 %]"),
                *(
                    (
                        *(entry.entry, render_verdict(entry), f"{entry.finished} of {entry.runs}"),
                        *map(_render_number, (entry.mean, entry.spread_factor, entry.score)),
                        render_ratio(entry.ratio_to_leader),
                    )
                    for entry in ranking.entries
                ),
            ],
            right=range(2, 6),
        ),
    ]


def render_verdict(entry: RankedEntry) -> str:
    """Render an entry's verdict and when it was dropped."""
    if entry.dropped_p is None:
        return entry.verdict
    return f"{entry.verdict}: dropped after block {entry.dropped_after_block} (p {entry.dropped_p:.2g})"


def render_ratio(ratio: MedianRatio | None) -> str:
    """Render a ratio to the leader with its interval."""
    if ratio is None:
        return "1"
    ends = "unknown" if not ratio.low or ratio.high is None else f"{ratio.low:.3g}, {ratio.high:.3g}"
    return f"{_render_number(ratio.value)} [{ends}]"


def _render_number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
