"""Figure: the classic roofline, FLOP/s over FLOPs per byte, under ceilings that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.drawing.axes import GREY, INK, clip, legend_of, listed, log_frame, looks, panels
from analysis.drawing.labels import NamedPoint, name_panels
from analysis.drawing.rooflines import intensity_axes, series
from analysis.roofline.bounds import Roof, at_roof, si
from analysis.roofline.points import Machine, Placed, machines
from analysis.roofline.published import vendor_roofs
from analysis.study import NotAnswerableError, Study

TITLE = "Roofline"
CAPTION = (
    "FLOP/s of one rank over FLOPs per byte, under the measured roofs of the machine: the products in the run's "
    "number format and "
    "the memory levels. The area of a sign is its share of the step. Hollow: the bytes are algorithmic, what "
    "operators read and "
    "write, not memory traffic; filled: counted by hardware. Peaks of vendors are thin dots, named, and no percentage "
    "is taken of "
    "them. A point above its roof is an input error: it is not drawn, and the table says why."
)
WIDE, HIGH = 9.0, 5.2
LEAST_DECADES = 2.6
CLOSE = 1.6  # ratio of two slopes that leave no room for a text between them
POINT_AREA = 200.0  # of a whole step, in square points


def table(study: Study) -> pd.DataFrame:
    """A row per point."""
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
        for machine in machines(study)
        for placed in machine.placed
    ]
    if not lines:
        raise NotAnswerableError("ceilings of products in the run's number format and of memory")
    return pd.DataFrame(lines)


def answer(study: Study) -> str:
    """The roof above each result's step, and how far the step is below it."""
    table(study)
    firsts = [
        placed
        for machine in machines(study)
        for placed in machine.placed
        if placed.point.name == machine.placed[0].point.name
    ]
    return listed([_sentence(placed) for placed in firsts])


def _sentence(placed: Placed) -> str:
    result = f"{placed.case.label} ({placed.case.benchmark} {placed.case.size})"
    if placed.refused:
        return f"{result}: refused, {placed.refused}"
    if not placed.point.flops:
        return f"{result}: {placed.point.name} has no FLOPs"
    return (
        f"{result}: {at_roof(placed.roof, placed.point.rate / placed.allowed)}, the {placed.point.name} reaches "
        f"{si(placed.point.rate)}FLOP/s of the {si(placed.allowed)}FLOP/s at its {placed.point.intensity:.3g} FLOP/B "
        f"({placed.point.basis} bytes)"
    )


def draw(study: Study) -> Figure:
    """A panel per machine."""
    table(study)
    shown = [machine for machine in machines(study) if machine.placed]
    labels = {series(placed.case) for machine in shown for placed in machine.placed}
    signs = looks(labels)
    figure, axes = panels(len(shown), 1, 6.2, extra_in=0.5)
    named = [_panel(axis, machine, signs) for machine, axis in zip(shown, axes, strict=True)]
    legend_of(figure, axes[0], signs)
    name_panels(figure, axes, named)
    return figure


def _panel(axis: Axes, machine: Machine, signs: dict[str, tuple[str, str]]) -> list[NamedPoint]:
    """Draw one machine, and return what is to be written at its points."""
    shown = [placed for placed in machine.placed if placed.state == "drawn"]
    peaks = list({placed.peak.name: placed.peak for placed in machine.placed}.values())
    left, right, low, high = _limits(machine, shown, peaks)
    log_frame(axis, (left, right), (low, high))
    axis.set_aspect("equal")
    _draw_memory_roofs(axis, machine, max(peak.per_s for peak in peaks))
    _draw_compute_roofs(axis, machine, peaks)
    _draw_vendor_roofs(axis, machine)
    for placed in shown:
        colour, marker = signs[series(placed.case)]
        area = POINT_AREA * min(1.0, placed.point.seconds / placed.case.bounds.step_s)
        axis.plot(
            [placed.point.intensity], [placed.point.rate], marker, color=colour, markersize=math.sqrt(area),
            markeredgewidth=2, markerfacecolor=colour if placed.point.basis == "counted" else "none",
        )  # fmt: skip
    intensity_axes(axis)
    axis.set_title(clip(machine.title, 96))
    return [
        (p.point.intensity, p.point.rate, f"{p.point.name}: {100 * p.point.rate / p.allowed:.2g} %", False)
        for p in shown
    ]


def _draw_memory_roofs(axis: Axes, machine: Machine, best: float) -> None:
    for level in machine.levels:
        _slope(axis, level, best, solid=level is machine.levels[-1])
    for names, per_s in _named(machine.levels):
        _along(axis, names, per_s, best)


