"""Where the time of a run went and how fast it worked: T = T_staging + E * tau + T_other. Table in, table out.

Per run: epochs E, seconds per epoch tau, rates. Per result (group of runs): the score by the rules, and means over the
scored runs the way the first round's joint analysis took them: arithmetic for times and epochs, harmonic for rates,
ratios of means for shares (Farrell et al., MLHPC 2021, arXiv 2110.11466).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.results.selection import Convergence, Selection, select
from analysis.statistics.scaling import Split
from analysis.tables.ingest import Tables

TIME_PARTS = ("staging_exposed_s", "train_s", "eval_s", "other_s")
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
)
SCALE = (
    "ranks", "nodes", "accelerators_per_node", "units", "units_described", "global_batch_size", "train_samples",
    "precision",
)  # fmt: skip


def per_run(
    runs: pd.DataFrame,
    *,
    staging_min_s: float = 1.0,
    epoch_factor: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """``runs`` with E, tau, T_other and rates of each run.

    Staging shorter than ``staging_min_s`` is a placeholder and counts as none. ``epoch_factor`` (by group) is a
    normalisation to a reference's epochs: it scales everything but staging; ``run_s`` then is the adjusted time.
    """
    table = runs.copy()
    factor = table["group"].map(dict(epoch_factor or {})).fillna(1.0).astype(float)
    for name in ("run_s", *TIME_PARTS, "staging_in_run_s", "staging_before_run_s", "train_samples", "eval_samples"):
        table[name] = pd.to_numeric(table[name])
    staging = table["staging_exposed_s"]
    for name in ("train_s", "eval_s", "other_s"):
        table[name] = table[name] * factor
    table["run_s"] = staging + table["train_s"] + table["eval_s"] + table["other_s"]
    table["run_with_staging_s"] = table["run_s"] + table["staging_before_run_s"]
    table["epochs"] = pd.to_numeric(table["epochs_run"]) * factor
    table["epoch_time_s"] = table["train_s"] + table["eval_s"]
    table["tau_s"] = table["epoch_time_s"] / table["epochs"]
    total_staging = table["staging_in_run_s"] + table["staging_before_run_s"]
    table["staging_s"] = total_staging.where(total_staging >= staging_min_s)
    table["evals"] = evals = pd.to_numeric(table["evals_logged"]) * factor
    table["train_rate"] = _positive(table["epochs"] * table["train_samples"] / table["train_s"])
    table["eval_rate"] = _positive(evals * table["eval_samples"] / table["eval_s"]).where(~table["async_eval"])
    table["epoch_rate"] = _positive(1.0 / table["tau_s"])
    per_epoch = np.floor(table["train_samples"] + evals / table["epochs"] * table["eval_samples"])
    table["combined_rate"] = _positive(table["epoch_rate"] * per_epoch)
    table["staging_rate"] = _positive((table["train_samples"] + table["eval_samples"]) / table["staging_s"])
    return table


def results(table: pd.DataFrame, selections: Mapping[str, Selection]) -> pd.DataFrame:
    """One row per result from `per_run` and the runs chosen for each group (`choose`)."""
    rows = [_result(group, selections[str(name)]) for name, group in table.groupby("group", sort=True)]
    table = pd.DataFrame(rows)
    numbers = ["score_s", "score_with_staging_s", "score_low_s", "score_high_s", "models", "models_per_min", *_NUMBERS]
    table[numbers] = table[numbers].apply(pd.to_numeric)
    table["score_tool_s"] = table["score_s"] * table["scaling_factor"].fillna(1.0).where(table["mode"] == "strong", 1.0)
    return table


def split_of(row: Mapping[Hashable, Any] | pd.Series) -> Split:
    """The mean run of a result, split for the arithmetic of speed-ups."""
    return Split(
        units=float(row["units"]),
        epochs=float(row["epochs.mean"]),
        compute_s=float(row["epoch_time_s.mean"]),
        staging_s=float(row["staging_exposed_s.mean"]),
        other_s=float(row["other_s.mean"]),
    )


def choose(tables: Tables, *, convergence: Convergence = "rules") -> dict[str, Selection]:
    """The scored runs of every group. ``status`` believes a logged success; ``rules`` wants the target reached."""
    return {
        str(name): select(group, tables.records, tables.targets[str(name)], convergence)
        for name, group in tables.runs.groupby("group", sort=True)
    }


def harmonic(values: pd.Series) -> tuple[float, float]:
    """Harmonic mean of rates and its spread 1 / (1/mean - std(1/x)) - mean, as the first round's analysis took them."""
    known = values.dropna()
    if known.empty:
        return math.nan, math.nan
    inverse = 1.0 / known
    mean = 1.0 / float(inverse.mean())
    spread = float(inverse.std(ddof=1)) if len(known) > 1 else math.nan
    return mean, 1.0 / (1.0 / mean - spread) - mean


