"""How often `mlhpc history check` alarms on an unchanged machine, and what it finds, on unfriendly truths.

    python benchmarks/history_rates.py [--series 200] [--effects 40] [--rate 0.05] [--truths "Student t3"] [--counts 60]

A row is a truth and a number of results. "alarms" is the share of unchanged machines that are called faster or slower;
"said" the share of alarms whose text assumes a smaller correlation than the truth has; "inconclusive" the share of those
machines. "found in 80 %" is how much slower the second half must be to be called slower in four of five histories. "place"
and "size" are the shares of the finds at that effect for which the 95 % set of places and the 95 % interval of the size
hold the truth; --effects 0 leaves them out. `tests/suite/statistics/test_changes.py` has the fast form.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.verdict_rates import Noise, wilson
from mlhpc.analysis.history.record import Record, Series
from mlhpc.analysis.history.verdict import SeriesVerdict, find_smallest_change, judge_all
from mlhpc.suite.statistics import Outcome

COUNTS = (20, 30, 60)
CHANGED_COUNTS = (20, 30, 60)
EFFECTS = (1.01, 1.015, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 3.0)
SERIES = Series(
    benchmark="b", size="s", scenario="strong", division="closed", rules="v3.0", system="m", nodes=1, ranks=1
)


def steady(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw results of 1 %."""
    return np.exp(chance.normal(0.0, 0.01, n))


def correlated(chance: np.random.Generator, n: int, correlation: float) -> np.ndarray:
    """Draw results of 1 % of which each correlates with the one before it."""
    rest = chance.normal(0.0, 1.0, n)
    for index in range(1, n):
        rest[index] = correlation * rest[index - 1] + np.sqrt(1.0 - correlation**2) * rest[index]
    return np.exp(0.01 * rest)


