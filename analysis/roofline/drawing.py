"""What the figures of rooflines share: logarithmic scales in SI units, the name of a result's signs."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.page.drawing import clip
from analysis.roofline.bounds import si
from analysis.roofline.cases import Case


def si_scale(scale: Axis, unit: str) -> None:
    """Ticks of a logarithmic scale with decimal prefixes, at 1, 2 and 5 where less than three decades are shown."""
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
    """What tells a result's points from others': one system may have run several benchmarks."""
    return clip(f"{case.benchmark} {case.size}, {case.label}", 40)
