"""Figure: efficiency over machine size by cause, and models of seconds per epoch where there are scales enough."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.drawing.axes import BLUE, CYCLE, GREEN, GREY, INK, ORANGE, VERMILION, clip, listed, panels
from analysis.drawing.digits import seconds_with_interval
from analysis.results.decompose import split_of
from analysis.results.extent import extent
from analysis.results.scaling import (
    DASHED_REACH,
    SOLID_REACH,
    Factors,
    Model,
    NotEnoughPointsError,
    extrapolate,
    factors,
    fit,
)
from analysis.study import NotAnswerableError, Study

TITLE = "Scaling"
CAPTION = (
    "Efficiency against the smallest size of the same machine, round and division, counted in what varies "
    "(accelerators, "
    "processors, nodes, cores or ranks): 1 is perfect; the weak-scaling efficiency of the table is given where the "
    "batch grew "
    "with the size. Total = system (epochs per second and unit) × algorithmic (epochs needed) × staging × other. "
    "Where five "
    "sizes or more were run, models of the seconds per epoch follow, each with its 5-95 % bootstrap band over runs; "
    "solid to "
    "twice the largest size, dashed to four times, no further. The interval of a predicted time is over all models, "
    "each band "
    "widened by the error on sizes left out. Its upper end holds if no limit begins beyond the largest size, such as a "
    "full switch or a largest batch: no model knows one."
)
MOST_TICKS = 5
SCALING = "weak-scaling efficiency"
LINES = (
    ("efficiency", "total", INK, "o"),
    ("system", "system", BLUE, "s"),
    ("algorithmic", "algorithmic", VERMILION, "^"),
    ("staging", "staging", ORANGE, "D"),
    ("other", "other", GREY, "v"),
)


@dataclass(frozen=True)
class Series:
    """Results of one machine and round, the smallest first; ``count`` is what ``sizes`` counts."""

    title: str
    rows: pd.DataFrame
    sizes: tuple[float, ...]
    count: str


def table(study: Study) -> pd.DataFrame:
    """Efficiencies by size, and every model or why there is none."""
    lines = []
    for series in _series(study):
        models, why = _models(study, series)
        predicted = _predicted(study, series, models)
        batches = series.rows["global_batch_size"].tolist()
        records = series.rows.to_dict("records")
        for row, size, factors_to in zip(records, series.sizes, _factors(series), strict=True):
            fixed = row["global_batch_size"] / size == batches[0] / series.sizes[0]
            lines.append(
                {
                    "series": series.title,
                    "size": size,
                    "counts": series.count,
                    "label": row["label"],
                    "speed-up": factors_to.speed_up,
                    "efficiency": factors_to.efficiency,
                    "system": factors_to.system,
                    "algorithmic": factors_to.algorithmic,
                    "staging": factors_to.staging,
                    "other": factors_to.other,
                    SCALING: factors_to.system if fixed else None,
                    **predicted,
                    "models": why
                    or "; ".join(f"{m.name} {m.form}, left-out error {100 * m.loo_error:.1f} %" for m in models),
                }
            )
    if not lines:
        raise NotAnswerableError(
            "two sizes of one machine (units, nodes or cores) in one round and division, same benchmark and size"
        )
    return pd.DataFrame(lines)


def answer(study: Study) -> str:
    """The last size of every series."""
    last = table(study).groupby("series", sort=True).tail(1)
    return listed(
        [
            f"{row['series']}: {100 * row['efficiency']:.0f} % at {row['size']:g} {row['counts']} "
            f"(system {100 * row['system']:.0f} %, algorithmic {100 * row['algorithmic']:.0f} %){_further(row)}"
            for row in last.to_dict("records")
        ]
    )


def _predicted(study: Study, series: Series, models: list[Model]) -> dict[str, float]:
    """Seconds per epoch at SOLID_REACH times the largest size, with their interval; empty without models."""
    if not models:
        return {}
    further = SOLID_REACH * max(series.sizes)
    value, low, high = extrapolate(_times(study, series), models, further)
    return {"further size": further, "s/epoch there": value, "there from": low, "there to": high}


def _further(row: Mapping[Hashable, Any]) -> str:
    if pd.isna(row.get("further size", None)):
        return ""
    time = seconds_with_interval(row["s/epoch there"], row["there from"], row["there to"])
    largest = row["further size"] / SOLID_REACH
    return (
        f"; by the models {time} per epoch at {row['further size']:g} "
        f"(the upper end holds if no limit begins beyond {largest:g})"
    )


def draw(study: Study) -> Figure:
    """A panel of efficiencies per series, then a panel of models per series that has enough scales."""
    table(study)
    series = _series(study)
    fitted = [(each, models) for each in series if (models := _models(study, each)[0])]
    figure, axes = panels(len(series) + len(fitted), min(3, len(series) + len(fitted)), 3.0, extra_in=0.3)
    for each, axis in zip(series, axes, strict=False):
        _efficiencies(axis, each)
        if axis is axes[0]:
            handles, labels = axis.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=len(LINES))
    for (each, models), axis in zip(fitted, axes[len(series) :], strict=True):
        _extrapolations(axis, each, _times(study, each), models)
    return figure


def _efficiencies(axis: Axes, series: Series) -> None:
    known = _factors(series)
    for name, label, colour, marker in LINES:
        width = 2.0 if name == "efficiency" else 1.2
        shares = [getattr(factors_to, name) for factors_to in known]
        axis.plot(series.sizes, shares, color=colour, marker=marker, linewidth=width, label=label)
    axis.axhline(1.0, color=INK, linewidth=0.7, linestyle=":")
    axis.set_xscale("log", base=2)
    _size_ticks(axis, series.sizes)
    axis.set_ylim(bottom=0)
    axis.set_title(_two_lines(series.title))
    axis.set_xlabel(series.count)
    axis.set_ylabel("efficiency")


def _extrapolations(axis: Axes, series: Series, times: dict[float, list[float]], models: list[Model]) -> None:
    for size, values in times.items():
        axis.plot([size] * len(values), values, ".", color=INK, alpha=0.5)
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
    _size_ticks(axis, [*times, DASHED_REACH * high])
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_title(f"{_two_lines(series.title)}: models")
    axis.set_xlabel(series.count)
    axis.set_ylabel("seconds per epoch")
    axis.legend()


def _two_lines(title: str) -> str:
    """Machine, then problem and round."""
    machine, _, problem = title.partition(" · ")
    return f"{clip(machine, 28)}\n{clip(problem, 24)}"


def _size_ticks(axis: Axes, sizes: Sequence[float]) -> None:
    """Ticks at the sizes, from the largest down, as far as they have room on a logarithmic axis."""
    ordered = sorted(set(sizes), reverse=True)
    least = (ordered[0] / ordered[-1]) ** (1 / MOST_TICKS)
    kept = ordered[:1]
    for size in ordered[1:]:
        last = size == ordered[-1]
        if last and len(kept) > 1 and kept[-1] / size < least:
            kept.pop()
        if last or kept[-1] / size >= least:
            kept.append(size)
    axis.set_xticks(kept, [f"{size:g}" for size in kept])
    axis.minorticks_off()


def _models(study: Study, series: Series) -> tuple[list[Model], str]:
    try:
        return fit(_times(study, series)), ""
    except NotEnoughPointsError as error:
        return [], f"not enough points: {error}"


def _times(study: Study, series: Series) -> dict[float, list[float]]:
    """Seconds per epoch of every run that reached the target, by size."""
    times: dict[float, list[float]] = {}
    for row, size in zip(series.rows.to_dict("records"), series.sizes, strict=True):
        taus = study.converged_of(row["group"])["tau_s"].dropna()
        times.setdefault(size, []).extend(float(tau) for tau in taus if tau > 0)
    return times


def _factors(series: Series) -> list[Factors]:
    splits = [split_of(row, size) for row, size in zip(series.rows.to_dict("records"), series.sizes, strict=True)]
    return [factors(splits[0], split) for split in splits]


def _series(study: Study) -> list[Series]:
    series = []
    frame = study.distinct
    frame = frame[(frame["mode"] == "strong") & (frame["epoch_time_s.mean"] > 0)]
    for key, rows in frame.groupby(["benchmark", "size", "rounds", "division", "machine", "device"], sort=True):
        found = extent(rows)
        sizes, count = found.sizes, found.count
        if sizes.notna().all() and sizes.nunique() > 1 and (sizes > 0).all():
            title = f"{key[4]} · {key[0]}" + (f" {key[1]}" if key[1] != "full" else "") + f" · {key[2]}"
            ordered = rows.assign(extent=sizes.astype(float)).sort_values(["extent", "run_s.mean"])
            series.append(Series(title, ordered, tuple(ordered["extent"]), count))
    return series
