"""Figure: rooflines of a step and of its kernels: over intensity, over time, and at every memory level."""

from __future__ import annotations

import math
from dataclasses import dataclass

import altair as alt
import pandas as pd

from mlhpc.analysis.drawing.charts import (
    TEXT_COLOUR,
    Chart,
    draw_panels,
    draw_points,
    layer_charts,
    make_number_channel,
)
from mlhpc.analysis.drawing.view import UNDERSTAND_TIME, Question, View, join_statements, render_label
from mlhpc.analysis.roofline.bounds import Point, Roof, describe_roof_share, explain_above_roof, render_si
from mlhpc.analysis.roofline.points import PlacedPoint, find_counters, list_kernels, list_machines
from mlhpc.analysis.roofline.regime import (
    Case,
    compute_rank_roof,
    find_host_link,
    list_measured_cases,
    list_memory_levels,
    list_peaks,
)
from mlhpc.analysis.study import NotAnswerableError, Study

TITLE = "Roofline"
HOST_LINK = "host link [B/s]"
ROOF_MARGIN_FACTOR = 4.0  # how far a roof is drawn beyond the points and its ridge


def build_roof_table(study: Study) -> pd.DataFrame:
    """Build a row per point."""
    lines = [
        placed.identity
        | {
            "share of the roof": placed.point.rate / placed.allowed if placed.state == "drawn" else math.nan,
            "roof": placed.roof,
            "FLOP/B": placed.point.intensity,
            "FLOP/s": placed.point.rate,
            "roof at this intensity [FLOP/s]": placed.allowed,
            "seconds per step": placed.point.seconds,
            "FLOP": placed.point.flops,
            "bytes": placed.point.bytes,
            "bytes are": placed.point.basis,
            "compute roof [FLOP/s]": placed.peak.per_s,
            "compute roof from": f"{placed.peak.name}: {placed.peak.source}",
            "memory roof [B/s]": placed.bandwidth.per_s,
            "memory roof from": f"{placed.bandwidth.name}: {placed.bandwidth.source}",
            "state": placed.state,
            "ceilings": f"{machine.file.system}, {machine.file.date[:10]}",
        }
        | ({} if (link := find_host_link(machine.file)) is None else {HOST_LINK: link.value})
        for machine in list_machines(study)
        for placed in machine.placed
    ]
    if not lines:
        raise NotAnswerableError("ceilings of products in the run's number format and of memory")
    return pd.DataFrame(lines)


def render_roof_answer(study: Study) -> str:
    """Name the roof above each result's step, and how far the step is below it."""
    # For its error: without points there is no answer either
    build_roof_table(study)
    firsts = [
        placed
        for machine in list_machines(study)
        for placed in machine.placed
        # The first point of a machine is the whole step
        if placed.point.name == machine.placed[0].point.name
    ]
    return join_statements([_describe_point(placed) for placed in firsts])


def _describe_point(placed: PlacedPoint) -> str:
    result = f"{placed.case.label} ({placed.case.benchmark} {placed.case.size})"
    if placed.refused:
        return f"{result}: refused, {placed.refused}"
    if not placed.point.flops:
        return f"{result}: {placed.point.name} has no FLOPs"
    return (
        f"{result}: {describe_roof_share(placed.roof, placed.point.rate / placed.allowed)}, the {placed.point.name}"
        f" reaches {render_si(placed.point.rate)}FLOP/s of the {render_si(placed.allowed)}FLOP/s at its"
        f" {placed.point.intensity:.3g} FLOP/B ({placed.point.basis} bytes)"
    )


