"""Figure: the time-based roofline, seconds at the compute roof over seconds at the memory roof, launches included."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.drawing.axes import GREY, INK, ORANGE, clip, legend_of, listed, log_frame, looks, panels
from analysis.drawing.labels import name_panels
from analysis.drawing.rooflines import series, si_scale
from analysis.roofline.bounds import Complexity, at_roof, si
from analysis.roofline.points import Machine, Placed, machines
from analysis.study import NotAnswerableError, Study

TITLE = "Time-based roofline"
CAPTION = (
    "Seconds that a phase's or kernel's bytes take at the memory roof (across) and its FLOPs at the compute roof "
    "(up); above "
    "the diagonal compute binds, below it memory. The dashed corner through the measured time of a phase shows how "
    "far it "
    "is: at its roof a point would touch its corner. The orange square is what issuing the operators costs, their "
    "number "
    "times the smallest product that was measured: a point inside waits for launches, which a plot of intensity hides. "
    "Without a count of operators the square is one launch, and a phase whose point is near it and its corner far away "
    "issues many small operators."
)


def table(study: Study) -> pd.DataFrame:
    """A row per point."""
    lines = [
        placed.identity
        | {
            "at the compute roof [s]": complexity.compute_s,
            "at the memory roof [s]": complexity.memory_s,
            "operators": placed.point.count or math.nan,
            "issuing them [s]": complexity.launch_s if placed.point.count else math.nan,
            "measured [s]": complexity.seconds,
            "nearest roof": complexity.bound,
            "measured / roof": complexity.seconds / complexity.roof_s,
            "bytes are": placed.point.basis,
            "one launch [s]": machine.launch_s or math.nan,
            "measured / one launch": complexity.seconds / machine.launch_s if machine.launch_s else math.nan,
            "ceilings": f"{machine.file.system}, {machine.file.date[:10]}",
        }
        for machine in machines(study)
        for placed, complexity in machine.complexities()
    ]
    if not lines:
        raise NotAnswerableError("points below the ceilings of products in the run's number format and of memory")
    return pd.DataFrame(lines)


def answer(study: Study) -> str:
    """The roof nearest to each result's longest point, and whether it binds."""
    rows = table(study).sort_values("measured [s]", ascending=False).drop_duplicates(["benchmark", "size", "label"])
    return listed(
        [
            f"{r['label']} ({r['benchmark']} {r['size']}), {r['point']} of {si(r['measured [s]'])}s: "
            f"{at_roof(r['nearest roof'], 1 / r['measured / roof'])}"
            for r in rows.to_dict("records")
        ]
    )


def draw(study: Study) -> Figure:
    """A panel per machine."""
    table(study)
    shown = [machine for machine in machines(study) if machine.complexities()]
    signs = looks(series(placed.case) for machine in shown for placed, _ in machine.complexities())
    columns = min(2, len(shown))
    figure, axes = panels(len(shown), columns, 5.4, extra_in=0.5)
    named = [_panel(axis, machine, signs, 90 // columns) for machine, axis in zip(shown, axes, strict=True)]
    legend_of(figure, axes[0], signs)
    name_panels(figure, axes, named)
    return figure


def _panel(
    axis: Axes, machine: Machine, signs: dict[str, tuple[str, str]], width: int
) -> list[tuple[float, float, str, bool]]:
    points = machine.complexities()
    times = [t for _, c in points for t in (c.compute_s, c.memory_s, c.seconds, c.launch_s, machine.launch_s) if t > 0]
    low, high = min(times) / 10, max(times) * 10
    log_frame(axis, (low, high), (low, high))
    axis.set_aspect("equal")
    axis.plot([low, high], [low, high], color=GREY, linewidth=1.0)
    launch = max((c.launch_s for _, c in points), default=0.0) or machine.launch_s
    if launch > low:
        square = Rectangle((low, low), launch - low, launch - low, facecolor=ORANGE, edgecolor=ORANGE, alpha=0.25)
        axis.add_patch(square)
        axis.annotate("launch", (low, launch), xytext=(4, 3), textcoords="offset points", color=INK)
    corners = _corners(points)
    for placed, complexity in points:
        colour, marker = signs[series(placed.case)]
        t = complexity.seconds
        counted = placed.point.basis == "counted"
        if complexity.name in corners:
            axis.plot([low, t, t], [t, t, low], linestyle="--", color=colour, linewidth=1.2)
        axis.plot(
            [complexity.memory_s], [complexity.compute_s], marker, color=colour, markersize=7 if counted else 11,
            markeredgewidth=2, markerfacecolor=colour if counted else "none",
        )  # fmt: skip
    for scale in (axis.xaxis, axis.yaxis):
        si_scale(scale, "s")
    axis.set_xlabel("bytes at the memory roof (below the diagonal it is nearer)")
    axis.set_ylabel("FLOPs at the compute roof (above it is nearer)")
    axis.set_title(clip(machine.title, width), fontsize=11)
    return [(c.memory_s, c.compute_s, f"{c.name}: {c.seconds / c.roof_s:.3g} ×", False) for _, c in points]


def _corners(points: Sequence[tuple[Placed, Complexity]]) -> set[str]:
    """Points with a corner at their measured time: phases, or kernels if they are few; of several results the first
    alone.
    """
    if len({series(placed.case) for placed, _ in points}) > 1:
        return {points[0][1].name}
    return {complexity.name for placed, complexity in points if placed.point.basis != "counted" or len(points) < 4}
