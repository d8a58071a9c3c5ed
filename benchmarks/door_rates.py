"""How often the doors beside `compare` are wrong: slow rank, watch, ab steps, tune and the time between failures.

    python benchmarks/door_rates.py [--runs 300] [--door TEXT] [--truth effect]

A row is a truth of a door. "seen" is how often the door names something that is not there, or (rows "effect") how often it finds
an effect of the size that it says to find in 8 of 10 cases.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.goodput_rates import Truth, simulate
from benchmarks.verdict_rates import wilson
from mlhpc.plugins.fleet.watch import EFFECT, FALSE_ALARM_RATE, Job
from mlhpc.plugins.tune.race import PairPower, Race, RaceRules, estimate_spread, make_balanced_order
from mlhpc.plugins.tune.sides import QUANTITIES, find_visible_step_time, judge
from mlhpc.suite.log.goodput import Goodput, compute_constant_rate_p, estimate_mtbf_s
from mlhpc.suite.performance.stragglers import StragglerTest, find_straggler

Floats = NDArray[np.float64]
Chance = np.random.Generator
Trial = Callable[[Chance], bool | None]  # None: does not count
VISIBLE = "80 % found"


def last(chance: Chance, shape: tuple[int, int], correlation: float) -> Floats:
    """Draw normal noise; along the first axis each value correlates with the one before."""
    noise = chance.standard_normal(shape)
    for place in range(1, len(noise)):
        noise[place] *= math.sqrt(1 - correlation**2)
        noise[place] += correlation * noise[place - 1]
    return noise


def judge_ranks(own: Floats) -> StragglerTest:
    """Ask which rank is slow."""
    found = find_straggler(own, own.max(axis=1, keepdims=True) - own + 0.001, np.ones(len(own)))
    assert found is not None
    return found


SHAPE = (20, 8)


def spells(chance: Chance) -> Floats:
    """Draw in which blocks a rank is slow: for five, which begin by chance."""
    begins = chance.random((24, 8)) < 0.01
    return np.array([begins[place : place + 5].any(axis=0) for place in range(20)], dtype=float)


RANKS: dict[str, Callable[[Chance], Floats]] = {
    "independent, 3 %": lambda c: 1 + 0.03 * c.standard_normal(SHAPE),
    "0.03 AR(0.5)": lambda c: np.exp(0.03 * last(c, SHAPE, 0.5)),
    "0.03 AR(0.9)": lambda c: np.exp(0.03 * last(c, SHAPE, 0.9)),
    "0.03 AR(0.9) by node of two ranks, own noise 0.3 %": lambda c: np.exp(
        0.03 * last(c, (20, 4), 0.9).repeat(2, axis=1) + 0.003 * c.standard_normal(SHAPE)
    ),
    "0.03 AR(0.9) of one node, own noise 0.3 %": lambda c: np.exp(
        0.03 * last(c, (20, 1), 0.9) * (np.arange(8) < 2) + 0.003 * c.standard_normal(SHAPE)
    ),
    "t1.5, 3 %": lambda c: 1 + 0.03 * c.standard_t(1.5, SHAPE),
    "one stall of 20 times": lambda c: (
        1 + 0.03 * c.standard_normal(SHAPE) + 19 * (np.arange(160) == c.integers(160)).reshape(SHAPE)
    ),
    "spells: 30 % slow for 5 blocks, 1 % begin a block": lambda c: (
        1 + 0.01 * c.standard_normal(SHAPE) + 0.3 * spells(c)
    ),
    "one rank 30 % slow in 5 of 20 blocks": lambda c: (
        1 + 0.01 * c.standard_normal(SHAPE) + 0.3 * np.outer(np.arange(20) < 5, np.arange(8) == c.integers(8))
    ),
    "random walk of 1 %": lambda c: np.exp(0.01 * np.cumsum(c.standard_normal(SHAPE), axis=0)),
    "season of 60 blocks, 3 %, noise 1 %": lambda c: np.exp(
        0.03 * np.sin(2 * math.pi * (np.arange(20)[:, None] / 60 + c.random(8))) + 0.01 * c.standard_normal(SHAPE)
    ),
    "8 blocks, 4 ranks: 0.03 AR(0.9)": lambda c: np.exp(0.03 * last(c, (8, 4), 0.9)),
    "noise as long as the run: 0.02 AR(0.97), own noise 2 %": lambda c: np.exp(
        0.02 * last(c, SHAPE, 0.97) + 0.02 * c.standard_normal(SHAPE)
    ),
}


def find_slow_rank(correlation: float) -> Trial:
    """Slow a rank of a second run by what the first says is found."""

    def trial(chance: Chance) -> bool | None:
        first = judge_ranks(1 + 0.03 * last(chance, SHAPE, correlation))
        share = first.find_visible_share()
        if share is None:
            return None
        own = 1 + 0.03 * last(chance, SHAPE, correlation)
        own[:, 1] += share * first.step_s
        found = judge_ranks(own)
        return found.is_slow and found.slow == 1

    return trial


STEPS = (200, 10)
WORKERS: dict[str, Callable[[Chance], Floats]] = {
    "independent, 2 %": lambda c: 0.02 * c.standard_normal(STEPS),
    "0.05 AR(0.97)": lambda c: 0.05 * last(c, STEPS, 0.97),
    "0.1 AR(0.97)": lambda c: 0.1 * last(c, STEPS, 0.97),
    "0.1 AR(0.99)": lambda c: 0.1 * last(c, STEPS, 0.99),
    "season of 60 steps, 15 %, noise 2 %": lambda c: (
        0.15 * np.sin(2 * math.pi * (np.arange(200)[:, None] / 60 + c.random(10))) + 0.02 * c.standard_normal(STEPS)
    ),
    "season of 150 steps, 15 %, noise 2 %": lambda c: (
        0.15 * np.sin(2 * math.pi * (np.arange(200)[:, None] / 150 + c.random(10))) + 0.02 * c.standard_normal(STEPS)
    ),
    "random walk of 1 %": lambda c: 0.01 * np.cumsum(c.standard_normal(STEPS), axis=0),
    "one step in a hundred stalls for 10 times": lambda c: (
        0.02 * c.standard_normal(STEPS) + math.log(10) * (c.random(STEPS) < 0.01)
    ),
    "not normal: t1.5, 2 %": lambda c: 0.02 * c.standard_t(1.5, STEPS).clip(-50, 50),
    "unlike workers: one has 0.1 AR(0.97), noise 1 %": lambda c: (
        0.1 * last(c, STEPS, 0.97) * (np.arange(10) < 1) + 0.01 * c.standard_normal(STEPS)
    ),
}


def watch(logs: Floats) -> Job:
    """Make a job from logs of times."""
    times = {f"w{number}": dict(enumerate(each.tolist())) for number, each in enumerate(np.exp(logs).T)}
    return Job.create(times, FALSE_ALARM_RATE, EFFECT)


def find_slower_worker(noise: float, correlation: float) -> Trial:
    """Slow a worker of a second job from its middle on by what the first says is found."""

    def trial(chance: Chance) -> bool | None:
        first = watch(noise * last(chance, STEPS, correlation))
        visible = None if first.find_slowdowns() else first.find_visible()
        if visible is None:
            return None
        logs = noise * last(chance, STEPS, correlation)
        logs[100:, 0] += math.log1p(visible)
        return any(each.worker == "w0" for each in watch(logs).find_slowdowns())

    return trial


def judge_steps(a: list[float], b: list[float]) -> bool:
    """Ask whether step times differ."""
    same = dict.fromkeys(QUANTITIES, [1.0] * len(a))
    return judge({**same, "step time": a}, {**same, "step time": b})[0].verdict in ("slower", "faster")


def disturb(pairs: int, period: int) -> Trial:
    """Make every so-manieth block 10 % slower, whoever's it is."""

    def trial(chance: Chance) -> bool:
        times: dict[str, list[float]] = {"a": [], "b": []}
        place, seed = int(chance.integers(period)), int(chance.integers(2**31))
        for block in range(1, pairs + 1):
            for side in make_balanced_order(block, ("a", "b"), seed):
                times[side].append(math.exp(0.01 * chance.standard_normal() + 0.1 * (place % period == 0)))
                place += 1
        return judge_steps(times["a"], times["b"])

    return trial