def draw_roof_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per machine: points under the memory and compute roofs of their number format."""

    def draw(rows: pd.DataFrame) -> Chart:
        # Results on one machine may use other number formats, threads and memory levels: a roof line for each
        pairs = rows[["compute roof [FLOP/s]", "memory roof [B/s]"]].drop_duplicates().itertuples(index=False)
        intensities = rows["FLOP/B"]
        roofs = pd.concat(
            [_build_roof_line(peak, bandwidth, intensities, f"{render_si(bandwidth)}B/s") for peak, bandwidth in pairs]
            # Weights that come from the host are used at 2 FLOPs a token: from its ridge on, their load is hidden
            + [
                _build_roof_line(
                    peak, link, intensities, f"host link {render_si(link)}B/s; offload pays from its ridge on"
                )
                for peak, link in _list_host_links(rows)
            ]
        )
        return _draw_under_roofs(roofs, rows)

    shown = table[(table["state"] == "drawn") & (table["FLOP"] > 0)]
    return draw_panels(_mark_points(shown), ["ceilings"], draw, columns=1, zoom=True)


def _list_host_links(rows: pd.DataFrame) -> list[tuple[float, float]]:
    """List (compute roof, bandwidth of the host link) where the link was measured."""
    if HOST_LINK not in rows:
        return []
    pairs = rows[["compute roof [FLOP/s]", HOST_LINK]].dropna().drop_duplicates()
    return [(float(peak), float(link)) for peak, link in pairs.itertuples(index=False)]


def build_time_table(study: Study) -> pd.DataFrame:
    """Build a row per point, with its seconds at each roof."""
    lines = [
        placed.identity
        | {
            "at the compute roof [s]": complexity.compute_s,
            "at the memory roof [s]": complexity.memory_s,
            "operators": placed.point.count or math.nan,
            # Without counters the number of operators is not known
            "issuing them [s]": complexity.launch_s if placed.point.count else math.nan,
            "measured [s]": complexity.seconds,
            "nearest roof": complexity.bound,
            "measured / roof": complexity.seconds / complexity.roof_s,
            "bytes are": placed.point.basis,
            "one launch [s]": machine.launch_s or math.nan,
            "measured / one launch": complexity.seconds / machine.launch_s if machine.launch_s else math.nan,
            "ceilings": f"{machine.file.system}, {machine.file.date[:10]}",
        }
        for machine in list_machines(study)
        for placed, complexity in machine.complexities()
    ]
    if not lines:
        raise NotAnswerableError("points below the ceilings of products in the run's number format and of memory")
    return pd.DataFrame(lines)


def render_time_answer(study: Study) -> str:
    """Name the roof nearest to each result's longest point, and say whether it binds."""
    rows = (
        build_time_table(study)
        .sort_values("measured [s]", ascending=False)
        .drop_duplicates(["benchmark", "size", "label"])
    )
    return join_statements(
        [
            f"{r['label']} ({r['benchmark']} {r['size']}), {r['point']} of {render_si(r['measured [s]'])}s: "
            f"{describe_roof_share(r['nearest roof'], 1 / r['measured / roof'])}"
            for r in rows.to_dict("records")
        ]
    )


