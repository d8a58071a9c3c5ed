"""How often the number of runs that `mlhpc run --detect` states finds the difference, on simulated machines.

    python benchmarks/detect_rates.py [--machines 300] -o benchmarks/results/DATE-detect_rates.txt

A machine has a spread (log-uniform, 1 to 8 %) and a kind of noise. Its few earlier runs tell the number of runs; then so
many runs of A and of B, which takes longer by the difference, are compared as `mlhpc compare` does.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from mlhpc.suite.log.spread import KnownSpread
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.comparison import compare_times

NOISES = ("normal", "Student t5", "two states")
RUN_S = 300.0


def draw(chance: np.random.Generator, noise: str, count: int) -> np.ndarray:
    """Draw noise of spread 1."""
    if noise == "Student t5":
        return chance.standard_t(5, count) / np.sqrt(5 / 3)
    if noise == "two states":  # a machine that is sometimes slower: one run in five, by 2.5 spreads
        return (chance.random(count) < 0.2) * 2.5 - 0.5 + 0.05 * chance.standard_normal(count)
    return chance.standard_normal(count)


def find_rate(noise: str, machines: int, difference: float, seed: int) -> tuple[int, int, list[int]]:
    """Return how many machines found the difference, how many would need too many runs, and the numbers of runs."""
    chance = np.random.default_rng((seed, NOISES.index(noise)))
    found, many, counts = 0, 0, []
    for _ in range(machines):
        spread = float(np.exp(chance.uniform(np.log(0.01), np.log(0.08))))
        earlier = RUN_S * np.exp(spread * draw(chance, noise, int(chance.choice([5, 10, 20]))))
        needed = KnownSpread.of([[float(time) for time in earlier]], "simulated").count_runs(difference)
        if needed.runs is None:
            many += 1
            continue
        counts.append(needed.runs)
        sides = []
        for longer in (1.0, 1.0 + difference):
            times = longer * RUN_S * np.exp(spread * draw(chance, noise, needed.runs))
            sides.append([(1000.0 * RUN_S * longer * len(sides) + at * RUN_S, float(t)) for at, t in enumerate(times)])
        compared = compare_times(*sides, same_machine=False)
        found += compared is not None and compared.outcome == Outcome.SLOWER
    return found, many, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machines", type=int, default=300)
    parser.add_argument("--difference", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=74)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    lines = [f"{'noise':<12} {'machines':>8} {'found':>7} {'runs: median':>13} {'most':>5} {'above 1,000':>12}"]
    for noise in NOISES:
        found, many, counts = find_rate(noise, options.machines, options.difference, options.seed)
        share = f"{100 * found / len(counts):.0f} %"
        lines.append(
            f"{noise:<12} {options.machines:>8} {share:>7} {statistics.median(counts):>13g} {max(counts):>5} {many:>12}"
        )
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in facts if line.startswith("model name")), "unknown CPU")
    what = (
        f"difference {100 * options.difference:g} %, wanted 80 %, 5, 10 or 20 earlier runs, seed {options.seed}; {cpu}"
    )
    text = "\n".join([what, *lines])
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
