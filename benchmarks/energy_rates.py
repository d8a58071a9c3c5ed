"""How often the 95 % interval of a run's energy holds the truth, and how wide it is, on unfriendly loads and meters.

    python benchmarks/energy_rates.py [--runs 400] [--meter NAME] [--truth NAME] [-o FILE]

A row is a meter and a truth. Meters read moments every second, moments at random intervals, or means at random intervals as
the suite's sampler does. They are exact, so nothing hides behind their accuracy. `tests/suite/log/energy/test_rates.py` has the
fast form.
"""

from __future__ import annotations

import argparse
import math
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.verdict_rates import wilson
from mlhpc.suite.log.energy.power_log import START, STOP, PowerLog, PowerLogEvent
from mlhpc.suite.log.energy.score import PowerLogs, compute_energy_of_run
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.machine.power.sampler import INTERVAL_S, JITTER

BEGIN_S = 1_700_000_000.0
IDLE_W, LOW_W, HIGH_W, RATING_W = 150.0, 400.0, 1200.0, 1600.0
MARGIN_S = 30.0  # of idle power before and after a run


@dataclass(frozen=True)
class Load:
    """Power by pieces: ``watts[i]`` from ``edges[i]`` to ``edges[i + 1]``, in seconds from run_start."""

    edges: np.ndarray
    watts: np.ndarray

    def joules(self, at: np.ndarray) -> np.ndarray:
        """Energy from the first edge to some times."""
        counted = np.concatenate([[0.0], np.cumsum(np.diff(self.edges) * self.watts)])
        return np.interp(at, self.edges, counted)

    def moment(self, at: np.ndarray) -> np.ndarray:
        """Power at some times."""
        return self.watts[np.clip(np.searchsorted(self.edges, at, "right") - 1, 0, len(self.watts) - 1)]


@dataclass(frozen=True)
class Truth:
    """A load within the run, and what its meter does beside reading."""

    within: Callable[[np.random.Generator, float], tuple[np.ndarray, np.ndarray]]  # lengths and watts of pieces
    seconds: float = 300.0
    clock_bound_s: float = 0.0  # the meter's clock is off by this at most, and drifts by it over the run
    unit_w: float = 0.0  # readings are rounded to it
    lost: float = 0.0  # share of the readings
    gap_s: float = 0.0  # without any reading


def wave(period_s: float, wobble: float = 0.0) -> Callable[[np.random.Generator, float], tuple[np.ndarray, np.ndarray]]:
    """A load between two powers, a random share of each period high. ``wobble`` varies the periods."""

    def within(chance: np.random.Generator, seconds: float) -> tuple[np.ndarray, np.ndarray]:
        count = math.ceil(seconds / period_s * 1.2) + 4
        high = chance.uniform(0.2, 0.8)
        periods = period_s * np.maximum(1 + wobble * chance.normal(size=count), 0.1)
        lengths = np.stack([periods * high, periods * (1 - high)], axis=1).ravel()
        watts = np.tile([HIGH_W, LOW_W], count)
        skipped = int(chance.integers(2))
        lengths = lengths[skipped:]
        lengths[0] *= chance.random()
        return lengths, watts[skipped:]

    return within