def draw_time_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per machine: seconds at the compute roof over seconds at the memory roof, equal on the diagonal."""

    def draw(rows: pd.DataFrame) -> Chart:
        x, y = "at the memory roof [s]", "at the compute roof [s]"
        known = pd.concat([rows[x], rows[y]])
        ends = pd.DataFrame({"_x": [known[known > 0].min() / ROOF_MARGIN_FACTOR, known.max() * ROOF_MARGIN_FACTOR]})
        diagonal = (
            alt.Chart(ends)
            .mark_line(color=TEXT_COLOUR, strokeDash=[4, 3])
            .encode(x=make_number_channel(alt.X, "_x", x, log=True), y=make_number_channel(alt.Y, "_x", y, log=True))
        )
        marks = draw_points(
            rows,
            make_number_channel(alt.X, x, log=True),
            make_number_channel(alt.Y, y, log=True),
            rows["_sign"],
            hollow="_hollow",
        )
        return layer_charts(diagonal, marks, height=420)

    shown = table[(table["at the compute roof [s]"] > 0) & (table["at the memory roof [s]"] > 0)]
    return draw_panels(_mark_points(shown), ["ceilings"], draw, zoom=True)


def build_level_table(study: Study) -> pd.DataFrame:
    """Build a row per result, kernel and memory level."""
    return pd.DataFrame(
        [
            {
                "label": level.case.label,
                "benchmark": level.case.benchmark,
                "size": level.case.size,
                "kernel": point.name,
                "launches per step": point.count,
                "seconds per step": point.seconds,
                "FLOP": point.flops,
                "level": level.name,
                "bytes": point.bytes,
                "FLOP/B": point.intensity,
                "FLOP/s": point.rate,
                "level's rate [B/s]": point.bytes / point.seconds,
                "level's roof [B/s]": level.roof.per_s,
                "compute roof [FLOP/s]": level.peak.per_s,
                "share of the roof": point.bytes / point.seconds / level.roof.per_s,
                "state": f"refused: {why}" if (why := explain_above_roof(point, level.peak, level.roof)) else "drawn",
            }
            for level in _list_levels(study)
            for point in level.points
        ]
    )


def render_level_answer(study: Study) -> str:
    """Name the level whose roof is nearest for the longest kernel of each result."""
    # A kernel above a roof is an input error, and no answer may rest on it
    rows = build_level_table(study).query("state == 'drawn'")
    if rows.empty:
        return "every counted kernel lies above a roof: see the table"
    longest = rows.sort_values(["seconds per step", "share of the roof"], ascending=False)
    first = longest.drop_duplicates(["benchmark", "size", "label"])
    return join_statements(
        [
            f"{r['label']} ({r['benchmark']} {r['size']}), {r['kernel']}:"
            f" {describe_roof_share(r['level'], r['share of the roof'])}"
            for r in first.to_dict("records")
        ]
    )


def draw_level_chart(table: pd.DataFrame) -> Chart:
    """Draw a panel per result: every kernel at every memory level, under the level's roof."""

    def draw(rows: pd.DataFrame) -> Chart:
        peak = float(rows["compute roof [FLOP/s]"].max())
        levels = rows.drop_duplicates("level")[["level", "level's roof [B/s]"]].itertuples(index=False)
        roofs = pd.concat(
            [
                _build_roof_line(peak, bandwidth, rows["FLOP/B"], f"{name}: {render_si(bandwidth)}B/s")
                for name, bandwidth in levels
            ]
        )
        return _draw_under_roofs(roofs, rows)

    shown = table[(table["state"] == "drawn") & (table["FLOP"] > 0) & (table["FLOP/B"] > 0)]
    return draw_panels(
        shown.assign(_sign=shown["level"], _hollow=False), ["benchmark", "size", "label"], draw, columns=1, zoom=True
    )


def _draw_under_roofs(roofs: pd.DataFrame, rows: pd.DataFrame) -> Chart:
    """Draw points under roofs, whose names stand at their lower ends."""
    across, up = "arithmetic intensity [FLOP/B]", "FLOP/s"
    base = alt.Chart(roofs).encode(x=make_number_channel(alt.X, "_x", across, log=True))
    y = make_number_channel(alt.Y, "_y", up, log=True, prefix=True)
    lines = base.mark_line(color=TEXT_COLOUR, strokeWidth=1.5).encode(y=y, detail="_roof:N")
    text = base.transform_filter("datum._first").mark_text(align="left", dx=4, dy=-8).encode(y="_y:Q", text="_roof:N")
    marks = draw_points(
        rows,
        make_number_channel(alt.X, "FLOP/B", across, log=True),
        make_number_channel(alt.Y, "FLOP/s", up, log=True, prefix=True),
        rows["_sign"],
        hollow="_hollow",
    )
    return layer_charts(lines, text, marks, height=420)


def _build_roof_line(peak: float, bandwidth: float, intensities: pd.Series, name: str) -> pd.DataFrame:
    """Build the line of one roof: up to the ridge with the bandwidth, then level at the peak."""
    ridge = peak / bandwidth
    left = min(float(intensities.min()), ridge) / ROOF_MARGIN_FACTOR
    right = max(float(intensities.max()), ridge) * ROOF_MARGIN_FACTOR
    x = [left, ridge, right]
    return pd.DataFrame({"_x": x, "_y": [left * bandwidth, peak, peak], "_roof": name, "_first": [True, False, False]})


