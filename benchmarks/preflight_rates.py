"""How often `mlhpc preflight judge` calls healthy nodes bad, and what it finds, on unfriendly truths.

    python benchmarks/preflight_rates.py [--nodes 4 8 16 64] [--healthy 12800] [--slow 25] [--metrics 20]

A row is a truth: how nodes and repetitions of a time differ. "named" is the share of healthy nodes that are called bad
over all metrics in one look, with its Wilson interval (95 %). "found in 80 %" is how much slower one node must be in one
metric to be called bad in four of five fleets. "printed" is the median of the slowdown that the verdict says is found
in 90 %. `tests/plugins/fleet/test_rates.py` has the fast form.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.verdict_rates import wilson
from mlhpc.plugins.fleet.outliers import MIN_FOR_SPREAD, MIN_SAMPLE_FOR_TAILS, HealthyTails, count_outliers
from mlhpc.plugins.fleet.samples import Metric
from mlhpc.plugins.fleet.slow_nodes import EFFECT, FALSE_ALARM_RATE, FEW_REPETITIONS, FleetVerdict, judge

Shape = tuple[int, int, int]  # metrics, nodes, repetitions
Noise = Callable[[np.random.Generator, Shape], np.ndarray]  # logarithms of times

EFFECTS = (0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95)


def repetitions(spread: float, noise: Callable[[np.random.Generator, Shape], np.ndarray]) -> Noise:
    """Let nodes differ normally by 1 %, and repetitions by ``spread`` times the noise."""

    def draw(chance: np.random.Generator, shape: Shape) -> np.ndarray:
        return 0.01 * chance.standard_normal((*shape[:2], 1)) + spread * noise(chance, shape)

    return draw


def nodes(spread: float, noise: Callable[[np.random.Generator, Shape], np.ndarray]) -> Noise:
    """Let repetitions differ normally by 0.5 %, and nodes by ``spread`` times the noise."""

    def draw(chance: np.random.Generator, shape: Shape) -> np.ndarray:
        return spread * noise(chance, (*shape[:2], 1)) + 0.005 * chance.standard_normal(shape)

    return draw


def normal(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Draw normal values."""
    return chance.standard_normal(shape)


def student(freedom: int) -> Noise:
    """Draw Student's t."""
    return lambda chance, shape: chance.standard_t(freedom, shape)