def _draw_compute_roofs(axis: Axes, machine: Machine, peaks: Sequence[Roof]) -> None:
    left, right = axis.get_xlim()
    for peak in peaks:
        start = max(left, peak.per_s / machine.levels[0].per_s)
        axis.plot([start, right], [peak.per_s] * 2, color=INK, linewidth=1.8)
        ridge = peak.per_s / machine.levels[-1].per_s
        axis.plot([ridge], [peak.per_s], ".", color=INK, markersize=9)
        text = f"{peak.name}: {si(peak.per_s)}FLOP/s, ridge at {ridge:.3g} FLOP/B" + _dashed(machine, peak)
        axis.annotate(text, (right, peak.per_s), xytext=(-4, 4), textcoords="offset points", ha="right")
    for roof in machine.lesser_peaks:
        start = max(left, roof.per_s / machine.levels[0].per_s)
        axis.plot([start, right], [roof.per_s] * 2, color=INK, linewidth=0.9, linestyle="--")


def _draw_vendor_roofs(axis: Axes, machine: Machine) -> None:
    left, high = axis.get_xlim()[0], axis.get_ylim()[1]
    precisions = sorted({case.precision for case in machine.cases})
    for roof in (roof for name in precisions for roof in vendor_roofs(machine.file.device.name, name)):
        if roof.per_s < high:
            axis.axhline(roof.per_s, color=GREY, linewidth=0.9, linestyle=":")
            text = f"vendor: {roof.name}, {si(roof.per_s)}FLOP/s"
            axis.annotate(text, (left, roof.per_s), xytext=(4, 2), textcoords="offset points")


def _dashed(machine: Machine, peak: Roof) -> str:
    """What is said of the dashed lines that belong to a peak: its number format in another mode."""
    kind = peak.name.split(",")[0]
    lesser = [roof for roof in machine.lesser_peaks if roof.name.startswith(kind)]
    return "".join(f"; dashed:{roof.name.removeprefix(kind).lstrip(',')} {si(roof.per_s)}FLOP/s" for roof in lesser)


def _limits(machine: Machine, shown: Sequence[Placed], peaks: Sequence[Roof]) -> tuple[float, float, float, float]:
    """Around points and ridges, with decades as long on both axes in a panel of WIDE to HIGH."""
    ridge = max(peak.per_s for peak in peaks) / machine.levels[-1].per_s
    intensities = [placed.point.intensity for placed in shown] + [ridge]
    rates = [placed.point.rate for placed in shown] + [peak.per_s for peak in peaks]
    x = [math.log10(min(intensities)) - 0.7, math.log10(max(intensities)) + 0.9]
    y = [math.log10(min(rates)) - 0.5, math.log10(max(rates)) + 0.4]
    y[0] = min(y[0], y[1] - LEAST_DECADES)
    missing = (y[1] - y[0]) * WIDE / HIGH - (x[1] - x[0])
    if missing > 0:
        x = [x[0] - 0.6 * missing, x[1] + 0.4 * missing]
    else:
        y[0] += missing * HIGH / WIDE
    return 10 ** x[0], 10 ** x[1], 10 ** y[0], 10 ** y[1]


def _slope(axis: Axes, level: Roof, peak: float, *, solid: bool) -> None:
    """A memory roof up to the highest peak."""
    left, low = axis.get_xlim()[0], axis.get_ylim()[0]
    start, end = max(left, low / level.per_s), peak / level.per_s
    if start >= end:
        return
    axis.plot(
        [start, end], [start * level.per_s, peak], color=INK if solid else GREY, linewidth=1.8 if solid else 1.2,
        linestyle="-" if solid else "--",
    )  # fmt: skip


def _named(levels: Sequence[Roof]) -> list[tuple[str, float]]:
    """What is written along which slope: levels whose lines are too close share one text."""
    texts: list[tuple[str, float]] = []
    for level in sorted(levels, key=lambda roof: -roof.per_s):
        text = f"{level.name}: {si(level.per_s)}B/s"
        if texts and texts[-1][1] < CLOSE * level.per_s:
            texts[-1] = (f"{texts[-1][0]} · {text}", texts[-1][1])
        else:
            texts.append((text, level.per_s))
    return texts


def _along(axis: Axes, text: str, per_s: float, peak: float) -> None:
    """A text above the visible lower end of a slope, where that is long enough."""
    start = max(axis.get_xlim()[0], axis.get_ylim()[0] / per_s)
    if peak / per_s / start > 10:
        at = (start * 1.2, start * 1.2 * per_s)
        axis.annotate(text, at, xytext=(-3, 5), textcoords="offset points", rotation=45, rotation_mode="anchor")
