"""Computes the parts of each run's time, averages the runs of each result, and splits speed-ups into factors by cause.

A run takes T = T_staging + E * tau + T_other: E epochs of tau seconds each. A result is a group of runs. It has the
score by the rules and means over the scored runs. The means are those of the first round's joint analysis (Farrell et
al., MLHPC 2021, arXiv 2110.11466). They are arithmetic for times and epochs, and harmonic for rates. Shares are ratios
of means.

Finds results that were published again: the same runs under a later round.

They are one measurement and are shown once.

Measures how much the runs of one result differ, split into epochs and seconds per epoch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mlhpc.analysis.results.selection import Convergence, Selection, select
from mlhpc.analysis.tables.ingest import Tables

# These sum to the time of the run. What the first epoch trains longer than later ones is a part of its own
TIME_PARTS = ("staging_exposed_s", "first_epoch_extra_s", "train_s", "eval_s", "other_s")
RATES = ("train_rate", "eval_rate", "combined_rate", "epoch_rate", "staging_rate")
MEANS = (
    "run_s", "run_with_staging_s", "epochs", "tau_s", "init_s", "staging_s", "staging_before_run_s", "epoch_time_s",
    *TIME_PARTS, "eval_hidden_s", "evals",
)  # fmt: skip
IDENTITY = (
    "group", "round", "submitter", "system", "system_key", "mode", "benchmark", "size", "division", "published",
    "metric", "metric_name", "target", "target_direction", "required_runs",
)  # fmt: skip
_NUMBERS = (
    "ranks",
    "nodes",
    "accelerators_per_node",
    "units",
    "units_described",
    "global_batch_size",
    "train_samples",
    "scaling_factor",
    "cores",
)
SCALE = (
    "ranks", "nodes", "accelerators_per_node", "units", "units_described", "global_batch_size", "train_samples",
    "precision",
)  # fmt: skip


@dataclass(frozen=True)
class Split:
    """Holds the mean run of a result.

    ``staging_s`` has the first epoch's extra too. The four times sum to the time of the run.
    """

    units: float
    epochs: float
    train_s: float
    eval_s: float
    staging_s: float
    other_s: float

    @property
    def compute_s(self) -> float:
        """Return the time in epochs: training and the evaluation that it waits for."""
        return self.train_s + self.eval_s

    @property
    def run_s(self) -> float:
        """Return the time to train."""
        return self.compute_s + self.staging_s + self.other_s


@dataclass(frozen=True)
class Factors:
    """Holds a speed-up as the product ``units`` x ``system`` x ``evaluation`` x ``algorithmic`` x ``staging`` x ``other``.

    ``system`` is the ratio of epochs trained per second and unit (1: ideal), and ``evaluation`` the effect of waiting
    for evaluations. ``algorithmic`` is the ratio of epochs needed. It is below 1 if the second result needs more
    epochs, usually because its batch is larger. ``staging`` has what the first epoch takes longer, too; it and
    ``other`` are the effects of time outside such epochs.
    """

    units: float
    system: float
    evaluation: float
    algorithmic: float
    staging: float
    other: float

    @property
    def speed_up(self) -> float:
        """Return the time of the first result over the time of the second."""
        return self.units * self.efficiency

    @property
    def efficiency(self) -> float:
        """Return the speed-up divided by the ratio of units."""
        return self.system * self.evaluation * self.algorithmic * self.staging * self.other


def compute_factors(a: Split, b: Split) -> Factors:
    """Return the factors of the speed-up of ``b`` over ``a``. Their product is exact."""
    units = b.units / a.units
    busy_a, busy_b = a.compute_s + a.staging_s, b.compute_s + b.staging_s
    return Factors(
        units=units,
        system=(a.train_s / a.epochs) / (b.train_s / b.epochs) / units,
        evaluation=(a.compute_s / a.train_s) / (b.compute_s / b.train_s),
        algorithmic=a.epochs / b.epochs,
        staging=(busy_a / a.compute_s) / (busy_b / b.compute_s),
        other=(a.run_s / busy_a) / (b.run_s / busy_b),
    )


def add_time_parts(
    runs: pd.DataFrame,
    *,
    staging_min_s: float = 1.0,
    epoch_factor: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """Return ``runs`` with the columns for E, tau, T_other and rates added.

    Staging shorter than ``staging_min_s`` is a placeholder event and counts as no staging. ``epoch_factor`` (by group)
    normalises a result to the reference's number of epochs. It scales ``run_s`` and all times but staging.
    """
    table = runs.copy()
    factor = table["group"].map(dict(epoch_factor or {})).fillna(1.0).astype(float)
    for name in ("run_s", *TIME_PARTS, "staging_in_run_s", "staging_before_run_s", "train_samples", "eval_samples"):
        table[name] = pd.to_numeric(table[name])
    # Staging is not scaled: it happens once, however many epochs follow
    staging = table["staging_exposed_s"]
    table["first_epoch_extra_s"] = extra = table["first_epoch_extra_s"].fillna(0.0)
    table["train_s"] -= extra
    for name in ("train_s", "eval_s", "other_s"):
        table[name] = table[name] * factor
    # The sum of the scaled parts: run_stop - run_start would be the time before normalisation
    table["run_s"] = staging + extra + table["train_s"] + table["eval_s"] + table["other_s"]
    table["run_with_staging_s"] = table["run_s"] + table["staging_before_run_s"]
    table["epochs"] = pd.to_numeric(table["epochs_run"]) * factor
    table["epoch_time_s"] = table["train_s"] + table["eval_s"]
    table["tau_s"] = table["epoch_time_s"] / table["epochs"]
    total_staging = table["staging_in_run_s"] + table["staging_before_run_s"]
    table["staging_s"] = total_staging.where(total_staging >= staging_min_s)
    table["evals"] = evals = pd.to_numeric(table["evals_logged"]) * factor
    table["train_rate"] = _positive(table["epochs"] * table["train_samples"] / table["train_s"])
    # Evaluation beside training has no time of its own, so its samples per second would be too high
    table["eval_rate"] = _positive(evals * table["eval_samples"] / table["eval_s"]).where(~table["async_eval"])
    table["epoch_rate"] = _positive(1.0 / table["tau_s"])
    per_epoch = np.floor(table["train_samples"] + evals / table["epochs"] * table["eval_samples"])
    table["combined_rate"] = _positive(table["epoch_rate"] * per_epoch)
    table["staging_rate"] = _positive((table["train_samples"] + table["eval_samples"]) / table["staging_s"])
    return table


def build_results(table: pd.DataFrame, selections: Mapping[str, Selection]) -> pd.DataFrame:
    """Return one row per result, from the table of `add_time_parts` and the scored runs of each group
    (`select_scored_runs`).
    """
    rows = [_result(group, selections[str(name)]) for name, group in table.groupby("group", sort=True)]
    table = pd.DataFrame(rows)
    numbers = ["score_s", "score_with_staging_s", "score_low_s", "score_high_s", "models", "models_per_min", *_NUMBERS]
    table[numbers] = table[numbers].apply(pd.to_numeric)
    table["score_tool_s"] = table["score_s"] * table["scaling_factor"].fillna(1.0).where(table["mode"] == "strong", 1.0)
    return table


def build_split(row: Mapping[Hashable, Any] | pd.Series, size: float | None = None) -> Split:
    """Return the mean run of a result, split for the arithmetic of speed-ups.

    ``size`` is that of its machine, compute units unless given.
    """
    return Split(
        units=float(row["units"] if size is None else size),
        epochs=float(row["epochs.mean"]),
        train_s=float(row["train_s.mean"]),
        eval_s=float(row["eval_s.mean"]),
        staging_s=float(row["staging_exposed_s.mean"] + row["first_epoch_extra_s.mean"]),
        other_s=float(row["other_s.mean"]),
    )


def select_scored_runs(tables: Tables, *, convergence: Convergence = "rules") -> dict[str, Selection]:
    """Select the scored runs of every group.

    ``rules``: a run counts if it reached the target; ``status``: if its log says that it did.
    """
    return {
        str(name): select(group, tables.records, tables.targets[str(name)], convergence)
        for name, group in tables.runs.groupby("group", sort=True)
    }


def compute_harmonic_mean(values: pd.Series) -> tuple[float, float]:
    """Return the harmonic mean of rates and its spread, both NaN without a rate.

    The spread is 1 / (1/mean - std(1/x)) - mean, as in the first round's joint analysis.
    """
    known = values.dropna()
    if known.empty:
        return math.nan, math.nan
    # Times add up over runs and rates do not, so the mean is over seconds per sample
    inverse = 1.0 / known
    mean = 1.0 / float(inverse.mean())
    spread = float(inverse.std(ddof=1)) if len(known) > 1 else math.nan
    return mean, 1.0 / (1.0 / mean - spread) - mean


def _result(group: pd.DataFrame, chosen: Selection) -> dict[str, Any]:
    first = group.iloc[0]
    counted = group[group["run"].isin(chosen.averaged)]
    row: dict[str, Any] = {name: first[name] for name in IDENTITY}
    row |= {name: _find_common_value(group[name]) for name in SCALE}
    threads = _find_common_value(group["threads_per_rank"].where(group["device_type"] == "cpu"))
    row["cores"] = row["ranks"] * threads if row["ranks"] and threads else None
    row |= _scores(group, counted, chosen)
    for name in MEANS:
        row |= _mean_and_std(name, counted[name])
    for name in RATES:
        row[f"{name}.mean"], row[f"{name}.std"] = compute_harmonic_mean(counted[name])
    row["reached_value.mean"] = float(pd.to_numeric(counted["reached_value"]).mean())
    row |= _mean_and_std("epochs_to_target", counted["epochs_to_target"])
    return row | _ratios(row, chosen)


def _scores(group: pd.DataFrame, counted: pd.DataFrame, chosen: Selection) -> dict[str, Any]:
    low, high = chosen.interval_s or (None, None)
    return {
        "n_started": len(group),
        "n_reached": int(group["converged"].sum()),
        "n_scored": chosen.scored,
        "n_averaged": len(counted),
        "score_s": chosen.score_s,
        "score_with_staging_s": chosen.score_with_staging_s,
        "scaling_factor": _find_common_value(group["scaling_factor"]),
        "score_note": chosen.note,
        "score_low_s": low,
        "score_high_s": high,
        "score_interval_of": chosen.interval_words,
        "models": chosen.models,
        "models_per_min": chosen.models_per_min,
        "units_busy": (_find_common_value(group["units"]) or math.nan) * (chosen.at_once or math.nan),
        "fastest_s": float(group.loc[group["converged"] & ~group["pruned"], "run_s"].min()),
        "slowest_s": float(group.loc[group["converged"] & ~group["pruned"], "run_s"].max()),
        "async_eval": bool(group["async_eval"].any()),
        "carried_over_from": _find_common_value(group["carried_over_from"]),
        "baselines": _find_common_value(group["baselines"]),
        "oracle_baselines": _find_common_value(group["oracle_baselines"]),
    }


def _mean_and_std(name: str, values: pd.Series) -> dict[str, float]:
    numbers = pd.to_numeric(values)
    return {f"{name}.mean": float(numbers.mean()), f"{name}.std": float(numbers.std(ddof=1))}


def _ratios(row: Mapping[str, Any], chosen: Selection) -> dict[str, float]:
    """Return rates per unit, cost and shares.

    In throughput mode the cost is that of the whole system until all are done.
    """
    units = row["units"] or math.nan
    ratios = {f"{name}_per_unit": row[f"{name}.mean"] / units for name in RATES[:4]}
    if row["mode"] == "weak":
        ratios["unit_hours"] = (row["units_described"] or math.nan) * (chosen.score_s or math.nan) / 3600.0
    else:
        ratios["unit_hours"] = units * row["run_s.mean"] / 3600.0
    # A log whose clock stood still has times of 0 s
    epoch_s, run_s = row["tau_s.mean"] or math.nan, row["run_s.mean"] or math.nan
    ratios["staging_in_epochs"] = row["staging_s.mean"] / epoch_s
    return ratios | {f"{name.removesuffix('_s')}_share": row[f"{name}.mean"] / run_s for name in TIME_PARTS}


def _find_common_value(values: pd.Series) -> Any:
    """Return the value that all runs have, ignoring missing ones. None: they differ, or none has a value."""
    distinct = values.dropna().unique()
    return distinct[0] if len(distinct) == 1 else None


def _positive(values: pd.Series) -> pd.Series:
    return values.where(np.isfinite(values) & (values > 0.0))


CLASS_COLUMNS = ["benchmark", "size", "mode", "division"]


def find_copies(results: pd.DataFrame, runs: pd.DataFrame) -> pd.Series:
    """Find for each result the group of the earlier result that it repeats, with all runs and the score.

    None: the result is no copy. Runs are the same if they started at the same time and took as long. Hashes are not
    compared, because they differ where names were edited. Two results of one round are never copies: each was submitted
    as a result.
    """
    signatures = {str(name): _signature(group) for name, group in runs[~runs["pruned"]].groupby("group", sort=True)}
    earlier: dict[tuple[object, ...], list[Mapping[str, object]]] = {}
    found: dict[object, str] = {}
    # In the order of rounds, so that the first of equal results is the original
    for index, row in results.sort_values(["round", "group"]).iterrows():
        signature = signatures.get(row["group"])
        if signature is None:
            continue
        key = (*(row[name] for name in CLASS_COLUMNS), signature, _round_score(row["score_s"]))
        originals = [known for known in earlier.setdefault(key, []) if known["round"] != row["round"]]
        if originals:  # where several results of a round have the same runs, that of the same system
            found[index] = str(max(originals, key=lambda known: known["system"] == row["system"])["group"])
        else:
            earlier[key].append(row.to_dict())
    return pd.Series(found, index=results.index, dtype=object)


def list_rounds(results: pd.DataFrame) -> pd.Series:
    """Join the rounds of each result and of its copies, as "v1.0 = v2.0 = v3.0"."""
    copies = results.groupby("same_as")["round"].apply(list).to_dict() if results["same_as"].notna().any() else {}
    rounds = [dict.fromkeys([row["round"], *copies.get(row["group"], [])]) for row in results.to_dict("records")]
    return pd.Series([" = ".join(map(str, each)) for each in rounds], index=results.index, dtype=object)


def _signature(runs: pd.DataFrame) -> tuple[tuple[float, float], ...] | None:
    """Return start (ms) and length (s) of every run. None: a run has no start, by which it could be recognised."""
    starts = pd.to_numeric(runs["run_start_ms"])
    if starts.isna().any():
        return None
    # A run without run_stop has no length. NaN differs from itself, so with NaN no copy would be found
    lengths = pd.to_numeric(runs["run_s"]).fillna(-1.0)
    return tuple(sorted(zip(starts.astype(float), lengths.astype(float), strict=True)))


def _round_score(score_s: object) -> float | None:
    value = pd.to_numeric(score_s) if score_s is not None else math.nan
    # The mean of the same times may differ in the last digits, by the order in which they are added
    return None if value != value else float(f"{value:.9g}")


@dataclass(frozen=True)
class RunSpread:
    """Holds the spread of the training time E·tau over runs.

    ``variance_epochs``, ``variance_epoch_time`` and ``covariance_twice`` (natural logs) sum to the variance of
    log(E·tau). ``axis_1`` and ``axis_2`` are the variances (log10²) along the principal axes of (log10 E, log10 tau),
    larger first. ``along_epochs`` is the squared epochs component of the first axis' direction (1: all spread is
    convergence). ``correlation`` is that of the logs, NaN if one of them does not vary.
    """

    n: int
    variance_epochs: float
    variance_epoch_time: float
    covariance_twice: float
    axis_1: float
    axis_2: float
    along_epochs: float
    correlation: float

    @property
    def axis_1_share(self) -> float:
        """Return the share of the variance along the first axis."""
        return self.axis_1 / (self.axis_1 + self.axis_2) if self.axis_1 + self.axis_2 > 0 else math.nan


def compute_run_spread(epochs: pd.Series, tau_s: pd.Series) -> RunSpread | None:
    """Compute the spread of runs; None for fewer than two runs."""
    usable = epochs.notna() & tau_s.notna() & (epochs > 0) & (tau_s > 0)
    if usable.sum() < 2:
        return None
    # The axes are in log10; the variances of the parts are converted to natural logs below
    logs = np.log10(np.stack([epochs[usable].to_numpy(float), tau_s[usable].to_numpy(float)]))
    covariance = np.cov(logs, ddof=1)
    variances, axes = np.linalg.eigh(covariance)
    natural = covariance * math.log(10) ** 2
    varies = bool((logs.std(axis=1) > 0).all())
    return RunSpread(
        n=int(usable.sum()),
        variance_epochs=float(natural[0, 0]),
        variance_epoch_time=float(natural[1, 1]),
        covariance_twice=float(2 * natural[0, 1]),
        # eigh sorts ascending, and rounding may give a variance just below 0
        axis_1=float(max(variances[1], 0.0)),
        axis_2=float(max(variances[0], 0.0)),
        along_epochs=float(axes[0, 1] ** 2),
        correlation=float(np.corrcoef(logs)[0, 1]) if varies else math.nan,
    )
