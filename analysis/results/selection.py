"""Selects the scored runs of a result and computes its score, with `mlhpc.suite.log.score`.

Runs have their names in the table.

Computes the reference's epochs to target by batch size, from the rulesets and the cards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from mlhpc.suite import RULESET
from mlhpc.suite.card import Target
from mlhpc.suite.compliance.rcp_limit import RcpLimit, compute_limit
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset
from mlhpc.suite.log.energy.score import EnergyToSolution, find_energy
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.score import JudgedRun, compute_throughput, compute_time_to_train, count_concurrent_runs
from mlhpc.suite.statistics.sessions import TimedRun

Convergence = Literal["rules", "status"]

ENERGY_COLUMNS = (
    "energy_j",
    "energy_low_j",
    "energy_high_j",
    "energy_kind",
    "energy_valid",
    "energy_note",
    "watts_per_node",
    "energy_delay_js",
    "idle_share",
    "interconnect_estimated",
)


@dataclass(frozen=True)
class Selection:
    """Holds the runs that enter means, ``averaged``: the scored runs. Without a score they are all that converged.

    ``score_s`` is the time to train; in throughput mode, the time to train all. None: there is no score, and ``note``
    gives the reason. ``fate`` says for every run whether it was scored, or why not. ``at_once``: how many of the models
    of throughput mode were trained at the same time, at most.
    """

    averaged: tuple[str, ...]
    scored: int
    score_s: float | None
    score_with_staging_s: float | None
    note: str
    fate: Mapping[str, str]
    interval_s: tuple[float, float] | None = None
    interval_words: str = ""
    models: int | None = None
    models_per_min: float | None = None
    at_once: int | None = None
    energy: EnergyToSolution | None = None


def select(
    group: pd.DataFrame, records: Mapping[str, RunRecord], target: Target | None, convergence: Convergence = "rules"
) -> Selection:
    """Select the runs of one result that are scored, and score them. Pruned runs are left out.

    With ``status``, a logged success counts as convergence.
    """
    pruned = {str(name): "pruned" for name in group.loc[group["pruned"], "run"]}
    names = [str(name) for name in group.loc[~group["pruned"], "run"]]
    if target is None:
        fate = pruned | dict.fromkeys(names, "not judged: no target known")
        return Selection((), 0, None, None, "no target is known for this benchmark and size", fate)
    judge = _make_status_target(target) if convergence == "status" else target
    # The folder, too, may say that a run was resumed, which its log alone does not show
    entered = [replace(records[name], resumed=resumed) for name, resumed in _resumed(group, names)]
    if group["mode"].iloc[0] == "weak":
        return _throughput(names, entered, judge, pruned)
    score = compute_time_to_train(entered, judge, _find_points(group))
    fate = pruned | {name: _fate(run, score.valid) for name, run in zip(names, score.runs, strict=True)}
    # Means are still of interest without a score: they are over all runs that converged
    if not score.valid:
        done = _converged(names, score.runs)
        return Selection(done, 0, None, None, _reason(score.reason), fate)
    averaged = tuple(name for name, run in zip(names, score.runs, strict=True) if run.dropped is None)
    # The rules let one run fail, which then counts as the slowest. Runs outside of the required number do not count
    failed = any(not run.converged and "outside" not in (run.dropped or "") for run in score.runs)
    return Selection(
        averaged=averaged,
        scored=score.required_runs,
        score_s=score.mean_s,
        score_with_staging_s=score.mean_with_staging_s,
        note=f"olympic mean of {score.required_runs} runs" + (", one of which failed" if failed else ""),
        fate=fate,
        interval_s=score.interval_s,
        interval_words=score.interval_words,
        energy=find_energy(score),
    )


def _find_points(group: pd.DataFrame) -> Mapping[int, Sequence[float]]:
    """Find the reference points of a result: their spread bounds that of its epochs from below."""
    first = group.iloc[0]
    samples = math.nan if first["train_samples"] is None else float(first["train_samples"])
    return find_reference_points(first["benchmark"], first["size"], str(first["round"]), samples)


def _make_status_target(target: Target) -> Target:
    return _StatusTarget(**{name: getattr(target, name) for name in Target.__struct_fields__})


class _StatusTarget(Target, frozen=True):
    """Accepts any evaluation as reaching the target, so that only a log's own status decides."""

    def reached(self, value: float) -> bool:
        """Return True."""
        return True


