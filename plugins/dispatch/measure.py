"""Measures what modes cost: overhead at length 0, break-even length, and how both grow with ranks.

A controller costs a computation of length L, its all-reduce included, max(L + a, b): a is what each computation pays
however long it is, b the shortest time between two commands. So it has 95 % of SPMD's throughput from
max(19 a, 0.95 b) on. That is the closed form. The measured break-even is where throughputs at lengths around it cross
95 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from mlhpc.plugins.dispatch.loops import Controller, Mode, time_mode
from mlhpc.plugins.dispatch.results import SHARE, Beyond, Interval, Row
from mlhpc.suite.plugins import NETWORK, list_missing_wings
from mlhpc.suite.statistics.sessions import compute_log_interval, compute_mean_interval

CONFIDENCE = 0.95
SAMPLE_S = 0.05  # the shortest timing
LEAST, MOST = 8, 4096  # computations of one timing
EXCESS = 1 / SHARE - 1  # time over SPMD's, minus 1, at the break-even
HIDING = 8.0  # a computation so much longer than the cost could hide it
AROUND = (0.35, 0.7, 1.4)  # lengths measured, over the predicted break-even


class Case(NamedTuple):
    """What is timed: so many computations of one length in one mode, each command delayed."""

    mode: Mode
    computations: int
    length_s: float
    delay_s: float = 0.0


def time_in_turn(controller: Controller, cases: Sequence[Case], repeats: int) -> dict[Case, list[float]]:
    """Time the cases in turn, beginning with another one each time. Returns seconds per computation."""
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(repeats):
        for place in range(len(cases)):
            case = cases[(turn + place) % len(cases)]
            times[case].append(time_mode(controller, *case))
    return times


def make_case(mode: Mode, length_s: float, expected_s: float, least: int = LEAST) -> Case:
    """Choose how many computations a timing has: whole chains, and rounds of all clients."""
    unit = mode.chain * mode.clients or 1
    count = min(max(least, math.ceil(SAMPLE_S / expected_s)), max(least, MOST))
    return Case(mode, unit * max(2, math.ceil(count / unit)), length_s)


def measure_overheads(
    controller: Controller, modes: Sequence[Mode], repeats: int, delay_s: float = 0.0
) -> dict[Mode, list[float]]:
    """Time empty computations in each mode: seconds per computation."""
    cases = []
    for mode in modes:
        least = 4 * max(mode.depth, mode.chain, LEAST)  # so that filling the queue at the start does not count much
        time_mode(controller, mode, least, 0.0, delay_s)  # warms up
        case = make_case(mode, 0.0, time_mode(controller, mode, least, 0.0, delay_s), least)
        cases.append(case._replace(delay_s=delay_s))
    times = time_in_turn(controller, cases, repeats)
    return {case.mode: times[case] for case in cases}


def measure_rows(
    name: str,
    controller: Controller,
    modes: Sequence[Mode],
    repeats: int,
    delay_s: float = 0.0,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Measure all modes of a controller. The first mode is SPMD."""
    spmd, *commanded = modes
    tell(f"{name}: empty computations")
    empty = measure_overheads(controller, modes, repeats, delay_s)
    base = statistics.median(empty[spmd])
    costs = {mode: statistics.median(empty[mode]) - base for mode in commanded}
    seen = [mode for mode in commanded if costs[mode] > EXCESS * base]
    tell(f"{name}: computations of up to {1e3 * max(costs.values()) / EXCESS:.3g} ms")
    # What is left of the cost at a length that could hide it: long enough for that, and short, so that it is seen
    some = {mode: [base + HIDING * costs[mode]] for mode in seen}
    longs = _time_pairs(controller, spmd, some, base, repeats, delay_s)
    paid = {mode: statistics.median([slow - fast for fast, slow in longs[mode][0]]) for mode in seen}
    predicted = {mode: max(max(paid[mode], 0.0) / EXCESS, SHARE * statistics.median(empty[mode])) for mode in seen}
    around = {mode: [factor * predicted[mode] for factor in AROUND] for mode in seen}
    pairs = _time_pairs(controller, spmd, around, base, repeats, delay_s)
    return [
        Row(
            controller=name,
            version=controller.version,
            mode=mode.name,
            n=repeats,
            spmd_s=base,
            overhead_s=make_interval([slow - fast for fast, slow in zip(empty[spmd], empty[mode], strict=True)]),
            ratio=make_interval([slow / fast for fast, slow in zip(empty[spmd], empty[mode], strict=True)], log=True),
            break_even_s=make_interval([find_crossing(each) for each in zip(*pairs[mode], strict=True)], log=True)
            if mode in pairs
            else None,
            predicted_s=predicted.get(mode),
        )
        for mode in commanded
    ]


