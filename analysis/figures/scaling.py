"""Figure: efficiency over machine size by cause, and models of seconds per epoch if there are enough sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    TEXT_COLOUR,
    VERMILION,
    Chart,
    convert_to_long_table,
    draw_panels,
    layer_charts,
    make_kind_channels,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import CHOOSE_SYSTEMS, Question, View, join_statements, render_seconds_interval
from mlhpc.analysis.figures.waterfall import NAMES, PARTS, compute_intervals, may_be_chance
from mlhpc.analysis.results.decompose import Factors, build_split, compute_factors
from mlhpc.analysis.results.machine_size import choose_extent
from mlhpc.analysis.results.scaling import (
    SOLID_REACH,
    Model,
    NotEnoughPointsError,
    find_break,
    fit,
    predict_time,
)
from mlhpc.analysis.study import NotAnswerableError, Study

TITLE = "Scaling"
QUESTION = Question(
    CHOOSE_SYSTEMS,
    "Does a system scale, and what ends it?",
    ("units", "tau_s.mean"),
    needs="a second machine size",
    decision="a model is fitted from five scales on and drawn solid to twice the largest",
)
CAPTION = (
    "Efficiency against the smallest size of the same machine, round and division, counted in what varies "
    "(accelerators, processors, nodes, cores or ranks): 1 is perfect; the weak-scaling efficiency of the table is "
    "given where the batch grew with the size. Efficiency = system (epochs trained per second and unit) × evaluation "
    "× algorithmic (epochs needed) × staging × other. The table has the 95 % interval of each; one that holds 1 may "
    "be chance. Staging has what the first epoch trains longer, too. Where five sizes or more were run, the answer and "
    "the table predict the seconds per epoch at twice the largest size. "
    "The interval of a predicted time is over all models, each band widened by the error on sizes left out. Its "
    "upper end holds if no limit begins beyond the largest size, such as a full switch or a largest batch: no model "
    "knows one. A largest size that is slower than two of three models foresee from the smaller ones, by more than "
    "the spread of a size, ends the prediction."
)
SCALING = "weak-scaling efficiency"
LINES = {
    "efficiency": TEXT_COLOUR, "system": BLUE, "evaluation": GREEN, "algorithmic": VERMILION, "staging": ORANGE,
    "other": GREY,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """Holds results of one machine and round, the smallest first. ``count`` is what ``sizes`` counts."""

    title: str
    rows: pd.DataFrame
    sizes: tuple[float, ...]
    count: str


def build_table(study: Study) -> pd.DataFrame:
    """Build efficiencies by size, and every model or why there is none."""
    lines = []
    for series in _series(study):
        models, why = _models(study, series)
        predicted = _predict_further(study, series, models)
        batches = series.rows["global_batch_size"].tolist()
        records = series.rows.to_dict("records")
        first = series.rows.iloc[0]
        for row, size, factors_to in zip(records, series.sizes, _factors(series), strict=True):
            # Weak scaling has the same work on each unit; with a fixed batch the ratio would mean something else
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
                    "evaluation": factors_to.evaluation,
                    "algorithmic": factors_to.algorithmic,
                    "staging": factors_to.staging,
                    "other": factors_to.other,
                    SCALING: factors_to.system if fixed else None,
                    **_list_ends(study, first, pd.Series(row), factors_to),
                    "repeats": any(map(study.repeats_courses, {row["group"], first["group"]})),
                    **predicted,
                    "models": (
                        why or "; ".join(f"{m.name} {m.form}, left-out error {100 * m.loo_error:.1f} %" for m in models)
                    ),
                }
            )
    if not lines:
        raise NotAnswerableError(
            "two sizes of one machine (units, nodes or cores) in one round and division, same benchmark and size"
        )
    return pd.DataFrame(lines)


def render_answer(study: Study) -> str:
    """State the efficiency at the last size of every series."""
    last = build_table(study).groupby("series", sort=True).tail(1)
    return join_statements(list(map(_describe_last, last.to_dict("records"))))


def _list_ends(study: Study, first: pd.Series, row: pd.Series, factors_to: Factors) -> dict[str, float]:
    """List the ends of the 95 % interval of each factor between the smallest size and this one."""
    if row["group"] == first["group"]:
        return {}
    part = dict(zip(NAMES, PARTS, strict=False))
    found = compute_intervals(study, first, row, factors_to)
    return {
        f"{part[name]} {end}": at for name, ends in found.items() for end, at in zip(("from", "to"), ends, strict=True)
    }


def _describe_last(row: Mapping[Hashable, Any]) -> str:
    system, algorithmic = (_describe_factor(row, name) for name in ("system", "algorithmic"))
    again = ", of repeated courses" * row["repeats"]
    share = f"{100 * row['efficiency']:.0f} % at {row['size']:g} {row['counts']} ({system}, {algorithmic}{again})"
    return f"{row['series']}: {share}{_describe_prediction(row)}"


def _describe_factor(row: Mapping[Hashable, Any], name: str) -> str:
    return f"{name} {100 * row[name]:.0f} %{': may be chance' * may_be_chance(row, name)}"


def _predict_further(study: Study, series: Series, models: list[Model]) -> dict[str, float | str]:
    """Predict seconds per epoch at SOLID_REACH times the largest size, with their interval; empty without models.

    Nothing is predicted, and the table says why, if the largest size does not follow the smaller ones.
    """
    if not models:
        return {}
    if why := find_break(_times(study, series), models):
        return {"no prediction": why}
    # No further: beyond it a prediction has no upper end
    further = SOLID_REACH * max(series.sizes)
    value, low, high = predict_time(_times(study, series), models, further)
    return {"further size": further, "s/epoch there": value, "there from": low, "there to": high}


def _describe_prediction(row: Mapping[Hashable, Any]) -> str:
    if isinstance(why := row.get("no prediction"), str):
        return f"; {why}"
    if pd.isna(row.get("further size", None)):
        return ""
    time = render_seconds_interval(row["s/epoch there"], row["there from"], row["there to"])
    largest = row["further size"] / SOLID_REACH
    return (
        f"; by the models {time} per epoch at {row['further size']:g} "
        f"(the upper end holds if no limit begins beyond {largest:g} and no size had a better day)"
    )


def draw_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per machine and round: a line for the efficiency and for each of its factors, over the size."""
    long = convert_to_long_table(table, list(LINES), "_factor", "_share")
    kinds = make_kind_channels("_factor", LINES)

    def draw(rows: pd.DataFrame) -> Chart:
        x = make_number_channel(alt.X, "size", str(rows["counts"].iloc[0]), log=True)
        y = alt.Y("_share:Q", title="efficiency", scale=alt.Scale(zero=True))
        base = alt.Chart(rows).encode(x=x, y=y, color=kinds["color"])
        line = base.mark_line()
        marks = base.mark_point(size=70, filled=True, opacity=1).encode(shape=kinds["shape"])
        perfect = alt.Chart(rows.head(1)).mark_rule(strokeDash=[2, 3]).encode(y=alt.datum(1.0))
        return layer_charts(perfect, line, marks, height=230)

    return draw_panels(long, ["series"], draw, zoom=True)


