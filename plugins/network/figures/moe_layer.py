"""Figure: an MoE layer by the fitted model: time by idea, which r and degree win, where 2DH overtakes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import altair as alt
import numpy as np
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    BLUE,
    GREEN,
    ORANGE,
    Chart,
    draw_panels,
    layer_charts,
    make_marker_channels,
    make_number_channel,
    make_span_channels,
)
from mlhpc.analysis.drawing.view import RUN_EXPERTS, Question, View, render_label
from mlhpc.analysis.study import Study
from mlhpc.plugins.network.figures import list_fits
from mlhpc.plugins.network.fit import LAYER_VARIANTS, Fit, choose_execution, find_measured_variants, predict_variants_s
from mlhpc.plugins.network.intervals import (
    compute_gain_interval,
    compute_layer_interval,
    find_crossover,
    list_bounded_ranks,
    list_supported_ranks,
    predict_all_to_all_band,
)
from mlhpc.suite.performance.cost_model import predict_layer_time_s

TITLE = "MoE layer"
LOADS = (0.25, 1.0, 2.0, 4.0, 8.0, 16.0)  # rows per token: top-k times the capacity factor
POINTS = 60  # sizes of a line


def build_time_table(study: Study) -> pd.DataFrame:
    """Build predicted and measured seconds by ranks and idea."""
    return pd.DataFrame([row for fit in list_fits(study) for row in _time_rows(fit)])


def render_time_answer(study: Study) -> str:
    """Say what the ideas gain where it was measured, and what the model predicts on twice the ranks."""
    sentences = []
    for fit in list_fits(study):
        layer = fit.sweep.layers[-1]
        measured = find_measured_variants(layer)
        gain = measured[LAYER_VARIANTS[1]].seconds / measured[LAYER_VARIANTS[-1]].seconds
        sentences.append(
            f"{render_label(fit.sweep.name)}: {gain:.2f}x over linear with r 1 on {layer.ranks} ranks (measured), "
            f"{_describe_extrapolation(fit)}"
        )
    return "; ".join(sentences)


def draw_time_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per sweep: lines of the model, markers where it was measured, bands beyond."""

    def draw(rows: pd.DataFrame) -> Chart:
        look = make_marker_channels(LAYER_VARIANTS)
        base = alt.Chart(rows).encode(x=make_number_channel(alt.X, "ranks", log=True))
        title = "layer, forward and backward [s]"
        line = base.mark_line().encode(
            y=make_number_channel(alt.Y, "model [s]", title, log=True, prefix=True), color=look["color"]
        )
        ends = make_span_channels("y", "low [s]", "high [s]", title)
        band = base.transform_filter("datum.extrapolated").mark_area(opacity=0.15).encode(**ends, color=look["color"])
        measured = base.transform_filter("isValid(datum['measured [s]'])").mark_point(size=80, filled=True, opacity=1)
        marks = measured.encode(y=make_number_channel(alt.Y, "measured [s]", title, log=True, prefix=True), **look)
        return layer_charts(band, line, marks, height=320)

    return draw_panels(table.assign(_sign=table["idea"]), ["sweep"], draw, zoom=True)


def build_choice_table(study: Study) -> pd.DataFrame:
    """Build the choice and its gain by ranks and load."""
    return pd.DataFrame([row for fit in list_fits(study) for row in _choice_rows(fit)])


def render_choice_answer(study: Study) -> str:
    """Count how often each r wins, on the measured grids and beyond."""
    frame = build_choice_table(study)
    sentences = []
    for name, rows in frame.groupby("sweep", sort=False):
        counts = Counter(rows["r"])
        wins = ", ".join(f"r {r} in {count}" for r, count in sorted(counts.items()))
        flat = (rows["degree"] == 1).sum()
        sentences.append(
            f"{render_label(name)}: of {len(rows)} cases {wins}; no overlap is best in {flat}; 2DH in "
            f"{(rows['algorithm'] == '2dh').sum()}"
        )
    return "; ".join(sentences)