def _mark_points(table: pd.DataFrame) -> pd.DataFrame:
    """Give each point its legend entry and make those with bytes that are not counted hollow."""
    # One system may have run several benchmarks, so the legend names them too
    names = (table["benchmark"] + " " + table["size"] + ", " + table["label"]).map(lambda name: render_label(name, 40))
    return table.assign(_sign=names, _hollow=table["bytes are"] != "counted")


@dataclass(frozen=True)
class Level:
    """Holds one memory level of one case: its roof and the kernels' points there."""

    case: Case
    peak: Roof
    roof: Roof
    name: str
    points: tuple[Point, ...]


def _list_levels(study: Study) -> list[Level]:
    if not study.inputs.counters:
        raise NotAnswerableError(
            "needs counters: a counters file of the workload on this system among the report's paths"
        )
    levels = [level for case in list_measured_cases(study) for level in _levels_of(study, case)]
    if not levels:
        counted = ", ".join(f"{c.benchmark} {c.size} on {c.system}" for c in study.inputs.counters)
        raise NotAnswerableError(f"needs counters of a result shown here; those given are of {counted}")
    return levels


def _levels_of(study: Study, case: Case) -> list[Level]:
    counted = find_counters(study, case)
    assert case.ceilings is not None
    assert case.work is not None
    peaks, levels = list_peaks(case.ceilings, case.work), list_memory_levels(case.ceilings)
    if counted is None or not peaks:
        return []
    peak = peaks[0]
    return [
        Level(
            case,
            peak,
            compute_rank_roof(case.ceilings, case.work, m, m.name, shared=m is levels[-1]),
            m.name,
            tuple(points),
        )
        for m in levels
        if (points := list_kernels(counted, m.name))
    ]


VIEWS = (
    View(
        "roofline", "Roofline",
        Question(
            UNDERSTAND_TIME,
            "How far is a step from the roof of its machine, and which roof is it?",
            ("executed_flops_per_sample", "algorithmic_bytes_per_sample"),
            needs="ceilings of the machine",
        ),
        "FLOP/s of one rank over FLOPs per byte, under the measured roofs of the machine: the products in the "
        "run's number format and the memory. Hollow: the bytes are algorithmic, what operators read and write, "
        "not memory traffic; filled: counted by hardware. A point above its roof is an input error: it is not "
        "drawn, and the table says why.",
        build_roof_table, render_roof_answer, draw_roof_chart,
    ),
    View(
        "time_roofline", "Compute, memory or launches",
        Question(
            UNDERSTAND_TIME,
            "Does a step compute, move bytes, or wait for operators to be issued?",
            ("executed_flops_per_sample", "algorithmic_bytes_per_sample"),
            needs="ceilings of the machine",
        ),
        "Seconds that a phase's or kernel's bytes take at the memory roof (across) and its FLOPs at the compute "
        "roof (up); above the dashed diagonal compute binds, below it memory. The table has the measured time, "
        "how many times the nearest roof it is, and what issuing the operators costs: their number times the "
        "smallest product that was measured.",
        build_time_table, render_time_answer, draw_time_chart,
    ),
    View(
        "hierarchical_roofline", "Every memory level",
        Question(
            UNDERSTAND_TIME,
            "Which memory level do a step's kernels wait for?",
            ("executed_flops_per_sample",),
            needs="counters of the kernels",
        ),
        "Each kernel that hardware counted, at every memory level: the same FLOP/s, the FLOPs per byte that "
        "crossed the level. All bytes are counted. A sign above its roof is an input error: it is not drawn, "
        "and the table says why.",
        build_level_table, render_level_answer, draw_level_chart,
    ),
)  # fmt: skip
