"""Drawing shared by the figures of rooflines: logarithmic scales with decimal prefixes, axes, and names of signs."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.drawing.axes import clip
from analysis.roofline.bounds import si
from analysis.roofline.cases import Case


def si_scale(scale: Axis, unit: str) -> None:
    """Ticks with decimal prefixes on a logarithmic scale: at 1, 2 and 5 if it spans less than three decades."""
    low, high = scale.get_view_interval()
    few = math.log10(high / low) < 3
    scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{si(value)}{unit}".strip()))
    scale.set_minor_formatter(NullFormatter())


def intensity_axes(axis: Axes) -> None:
    """The axes of a roofline: FLOP/s over arithmetic intensity."""
    si_scale(axis.yaxis, "FLOP/s")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("arithmetic intensity [FLOP/B]")


def series(case: Case) -> str:
    """The legend entry of a result's points: one system may have run several benchmarks."""
    return clip(f"{case.benchmark} {case.size}, {case.label}", 40)
