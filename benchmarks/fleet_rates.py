"""How often healthy nodes are called bad: ours, and the fixed rules in use elsewhere. And how often a slow node is found.

    python benchmarks/fleet_rates.py [--nodes 16] [--metrics 20] [--fleets 4000]

A healthy node's value of a metric is 100 exp(noise z), z normal, or Student's t with 5 degrees of freedom of the same
variance. Ours judges by `suite.statistics.outliers` at the rate that `mlhpc preflight judge` gives each metric. "-5 %": below 0.95
of the fleet's mean in any metric. "Megatron": further from the median than max(median absolute deviation, 10 % of the median), on
either side (its gpu_sniff_test.py). All simulated: no node was measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from datetime import date

import numpy as np
from scipy import stats

from analysis.fleet.slow_nodes import RATE
from suite.statistics.outliers import critical, find_outliers, power

NOISES = (0.01, 0.02, 0.05, 0.08, 0.12, 0.2)
SLOW = (0.02, 0.05, 0.1, 0.2, 0.4)


def normal(chance: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return chance.standard_normal(shape)


def heavy(chance: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return chance.standard_t(5, shape) / math.sqrt(5 / 3)


def ours(values: np.ndarray, rate: float) -> np.ndarray:
    """Nodes (N,) that are bad in any metric of values (M, N)."""
    bad = np.zeros(values.shape[1], dtype=bool)
    for row in values:
        worse = -np.log(row)
        apart = find_outliers(worse, rate)
        assert apart is not None
        if apart.count:
            bad[np.argsort(worse)[::-1][: apart.count]] = True
    return bad


def five_percent(values: np.ndarray, rate: float) -> np.ndarray:
    return (values < 0.95 * values.mean(axis=1, keepdims=True)).any(axis=0)


def megatron(values: np.ndarray, rate: float) -> np.ndarray:
    middle = np.median(values, axis=1, keepdims=True)
    away = np.abs(values - middle)
    limit = np.maximum(np.median(away, axis=1, keepdims=True), 0.1 * middle)
    return (away > limit).any(axis=0)


def false_alarms(fleets: int, nodes: int, metrics: int, draw: Callable[..., np.ndarray]) -> None:
    rate = -math.expm1(math.log1p(-RATE) / metrics)
    for noise in NOISES:
        chance = np.random.default_rng(round(1000 * noise))
        counts = dict.fromkeys((ours, five_percent, megatron), 0)
        for _ in range(fleets):
            values = 100 * np.exp(noise * draw(chance, (metrics, nodes)))
            for rule in counts:
                counts[rule] += int(rule(values, rate).sum())
        total = fleets * nodes
        low, high = stats.binom.interval(0.95, total, RATE)
        shares = " | ".join(f"{100 * count / total:.3f} %" for count in counts.values())
        inside = "yes" if low <= counts[ours] <= high else "no"
        print(
            f"| {noise:.0%} | {shares} | {100 * low / total:.3f} to {100 * high / total:.3f} % | {inside} |", flush=True
        )


def detection(nodes: int, metrics: int, simulations: int) -> None:
    rate = -math.expm1(math.log1p(-RATE) / metrics)
    for noise in (0.01, 0.02, 0.05):
        for slow in SLOW:
            chance = np.random.default_rng(2)
            told = power(-math.log1p(-slow), noise, nodes - 1, critical(nodes, 1, rate))
            found = 0
            for _ in range(simulations):
                values = 100 * np.exp(noise * chance.standard_normal(nodes))
                values[0] *= 1 - slow
                found += bool(ours(values[None], rate)[0])
            low, high = stats.binom.interval(0.95, simulations, told)
            inside = "yes" if low <= found <= high else "no"
            print(f"| {noise:.0%} | {slow:.0%} | {told:.3f} | {found / simulations:.3f} | {inside} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--fleets", type=int, default=8000)
    parser.add_argument("--simulations", type=int, default=1000)
    given = parser.parse_args()
    print(f"{date.today()}; simulated, seeds 1000 times the noise and 2")
    print(f"\n{given.fleets} fleets of {given.nodes} healthy nodes, {given.metrics} metrics")
    print(f"promised: {RATE:.1%} of nodes over all metrics\n")
    for name, draw in (("normal", normal), ("Student's t with 5 degrees of freedom", heavy)):
        print(f"Noise: {name}\n\n| noise | ours | -5 % rule | Megatron's | 95 % of what is promised | ours inside |")
        print("| --- | --- | --- | --- | --- | --- |")
        false_alarms(given.fleets, given.nodes, given.metrics, draw)
        print()
    print(f"One slow node of {given.nodes}, found at that rate, {given.simulations} simulations each\n")
    print("| noise | slower by | power told | found | within its 95 % |\n| --- | --- | --- | --- | --- |")
    detection(given.nodes, given.metrics, given.simulations)


if __name__ == "__main__":
    main()
