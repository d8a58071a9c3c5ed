"""How often `mlhpc preflight judge` calls healthy nodes bad, and what it finds, on unfriendly truths.

    python benchmarks/preflight_rates.py [--fleets 200]

A row is a truth: how repetitions of a time differ. "named" is the share of healthy nodes that are called bad over all
metrics. "found in 80 %" is how much slower one node must be in one metric to be called bad in four of five fleets.
`tests/analysis/fleet/test_rates.py` has the fast form.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.fleet.samples import Metric
from analysis.fleet.slow_nodes import RATE, judge
from benchmarks.verdict_rates import wilson

Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

EFFECTS = (0.0005, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 0.9)


def normal(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw times whose logarithm has a standard deviation of 1 %."""
    return np.exp(0.01 * chance.standard_normal(shape))


def doubled(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw times of which one in 50 is twice as long."""
    return normal(chance, shape) * (1.0 + (chance.random(shape) < 0.02))


def exponential(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw times that are late by an exponential time, 5 % on average."""
    return 1.0 + 0.05 * chance.exponential(1.0, shape)


def student3(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw times whose logarithm is Student's t with 3 degrees of freedom."""
    return np.exp(0.02 * chance.standard_t(3, shape))


def student5(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw times whose logarithm is Student's t with 5 degrees of freedom."""
    return np.exp(0.02 * chance.standard_t(5, shape))


def rounded(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw times that are known to 1 %."""
    return np.round(np.exp(0.003 * chance.standard_normal(shape)), 2)


def quiet(chance: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw times that differ by 1e-5."""
    return np.exp(1e-5 * chance.standard_normal(shape))


TRUTHS: dict[str, tuple[Noise, int, int]] = {  # noise, nodes, repetitions
    "normal, 1 %": (normal, 16, 5),
    "normal, 1 %, 4 nodes": (normal, 4, 5),
    "1 in 50 takes twice as long": (doubled, 64, 5),
    "1 in 50 takes twice as long, 3 repetitions": (doubled, 64, 3),
    "exponential": (exponential, 16, 5),
    "Student t3": (student3, 16, 5),
    "Student t3, 1 repetition": (student3, 16, 1),
    "Student t5": (student5, 16, 5),
    "Student t5, 1 repetition": (student5, 16, 1),
    "rounded to 1 %": (rounded, 8, 5),
    "quiet": (quiet, 16, 5),
}


def bad_nodes(chance: np.random.Generator, truth: str, metrics: int, rate: float, slower: float = 0.0) -> set[str]:
    """Draw a fleet whose first node is ``slower`` in the first metric, and find the nodes that are called bad."""
    noise, nodes, repetitions = TRUTHS[truth]
    drawn = []
    for number in range(metrics):
        times = noise(chance, (nodes, repetitions))
        if number == 0:
            times[0] /= 1.0 - slower
        samples = {f"n{node}": tuple(row) for node, row in enumerate(times.tolist())}
        drawn.append(Metric(f"m{number}", "", "s", "less", samples))
    return {node for node, word in judge(drawn, rate=rate).words.items() if word == "bad"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument("--metrics", type=int, default=20)
    given = parser.parse_args()
    chance = np.random.default_rng(20261127)
    print(f"{platform.node()}, {given.fleets} fleets each, {given.metrics} metrics, {RATE:.1%} stated")
    print("| truth | nodes | named | Wilson | found in 80 % |")
    print("| --- | --- | --- | --- | --- |")
    for truth, (_, nodes, _) in TRUTHS.items():
        named = sum(len(bad_nodes(chance, truth, given.metrics, RATE)) for _ in range(given.fleets))
        total = given.fleets * nodes
        low, high = wilson(named, total)
        few, each = max(20, given.fleets // 4), RATE / given.metrics
        found = next(
            (
                effect
                for effect in EFFECTS
                if sum("n0" in bad_nodes(chance, truth, 1, each, effect) for _ in range(few)) >= 0.8 * few
            ),
            None,
        )
        print(
            f"| {truth} | {nodes} | {100 * named / total:.2f} % | {100 * low:.2f} to {100 * high:.2f} % | "
            f"{'none' if found is None else f'{found:.2%}'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
