"""How often `mlhpc compare` is wrong on unfriendly truths, and whether what it says of its power is true.

    python benchmarks/verdict_rates.py [--pairs 400]

First table: a row is a truth and the runs of A and B. "different" is the share of equal results that are called faster
or slower (5 % is stated). "named" is the assumption that this truth breaks, and the share of those verdicts whose text
names it. Second table: the smallest difference that is stated, and how often one so large is found (80 % is stated);
"median": of the median of what is stated, "own": of each statement. Third table: the number of runs that is stated to
show 5 %, its range, and how often that many fresh runs find 5 %.

Runs of A come before those of B, with 30 s between runs and a day between sessions. The rows "pooled" show what the
verdict would be worth if sessions without a visible difference were taken for one.
`tests/suite/statistics/test_comparison.py` has the fast form.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlhpc.suite.compliance.verdict import PairVerdict, Standing, Task, judge_pair
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.sessions import TimedRun, estimate_mean, find_sessions

Chance = np.random.Generator
Noise = Callable[[Chance, int], np.ndarray]  # log times of runs in their order
Truth = Callable[[Chance, int, int], tuple[np.ndarray, np.ndarray]]

RUN_S, PAUSE_S, DAY_S = 600.0, 30.0, 86400.0
SIZES = ((3, 3), (3, 10), (5, 5), (8, 8))
SESSIONS = "the machine was the same in both sessions"
INDEPENDENT = "do not depend on each other"
ALIKE = "a longer tail or wider noise than the other"


def normal(sd: float) -> Noise:
    """Draw independent normal logs."""
    return lambda chance, n: chance.normal(0.0, sd, n)


def correlated(sd: float, by: float) -> Noise:
    """Draw logs each of which correlates with the one before it."""

    def draw(chance: Chance, n: int) -> np.ndarray:
        logs = chance.normal(0.0, 1.0, n)
        for place in range(1, n):
            logs[place] = by * logs[place - 1] + np.sqrt(1.0 - by**2) * logs[place]
        return sd * logs

    return draw


def states(sd: float, jump: float, stays: float) -> Noise:
    """Draw two states that the machine stays in with a probability, and noise."""

    def draw(chance: Chance, n: int) -> np.ndarray:
        changes = np.cumsum(chance.random(n) > stays) + chance.integers(2)
        return chance.normal(0.0, sd, n) + jump * (changes % 2)

    return draw


def epochs(values: Sequence[int], shares: Sequence[float], sd: float) -> Noise:
    """Draw runs of a number of epochs."""
    return lambda chance, n: np.log(chance.choice(values, n, p=shares)) + chance.normal(0.0, sd, n)


def alike(noise: Noise) -> Truth:
    """Draw both sides from one law, independent of each other."""
    return lambda chance, a, b: (noise(chance, a), noise(chance, b))


def in_a_row(noise: Noise) -> Truth:
    """Draw both sides from one series."""

    def draw(chance: Chance, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        logs = noise(chance, a + b)
        return logs[:a], logs[a:]

    return draw


def growing(per_run: Callable[[np.ndarray], np.ndarray], sd: float) -> Truth:
    """Draw one series whose times change with the number of the run."""
    return in_a_row(lambda chance, n: per_run(np.arange(n)) + chance.normal(0.0, sd, n))


def apart(sd: float, runs: Noise) -> Truth:
    """Draw one session a side, each with an offset of its own."""
    return lambda chance, a, b: tuple(chance.normal(0.0, sd) + runs(chance, n) for n in (a, b))  # type: ignore[return-value]


def stepped(chance: Chance, n: int) -> np.ndarray:
    """Draw a series with a step of 5 % from a run on."""
    return chance.normal(0.0, 0.01, n) + 0.05 * (np.arange(n) >= chance.integers(1, n))


# Name: truth, the assumption that it breaks (None: none)
TRUTHS: dict[str, tuple[Truth, str | None]] = {
    "0.01 z": (alike(normal(0.01)), None),
    "Student t2, 0.05": (alike(lambda chance, n: 0.05 * chance.standard_t(2, n)), None),
    "Student t1.5, 0.05": (alike(lambda chance, n: 0.05 * chance.standard_t(1.5, n)), None),
    "exponential tail of 10 %": (alike(lambda chance, n: np.log1p(0.1 * chance.exponential(1.0, n))), None),
    "1 in 10 takes twice as long": (
        alike(lambda chance, n: np.log1p(chance.random(n) < 0.1) + chance.normal(0.0, 0.01, n)),
        None,
    ),
    "1 in 10 has 30 % noise": (
        alike(lambda chance, n: chance.normal(0.0, 1.0, n) * np.where(chance.random(n) < 0.1, 0.3, 0.01)),
        None,
    ),
    "epochs 3, 4, 5": (alike(epochs((3, 4, 5), (0.2, 0.6, 0.2), 0.005)), None),
    "epochs 4 or 5 (0.9, 0.1)": (alike(epochs((4, 5), (0.9, 0.1), 0.005)), None),
    "rounded to 1 %": (alike(lambda chance, n: np.log(np.round(np.exp(chance.normal(0.0, 0.01, n)), 2))), None),
    "every 4th run + 10 %": (
        in_a_row(lambda chance, n: 0.1 * (np.arange(n) % 4 == 3) + chance.normal(0.0, 0.01, n)),
        None,
    ),
    "first run + 20 %": (in_a_row(lambda chance, n: 0.2 * (np.arange(n) == 0) + chance.normal(0.0, 0.01, n)), None),
    "A 0.01 z, B 0.1 z": (lambda chance, a, b: (normal(0.01)(chance, a), normal(0.1)(chance, b)), ALIKE),
    "A 0.1 z, B 0.01 z": (lambda chance, a, b: (normal(0.1)(chance, a), normal(0.01)(chance, b)), ALIKE),
    "A 0.1 (E - 1), B 0.01 z": (
        lambda chance, a, b: (0.1 * (chance.exponential(1.0, a) - 1.0), normal(0.01)(chance, b)),
        ALIKE,
    ),
    "stalls of A alone, equal geometric means": (
        lambda chance, a, b: (
            np.log(2.0) * ((chance.random(a) < 0.1) - 0.1) + chance.normal(0.0, 0.01, a),
            normal(0.01)(chance, b),
        ),
        ALIKE,
    ),
    "AR(0.7), 0.02": (in_a_row(correlated(0.02, 0.7)), INDEPENDENT),
    "AR(0.9), 0.02": (in_a_row(correlated(0.02, 0.9)), INDEPENDENT),
    "random walk of 0.01 z": (in_a_row(lambda chance, n: np.cumsum(chance.normal(0.0, 0.01, n))), INDEPENDENT),
    "two states, stays with 0.8": (in_a_row(states(0.003, 0.08, 0.8)), INDEPENDENT),
    "a step of 5 %": (in_a_row(stepped), SESSIONS),
    "0.01 z + 0.003 k": (growing(lambda k: 0.003 * k, 0.01), SESSIONS),
    "0.003 z + 0.001 k^1.5": (growing(lambda k: 0.001 * k**1.5, 0.003), SESSIONS),
    "one session a side of 0.02 z, runs 0.01 z": (apart(0.02, normal(0.01)), SESSIONS),
    "one session a side of 0.02 z, runs 0.002 z": (apart(0.02, normal(0.002)), SESSIONS),
}
BOUND = "because of their sessions"
FIVE, DAYS = (5,), (1,) * 5
# Runs of each session of A and of B, deviation of sessions, noise of runs
SESSION_TRUTHS: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], float, Noise, str | None]] = {
    "2 and 2 sessions of 0.02 z, runs 0.01 z": ((2 * FIVE, 2 * FIVE), 0.02, normal(0.01), None),
    "3 and 3 sessions of 0.02 z, runs 0.01 z": ((3 * FIVE, 3 * FIVE), 0.02, normal(0.01), None),
    "3 and 3 sessions of 0.02 z, runs 0.002 z": ((3 * FIVE, 3 * FIVE), 0.02, normal(0.002), None),
    "3 and 5 sessions of 0.02 z, runs 0.01 z": ((3 * FIVE, 5 * FIVE), 0.02, normal(0.01), None),
    "5 and 5 sessions of 0.02 t3, runs 0.01 z": ((5 * FIVE, 5 * FIVE), -0.02, normal(0.01), None),
    "3 and 3 sessions of 0.02 z, runs AR(0.9)": ((3 * FIVE, 3 * FIVE), 0.02, correlated(0.02, 0.9), None),
    "3 and 3 sessions, that differ by nothing": ((3 * FIVE, 3 * FIVE), 0.0, normal(0.01), None),
    "3 sessions and 1 of 0.02 z": ((3 * FIVE, FIVE), 0.02, normal(0.01), None),
    "5 sessions and 1 of 0.02 z": ((5 * FIVE, FIVE), 0.02, normal(0.01), None),
    "2 and 2 sessions of 0.05 z, first run + 20 %": (
        (2 * FIVE, 2 * FIVE),
        0.05,
        lambda chance, n: chance.normal(0.0, 0.01, n) + 0.2 * (np.arange(n) == 0),
        None,
    ),
    "2 sessions and 1, that differ by nothing": ((2 * FIVE, FIVE), 0.0, normal(0.01), None),
    "2 sessions and 1 of 0.05 z": ((2 * FIVE, FIVE), 0.05, normal(0.01), None),
    "a session of one run apart, 0.035 z": (((1, 4), FIVE), 0.035, normal(0.01), None),
    "a session of one run apart, 0.02 z, runs 0.1 z": (((1, 9), (10,)), 0.02, normal(0.1), None),
    "2 sessions and 1 of 0.02 t3": ((2 * FIVE, FIVE), -0.02, normal(0.01), None),
    "2 sessions and 1 of 0.1 z": ((2 * FIVE, FIVE), 0.1, normal(0.01), BOUND),
    "2 and 2 sessions of 0.1 z": ((2 * FIVE, 2 * FIVE), 0.1, normal(0.01), BOUND),
    "one run a day, days of 0.02 z": ((DAYS, DAYS), 0.02, normal(0.01), None),
    "one run a day beside one session, 0.02 z": ((DAYS, FIVE), 0.02, normal(0.01), None),
}


def make_runs(logs: Sequence[float], begin_s: float) -> list[TimedRun]:
    """Make runs one after the other."""
    runs = []
    for log in logs:
        runs.append(TimedRun(begin_s, RUN_S * float(np.exp(log))))
        begin_s += runs[-1].time_s + PAUSE_S
    return runs


def draw_sessions(
    chance: Chance, counts: tuple[tuple[int, ...], tuple[int, ...]], spread: float, noise: Noise
) -> list[list[TimedRun]]:
    """Draw the sessions of A, then those of B, a day apart. A negative spread is one of Student's t3."""
    sides, day = [], 0
    for sessions in counts:
        runs = []
        for count in sessions:
            level = spread * chance.standard_t(3) if spread < 0.0 else chance.normal(0.0, spread)
            runs += make_runs(level + noise(chance, count), DAY_S * day)
            day += 1
        sides.append(runs)
    return sides