def _result(group: pd.DataFrame, chosen: Selection) -> dict[str, Any]:
    first = group.iloc[0]
    counted = group[group["run"].isin(chosen.averaged)]
    row: dict[str, Any] = {name: first[name] for name in IDENTITY}
    row |= {name: _agreed(group[name]) for name in SCALE}
    row |= {
        "n_started": len(group),
        "n_reached": int(group["converged"].sum()),
        "n_scored": chosen.scored,
        "n_averaged": len(counted),
        "score_s": chosen.score_s,
        "score_with_staging_s": chosen.score_with_staging_s,
        "scaling_factor": _agreed(group["scaling_factor"]),
        "score_note": chosen.note,
        "score_low_s": chosen.interval_s[0] if chosen.interval_s else None,
        "score_high_s": chosen.interval_s[1] if chosen.interval_s else None,
        "models": chosen.models,
        "models_per_min": chosen.models_per_min,
        "fastest_s": float(counted["run_s"].min()) if len(counted) else math.nan,
        "slowest_s": float(counted["run_s"].max()) if len(counted) else math.nan,
        "async_eval": bool(group["async_eval"].any()),
        "carried_over_from": _agreed(group["carried_over_from"]),
        "baselines": _agreed(group["baselines"]),
    }
    for name in MEANS:
        values = pd.to_numeric(counted[name])
        row[f"{name}.mean"] = float(values.mean())
        row[f"{name}.std"] = float(values.std(ddof=1))
    for name in RATES:
        row[f"{name}.mean"], row[f"{name}.std"] = harmonic(counted[name])
    units = row["units"] or math.nan
    row["reached_value.mean"] = float(pd.to_numeric(counted["reached_value"]).mean())
    row["epochs_to_target.mean"] = float(pd.to_numeric(counted["epochs_to_target"]).mean())
    row["epochs_to_target.std"] = float(pd.to_numeric(counted["epochs_to_target"]).std(ddof=1))
    for name in RATES[:4]:
        row[f"{name}_per_unit"] = row[f"{name}.mean"] / units
    weak = first["mode"] == "weak"
    spent_s, spent_units = (
        (chosen.score_s or math.nan, row["units_described"] or math.nan) if weak else (row["run_s.mean"], units)
    )
    row["unit_hours"] = spent_units * spent_s / 3600.0
    row["staging_in_epochs"] = row["staging_s.mean"] / row["tau_s.mean"]
    for name in TIME_PARTS:
        row[f"{name.removesuffix('_s')}_share"] = row[f"{name}.mean"] / row["run_s.mean"]
    return row


def _agreed(values: pd.Series) -> Any:
    """The one value of a column, or None where runs differ or none has it."""
    distinct = values.dropna().unique()
    return distinct[0] if len(distinct) == 1 else None


def _positive(values: pd.Series) -> pd.Series:
    return values.where(np.isfinite(values) & (values > 0.0))
