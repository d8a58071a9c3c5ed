"""Figure: efficiency over machine size by cause, and models of seconds per epoch where there are scales enough."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.page.drawing import BLUE, CYCLE, GREEN, GREY, INK, ORANGE, VERMILION, clip, listed, panels
from analysis.results.decompose import split_of
from analysis.statistics.scaling import (
    DASHED_REACH,
    SOLID_REACH,
    Factors,
    Model,
    NotEnoughPointsError,
    factors,
    fit,
)
from analysis.study import NotAnswerableError, Study

TITLE = "Scaling"
CAPTION = (
    "Efficiency against the smallest size of the same machine and round: 1 is perfect. Total = system (epochs per second and "
    "unit) × algorithmic (epochs needed) × staging × other. Where five sizes or more were run, models of the seconds per epoch "
    "follow, each with its 5-95 % bootstrap band over runs; solid to twice the largest size, dashed to four times, no further."
)
ORDER = 33
LINES = (
    ("efficiency", "total", INK, "o"),
    ("system", "system", BLUE, "s"),
    ("algorithmic", "algorithmic", VERMILION, "^"),
    ("staging", "staging", ORANGE, "D"),
    ("other", "other", GREY, "v"),
)
Series = tuple[str, pd.DataFrame]


def table(study: Study) -> pd.DataFrame:
    """Efficiencies by size, and every model or why there is none."""
    lines = []
    for title, rows in _series(study):
        known = _factors(rows)
        models, why = _models(study, rows)
        for row, factors_to in zip(rows.to_dict("records"), known, strict=True):
            fixed = row["global_batch_size"] / row["units"] == rows["global_batch_size"].iloc[0] / rows["units"].iloc[0]
            lines.append(
                {
                    "series": title,
                    "compute units": row["units"],
                    "label": row["label"],
                    "speed-up": factors_to.speed_up,
                    "efficiency": factors_to.efficiency,
                    "system": factors_to.system,
                    "algorithmic": factors_to.algorithmic,
                    "staging": factors_to.staging,
                    "other": factors_to.other,
                    "weak efficiency (equal batch per unit)": factors_to.system if fixed else None,
                    "models": why
                    or "; ".join(f"{m.name} {m.form}, left-out error {100 * m.loo_error:.1f} %" for m in models),
                }
            )
    if not lines:
        raise NotAnswerableError("two sizes of one machine in one round, same benchmark and size")
    return pd.DataFrame(lines)


def answer(study: Study) -> str:
    """The last size of every series."""
    last = table(study).groupby("series", sort=True).tail(1)
    return listed(
        [
            f"{row['series']}: {100 * row['efficiency']:.0f} % at {row['compute units']:g} units "
            f"(system {100 * row['system']:.0f} %, algorithmic {100 * row['algorithmic']:.0f} %)"
            for row in last.to_dict("records")
        ]
    )


def draw(study: Study) -> Figure:
    """A panel of efficiencies per series, then a panel of models per series that has enough scales."""
    table(study)
    series = _series(study)
    fitted = [(title, rows, models) for title, rows in series if (models := _models(study, rows)[0])]
    figure, axes = panels(len(series) + len(fitted), min(3, len(series) + len(fitted)), 3.0, extra_in=0.3)
    for (title, rows), axis in zip(series, axes, strict=False):
        _efficiencies(axis, title, rows)
        if axis is axes[0]:
            handles, labels = axis.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=len(LINES))
    for (title, rows, models), axis in zip(fitted, axes[len(series) :], strict=True):
        _extrapolations(axis, title, study, rows, models)
    return figure


def _efficiencies(axis: Axes, title: str, rows: pd.DataFrame) -> None:
    known = _factors(rows)
    for name, label, colour, marker in LINES:
        width = 2.0 if name == "efficiency" else 1.2
        axis.plot(
            rows["units"], [getattr(f, name) for f in known], color=colour, marker=marker, linewidth=width, label=label
        )
    axis.axhline(1.0, color=INK, linewidth=0.7, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(rows["units"].unique()), [f"{n:g}" for n in sorted(rows["units"].unique())])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(clip(title, 40))
    axis.set_xlabel("compute units")
    axis.set_ylabel("efficiency")


def _extrapolations(axis: Axes, title: str, study: Study, rows: pd.DataFrame, models: list[Model]) -> None:
    times = _times(study, rows)
    for units, values in times.items():
        axis.plot([units] * len(values), values, ".", color=INK, alpha=0.5)
    low, high = min(times), max(times)
    solid = np.geomspace(low, SOLID_REACH * high, 60)
    dashed = np.geomspace(SOLID_REACH * high, DASHED_REACH * high, 20)
    for model, colour in zip(models, (BLUE, GREEN, CYCLE[3]), strict=True):
        axis.plot(solid, model.time_s(solid), color=colour, label=f"{model.name} ±{100 * model.loo_error:.0f} %")
        axis.fill_between(solid, *model.band(solid), color=colour, alpha=0.15, linewidth=0)
        axis.plot(dashed, model.time_s(dashed), color=colour, linestyle="--", linewidth=1)
    predicted = np.array([model.time_s(dashed) for model in models])
    axis.fill_between(dashed, predicted.min(axis=0), predicted.max(axis=0), color=GREY, alpha=0.2, linewidth=0)
    axis.axvline(high, color=GREY, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(clip(f"{title}: models", 40))
    axis.set_xlabel("compute units")
    axis.set_ylabel("seconds per epoch")
    axis.legend()


def _models(study: Study, rows: pd.DataFrame) -> tuple[list[Model], str]:
    try:
        return fit(_times(study, rows)), ""
    except NotEnoughPointsError as error:
        return [], f"not enough points: {error}"


def _times(study: Study, rows: pd.DataFrame) -> dict[float, list[float]]:
    """Seconds per epoch of every run that reached the target, by compute units."""
    times: dict[float, list[float]] = {}
    for row in rows.to_dict("records"):
        taus = study.runs_of(row["group"]).query("converged")["tau_s"].dropna()
        times.setdefault(float(row["units"]), []).extend(float(tau) for tau in taus if tau > 0)
    return times


def _factors(rows: pd.DataFrame) -> list[Factors]:
    splits = [split_of(row) for row in rows.to_dict("records")]
    return [factors(splits[0], split) for split in splits]


def _series(study: Study) -> list[Series]:
    series = []
    frame = study.results
    frame = frame[(frame["mode"] == "strong") & (frame["units"] > 0) & (frame["epoch_time_s.mean"] > 0)]
    for key, rows in frame.groupby(["benchmark", "size", "round", "machine", "device"], sort=True):
        if rows["units"].nunique() > 1:
            title = f"{key[3]} · {key[0]}" + (f" {key[1]}" if key[1] != "full" else "") + f" · {key[2]}"
            series.append((title, rows.sort_values(["units", "run_s.mean"])))
    return series