def is_pooled_different(a: Sequence[TimedRun], b: Sequence[TimedRun]) -> bool:
    """Judge as nobody should: runs are the unit unless an F test of 5 % finds that sessions of a side differ."""
    from scipy import stats

    sides = [[[float(np.log(run.time_s)) for run in each] for each in find_sessions(runs)] for runs in (a, b)]
    every = [[log for session in side for log in session] for side in sides]
    between = sum(
        len(x) * (np.mean(x) - np.mean(all_)) ** 2 for side, all_ in zip(sides, every, strict=True) for x in side
    )
    inside = sum((log - np.mean(session)) ** 2 for side in sides for session in side for log in session)
    few, many = sum(map(len, sides)) - 2, sum(map(len, every)) - sum(map(len, sides))
    if many and stats.f.sf(between / few / (inside / many), few, many) > 0.05:
        return bool(stats.ttest_ind(*every, equal_var=False).pvalue < 0.05)
    return is_different(judge(a, b))


def judge(a: Sequence[TimedRun], b: Sequence[TimedRun]) -> PairVerdict:
    """Judge as `mlhpc compare` does: two compliant results of one machine."""
    task = Task("cosmoflow", "full", "strong")
    sides = (
        Standing(task, "v3.0", "closed", "here", tuple(runs), (), 0.001, len(runs), 0, None, None, None)
        for runs in (a, b)
    )
    return judge_pair(*sides)