def growing(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw results of which the deviation grows from 1 to 3 %."""
    return np.exp(np.linspace(0.01, 0.03, n) * chance.normal(0.0, 1.0, n))


def in_sessions(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw results of 1 % in sessions of five, of which the levels have a deviation of 2 %."""
    return steady(chance, n) * np.repeat(np.exp(chance.normal(0.0, 0.02, n // 5 + 1)), 5)[:n]


def with_outlier(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw results of which one takes three times as long."""
    return steady(chance, n) * np.where(np.arange(n) == chance.integers(n), 3.0, 1.0)


def in_states(chance: np.random.Generator, n: int, stays: float, noise: float = 0.005) -> np.ndarray:
    """Draw results of a machine with two speeds 5 % apart, which keeps its speed with this probability."""
    states = (np.cumsum(chance.random(n) > stays) + chance.integers(2)) % 2
    return np.exp(noise * chance.standard_normal(n) + 0.05 * states)


def with_bad_days(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw results of 1 % of which three take 1.6 times as long."""
    found = steady(chance, n)
    found[chance.choice(n, 3, replace=False)] *= 1.6
    return found


def in_seasons(chance: np.random.Generator, n: int, period: float) -> np.ndarray:
    """Draw results of 1 % that follow a wave of 3 %."""
    return steady(chance, n) * np.exp(0.03 * np.sin(2 * np.pi * (np.arange(n) / period + chance.random())))


def at_weekends(chance: np.random.Generator, n: int) -> np.ndarray:
    """Draw results of 1 % that take 10 % longer at weekends."""
    return steady(chance, n) * np.where((np.arange(n) + chance.integers(7)) % 7 > 4, 1.1, 1.0)


# Of a truth whose neighbours correlate: by how much. An alarm that assumes less is said to assume it
CORRELATED = {
    "correlation 0.3": 0.3,
    "correlation 0.6": 0.6,
    "correlation 0.8": 0.8,
    "correlation 0.9": 0.9,
    "two speeds, keeps one with 0.65": 0.3,
    "two speeds, keeps one with 0.8": 0.6,
    "two speeds, keeps one with 0.9": 0.8,
    "wave of 15 results": 0.75,
    "wave of 30 results": 0.8,
    "sessions of 5 differ by 2 %": 0.64,
}
UNCHANGED: dict[str, Noise] = {
    "log-normal, 1 %": steady,
    "Student t3": lambda chance, n: np.exp(0.01 * chance.standard_t(3, n)),
    "exponential tail": lambda chance, n: 1.0 + 0.1 * chance.exponential(1.0, n),
    "rounded to 1 %": lambda chance, n: np.round(steady(chance, n), 2),
    "correlation 0.3": lambda chance, n: correlated(chance, n, 0.3),
    "correlation 0.6": lambda chance, n: correlated(chance, n, 0.6),
    "correlation 0.8": lambda chance, n: correlated(chance, n, 0.8),
    "correlation 0.9": lambda chance, n: correlated(chance, n, 0.9),
    "two speeds, keeps one with 0.65": lambda chance, n: in_states(chance, n, 0.65),
    "two speeds, keeps one with 0.8": lambda chance, n: in_states(chance, n, 0.8),
    "two speeds, keeps one with 0.9": lambda chance, n: in_states(chance, n, 0.9),
    "wave of 15 results": lambda chance, n: in_seasons(chance, n, 15),
    "wave of 30 results": lambda chance, n: in_seasons(chance, n, 30),
    "weekends": at_weekends,
    "three bad days": with_bad_days,
    "spread grows from 1 to 3 %": growing,
    "one outlier": with_outlier,
    "sessions of 5 differ by 2 %": in_sessions,
}
# Levels of three thirds of a series, or the drift of all of it
CHANGED: dict[str, tuple[float, float, float] | float] = {
    "22 % up, then 4 % down": (1.0, 1.22, 1.17),
    "10 % up and back": (1.0, 1.1, 1.0),
    "5 % up twice": (1.0, 1.05, 1.1),
    "10 % down": (1.0, 1.0, 0.9),
    "drift of 0.2 % a result": 0.002,
    "drift of 11.6 % in 30 results": float(np.log(1.116) / 29),
}


def judge(values: Iterable[float], rate: float) -> SeriesVerdict:
    """Judge a history of results that take so long, one a day."""
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    records = [
        Record(
            date=(begin + timedelta(days=day)).isoformat(),
            added=begin.isoformat(),
            source="",
            series=SERIES,
            score=None,
            compliant=True,
            time_s=(),
            epoch_s=(60.0 * float(value),),
            logs={},
            facts={},
            facts_sha256="",
            suite_version=None,
        )
        for day, value in enumerate(values)
    ]
    (verdict,) = judge_all(records, rate)
    return verdict


def stepped(truth: str, chance: np.random.Generator, count: int, effect: float) -> np.ndarray:
    """Draw a series of which the second half takes ``effect`` times as long."""
    return UNCHANGED[truth](chance, count) * np.where(np.arange(count) < count // 2, 1.0, effect)


def verdicts(truth: str, count: int, series: int, rate: float) -> list[SeriesVerdict]:
    """Judge so many unchanged machines."""
    chance = np.random.default_rng([20261127, count])
    return [judge(UNCHANGED[truth](chance, count), rate) for _ in range(series)]


def found(truth: str, count: int, effect: float, series: int, rate: float) -> list[SeriesVerdict]:
    """Judge so many machines that became slower, and return the verdicts that say so."""
    chance = np.random.default_rng([20261128, count])
    verdicts = [judge(stepped(truth, chance, count, effect), rate) for _ in range(series)]
    return [verdict for verdict in verdicts if verdict.word == Outcome.SLOWER]


def smallest_found(truth: str, count: int, series: int, rate: float) -> tuple[float, list[SeriesVerdict]] | None:
    """Find the smallest effect that is found in 80 %, and the verdicts that found it."""
    low, high = -1, len(EFFECTS)
    best = None
    while high - low > 1:
        middle = (low + high) // 2
        verdicts = found(truth, count, EFFECTS[middle], series, rate)
        if len(verdicts) >= 0.8 * series:
            high, best = middle, (EFFECTS[middle], verdicts)
        else:
            low = middle
    return best


def coverage(effect: float, verdicts: Sequence[SeriesVerdict]) -> str:
    """Render the shares of finds for which the places and the interval of the size hold the truth."""
    places = sizes = 0
    for verdict in verdicts:
        true = len(verdict.values) // 2
        places += any(each.places[0] <= true <= each.places[1] for each in verdict.found)
        assert verdict.standing is not None
        low, high = verdict.standing.size.interval or (0.0, 0.0)
        sizes += low <= effect <= high
    return f"{100 * places / len(verdicts):.0f} % | {100 * sizes / len(verdicts):.0f} %"


def changed(truth: str, count: int, chance: np.random.Generator) -> np.ndarray:
    """Draw a series of 1 % of a machine that changes."""
    levels = CHANGED[truth]
    if isinstance(levels, float):
        return steady(chance, count) * np.exp(levels * np.arange(count))
    return steady(chance, count) * np.array(levels)[np.arange(count) * 3 // count]


def print_unchanged(truths: Sequence[str], counts: Sequence[int], series: int, effects: int, rate: float) -> None:
    """Print the table of unchanged machines. ``effects``: how many series for each effect."""
    print("| truth | results | alarms | Wilson | said | inconclusive | found in 80 % | place | size |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for truth in truths:
        for count in counts:
            judged = verdicts(truth, count, series, rate)
            said = [verdict.word for verdict in judged]
            alarmed = [verdict for verdict in judged if verdict.word in (Outcome.FASTER, Outcome.SLOWER)]
            alarms = len(alarmed)
            named = sum(verdict.changes.held < CORRELATED.get(truth, 0.0) for verdict in alarmed)
            low, high = wilson(alarms, series)
            unsure = said.count(Outcome.INCONCLUSIVE)
            effect = "not measured | - | -"
            if effects:
                best = smallest_found(truth, count, effects, rate)
                effect = "more than 3 times | - | -" if best is None else f"× {best[0]:g} | {coverage(*best)}"
            print(
                f"| {truth} | {count} | {100 * alarms / series:.1f} % | {100 * max(low, 0.0):.1f} to {100 * high:.1f} % | "
                f"{f'{named} of {alarms}' if alarms else '-'} | "
                f"{100 * unsure / series:.1f} % | {effect} |",
                flush=True,
            )


def print_power(truths: Sequence[str], counts: Sequence[int], series: int, rate: float, seed: int) -> None:
    """Print how often a fresh series with the change that another one says to be found is called slower (80 % stated)."""
    print("| truth | results | stated, 10 to 90 % | called slower | Wilson | n |")
    print("| --- | --- | --- | --- | --- | --- |")
    for truth in truths:
        for count in counts:
            chance, sizes, slower = np.random.default_rng([seed, count]), [], 0
            for _ in range(series):
                first = judge(UNCHANGED[truth](chance, count), rate)
                if first.word == Outcome.SLOWER or (said := find_smallest_change(first)) is None:
                    continue
                sizes.append(100 * said[1])
                effect = np.where(np.arange(count) < count - said[0], 1.0, 1.0 + said[1])
                slower += judge(UNCHANGED[truth](chance, count) * effect, rate).word == Outcome.SLOWER
            low, high = wilson(slower, len(sizes))
            ends = " to ".join(f"{each:.1f}" for each in np.quantile(sizes, (0.1, 0.9)))
            seen = f"{100 * slower / len(sizes):.1f} % | {100 * low:.1f} to {100 * high:.1f} %"
            print(f"| {truth} | {count} | {ends} % | {seen} | {len(sizes)} |", flush=True)


def print_changed(series: int, rate: float) -> None:
    """Print the table of machines that changed."""
    print("\n| a machine that changes | results | slower | faster | equivalent | inconclusive |")
    print("| --- | --- | --- | --- | --- | --- |")
    order = (Outcome.SLOWER, Outcome.FASTER, Outcome.EQUIVALENT, Outcome.INCONCLUSIVE)
    for truth in CHANGED:
        for count in CHANGED_COUNTS:
            chance = np.random.default_rng([20261129, count])
            said = [judge(changed(truth, count, chance), rate).word for _ in range(series)]
            shares = " | ".join(f"{100 * said.count(word) / series:.0f} %" for word in order)
            print(f"| {truth} | {count} | {shares} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=200)
    parser.add_argument("--effects", type=int, default=40, help="series for each effect and each change")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--truths", nargs="*", choices=list(UNCHANGED), default=list(UNCHANGED))
    parser.add_argument("--counts", nargs="*", type=int, default=COUNTS, help="numbers of results")
    parser.add_argument("--changed-only", action="store_true")
    parser.add_argument("--seed", type=int, default=20261129, help="of --power")
    parser.add_argument("--power", action="store_true", help="only whether the smallest change that is stated is found")
    given = parser.parse_args()
    print(f"{given.series} series each ({given.effects} for effects and changes), {100 * given.rate:g} % stated")
    if given.power:
        print_power(given.truths, given.counts, given.series, given.rate, given.seed)
        return
    if not given.changed_only:
        print_unchanged(given.truths, given.counts, given.series, given.effects, given.rate)
    if given.effects and (given.changed_only or len(given.truths) == len(UNCHANGED)):
        print_changed(given.effects, given.rate)


if __name__ == "__main__":
    main()