def draw_choice_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per sweep: ranks and load, coloured by r, with the gain in each cell."""
    kinds = alt.Scale(domain=["r 0", "r 1", "r > 1"], range=[BLUE, GREEN, ORANGE])
    how = [f"r {r} · {gain:.2f}x" for r, gain in zip(table["r"], table["gain"], strict=True)]
    ranks = [f"{n:,}{' *' if beyond else ''}" for n, beyond in zip(table["ranks"], table["extrapolated"], strict=True)]
    shown = table.assign(_kind=table["r"].map(lambda r: f"r {r}" if r < 2 else "r > 1"), _how=how, _ranks=ranks)

    def draw(rows: pd.DataFrame) -> Chart:
        base = alt.Chart(rows).encode(
            x=alt.X("k f:O", title="rows per token, k·f", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("_ranks:N", title="ranks", sort=list(dict.fromkeys(rows["_ranks"]))),
        )
        cells = base.mark_rect(opacity=0.3).encode(color=alt.Color("_kind:N", scale=kinds))
        return layer_charts(cells, base.mark_text().encode(text="_how:N"), height=30 * rows["ranks"].nunique())

    return draw_panels(shown, ["sweep"], draw, columns=1)


def build_crossover_table(study: Study) -> pd.DataFrame:
    """Build the ratio linear / 2DH by ranks and bytes: of the model and, where it was measured, of the sweep."""
    return pd.DataFrame([row for fit in list_fits(study) for row in _crossover_rows(fit)])


def render_crossover_answer(study: Study) -> str:
    """Say up to which size 2DH wins."""
    return "; ".join(
        f"{render_label(fit.sweep.name)}: "
        + ", ".join(
            f"{ranks:,} ranks{' (extrapolated)' if ranks > fit.sweep.ranks else ''}"
            f" {find_crossover(fit, ranks).words()}"
            for ranks in (fit.sweep.ranks, *list_bounded_ranks(fit))
        )
        + f"; on more than {(fit.sweep.ranks, *list_bounded_ranks(fit))[-1]:,} ranks: inconclusive"
        for fit in list_fits(study)
    )


def draw_crossover_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per sweep: linear over 2DH by bytes, with a line and band per number of ranks. Above 1, 2DH wins."""
    ranks = [
        f"{n:,} ranks{', extrapolated' if beyond else ''}"
        for n, beyond in zip(table["ranks"], table["extrapolated"], strict=True)
    ]

    def draw(rows: pd.DataFrame) -> Chart:
        look = make_marker_channels(ranks)
        base = alt.Chart(rows).encode(x=make_number_channel(alt.X, "bytes per rank", log=True, prefix=True))
        title = "time of linear / time of 2DH"
        band = base.mark_area(opacity=0.12).encode(**make_span_channels("y", "low", "high", title), color=look["color"])
        line = base.mark_line().encode(
            y=make_number_channel(alt.Y, "model, linear / 2DH", title, log=True), color=look["color"]
        )
        measured = base.transform_filter("isValid(datum['measured, linear / 2DH'])").mark_point(
            size=70, filled=True, opacity=1
        )
        marks = measured.encode(y=make_number_channel(alt.Y, "measured, linear / 2DH", title, log=True), **look)
        one = alt.Chart(rows.head(1)).mark_rule(strokeDash=[2, 3]).encode(y=alt.datum(1.0))
        return layer_charts(one, band, line, marks, height=320)

    return draw_panels(table.assign(_sign=ranks), ["sweep"], draw, zoom=True)


def _describe_extrapolation(fit: Fit) -> str:
    carried = list_supported_ranks(fit)
    if not carried:
        return f"on more than {fit.sweep.ranks:,}: inconclusive"
    ranks = carried[0]  # twice the measured ones: beyond, a time has a lower end only
    fastest = compute_layer_interval(fit, ranks, predict_variants_s(fit, ranks)[LAYER_VARIANTS[-1]])
    return (
        f"on {ranks:,} the layer takes {fastest.words(' ms', 1e3)} "
        "(extrapolated, 90 %, if no switch level begins there)"
    )


def _time_rows(fit: Fit) -> list[dict[str, object]]:
    measured = {layer.ranks: find_measured_variants(layer) for layer in fit.sweep.layers}
    rows: list[dict[str, object]] = []
    for ranks in sorted(set(list_supported_ranks(fit)) | set(measured)):
        for idea, seconds in predict_variants_s(fit, ranks).items():
            run = measured.get(ranks, {}).get(idea)
            # On measured ranks the measurement stands beside the model, so no interval is needed
            ends = compute_layer_interval(fit, ranks, seconds).data() if ranks > fit.sweep.ranks else {}
            rows.append(
                {
                    "sweep": fit.sweep.name,
                    "ranks": ranks,
                    "extrapolated": ranks > fit.sweep.ranks,
                    "idea": idea,
                    "model [s]": seconds,
                    "low [s]": ends.get("low"),
                    "high [s]": ends.get("high"),
                    "measured [s]": run.seconds if run else None,
                    "n": run.repeats if run else 0,
                    "error [%]": 100 * (seconds / run.seconds - 1) if run else None,
                }
            )
    return rows