def bursts(chance: np.random.Generator, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """A quiet load with a burst of 0.2 s now and then, 2 % of the time."""
    count = math.ceil(seconds / 5) + 4
    lengths = np.stack([chance.exponential(9.8, count), np.full(count, 0.2)], axis=1).ravel()
    return lengths, np.tile([LOW_W, HIGH_W], count)


def blocks(chance: np.random.Generator, seconds: float) -> tuple[np.ndarray, np.ndarray]:
    """Training of 20 s and evaluations of 4 s, with noise of a tenth of a second."""
    count = math.ceil(seconds / 0.1) + 10
    at = np.arange(count) * 0.1 + chance.uniform(0, 24)
    watts = np.where(at % 24 < 20, 1000.0, 500.0) + chance.normal(0, 50, count)
    return np.full(count, 0.1), watts


TRUTHS: dict[str, Truth] = {
    "period 1 s, in step": Truth(wave(1.0)),
    "period 1.003 s": Truth(wave(1.003)),
    "period of the sampler, 0.9 s": Truth(wave(0.9)),
    "period 2 s": Truth(wave(2.0)),
    "period 3 s": Truth(wave(3.0)),
    "period 0.5 s": Truth(wave(0.5)),
    "period 0.1 s": Truth(wave(0.1)),
    "period 0.1 s, wobbles": Truth(wave(0.1, 0.1)),
    "bursts, 2 % of the time": Truth(bursts),
    "training and evaluations": Truth(blocks),
    "clock off by up to 1 s, drifts": Truth(blocks, clock_bound_s=1.0),
    "a tenth of the readings lost": Truth(wave(0.7, 0.1), lost=0.1),
    "20 s without a reading": Truth(blocks, gap_s=20.0),
    "20 s long": Truth(wave(0.7, 0.1), seconds=20.0),
    "rounded to 100 W": Truth(
        lambda chance, seconds: (np.array([seconds + 1]), chance.uniform(420, 680, 1)), unit_w=100.0
    ),
}
# Name: seconds between readings (a share of them either way), what a reading is, whether the rating is stated
METERS: dict[str, tuple[float, float, str, bool]] = {
    "moments every 1 s": (1.0, 0.0, "moment", True),
    "moments every 1 s, no rating": (1.0, 0.0, "moment", False),
    "moments, random intervals": (INTERVAL_S, JITTER, "moment", True),
    "moments, random, no rating": (INTERVAL_S, JITTER, "moment", False),
    "means, random intervals": (INTERVAL_S, JITTER, "mean", True),
}


def load_of(chance: np.random.Generator, truth: Truth) -> Load:
    """Draw a load, with idle power before and after the run."""
    lengths, watts = truth.within(chance, truth.seconds)
    edges = np.concatenate([[0.0], np.cumsum(lengths)])
    count = int(np.searchsorted(edges, truth.seconds))
    inside = np.concatenate([edges[:count], [truth.seconds]])
    edges = np.concatenate([[-2 * MARGIN_S], inside, [truth.seconds + 2 * MARGIN_S]])
    return Load(edges, np.concatenate([[IDLE_W], watts[: len(inside) - 1], [IDLE_W]]))


def read(chance: np.random.Generator, load: Load, truth: Truth, meter: str) -> PowerLog:
    """Read a load as a meter does."""
    interval_s, jitter, kind, rated = METERS[meter]
    count = math.ceil((truth.seconds + 2 * MARGIN_S) / interval_s) + 2
    steps = interval_s * (1 + chance.uniform(-jitter, jitter, count)) if jitter else np.full(count, interval_s)
    at = -MARGIN_S + chance.uniform(0, interval_s) + np.cumsum(steps)
    at = at[at < truth.seconds + MARGIN_S]
    kept = chance.random(len(at)) >= truth.lost
    kept[[0, -1]] = True
    if truth.gap_s:
        begin = chance.uniform(5, truth.seconds - truth.gap_s - 5)
        kept &= ~((at > begin) & (at < begin + truth.gap_s))
    at = at[kept]
    watts = load.moment(at[1:]) if kind == "moment" else np.diff(load.joules(at)) / np.diff(at)
    if truth.unit_w:
        watts = np.round(watts / truth.unit_w) * truth.unit_w
    off = chance.uniform(-1, 1) * truth.clock_bound_s
    drift = chance.uniform(-1, 1) * truth.clock_bound_s
    shown = at + (off + (drift - off) * np.clip(at / truth.seconds, 0, 1) if truth.clock_bound_s else 0.0)
    times = np.round((BEGIN_S + shown) * 1e3)
    stated = {"accuracy": 1e-6, "reads": kind, "measurement_type": "AC", "scope": "node"}
    stated |= {"clock_offset_s": 0.0, "clock_bound_s": truth.clock_bound_s} | ({"rating_w": RATING_W} if rated else {})
    marks = (PowerLogEvent(START, None, times[0], 1), PowerLogEvent(STOP, None, times[-1], len(times) + 1))
    lines = array("q", range(2, len(times) + 1))
    return PowerLog(Path("node_0.txt"), "node", 0, array("d", times[1:]), array("d", watts), lines, marks, stated)


def covered(chance: np.random.Generator, truth: Truth, meter: str) -> tuple[bool, float]:
    """Whether the interval of one run holds its energy, and half its width as a share of the energy."""
    load = load_of(chance, truth)
    log = read(chance, load, truth, meter)
    record = RunRecord(nodes=1, run_start_s=BEGIN_S, run_stop_s=BEGIN_S + truth.seconds)
    found = compute_energy_of_run(record, PowerLogs(Path(), (log,)))
    before, after = load.joules(np.array([0.0, truth.seconds]))
    joules = after - before
    if found.joules is None or found.halfwidth_j is None:
        return True, math.inf
    return abs(found.joules - joules) <= found.halfwidth_j + 1e-3 * truth.seconds, found.halfwidth_j / joules


def short(truth: Truth) -> Truth:
    """The same truth over a run of 80 s, for tests."""
    return replace(truth, seconds=min(truth.seconds, 80.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--meter", action="append", choices=METERS)
    parser.add_argument("--truth", action="append", choices=TRUTHS)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    lines = [
        f"python benchmarks/energy_rates.py --runs {given.runs}: 95 % stated; seed 20261127",
        "| meter | truth | holds | Wilson | half width, median |",
        "| --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines))
    for meter in given.meter or METERS:
        for name in given.truth or TRUTHS:
            truth = TRUTHS[name]
            chance = np.random.default_rng(20261127)
            results = [covered(chance, truth, meter) for _ in range(given.runs)]
            held = sum(found for found, _ in results)
            low, high = wilson(held, given.runs)
            width = float(np.median([half for _, half in results]))
            rates = f"{100 * held / given.runs:.1f} % | {100 * low:.1f} to {100 * high:.1f} % | {100 * width:.2g} %"
            lines.append(f"| {meter} | {name} | {'no interval | - | -' if math.isinf(width) else rates} |")
            print(lines[-1], flush=True)
            if given.output:
                given.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