def find_slower_side(chance: Chance) -> bool:
    """Slow B of a second comparison of 10 pairs by what the first says is found."""
    first, second = np.exp(0.042 * chance.standard_normal((2, 10)))
    visible = find_visible_step_time([1.0] * 10, first.tolist()) or 0.0
    return judge_steps([1.0] * 10, (second * (1 + visible)).tolist())


def race(logs: Floats) -> str | None:
    """Run a race of a tuned entry whose pairs have these log ratios."""
    found = Race(RaceRules(("default", "tuned"), 0.05, len(logs), 0))
    for each in logs.tolist():
        if not found.over:
            found.add({"default": 1.0, "tuned": math.exp(each)})
    return found.winner


def find_faster(draw: Callable[[Chance, int], Floats], part: float | None) -> Trial:
    """Race an entry that is faster by what 16 pairs say is found, or by ``part`` over as many pairs as they say decide."""

    def trial(chance: Chance) -> bool | None:
        spread = estimate_spread([(math.exp(each), 1.0) for each in draw(chance, 16)])
        power = PairPower(spread or 0.0, 16, 0.05)
        effect, pairs = (power.find_visible(), 16) if part is None else (part, power.count_needed(part))
        if effect is None or pairs is None:
            return None
        return race(draw(chance, pairs) + math.log1p(-effect)) == "tuned"

    return trial