def _choice_rows(fit: Fit) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for ranks in sorted({layer.ranks for layer in fit.sweep.layers} | set(list_bounded_ranks(fit))):
        base = fit.layer_shape(ranks)
        for load in LOADS:
            shape = replace(base, capacity_factor=load / base.top_k)
            best = choose_execution(fit, shape, ranks)
            interval = compute_layer_interval(fit, ranks, best.seconds)
            plain = predict_layer_time_s(shape, fit.network, ranks, fit.flops_per_s, r=1, degree=1, algorithm="linear")
            gain = compute_gain_interval(fit, ranks, plain, best.seconds)
            rows.append(
                {
                    "sweep": fit.sweep.name,
                    "ranks": ranks,
                    "extrapolated": ranks > fit.sweep.ranks,
                    "k f": load,
                    "r": best.r,
                    "degree": best.degree,
                    "algorithm": best.algorithm,
                    "model [s]": best.seconds,
                    "low [s]": interval.low if ranks > fit.sweep.ranks else None,
                    "high [s]": interval.high if ranks > fit.sweep.ranks else None,
                    "gain": gain.value,
                    "gain low": gain.low if ranks > fit.sweep.ranks else None,
                    "gain high": gain.high if ranks > fit.sweep.ranks else None,
                }
            )
    return rows


def _crossover_rows(fit: Fit) -> list[dict[str, object]]:
    medians = {(m.ranks, m.size_bytes, m.algorithm): m.seconds for m in fit.sweep.measurements}
    across = {m.ranks for m in fit.sweep.measurements if m.ranks > m.ranks_per_node}
    rows: list[dict[str, object]] = []
    bytes_measured = sorted({m.size_bytes for m in fit.sweep.measurements})
    for ranks in sorted(across | set(list_bounded_ranks(fit))):
        measured = {size: seconds for (n, size, name), seconds in medians.items() if n == ranks and name == "linear"}
        # Up to the largest message that was measured, which on more ranks is a larger all-to-all
        largest = bytes_measured[-1] * max(1.0, ranks / fit.sweep.ranks)
        # With the measured sizes among them, so that a measurement has a row
        sizes = np.array(sorted({*np.geomspace(bytes_measured[0], largest, POINTS).tolist(), *measured}))
        band = predict_all_to_all_band(fit, ranks, sizes, "ratio")
        for i, size in enumerate(sizes.tolist()):
            other = medians.get((ranks, size, "2dh"))
            rows.append(
                {
                    "sweep": fit.sweep.name,
                    "ranks": ranks,
                    "extrapolated": ranks > fit.sweep.ranks,
                    "bytes per rank": size,
                    "model, linear / 2DH": float(band.value[i]),
                    "low": float(band.low[i]),
                    "high": float(band.high[i]),
                    "measured, linear / 2DH": measured[size] / other if other and size in measured else None,
                }
            )
    return rows


VIEWS = (
    View(
        "moe_layer_time", "Time by idea",
        Question(
            RUN_EXPERTS,
            "What does each idea of Tutel gain, here and on more ranks?",
            ("ranks", "idea", "model [s]", "measured [s]"),
            needs="an all-to-all sweep",
        ),
        "Forward and backward of the measured layer, tokens and experts growing with the ranks: one-hot masks; "
        "rows sorted by expert; 2DH where it is faster; the best r; the best overlap degree. Each line keeps "
        "what came before. Lines are the fitted model's, signs are measured. Bands are 90 % intervals of what "
        "is extrapolated: beyond twice the measured ranks a time has a lower end only. Upper ends hold if no switch "
        "level begins beyond the measured ranks.",
        build_time_table, render_time_answer, draw_time_chart,
    ),
    View(
        "moe_choice", "Which r, degree and all-to-all win",
        Question(
            RUN_EXPERTS,
            "Which r, overlap degree and all-to-all win where?",
            ("ranks", "k f", "r", "degree", "algorithm", "gain"),
            needs="an all-to-all sweep",
        ),
        "The fastest way to execute the measured layer by the fitted model, for ranks (experts grow with them) "
        "and for the rows each token becomes, k·f: top-k times the capacity that the load needs. r = 0 (blue) "
        "gathers all weights, r = 1 (green) moves each row once, r > 1 (orange) moves copies instead of "
        "weights; the number is the gain over r = 1, no overlap, linear. The table has the overlap degree and "
        "the all-to-all. Rows marked * are extrapolated to twice the measured ranks; their gains have "
        "90 % intervals, which hold if no switch level begins there.",
        build_choice_table, render_choice_answer, draw_choice_chart,
    ),
    View(
        "moe_crossover", "2DH against the linear all-to-all",
        Question(
            RUN_EXPERTS,
            "From how many ranks and up to which size does 2DH beat the linear all-to-all?",
            ("ranks", "bytes per rank", "model, linear / 2DH", "measured, linear / 2DH"),
            needs="an all-to-all sweep",
        ),
        "Time of the linear all-to-all divided by that of 2DH: above 1, 2DH wins. Signs are medians of the "
        "sweep, lines the fitted model, also on twice the measured ranks; bands are 90 % intervals, beyond the "
        "measured ranks if no switch level begins there.",
        build_crossover_table, render_crossover_answer, draw_crossover_chart,
    ),
)  # fmt: skip
