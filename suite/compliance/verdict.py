"""Answers, before any ranking, what a result is: its task, compliant, disturbed, of how many sessions.

`mlhpc compare`, `score`, the report, its index and `history` all ask here. So no door ranks what another one refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mlhpc.suite.compliance.result import Result, find_named_run
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.log.other_work import MAX_SHARE, render_percent
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.score import list_differences
from mlhpc.suite.statistics import CONFIDENCE, Outcome
from mlhpc.suite.statistics.comparison import Comparison, compare_times
from mlhpc.suite.statistics.sessions import TimedRun, compute_geometric_mean, find_sessions

MOST_DISTURBED: Final = MAX_SHARE  # with 6.8 % equal runs were called slower (docs/verdicts.md)
ALLOWED_TO_MISS = 1  # runs that may miss the target: the rules count one as the slowest


class Task(NamedTuple):
    """What two results must share to be compared: benchmark, size, and ``strong`` or ``weak``."""

    benchmark: str | None
    size: str | None
    scenario: str

    def __str__(self) -> str:
        named = self._replace(benchmark=self.benchmark or "no known benchmark,")
        return " ".join(str(part) for part in named if part is not None)


@dataclass(frozen=True)
class Standing:
    """What must be known of a result before it is ranked. Texts are None if there is nothing to say.

    ``runs`` are those that reached the target, ``cpu_runs`` the same with the CPU seconds of their ranks in place of
    their time; empty if not all logs state them. ``no_score`` and ``not_compliant``: why it is no score, or not of a
    compliant result. ``disturbed``: how much of the CPUs other programs used. ``missed`` of ``started`` runs missed the
    target.
    """

    task: Task
    round: str | None
    division: str | None
    system: str | None
    runs: tuple[TimedRun, ...]
    cpu_runs: tuple[TimedRun, ...]
    resolution_s: float
    started: int
    missed: int
    no_score: str | None
    not_compliant: str | None
    disturbed: str | None

    @property
    def not_ranked(self) -> str | None:
        """Why no door ranks the result. None: it may be ranked."""
        return self.not_compliant or self.no_score or self.disturbed

    @property
    def sessions(self) -> int:
        """The number of sessions of its runs."""
        return len(find_sessions(self.runs))


def assess(result: Result) -> Standing:
    """Say what a result is. Its runs, their errors and their CPUs decide; nothing is ranked here."""
    first = find_named_run(result.runs)
    done = [run.record for run in result.score.runs if run.converged]
    judged = [run for run in result.score.runs if not run.record.resumed]
    times = [time for run in result.runs for time in (run.run_start_s, run.run_stop_s) if time]
    cpu = [(run, run.own_cpu_s or 0.0) for run in done]
    return Standing(
        task=Task(first.benchmark, first.size, result.scenario),
        round=result.group.round or first.ruleset,
        division=result.division,
        system=result.group.system or first.platform,
        runs=tuple(_make_timed_run(run, run.time_to_train_s or 0.0) for run in done),
        cpu_runs=tuple(_make_timed_run(run, seconds) for run, seconds in cpu if all(each for _, each in cpu)),
        # 1 if all runs begin and end at whole seconds
        resolution_s=1.0 if all(time == int(time) for time in times) else 0.001,
        started=len(judged),
        missed=sum(not run.converged for run in judged),
        no_score=None if result.score.valid else str(result.score.reason),
        not_compliant=_describe_errors(result) if result.errors else None,
        disturbed=describe_disturbance(done),
    )


def _make_timed_run(run: RunRecord, seconds: float) -> TimedRun:
    return TimedRun(run.run_start_s or 0.0, seconds, run.job or "", float(len(run.epochs)))


def _describe_errors(result: Result) -> str:
    if result.under_way:
        return f"not judged yet: {result.under_way}"
    return f"NOT compliant ({', '.join(result.broken)})"


def describe_disturbance(runs: Sequence[RunRecord]) -> str | None:
    """Say during how many runs other programs used more than `MOST_DISTURBED` of the CPUs. None: in none, or not
    logged.
    """
    shares = [run.company.share for run in runs if run.company is not None and run.company.share > MOST_DISTURBED]
    if not shares:
        return None
    up_to = "up to " if len(shares) > 1 else ""
    during = f"during {len(shares)} of {len(runs)} runs" if len(runs) > 1 else "during its run"
    return f"other programs used {up_to}{render_percent(max(shares))} of the CPUs {during}"


@dataclass(frozen=True)
class PairVerdict:
    """The verdict on B against its baseline A.

    ``reasons`` say why it is inconclusive, or what else a person should know. ``scores`` is false if a side is no score
    of a compliant result. ``ratio`` is of geometric means, B over A; None if nothing may be compared. ``compared`` is
    None as well if runs show no spread. ``assumes`` says what a verdict rests on.
    """

    outcome: Outcome
    reasons: tuple[str, ...]
    scores: bool = True
    ratio: float | None = None
    compared: Comparison | None = None
    assumes: str | None = None

    @property
    def code(self) -> ExitCode:
        """The exit code of a command that asks for this verdict."""
        if self.outcome == Outcome.SLOWER:
            return ExitCode.FINDINGS
        if not self.scores:
            return ExitCode.NO_SCORE
        return ExitCode.INCONCLUSIVE if self.outcome == Outcome.INCONCLUSIVE else ExitCode.OK


def judge_pair(
    a: Standing,
    b: Standing,
    *,
    margin: float = 0.0,
    confidence: float = CONFIDENCE,
    any_runs: bool = False,
    busy: bool = False,
) -> PairVerdict:
    """Judge B against A, results of one task.

    ``any_runs``: also if a side is no score of a compliant result. ``busy``: also if other programs used the CPUs.
    """
    sides = (("A", a), ("B", b))
    invalid = [f"{side} is {text}" for side, one in sides for text in (one.no_score, one.not_compliant) if text]
    if not a.runs or not b.runs or ((a.no_score or b.no_score) and not any_runs):
        return PairVerdict(Outcome.INCONCLUSIVE, tuple(invalid), scores=False)
    compared = compare_times(
        a.runs,
        b.runs,
        confidence=confidence,
        margin=margin,
        resolution_s=max(a.resolution_s, b.resolution_s),
        same_machine=a.system == b.system,
    )
    # Other rules make other times: the ratio is shown, but says nothing of the machine.
    apart = list_differences(a.round, b.round, a.division, b.division)
    one, other = ({run[:2] for run in side.runs} for side in (a, b))
    if not apart and (one <= other or other <= one):
        same = f"{len(one & other)} of {len(b.runs)} runs of B are runs of A"
        apart = [f"{same}: a result and its copy say nothing of each other"]
    lost = [_describe_missed_runs(side, one) for side, one in sides if one.missed > ALLOWED_TO_MISS]
    disturbed = [f"{side}: {one.disturbed}" for side, one in sides if one.disturbed]
    against = [*apart, *lost, *(disturbed if not busy else []), *(invalid if not any_runs else [])]
    doubts = list(compared.doubts) if compared is not None else _describe_lacking_spread(a, b)
    if disturbed:
        doubts += _compare_cpu_seconds(a, b, confidence)
    outcome = compared.outcome if compared is not None and not against else Outcome.INCONCLUSIVE
    if compared is not None and not against and outcome == Outcome.INCONCLUSIVE:
        doubts += [compared.describe_power()]
    told = outcome != Outcome.INCONCLUSIVE and compared is not None
    return PairVerdict(
        outcome,
        (*apart, *lost, *disturbed, *invalid, *doubts),
        scores=any_runs or not invalid,
        ratio=compared.ratio
        if compared is not None
        else compute_geometric_mean(b.runs) / compute_geometric_mean(a.runs),
        compared=compared,
        assumes=f"assumes that {'; that '.join(_list_assumptions(compared, a, b))}"
        if told and compared is not None
        else None,
    )


def _describe_missed_runs(side: str, one: Standing) -> str:
    """Say that more runs missed the target than the rules allow. The other times alone would favour that side."""
    return f"{one.missed} of {one.started} runs of {side} missed the target, so its other times alone favour {side}"


def _describe_lacking_spread(a: Standing, b: Standing) -> list[str]:
    alone = [f"{side} has one run, which has no spread" for side, one in (("A", a), ("B", b)) if len(one.runs) == 1]
    return alone or ["all runs take the same time, so their spread is not known"]


def _compare_cpu_seconds(a: Standing, b: Standing, confidence: float) -> list[str]:
    """Say how the CPU seconds of both sides compare: other programs change them less than times."""
    if not a.cpu_runs or not b.cpu_runs:
        return []
    found = compare_times(a.cpu_runs, b.cpu_runs, confidence=confidence)
    ratio = compute_geometric_mean(b.cpu_runs) / compute_geometric_mean(a.cpu_runs)
    level = f" [{found.low:.3g}, {found.high:.3g}]: {found.outcome}" if found is not None else ", no interval"
    return [f"B takes {ratio:.3g} times the CPU seconds of A{level}"]


def _list_assumptions(compared: Comparison, a: Standing, b: Standing) -> list[str]:
    """List what a verdict rests on, as far as no test of the times can show it."""
    missed = [
        f"{one.missed} run of {side} missed the target by chance" for side, one in (("A", a), ("B", b)) if one.missed
    ]
    return [*list_assumptions(compared, a.runs, b.runs, same_machine=a.system == b.system), *missed]


def list_assumptions(
    compared: Comparison, a: Sequence[TimedRun], b: Sequence[TimedRun], *, same_machine: bool
) -> list[str]:
    """List what a verdict on the times of A and B rests on, as far as no test of them can show it."""
    apart = max(a) < min(b) or max(b) < min(a)
    several = min(compared.sessions_a, compared.sessions_b) > 1
    unit = "sessions" if compared.by_session else "runs"
    both = "all" if compared.by_session else "both"
    if not same_machine:
        texts = ["nothing but the systems differed between their sessions"]
    else:
        texts = [f"the machine was the same in {both} sessions (mlhpc ab runs them in turn)"] if apart else []
    texts += ["sessions of both sides differ alike"] if compared.by_session and not several else []
    if compared.bound is not None:
        texts.append(f"two results differ by at most {compared.bound.ratio:.3g} times because of their sessions")
    texts.append(f"{unit} do not depend on each other")
    texts.append(f"neither side has rare slow {unit}, a longer tail or wider noise than the other")
    return texts