def exponential(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Draw exponential values."""
    return chance.exponential(1.0, shape)


def doubled(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Double one time in 50; the others differ by 1 %."""
    return np.log(2.0) * (chance.random(shape) < 0.02) + 0.01 * chance.standard_normal(shape)


def dependent(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Draw normal values of which each depends on the one before (0.9)."""
    found = chance.standard_normal(shape)
    for later in range(1, shape[2]):
        found[..., later] = 0.9 * found[..., later - 1] + np.sqrt(1 - 0.9**2) * found[..., later]
    return found


def bursts(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Take 30 % longer in a share of 2 % of the time, in spells of five repetitions on average."""
    found = np.zeros(shape)
    slow = chance.random(shape[:2]) < 0.02
    for number in range(shape[2]):
        found[..., number] = 0.3 * slow
        slow = np.where(slow, chance.random(shape[:2]) < 0.8, chance.random(shape[:2]) < 0.2 * 0.02 / 0.98)
    return found


def drifting(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Measure one node after the other while all become slower, by 0.5 % from node to node."""
    return 0.005 * np.arange(shape[1])[:, None] + 0.01 * chance.standard_normal(shape)


def warming(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Let each node become faster or slower while it is measured, by 3 % from one repetition to the next."""
    return 0.03 * chance.standard_normal((*shape[:2], 1)) * np.arange(shape[2]) + 0.01 * chance.standard_normal(shape)


def rounded(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Know times to 1 %."""
    return np.log(np.round(np.exp(0.01 * chance.standard_normal(shape)), 2))


def bimodal(share: float, slower: float) -> Noise:
    """Let a share of the nodes be slower in each metric, others in each."""

    def draw(chance: np.random.Generator, shape: Shape) -> np.ndarray:
        return slower * (chance.random((*shape[:2], 1)) < share) + 0.01 * chance.standard_normal(shape)

    return draw


def generations(chance: np.random.Generator, shape: Shape) -> np.ndarray:
    """Let the same third of the nodes be 20 % slower in all metrics, as nodes of an older kind."""
    older = np.arange(shape[1]) % 3 == 0
    return 0.22 * older[:, None] + 0.01 * chance.standard_normal((*shape[:2], 1)) + 0.01 * chance.standard_normal(shape)


@dataclass(frozen=True)
class Truth:
    """How nodes and repetitions differ. ``held``: the verdict promises its rate for it, with ``fewest`` nodes or more."""

    noise: Noise
    repetitions: int = 5
    held: bool = True
    looks: int = 1
    fewest: int = 4


TRUTHS: dict[str, Truth] = {
    "repetitions normal, 1 %": Truth(repetitions(0.01, normal)),
    "repetitions normal, 10 %": Truth(repetitions(0.1, normal)),
    "1 repetition in 50 takes twice as long": Truth(repetitions(1.0, doubled)),
    "the same, 3 repetitions": Truth(repetitions(1.0, doubled), 3),
    "the same, 2 repetitions": Truth(repetitions(1.0, doubled), 2),
    "repetitions exponential, 10 %": Truth(repetitions(0.1, exponential)),
    "repetitions Student t3, 5 %": Truth(repetitions(0.05, student(3))),
    "repetitions Student t5, 5 %": Truth(repetitions(0.05, student(5))),
    "repetitions dependent (0.9), 5 %": Truth(repetitions(0.05, dependent)),
    "spells of 30 % in 2 % of the time": Truth(repetitions(1.0, bursts), held=False),
    "the same, bad in both of two looks": Truth(repetitions(1.0, bursts), looks=2, held=False),
    "rounded to 1 %": Truth(rounded),
    "a quiet fleet, 0.001 %": Truth(lambda chance, shape: 1e-5 * chance.standard_normal(shape)),
    "drift from node to node": Truth(drifting),
    "drift from repetition to repetition": Truth(warming),
    "nodes normal, 5 %": Truth(nodes(0.05, normal), fewest=MIN_FOR_SPREAD),
    "nodes exponential, 5 %": Truth(nodes(0.05, exponential), fewest=MIN_FOR_SPREAD),
    "nodes exponential, 5 %, 1 repetition": Truth(nodes(0.05, exponential), 1, fewest=MIN_FOR_SPREAD),
    "nodes Student t3, 3 %": Truth(nodes(0.03, student(3)), fewest=MIN_FOR_SPREAD),
    "nodes Student t3, 3 %, 1 repetition": Truth(nodes(0.03, student(3)), 1, fewest=MIN_FOR_SPREAD),
    "nodes Student t3, 1 %": Truth(nodes(0.01, student(3))),
    "nodes Student t5, 3 %": Truth(nodes(0.03, student(5)), fewest=MIN_FOR_SPREAD),
    "nodes bimodal: half are 10 % slower": Truth(bimodal(0.5, 0.105), held=False),
    "nodes bimodal: 1 in 10 is 10 % slower": Truth(bimodal(0.1, 0.105), held=False),
    "two generations under one name": Truth(generations),
}


def draw(chance: np.random.Generator, truth: str, shape: tuple[int, int], slower: float = 0.0) -> np.ndarray:
    """Draw logarithms of times (metrics, nodes, repetitions). The first node is ``slower`` in the first metric."""
    about = TRUTHS[truth]
    drawn = about.noise(chance, (*shape, about.repetitions))
    drawn[0, 0] -= np.log1p(-slower)
    return drawn


def may_be_bad(drawn: np.ndarray, rate: float) -> bool:
    """Say whether a fleet has outliers: only these can be bad, and most have none."""
    values, margin, each = np.median(drawn, axis=2), -np.log1p(-EFFECT), rate / len(drawn)
    least = margin / 2 if values.shape[1] < MIN_FOR_SPREAD else 0.0
    # Few nodes or repetitions are taken to have heavy tails; otherwise the values themselves decide
    known = values.shape[1] < MIN_SAMPLE_FOR_TAILS or drawn.shape[2] < FEW_REPETITIONS
    return any(
        count_outliers(values, each, margin=margin, tails=HealthyTails(heavy=heavy, least=least)).any()
        for heavy in ((True,) if known else (False, True))
    )


def verdict(drawn: np.ndarray, rate: float) -> FleetVerdict:
    """Judge a fleet."""
    samples = [{f"n{node}": tuple(row) for node, row in enumerate(one)} for one in np.exp(drawn).tolist()]
    return judge([Metric(f"m{number}", "", "s", "less", one) for number, one in enumerate(samples)], rate=rate)


def bad_nodes(
    chance: np.random.Generator, truth: str, shape: tuple[int, int], rate: float, slower: float = 0.0
) -> set[str]:
    """Draw one fleet and find the nodes that are called bad, in the same metric in all looks at it."""
    found: set[tuple[str, str]] | None = None
    for _ in range(TRUTHS[truth].looks):
        drawn = draw(chance, truth, shape, slower)
        bad = set(verdict(drawn, rate).bad) if may_be_bad(drawn, rate) else set()
        found = bad if found is None else found & bad
    return {node for node, _ in found or ()}


def row(chance: np.random.Generator, truth: str, shape: tuple[int, int], fleets: int, slow: int) -> str:
    """Measure one truth with fleets of one shape (metrics, nodes), and render it as a row of the table.

    ``slow``: how many fleets have a slow node, for each effect.
    """
    nodes = shape[1]
    named = sum(len(bad_nodes(chance, truth, shape, FALSE_ALARM_RATE)) for _ in range(fleets))
    low, high = wilson(named, fleets * nodes)
    slowest, fastest = len(EFFECTS), -1  # places of effects: found, and not found
    while slowest - fastest > 1:
        middle = (slowest + fastest) // 2
        found = sum("n0" in bad_nodes(chance, truth, shape, FALSE_ALARM_RATE, EFFECTS[middle]) for _ in range(slow))
        slowest, fastest = (middle, fastest) if found >= 0.8 * slow else (slowest, middle)
    effect = f"{EFFECTS[slowest]:.0%}" if slowest < len(EFFECTS) else "none"
    printed = [verdict(draw(chance, truth, shape), FALSE_ALARM_RATE).metrics[0].found for _ in range(10)]
    told = sorted(1.0 if one is None else one for one in printed)[5]
    held = "" if TRUTHS[truth].held and nodes >= TRUTHS[truth].fewest else " (not promised)"
    return (
        f"| {truth}{held} | {nodes} | {TRUTHS[truth].repetitions} | {fleets * nodes} | {100 * named / (fleets * nodes):.2f} % | "
        f"{100 * max(0.0, low):.2f} to {100 * high:.2f} % | {effect} | {told:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=(4, 8, 16, 64))
    parser.add_argument("--healthy", type=int, default=12800, help="healthy nodes of each row")
    parser.add_argument("--metrics", type=int, default=20)
    parser.add_argument("--slow", type=int, default=25, help="fleets with a slow node, for each effect")
    parser.add_argument("--truth", action="append", metavar="TEXT", help="only truths that begin so; repeatable [all]")
    given = parser.parse_args()
    print(
        f"{date.today()}, {platform.machine()}, seed 20261127; {given.metrics} metrics, {FALSE_ALARM_RATE:.1%} stated"
    )
    print("| truth | nodes | repetitions | n | named | Wilson 95 % | found in 80 % | printed: found in 90 % |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    chosen = [truth for truth in TRUTHS if given.truth is None or truth.startswith(tuple(given.truth))]
    for truth in chosen:
        for size in given.nodes:
            chance = np.random.default_rng(20261127 + size)
            print(row(chance, truth, (given.metrics, size), -(-given.healthy // size), given.slow), flush=True)


if __name__ == "__main__":
    main()