def is_different(verdict: PairVerdict) -> bool:
    """Return True if B is called faster or slower."""
    return verdict.outcome in (Outcome.FASTER, Outcome.SLOWER)


def compare_logs(logs: Sequence[np.ndarray], effect: float = 0.0) -> PairVerdict:
    """Judge runs of one session a side, those of B longer by an effect (a log)."""
    a = make_runs(logs[0], 0.0)
    return judge(a, make_runs(logs[1] + effect, a[-1].begin_s + a[-1].time_s + PAUSE_S))


def count_different(chance: Chance, truth: str, sizes: tuple[int, int], effect: float, pairs: int) -> int:
    """Count comparisons that call B faster or slower; with an effect (a ratio), those that call it slower."""
    verdicts = [compare_logs(TRUTHS[truth][0](chance, *sizes), float(np.log(effect))) for _ in range(pairs)]
    return sum(is_different(each) if effect == 1.0 else each.outcome == Outcome.SLOWER for each in verdicts)


def wilson(count: int, pairs: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share."""
    z, p = 1.96, count / pairs
    middle, half = p + z * z / (2 * pairs), z * np.sqrt(p * (1 - p) / pairs + z * z / (4 * pairs * pairs))
    return max(0.0, middle - half) / (1 + z * z / pairs), (middle + half) / (1 + z * z / pairs)


def render_share(count: int, pairs: int) -> str:
    """Render a share with its interval."""
    low, high = wilson(count, pairs)
    return f"{100 * count / pairs:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def render_runs(counts: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Render the runs of each session of A and of B."""
    return " and ".join(" + ".join(map(str, each)) for each in counts)


def print_row(truth: str, runs: str, found: Sequence[PairVerdict], named: str | None) -> None:
    """Print the row of a truth."""
    wrong = [each for each in found if is_different(each)]
    share = wilson(len(wrong), len(found))
    holds = "yes" if share[0] <= 0.05 else "no"
    said = sum(named in (each.assumes or "") for each in wrong) if named else 0
    text = f'"{named}": {said} of {len(wrong)}' if named else "-"
    print(f"| {truth} | {runs} | {render_share(len(wrong), len(found))} | {holds} | {text} |", flush=True)


def print_power(chance: Chance, pairs: int) -> None:
    """Print how often the smallest difference that is stated is found, and how often the stated number of runs finds 5 %."""
    laws = {"0.01 z": normal(0.01), "0.05 z": normal(0.05), "t2 0.05": lambda c, n: 0.05 * c.standard_t(2, n),
            "epochs 3, 4, 5": epochs((3, 4, 5), (0.2, 0.6, 0.2), 0.005)}  # fmt: skip
    print("| sessions | smallest difference stated, median | found: own |\n| --- | --- | --- |")
    for name in ("2 sessions and 1 of 0.05 z", "3 and 3 sessions of 0.02 z, runs 0.01 z"):
        counts, spread, law, _ = SESSION_TRUTHS[name]
        stated = [
            each.detectable
            for _ in range(pairs)
            if (each := judge(*draw_sessions(chance, counts, spread, law)).compared) is not None
        ]
        found_so = 0
        for factor in stated:
            a, b = draw_sessions(chance, counts, spread, law)
            found_so += judge(a, [run._replace(time_s=factor * run.time_s) for run in b]).outcome == Outcome.SLOWER
        print(f"| {name} | {100 * (np.median(stated) - 1):.2g} % | {render_share(found_so, len(stated))} |", flush=True)
    print("| noise | runs a side | smallest difference stated, median | found: median | found: own |")
    print("| --- | --- | --- | --- | --- |")
    for name, noise in laws.items():
        for n in (3, 5, 10):
            first = [compare_logs((noise(chance, n), noise(chance, n))).compared for _ in range(pairs)]
            stated = [float(np.log(each.detectable)) for each in first if each is not None]
            middle = float(np.median(stated))
            found = [
                sum(compare_logs((noise(chance, n), noise(chance, n)), by).outcome == Outcome.SLOWER for by in each)
                for each in ([middle] * len(stated), stated)
            ]
            shares = " | ".join(render_share(count, len(stated)) for count in found)
            print(f"| {name} | {n} | {100 * np.expm1(middle):.2g} % | {shares} |", flush=True)
    print("| noise | runs a side | stated runs for 5 %, 10 to 90 % | range, medians | found with so many |")
    print("| --- | --- | --- | --- | --- |")
    for name, noise in (*laws.items(), ("0.03 z", normal(0.03)), ("0.1 z", normal(0.1))):
        for n in (3, 5):
            first = [compare_logs((noise(chance, n), noise(chance, n))).compared for _ in range(pairs)]
            needed = [each.needed for each in first if each is not None and each.needed and each.needed.runs]
            found_so = sum(
                compare_logs([noise(chance, each.runs or 0) for _ in "AB"], float(np.log(1.05))).outcome
                == Outcome.SLOWER
                for each in needed
            )
            runs = np.quantile([each.runs or 0 for each in needed], (0.1, 0.9))
            ends = [np.median([each.low for each in needed]), np.median([each.high or 1000 for each in needed])]
            print(
                f"| {name} | {n} | {runs[0]:.0f} to {runs[1]:.0f} | {ends[0]:.0f} to {ends[1]:.0f} "
                f"| {render_share(found_so, len(needed))} |",
                flush=True,
            )


def print_scores(chance: Chance, pairs: int) -> None:
    """Print how often the interval of a score in sessions holds the mean of all sessions (95 % stated)."""
    print("| sessions of a score | runs of each session | interval holds | median width |\n| --- | --- | --- | --- |")
    for runs in (2 * FIVE, (1, 4), 3 * FIVE, 5 * FIVE, DAYS):
        for spread in (0.0, 0.02, 0.05, -0.02, 0.1):
            halves, held = [], 0
            for _ in range(pairs):
                mean, error = estimate_mean(find_sessions(draw_sessions(chance, (runs, ()), spread, normal(0.01))[0]))
                halves.append(error.find_half() if error is not None else 0.0)
                held += abs(mean - np.log(RUN_S)) <= halves[-1]
            law = f"{spread:g} z" if spread >= 0.0 else f"{-spread:g} t3"
            sizes = " + ".join(map(str, runs))
            print(
                f"| {law}, runs 0.01 z | {sizes} | {render_share(held, pairs)} | {100 * np.median(halves):.2g} % |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--scores", action="store_true", help="only the table of scores in sessions")
    given = parser.parse_args()
    chance = np.random.default_rng(20261129)
    if given.scores:
        print_scores(chance, given.pairs)
        return
    print(f"{platform.node()}, {given.pairs} comparisons each, 5 % stated")
    print("| truth, B equals A | runs of A, B | different | 5 % holds | named |")
    print("| --- | --- | --- | --- | --- |")
    for name, (truth, named) in TRUTHS.items():
        for sizes in SIZES:
            print_row(
                name, "{}, {}".format(*sizes), [compare_logs(truth(chance, *sizes)) for _ in range(given.pairs)], named
            )
    for name, (counts, spread, noise, named) in SESSION_TRUTHS.items():
        found = [judge(*draw_sessions(chance, counts, spread, noise)) for _ in range(given.pairs)]
        print_row(name, render_runs(counts), found, named)
    print(
        "| sessions that are pooled unless they differ visibly | runs of each session | different |\n| --- | --- | --- |"
    )
    for name, (counts, spread, noise, _) in SESSION_TRUTHS.items():
        wrong = sum(is_pooled_different(*draw_sessions(chance, counts, spread, noise)) for _ in range(given.pairs))
        print(f"| {name} | {render_runs(counts)} | {render_share(wrong, given.pairs)} |", flush=True)
    print_power(chance, min(given.pairs, 300))


if __name__ == "__main__":
    main()
