"""Figure: the hierarchical roofline, one kernel at every memory level, from what hardware counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.axes import CYCLE, INK, MARKERS, clip, listed, log_frame, panels
from analysis.drawing.labels import NamedPoint, name_panels
from analysis.drawing.rooflines import intensity_axes
from analysis.roofline.bounds import Point, Roof, above_roof, at_roof, si
from analysis.roofline.cases import Case, measured_cases
from analysis.roofline.points import counters_of, kernels
from analysis.roofline.regime import memory_levels, peaks_of, scaled
from analysis.study import NotAnswerableError, Study

TITLE = "Hierarchical roofline"
CAPTION = (
    "Each kernel that hardware counted, at every memory level: the same FLOP/s, the FLOPs per byte that crossed the "
    "level. Signs "
    "and roofs of a level share colour and shape. A short line is streaming, a long one reuse in caches. Filled "
    "signs: all bytes "
    "are counted. A sign above its roof is an input error: it is not drawn, and the table says why."
)
LEAST_DECADES = 2.6


@dataclass(frozen=True)
class Level:
    """One memory level of one case: its roof and the kernels' points there."""

    case: Case
    peak: Roof
    roof: Roof
    name: str
    points: tuple[Point, ...]

    @property
    def believed(self) -> list[Point]:
        """The points that lie under the roof."""
        return [point for point in self.points if not above_roof(point, self.peak, self.roof)]


def table(study: Study) -> pd.DataFrame:
    """A row per result, kernel and level."""
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
                "share of the roof": point.bytes / point.seconds / level.roof.per_s,
                "state": f"refused: {why}" if (why := above_roof(point, level.peak, level.roof)) else "drawn",
            }
            for levels in _cases(study)
            for level in levels
            for point in level.points
        ]
    )


def answer(study: Study) -> str:
    """The level whose roof is nearest for the longest kernel of each result."""
    rows = table(study).query("state == 'drawn'")
    if rows.empty:
        return "every counted kernel lies above a roof: see the table"
    longest = rows.sort_values(["seconds per step", "share of the roof"], ascending=False)
    first = longest.drop_duplicates(["benchmark", "size", "label"])
    return listed(
        [
            f"{r['label']} ({r['benchmark']} {r['size']}), {r['kernel']}: {at_roof(r['level'], r['share of the roof'])}"
            for r in first.to_dict("records")
        ]
    )


def draw(study: Study) -> Figure:
    """A panel per result."""
    results = _cases(study)
    figure, axes = panels(len(results), 1, 6.0, extra_in=0.4)
    named = [_panel(axis, levels) for levels, axis in zip(results, axes, strict=True)]
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    name_panels(figure, axes, named)
    return figure


def _panel(axis: Axes, levels: list[Level]) -> list[NamedPoint]:
    """Draw one result, and return what is to be written at its points."""
    peak, case = levels[0].peak, levels[0].case
    left, right, low, high = _limits(levels)
    log_frame(axis, (left, right), (low, high))
    _draw_roofs(axis, levels)
    names = []
    drawn = [(number, point) for number, level in enumerate(levels) for point in level.believed if point.flops]
    for kernel in dict.fromkeys(point.name for _, point in drawn):
        xs, ys = zip(*((p.intensity, p.rate) for _, p in drawn if p.name == kernel), strict=True)
        axis.plot(xs, ys, "-", color=INK, linewidth=0.8, alpha=0.7)
        names.append((max(xs), ys[0], clip(kernel, 30), False))
    for number, point in drawn:
        colour, marker = _look(number)
        axis.plot([point.intensity], [point.rate], marker, color=colour, markersize=9)
    intensity_axes(axis)
    axis.set_title(clip(f"{case.label}: {case.benchmark} {case.size}", 80))
    roof = [(x, peak.per_s, "", False) for x in np.geomspace(left, right, 120)]  # keeps names off the compute roof
    return names + [point for point in roof if math.isfinite(point[0])]


def _limits(levels: Sequence[Level]) -> tuple[float, float, float, float]:
    """Limits around all believed points and the ridges of all levels."""
    peak = levels[0].peak.per_s
    points = [point for level in levels for point in level.believed]
    intensities = [p.intensity for p in points] + [peak / level.roof.per_s for level in levels]
    rates = [p.rate for p in points if p.flops] + [peak]
    low = min(min(rates) / 3, peak / 10**LEAST_DECADES)
    return min(i for i in intensities if i > 0) / 4, max(intensities) * 6, low, peak * 3


def _draw_roofs(axis: Axes, levels: Sequence[Level]) -> None:
    peak, right, low = levels[0].peak, axis.get_xlim()[1], axis.get_ylim()[0]
    for number, level in enumerate(levels):
        colour, marker = _look(number)
        ridge = peak.per_s / level.roof.per_s
        axis.plot([low / level.roof.per_s, ridge], [low, peak.per_s], color=colour, linewidth=1.6)
        label = f"{level.name}: {si(level.roof.per_s)}B/s"
        axis.plot([], [], marker, linestyle="-", color=colour, markersize=8, label=label)
    axis.plot([peak.per_s / levels[0].roof.per_s, right], [peak.per_s] * 2, color=INK, linewidth=1.8)
    text = f"{peak.name}: {si(peak.per_s)}FLOP/s"
    axis.annotate(text, (right, peak.per_s), xytext=(-4, 4), textcoords="offset points", ha="right")


def _look(level: int) -> tuple[str, str]:
    """Colour and marker of a memory level."""
    return CYCLE[level % len(CYCLE)], MARKERS[level % len(MARKERS)]


def _cases(study: Study) -> list[list[Level]]:
    if not study.inputs.counters:
        raise NotAnswerableError(
            "needs counters: a counters file of the workload on this system among the report's paths"
        )
    results = [levels for case in measured_cases(study) if (levels := _levels(study, case))]
    if not results:
        counted = ", ".join(f"{c.benchmark} {c.size} on {c.system}" for c in study.inputs.counters)
        raise NotAnswerableError(f"needs counters of a result shown here; those given are of {counted}")
    return results


def _levels(study: Study, case: Case) -> list[Level]:
    counted = counters_of(study, case)
    assert case.ceilings is not None
    assert case.work is not None
    peaks, levels = peaks_of(case.ceilings, case.work), memory_levels(case.ceilings)
    if counted is None or not peaks:
        return []
    peak = peaks[0]
    return [
        Level(case, peak, scaled(case.ceilings, case.work, m, m.name, shared=m is levels[-1]), m.name, tuple(points))
        for m in levels
        if (points := kernels(counted, m.name))
    ]