def _time_pairs(
    controller: Controller,
    spmd: Mode,
    lengths: Mapping[Mode, Sequence[float]],
    base: float,
    repeats: int,
    delay_s: float,
) -> dict[Mode, list[list[tuple[float, float]]]]:
    """Time each mode and SPMD at lengths, the all-reduce included: by mode and length the pairs (SPMD, mode)."""
    cases = {
        mode: [
            tuple(make_case(each, max(length - base, 0.0), length)._replace(delay_s=delay_s) for each in (spmd, mode))
            for length in wanted
        ]
        for mode, wanted in lengths.items()
    }
    flat = list(dict.fromkeys(case for pairs in cases.values() for pair in pairs for case in pair))
    times = time_in_turn(controller, flat, repeats)
    return {
        mode: [list(zip(times[fast], times[slow], strict=True)) for fast, slow in pairs]
        for mode, pairs in cases.items()
    }


def find_crossing(pairs: Sequence[tuple[float, float]]) -> float:
    """Find SPMD's time of a computation at which a mode takes 1 / `SHARE` of it, from times at ascending lengths.

    Beyond the lengths it is the first or the last one.
    """
    points = [(fast, max(slow / fast - 1, EXCESS / 100)) for fast, slow in pairs]
    for (short, before), (long, after) in pairwise(points):
        if before > EXCESS >= after:
            return float(short * (long / short) ** (math.log(before / EXCESS) / math.log(before / after)))
    return points[0][0] if points[0][1] <= EXCESS else points[-1][0]


def make_interval(values: Sequence[float], *, log: bool = False) -> Interval:
    """Compute the mean and its 95 % interval; with ``log`` the geometric mean of positive values."""
    if log:
        low, high = compute_log_interval(values, CONFIDENCE) or (0.0, math.inf)
        return Interval(statistics.geometric_mean(values), low, high)
    middle, half = compute_mean_interval(values, CONFIDENCE)
    return Interval(middle, middle - half, middle + half)


def extrapolate(controller: str, mode: str, overheads: Mapping[int, Sequence[float]]) -> list[Beyond]:
    """Predict overheads on 2 and 4 times the measured ranks: a constant and a part per rank, as rank 0 sends to each.

    ``overheads`` has the seconds by number of ranks. Ends of intervals are those of the wing `network`: from fits to
    fewer ranks. Nothing without that wing or three numbers of ranks.
    """
    sizes = sorted(overheads)
    mean = {ranks: statistics.fmean(overheads[ranks]) for ranks in sizes}
    if len(sizes) < 3 or min(mean.values()) <= 0 or NETWORK in list_missing_wings():
        return []

    import numpy as np
    from scipy.optimize import nnls

    from mlhpc.plugins.network.fit import Errors
    from mlhpc.plugins.network.intervals import BOUNDED_GROWTH, compute_distances

    def predict(used: Sequence[int], ranks: int) -> float:
        # Relative errors: each number of ranks counts as much
        constant, each = nnls(np.array([[1 / mean[n], n / mean[n]] for n in used]), np.ones(len(used)))[0]
        return float(constant + each * ranks)

    noise = [statistics.variance(overheads[n]) / len(overheads[n]) / mean[n] ** 2 for n in sizes]
    tests = [
        (sizes[last], later, 1.0, math.log(mean[later] / predict(sizes[: last + 1], later)), statistics.fmean(noise))
        for last in range(1, len(sizes) - 1)
        for later in sizes[last + 1 :]
    ]
    errors, found = Errors(*np.array(tests).T), []
    for ranks in (2 * sizes[-1], 4 * sizes[-1]):
        value = predict(sizes, ranks)
        down, up = compute_distances(errors, "linear", sizes[-1], ranks, np.ones(1), np.array([max(noise)]))
        high = value * math.exp(up[0]) if ranks <= BOUNDED_GROWTH * sizes[-1] else None
        ends = Interval(value, value * math.exp(-down[0]), high)
        found.append(Beyond(controller=controller, mode=mode, ranks=ranks, overhead_s=ends))
    return found