def _throughput(names: Sequence[str], entered: list[RunRecord], target: Target, pruned: dict[str, str]) -> Selection:
    score = compute_throughput(entered, target)
    fate = pruned | {name: _fate(run, score.valid) for name, run in zip(names, score.runs, strict=True)}
    done = _converged(names, score.runs)
    return Selection(
        averaged=done,
        scored=len(done) if score.valid else 0,
        score_s=score.time_to_train_all_s,
        score_with_staging_s=score.time_to_train_all_with_staging_s,
        note=_reason(score.reason)
        or f"time from the first run_start to the last run_stop of {score.instances} instances",
        fate=fate,
        models=score.instances,
        models_per_min=score.models_per_minute,
        at_once=count_concurrent_runs([run.record for run in score.runs if run.converged]),
    )


def _resumed(group: pd.DataFrame, names: Sequence[str]) -> list[tuple[str, bool]]:
    flags = dict(zip(group["run"], group["resumed"], strict=True))
    return [(name, bool(flags[name])) for name in names]


def _converged(names: Sequence[str], runs: Sequence[JudgedRun]) -> tuple[str, ...]:
    return tuple(name for name, run in zip(names, runs, strict=True) if run.converged)


def _fate(run: JudgedRun, valid: bool) -> str:
    if not run.converged:
        return f"not converged: {run.failure}"
    if not valid:
        return "converged; no score"
    return f"left out: {run.dropped}" if run.dropped else "scored"


def _reason(reason: str | None) -> str:
    # The page writes "no score:" before it
    return (reason or "").removeprefix("not a score: ")


def add_energy(rows: pd.DataFrame, selections: Mapping[str, Selection]) -> pd.DataFrame:
    """Add `ENERGY_COLUMNS` to the table of results if any result has energy; otherwise return it as it is.

    ``energy_kind`` names what was measured; results of different kinds must not be compared.
    """
    found = {group: chosen.energy for group, chosen in selections.items() if chosen.energy is not None}
    known = [found.get(str(group)) for group in rows["group"]]
    if not any(each is not None and each.mean_j is not None for each in known):
        return rows
    cells: list[tuple[object, ...]] = []
    for each in known:
        if each is None:
            cells.append((None,) * len(ENERGY_COLUMNS))
            continue
        low, high = each.interval_j or (None, None)
        kind = f"{each.scope}, {each.current or 'AC or DC not stated'}" if each.scope else None
        numbers = (each.watts_per_node, each.delay_product_js, each.idle_share, each.estimated)
        # In the order of ENERGY_COLUMNS
        cells.append((each.mean_j, low, high, kind, each.valid, each.reason, *numbers))
    return rows.assign(**{name: [row[place] for row in cells] for place, name in enumerate(ENERGY_COLUMNS)})


def make_timed_runs(runs: pd.DataFrame, column: str = "run_s") -> tuple[TimedRun, ...]:
    """Return a time of each run with its start, its batch job, which divide runs into sessions, and its epochs."""
    known = runs[runs[column] > 0]
    starts, jobs = known["run_start_ms"].fillna(0.0) / 1e3, known["job"].fillna("")
    epochs = known["epochs_run"].fillna(0.0) if column == "run_s" and "epochs_run" in known else [0.0] * len(known)
    cells = zip(starts, known[column], jobs, epochs, strict=True)
    return tuple(TimedRun(float(at), float(time), str(job), float(number)) for at, time, job, number in cells)


def find_reference_points(
    benchmark: str, size: str, round_: str, train_samples: float
) -> Mapping[int, Sequence[float]]:
    """Find the epochs to target of reference runs, by global batch size; empty if none were recorded.

    If the rules count convergence in samples (OpenFold), they are divided by the result's ``train_samples``.
    """
    # Rulesets of public rounds are named by version: round v3.0 has ruleset 3.0.0
    public = f"{round_.removeprefix('v')}.0"
    name = public if round_.startswith("v") and public in list_rulesets() else RULESET
    rules = read_ruleset(name).benchmark(benchmark, size)
    if rules is None:
        return {}
    if not rules.epoch_counts_samples:
        return rules.reference_points
    # Written so that NaN, the value where no log states the samples, ends here too
    if not train_samples > 0:
        return {}
    return {batch: [seen / train_samples for seen in points] for batch, points in rules.reference_points.items()}


def compute_reference_limit(
    benchmark: str, size: str, round_: str, train_samples: float, batch: float, required_runs: float
) -> RcpLimit | None:
    """Compute the reference's mean epochs and the least allowed mean at a batch size.

    None: the batch size is outside the reference points, or is not known.
    """
    points = find_reference_points(benchmark, size, round_, train_samples)
    # NaN, a batch that no log states, does not equal itself
    return compute_limit(points, int(batch), int(required_runs)) if points and batch == batch else None
