"""Judges B against A from pairs of blocks: differences with intervals, and verdicts. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlhpc.suite.errors import InputError
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.intervals import compute_mean_interval

CONFIDENCE = 0.95  # of all intervals of one comparison together (Bonferroni)
MORE, LESS = "more", "less"  # of an amount; of a time it is slower and faster
LOSS = "loss"
TIME_QUANTITIES = ("step time", "CPU time")
QUANTITIES: Mapping[str, str] = {  # measured in each block, with their units
    "step time": "s",
    "CPU time": "s",
    "peak memory": "B",
    "executed FLOPs": "FLOP",
    "bytes sent": "B",
    LOSS: "",
}


@dataclass(frozen=True)
class Row:
    """One quantity of both sides over ``pairs`` pairs of blocks.

    ``difference`` is B over A minus 1, from the geometric mean of the pairs' ratios, with its interval. A loss may be
    negative: its difference is the mean of (B - A) / abs(A). It is None if a side is 0 or a value is no number.
    ``largest`` is the largest absolute difference of one pair. ``verdict`` is the `Outcome` of B (equivalent: every bit
    is equal in every pair). An amount is more or less instead of slower or faster.
    """

    quantity: str
    unit: str
    pairs: int
    a_mean: float
    a_spread: float
    b_mean: float
    b_spread: float
    difference: float | None
    low: float | None
    high: float | None
    largest: float | None
    verdict: str


def judge(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> list[Row]:
    """Judge every quantity from both sides' blocks, pair by pair. InputError for fewer than two pairs."""
    return [_judge_quantity(name, unit, a[name], b[name]) for name, unit in QUANTITIES.items()]


def _judge_quantity(name: str, unit: str, a: Sequence[float], b: Sequence[float]) -> Row:
    if len(a) != len(b) or len(a) < 2:
        raise InputError(
            f"{name}: {len(a)} blocks of A and {len(b)} of B; expected the same number of both, at least 2"
        )
    means = statistics.fmean(a), _compute_spread(a), statistics.fmean(b), _compute_spread(b)
    if not all(map(math.isfinite, (*a, *b))):
        return Row(name, unit, len(a), *means, None, None, None, None, Outcome.INCONCLUSIVE)
    if list(a) == list(b):
        return Row(name, unit, len(a), *means, 0.0, 0.0, 0.0, 0.0, Outcome.EQUIVALENT)
    signed = name == LOSS
    # Without ratios only the signs of the differences decide
    if any(x == 0 for x in a) or (not signed and min(*a, *b) <= 0):
        gaps = [y - x for x, y in zip(a, b, strict=True)]
        return Row(name, unit, len(a), *means, None, None, None, None, _judge_difference(name, min(gaps), max(gaps)))
    apart = [(y - x) / abs(x) if signed else math.log(y / x) for x, y in zip(a, b, strict=True)]
    middle, half = compute_mean_interval(apart, 1.0 - (1.0 - CONFIDENCE) / len(QUANTITIES))
    low, middle, high = (
        # exp of more than about 709 is no float.
        each if signed else math.expm1(min(each, 700.0))
        for each in (middle - half, middle, middle + half)
    )
    # One bad pair hides in a mean; for a loss it may be the whole finding.
    largest = max(abs(y - x) / abs(x) for x, y in zip(a, b, strict=True))
    return Row(name, unit, len(a), *means, middle, low, high, largest, _judge_difference(name, low, high))


def _judge_difference(name: str, low: float, high: float) -> str:
    """Judge B by the interval of its difference from A."""
    if low > 0:
        return Outcome.SLOWER if name in TIME_QUANTITIES else MORE
    if high < 0:
        return Outcome.FASTER if name in TIME_QUANTITIES else LESS
    return Outcome.INCONCLUSIVE


def _compute_spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def render_rows(rows: Sequence[Row]) -> list[str]:
    """Render rows as a table."""
    text = [f"{'quantity':<15} {'A':>11} {'spread':>8} {'B':>11} {'spread':>8} {'B - A':>10}  {'interval':<24} B is"]
    for row in rows:
        between = "none"
        if row.low is not None and row.high is not None:
            between = f"[{_render_percent(row, row.low)}, {_render_percent(row, row.high)}]"
        difference = "none" if row.difference is None else _render_percent(row, row.difference)
        text.append(
            f"{row.quantity:<15} {row.a_mean:>11.5g} {row.a_spread:>8.2g} {row.b_mean:>11.5g} {row.b_spread:>8.2g} "
            f"{difference:>10}  {between:<24} {row.verdict}"
        )
    return text


def _render_percent(row: Row, value: float) -> str:
    return f"{value:+.1e}" if row.quantity == LOSS else f"{100 * value:+.2f} %"
