"""How often `mlhpc history check` alarms on an unchanged machine, and how soon and where it finds a change.

    python benchmarks/history_rates.py [--series 1000] [--rate 0.01]

Series are log-normal; a change is a step in units of the standard deviation of a result. One check has two quantities, each
with half of the rate.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from suite.statistics.changes import find_changes

SIGMA = 0.05


def series(
    generator: random.Random, count: int, *, step: float = 0.0, place: int = 0, memory: float = 0.0
) -> list[float]:
    """Results of a machine; ``memory``: the correlation of a result with the one before it."""
    values, rest = [], generator.gauss(0.0, 1.0)
    for index in range(count):
        rest = memory * rest + math.sqrt(1.0 - memory**2) * generator.gauss(0.0, 1.0)
        values.append(math.exp(SIGMA * (rest + step * (index >= place))))
    return values


def alarm(quantities: list[list[float]], rate: float) -> list[int]:
    return [change.place for each in quantities for change in find_changes(each, rate / len(quantities))]


def rows(count_of_series: int, rate: float) -> Iterator[str]:
    generator = random.Random(20260901)

    def two(count: int, **options: float) -> list[list[float]]:
        return [series(generator, count, **options) for _ in range(2)]  # type: ignore[arg-type]

    yield "| an unchanged machine | results | alarms of one check |"
    yield "| --- | --- | --- |"
    for memory in (0.0, 0.3):
        for count in (15, 30, 60):
            alarms = sum(bool(alarm(two(count, memory=memory), rate)) for _ in range(count_of_series))
            what = f"correlation {memory:g} with the result before" if memory else "independent results"
            yield f"| {what} | {count} | {100 * alarms / count_of_series:.1f} % |"
    yield ""
    nightly = max(count_of_series // 10, 20)
    ever = 0
    for _ in range(nightly):
        values = two(60)
        ever += any(alarm([each[:count] for each in values], rate) for count in range(12, 61))
    share = f"{100 * ever / nightly:.0f} % of {nightly}"
    yield f"Checked after each of 60 results of an unchanged machine, some check alarms in {share} histories."
    yield ""
    yield "| a step of | results before | after | found | at most one result off, of those found |"
    yield "| --- | --- | --- | --- | --- |"
    few = max(count_of_series // 5, 20)
    for step in (2.0, 3.0, 5.0):
        for before, after in ((20, 2), (20, 3), (20, 5), (20, 10)):
            found = near = 0
            for _ in range(few):
                quantities = [
                    series(generator, before + after, step=step, place=before),
                    series(generator, before + after),
                ]
                places = alarm(quantities, rate)
                found += bool(places)
                near += any(abs(place - before) <= 1 for place in places)
            share = f"{100 * near / found:.0f} %" if found else "-"
            yield f"| {step:g} standard deviations | {before} | {after} | {100 * found / few:.0f} % | {share} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.01)
    given = parser.parse_args()
    print(
        f"mlhpc history check --false-alarms {given.rate:g}; {given.series} series, Python {platform.python_version()}\n"
    )
    for row in rows(given.series, given.rate):
        print(row, flush=True)


if __name__ == "__main__":
    main()
