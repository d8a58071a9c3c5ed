"""How often `mlhpc compare` is wrong, and what it finds, on unfriendly truths.

    python benchmarks/verdict_rates.py [--pairs 1000]

A row is a truth and the runs of A and B. "wrong" is the share of equal results that are called faster or slower. "found
in 80 %" is how much slower B must be to be called so in four of five comparisons. Runs of A come before those of B.
`tests/suite/statistics/test_comparison.py` has the fast form.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.comparison import TimedRun, compare_times

Noise = Callable[[np.random.Generator, int], np.ndarray]  # factors of the times of runs in their order

RUN_S = 600.0
SIZES = ((3, 3), (3, 10), (5, 5), (5, 10), (10, 10))
EFFECTS = (1.005, 1.01, 1.02, 1.03, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0)


def steady(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw runs whose log time has a standard deviation of 1 %."""
    return np.exp(chance.normal(0.0, 0.01, n))


def student(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw runs with Student's t of 3 degrees of freedom."""
    return np.exp(0.01 * chance.standard_t(3, n))


def tailed(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw runs that are late by an exponential time, 10 % on average."""
    return 1.0 + 0.1 * chance.exponential(1.0, n)


def doubled(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw runs of which one in ten takes twice as long."""
    return steady(chance, n) * (1.0 + (chance.random(n) < 0.1))


def in_epochs(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw runs of 6 epochs and more, the number above 5 geometric: many ties."""
    return (5.0 + chance.geometric(0.3, n)) / 8.0 * np.exp(chance.normal(0.0, 0.001, n))


def rounded(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw runs whose times are known to 1 %."""
    return np.round(steady(chance, n), 2)


TRUTHS: dict[str, tuple[Noise, float, float]] = {  # noise, drift of log time a run, spread of sessions
    "log-normal, 1 %": (steady, 0.0, 0.0),
    "Student t3": (student, 0.0, 0.0),
    "exponential tail": (tailed, 0.0, 0.0),
    "1 in 10 takes twice as long": (doubled, 0.0, 0.0),
    "epochs geometric": (in_epochs, 0.0, 0.0),
    "rounded to 1 %": (rounded, 0.0, 0.0),
    "drift of 0.5 % a run": (steady, 0.005, 0.0),
    "drift of 2 % a run": (steady, 0.02, 0.0),
    "sessions differ by 2 %": (steady, 0.0, 0.02),
}


def compared(chance: np.random.Generator, truth: str, sizes: tuple[int, int], effect: float) -> Outcome:
    """Draw the runs of A, then those of B, ``effect`` times as long, and compare them."""
    noise, drift, sessions = TRUTHS[truth]
    results: list[list[TimedRun]] = []
    before = 0
    for size, factor in zip(sizes, (1.0, effect), strict=True):
        level = factor * np.exp(chance.normal(0.0, sessions)) if sessions else factor
        times = RUN_S * level * noise(chance, size) * np.exp(drift * (before + np.arange(size)))
        results.append([((before + place) * RUN_S, float(time)) for place, time in enumerate(times)])
        before += size
    found = compare_times(*results)
    return Outcome.INCONCLUSIVE if found is None else found.outcome


def share(chance: np.random.Generator, truth: str, sizes: tuple[int, int], effect: float, pairs: int) -> int:
    """Count the comparisons that call B faster or slower if there is no effect, else those that call it slower."""
    wanted = (Outcome.FASTER, Outcome.SLOWER) if effect == 1.0 else (Outcome.SLOWER,)
    return sum(compared(chance, truth, sizes, effect) in wanted for _ in range(pairs))


def wilson(count: int, pairs: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share."""
    z, p = 1.96, count / pairs
    middle, half = p + z * z / (2 * pairs), z * np.sqrt(p * (1 - p) / pairs + z * z / (4 * pairs * pairs))
    return (middle - half) / (1 + z * z / pairs), (middle + half) / (1 + z * z / pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    given = parser.parse_args()
    chance = np.random.default_rng(20261127)
    print(f"{platform.node()}, {given.pairs} comparisons each, 5 % stated")
    print("| truth | runs of A, B | wrong | Wilson | found in 80 % |")
    print("| --- | --- | --- | --- | --- |")
    for truth in TRUTHS:
        for sizes in SIZES:
            wrong = share(chance, truth, sizes, 1.0, given.pairs)
            low, high = wilson(wrong, given.pairs)
            few = max(given.pairs // 5, 100)
            found = next((e for e in EFFECTS if share(chance, truth, sizes, e, few) >= 0.8 * few), None)
            effect = "more than 3 times" if found is None else f"× {found:g}"
            print(
                f"| {truth} | {sizes[0]}, {sizes[1]} | {100 * wrong / given.pairs:.1f} % | "
                f"{100 * low:.1f} to {100 * high:.1f} % | {effect} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