def _models(study: Study, series: Series) -> tuple[list[Model], str]:
    try:
        return fit(_times(study, series)), ""
    except NotEnoughPointsError as error:
        return [], f"not enough points: {error}"


def _times(study: Study, series: Series) -> dict[float, list[float]]:
    """Collect seconds per epoch of every run that reached the target, by size."""
    times: dict[float, list[float]] = {}
    for row, size in zip(series.rows.to_dict("records"), series.sizes, strict=True):
        # Each run by itself, because the models' bands are a bootstrap over runs
        taus = study.converged_of(row["group"])["tau_s"].dropna()
        times.setdefault(size, []).extend(float(tau) for tau in taus if tau > 0)
    return times


def _factors(series: Series) -> list[Factors]:
    splits = [build_split(row, size) for row, size in zip(series.rows.to_dict("records"), series.sizes, strict=True)]
    return [compute_factors(splits[0], split) for split in splits]


def _series(study: Study) -> list[Series]:
    series = []
    frame = study.distinct
    frame = frame[(frame["mode"] == "strong") & (frame["train_s.mean"] > 0)]
    # One machine, device and division: otherwise the size would not be the only difference
    for key, rows in frame.groupby(["benchmark", "size", "rounds", "division", "machine", "device"], sort=True):
        found = choose_extent(rows, training=True)
        sizes, count = found.sizes, found.count
        if sizes.notna().all() and sizes.nunique() > 1 and (sizes > 0).all():
            title = f"{key[4]} · {key[0]}" + (f" {key[1]}" if key[1] != "full" else "") + f" · {key[2]}"
            # Of equal sizes the faster result first: it is the reference if the smallest size has several
            ordered = rows.assign(extent=sizes.astype(float)).sort_values(["extent", "run_s.mean"])
            series.append(Series(title, ordered, tuple(ordered["extent"]), count))
    return series


VIEWS = (View("scaling", TITLE, QUESTION, CAPTION, build_table, render_answer, draw_chart),)