GAPS: dict[str, Callable[[Chance], float]] = {
    "exponential": lambda c: float(c.exponential()),
    "Weibull 0.5": lambda c: float(c.weibull(0.5) / 2),
    "log-normal 1.5": lambda c: math.exp(1.5 * c.standard_normal() - 1.125),
    "crash loop": lambda c: float(c.exponential() * (0.03 if c.random() < 1 / 3 else 1.485)),
    "Weibull 2": lambda c: float(c.weibull(2.0) / math.gamma(1.5)),
}


def look(gap: Callable[[Chance], float], chance: Chance) -> tuple[float | None, bool]:
    """Return the p of a constant rate over five trials, and whether the 90 % interval holds 3,000 s."""
    trials = []
    for _ in range(5):
        one = simulate(chance, Truth(gap=gap))
        ups = tuple(attempt[-1][0] - attempt[0][0] for attempt in one.logs)
        died = one.failures == len(ups)
        trials.append(Goodput(Path(), 0, len(ups), *[0.0] * 7, 0, None, None, (), died, ups))
    failures = sum(len(each.ups) - (not each.died) for each in trials)
    _, low, high = estimate_mtbf_s(math.fsum(up for each in trials for up in each.ups), failures)
    return compute_constant_rate_p(trials), low <= 3000 <= high


def list_rows() -> Iterator[tuple[str, str, str, Trial]]:
    """List door, truth, stated rate and a trial of each row."""
    for name, make in RANKS.items():
        yield "slow rank", name, "5 % named", lambda c, make=make: judge_ranks(make(c)).is_slow
    for correlation in (0.0, 0.6):
        yield (
            "slow rank",
            f"effect: the one that is stated, noise AR({correlation:g})",
            VISIBLE,
            find_slow_rank(correlation),
        )
    for name, make in WORKERS.items():
        yield "watch", name, "1 % named", lambda c, make=make: bool(watch(make(c)).find_slowdowns())
    for noise, correlation in ((0.02, 0.0), (0.1, 0.0), (0.05, 0.97)):
        truth = f"effect: the one that is stated, noise {noise:g} AR({correlation:g})"
        yield "watch", truth, VISIBLE, find_slower_worker(noise, correlation)
    for pairs in (10, 20):
        for period in (2, 4, 8):
            yield (
                "ab steps",
                f"{pairs} pairs, every block of {period} is 10 % slower",
                "0.83 % differ",
                disturb(pairs, period),
            )
    yield "ab steps", "effect: the one that is stated, 10 pairs, 3 % a block", VISIBLE, find_slower_side
    for name, draw in {
        "7 % a pair": lambda c, n: 0.07 * c.standard_normal(n),
        "t2, 3 % a pair": lambda c, n: 0.03 * c.standard_t(2, n),
    }.items():
        yield "tune", f"effect: the one that is stated, {name}", VISIBLE, find_faster(draw, None)
        yield "tune", f"effect: 5 %, in as many pairs as are stated, {name}", VISIBLE, find_faster(draw, 0.05)
    for name, gap in GAPS.items():
        yield (
            "failures",
            f"{name}: a constant rate is refuted",
            "5 %",
            lambda c, gap=gap: (look(gap, c)[0] or 1.0) < 0.05,
        )
        yield "failures", f"{name}: interval, if not refuted", "90 % hold", lambda c, gap=gap: hold(*look(gap, c))


def hold(p: float | None, held: bool) -> bool | None:
    """Return whether a printed interval holds."""
    return None if p is not None and p < 0.05 else held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--door", metavar="TEXT", default="", help="only rows whose door begins so [all]")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--truth", metavar="TEXT", default="", help="only rows whose truth begins so [all]")
    given = parser.parse_args()
    print(f"python benchmarks/door_rates.py --runs {given.runs}, seed {given.seed}; AMD EPYC, 2026-11-29")
    print("| door | truth | stated | seen | Wilson | n |")
    print("| --- | --- | --- | --- | --- | --- |")
    for door, truth, stated, trial in list_rows():
        if door.startswith(given.door) and truth.startswith(given.truth):
            chance = np.random.default_rng(given.seed)
            found = [each for _ in range(given.runs) if (each := trial(chance)) is not None]
            low, high = wilson(sum(found), len(found))
            seen = 100 * statistics.fmean(found)
            print(
                f"| {door} | {truth} | {stated} | {seen:.1f} % | {100 * low:.1f} to {100 * high:.1f} % | {len(found)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
