"""Whether each door's stated rate holds on truths that no other generator has, or its text names what fails.

    python benchmarks/unseen_truths.py [--runs 100] [--door TEXT]

A row is a door and a truth. "stated": share of wrong verdicts, or of intervals that hold. "seen" has Wilson's 95 % interval in
brackets. "holds": the interval contains the stated rate or lies on its good side. "named": the words of the output that name the
assumption which fails, and in how many of the wrong verdicts they stand. A row that neither holds nor is named is a failure.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.door_rates import judge_ranks
from benchmarks.door_rates import watch as make_job
from benchmarks.goodput_rates import Truth, simulate
from benchmarks.history_rates import judge as judge_history
from benchmarks.verdict_rates import DAY_S, make_runs, wilson
from mlhpc.analysis.figures import scaling as scaling_figure
from mlhpc.analysis.history.verdict import render_verdict
from mlhpc.analysis.results.scaling import find_break, fit, predict_time
from mlhpc.plugins.fleet.watch import ASSUMED
from mlhpc.suite.compliance.verdict import Standing, Task, judge_pair
from mlhpc.suite.log.goodput import Goodput, compute_advice, render_advice
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.sessions import TimedRun, compute_log_interval

Floats = np.ndarray
Chance = np.random.Generator
Seen = tuple[bool, str]  # wrong or not; the text of the output
Trial = Callable[[Chance], Seen | None]  # None: nothing was said
ALIKE = "longer tail or wider noise"
SAME = "the machine was the same"
INDEPENDENT = "do not depend on each other"


def last(chance: Chance, n: int, by: float) -> Floats:
    """Draw normal values that each correlate with the one before."""
    logs = chance.standard_normal(n)
    for place in range(1, n):
        logs[place] = by * logs[place - 1] + math.sqrt(1.0 - by**2) * logs[place]
    return logs


def two_modes(chance: Chance, n: int) -> Floats:
    """Draw runs of which half take 8 % longer."""
    return 0.08 * (chance.random(n) < 0.5) + 0.005 * chance.standard_normal(n)


def stepped_clock(chance: Chance, n: int) -> Floats:
    """Draw runs of 600 s of which one in five has a clock that was set by 2 s while it ran."""
    return np.log1p(chance.choice((-2.0, 2.0), n) / 600 * (chance.random(n) < 0.2)) + 0.001 * chance.standard_normal(n)


def slowest_of_ranks(chance: Chance, n: int) -> Floats:
    """Draw runs that take as long as the slowest of 64 ranks."""
    return np.log(chance.gamma(400, 1 / 400, (n, 64)).max(axis=1))


def ties(chance: Chance, n: int) -> Floats:
    """Draw runs of 600 s to the whole second, most of them equal."""
    return np.log(np.round(600 + 0.6 * chance.standard_normal(n)) / 600)


def uneven(chance: Chance, n: int) -> Floats:
    """Draw runs by turns of 0.2 and 5 %."""
    return np.where(np.arange(n) % 2, 0.05, 0.002) * chance.standard_normal(n)


def daily(chance: Chance, n: int) -> Floats:
    """Draw runs every two hours of a machine that is slower by 5 % in the afternoon, in a sine."""
    return 0.05 * np.sin(2 * np.pi * (np.arange(n) / 12 + chance.random())) + 0.005 * chance.standard_normal(n)


def geometric_epochs(chance: Chance, n: int) -> Floats:
    """Draw runs of 5 epochs and more: one in three goes on for another."""
    return np.log(4 + chance.geometric(2 / 3, n)) + 0.003 * chance.standard_normal(n)


def pareto(chance: Chance, n: int) -> Floats:
    """Draw runs with a Pareto tail of shape 1.5, 2 % at least."""
    return np.log1p(0.02 * chance.pareto(1.5, n))


def recovering(chance: Chance, n: int) -> Floats:
    """Draw a machine that was slow by 10 % at first and recovers with a time constant of three runs."""
    return 0.1 * np.exp(-np.arange(n) / 3) + 0.005 * chance.standard_normal(n)


def alternating(chance: Chance, n: int) -> Floats:
    """Draw runs whose neighbours differ: correlation -0.6."""
    return 0.02 * last(chance, n, -0.6)


NOISE: dict[str, tuple[Callable[[Chance, int], Floats], str]] = {
    "two modes, 8 % apart": (two_modes, ""),
    "a clock that is set by 2 s": (stepped_clock, ""),
    "the slowest of 64 ranks": (slowest_of_ranks, ""),
    "ties at whole seconds": (ties, ""),
    "by turns 0.2 and 5 % of noise": (uneven, ""),
    "a daily wave of 5 %": (daily, SAME),
    "geometric epochs": (geometric_epochs, ""),
    "Pareto 1.5": (pareto, ""),
    "slow at first": (recovering, SAME),
    "neighbours that differ": (alternating, ""),
}


def judge_runs(a: list[TimedRun], b: list[TimedRun], missed: int = 0) -> Seen:
    """Compare as `mlhpc compare` does; ``missed`` runs of A missed the target."""
    task = Task("cosmoflow", "full", "strong")
    sides = (
        Standing(task, "v3.0", "closed", "here", tuple(runs), (), 0.001, len(runs) + lost, lost, None, None, None)
        for runs, lost in ((a, missed), (b, 0))
    )
    verdict = judge_pair(*sides)
    return verdict.outcome in (Outcome.SLOWER, Outcome.FASTER), "; ".join((*verdict.reasons, verdict.assumes or ""))


def in_a_row(logs: Floats, first: int, missed: int = 0) -> Seen:
    """Compare the first runs of a series with the others."""
    runs = make_runs(logs.tolist(), 0.0)
    return judge_runs(runs[:first], runs[first:], missed)


def in_days(levels: Floats, days: int, chance: Chance) -> Seen:
    """Compare sessions of five runs, one a day: the first days with the others."""
    runs = [
        make_runs((level + 0.003 * chance.standard_normal(5)).tolist(), DAY_S * day) for day, level in enumerate(levels)
    ]
    return judge_runs([r for each in runs[:days] for r in each], [r for each in runs[days:] for r in each])


def drop_slowest(chance: Chance) -> Seen:
    """Compare five of six runs of A, whose slowest was ended by its time limit, with five of B."""
    logs = 0.02 * chance.standard_normal(11)
    keep = np.arange(11) != logs[:6].argmax()
    return in_a_row(logs[keep], 5, 1)


COMPARE: dict[str, tuple[Trial, str]] = {
    **{name: (lambda c, law=law: in_a_row(law(c, 10), 5), named) for name, (law, named) in NOISE.items()},
    "3 runs against 20": (lambda c: in_a_row(0.02 * c.standard_t(3, 23), 3), ""),
    "sessions with AR(0.8)": (lambda c: in_days(0.02 * last(c, 6, 0.8), 3, c), "sessions do not depend on each other"),
    "a step between sessions": (lambda c: in_days(0.002 * c.standard_normal(6) + 0.03 * (np.arange(6) > 2), 3, c), SAME),
    "sessions that age by 1 % a day": (lambda c: in_days(0.01 * np.arange(6) + 0.003 * c.standard_normal(6), 3, c), SAME),
    "the slowest run of A missed": (drop_slowest, "missed the target by chance"),
    "the same, B twice as noisy": (
        lambda c: in_a_row(np.r_[0.01 * c.standard_normal(5), 0.02 * c.standard_gamma(1, 5) - 0.02], 5), ALIKE,
    ),
}  # fmt: skip


def score(noise: Callable[[Chance, int], Floats]) -> Trial:
    """Ask whether the interval beside a score holds the mean of the law."""

    true = math.exp(statistics.fmean(noise(np.random.default_rng(7), 12_000).tolist()))

    def trial(chance: Chance) -> Seen:
        low, high = compute_log_interval(np.exp(noise(chance, 5)).tolist()) or (0.0, math.inf)
        return not low <= true <= high, "95 % for normal noise and independent runs on equal days"

    return trial


def history(noise: Callable[[Chance, int], Floats], count: int) -> Trial:
    """Ask whether an unchanged machine is called faster or slower."""

    def trial(chance: Chance) -> Seen:
        verdict = judge_history(np.exp(noise(chance, count)), 0.01)
        wrong = verdict.word in (Outcome.SLOWER, Outcome.FASTER)
        return wrong, "\n".join(render_verdict(verdict, 0.01)) if wrong else ""

    return trial


HISTORY: dict[str, tuple[Trial, str]] = {
    **{name: (history(law, 30), "neighbouring results correlate by at most") for name, (law, _) in NOISE.items()},
    "20 results, two modes": (history(two_modes, 20), ""),
    "12 results, Pareto 1.5": (history(pareto, 12), ""),
    "slow in every second week": (
        history(lambda c, n: 0.05 * ((np.arange(n) // 7) % 2) + 0.01 * c.standard_normal(n), 30), "correlate by at most",
    ),
}  # fmt: skip


def scale(law: Callable[[Chance], Callable[[float], float]], noise: Callable[[Chance, int], Floats]) -> Trial:
    """Ask whether both ends of a prediction at twice the largest size hold."""

    def trial(chance: Chance) -> Seen | None:
        true, sizes = law(chance), (4.0, 8.0, 16.0, 32.0, 64.0)
        runs = {n: (true(n) * np.exp(noise(chance, 5))).tolist() for n in sizes}
        models = fit(runs)
        if find_break(runs, models):
            return None
        value, low, high = predict_time(runs, models, 128.0)
        row = {"further size": 128.0, "s/epoch there": value, "there from": low, "there to": high}
        # Its words are about the upper end alone
        text = scaling_figure._describe_prediction(row) if true(128.0) > high else ""
        return not low <= true(128.0) <= high, text

    return trial


def amdahl(chance: Chance) -> Callable[[float], float]:
    """Draw Amdahl's law."""
    serial = float(chance.uniform(0.002, 0.05))
    return lambda n: serial + (1 - serial) / n


LIMIT = "no limit begins beyond"
DAY = "no size had a better day"
LAWS: dict[str, tuple[Callable[[Chance], Callable[[float], float]], str]] = {
    "tree of all-reduce: ceil(log2 n)": (lambda c: lambda n: 1 / n + 0.0015 * math.ceil(math.log2(n)), ""),
    "stragglers: sqrt(log n)": (lambda c: lambda n: (1 + 0.1 * math.sqrt(2 * math.log(n))) / n, ""),
    "two levels of switches at 24": (lambda c: lambda n: 1 / n + (0.004 if n > 24 else 0.001), ""),
    "padding: whole samples a rank": (lambda c: lambda n: math.ceil(4000 / n) / 4000, ""),
    "exponent 0.97": (lambda c: lambda n: n**-0.97, ""),
    "read by a shared file system": (lambda c: lambda n: max(1 / n, 0.006) + 0.25 / n, LIMIT),
    "n log n of metadata": (lambda c: lambda n: 1 / n + 2e-5 * n * math.log2(n), ""),
}
SCALING: dict[str, tuple[Trial, str]] = {
    **{name: (scale(law, lambda c, n: 0.01 * c.standard_normal(n)), named) for name, (law, named) in LAWS.items()},
    **{
        f"Amdahl, {name}": (scale(amdahl, law), "")
        for name, (law, _) in NOISE.items() if law not in (daily, recovering, geometric_epochs)
    },
    "Amdahl, a day of 3 % for each size": (
        scale(amdahl, lambda c, n: 0.03 * c.standard_normal() + 0.005 * c.standard_normal(n)), DAY,
    ),
}  # fmt: skip
GAPS: dict[str, Callable[[Chance], float]] = {
    "log-normal 1": lambda c: math.exp(c.standard_normal() - 0.5),
    "log-normal 1.5": lambda c: math.exp(1.5 * c.standard_normal() - 1.125),
    "log-normal 2.5": lambda c: math.exp(2.5 * c.standard_normal() - 3.125),
    "gamma 0.3": lambda c: float(c.gamma(0.3, 1 / 0.3)),
    "gamma 4": lambda c: float(c.gamma(4, 1 / 4)),
    "Pareto 1.8": lambda c: float(c.pareto(1.8)) * 0.8,
    "one node in ten fails ten times as often": lambda c: float(c.exponential() * (0.19 if c.random() < 0.5 else 1.81)),
    "a time limit of 1.2 mean gaps": lambda c: float(min(c.exponential(), 1.2)) / (1 - math.exp(-1.2)),
    "bathtub": lambda c: float(c.weibull(0.5) / 2 * 0.5 + (c.random() < 0.7) * c.weibull(4) * 0.79),
    "every night at the same hour": lambda c: 1.0 + 0.02 * float(c.standard_normal()),
}


def fail(gap: Callable[[Chance], float]) -> Trial:
    """Ask whether the interval of the time between failures holds it, if one is printed."""

    def trial(chance: Chance) -> Seen | None:
        trials = []
        for _ in range(5):
            one = simulate(chance, Truth(gap=gap))
            ups = tuple(attempt[-1][0] - attempt[0][0] for attempt in one.logs)
            died = one.failures == len(ups)
            times = (one.wall, one.useful, 0.0, 0.0, 60.0, 60.0, one.wall - math.fsum(ups))
            trials.append(Goodput(Path(), 0, len(ups), *times, 3, 1.0, 20.0, (), died, ups))
        failures = sum(len(each.ups) - (not each.died) for each in trials)
        trials[0] = Goodput(**{**vars(trials[0]), "each": tuple([None] * (failures - sum(t.died for t in trials)))})  # type: ignore[arg-type]
        advice = compute_advice([Goodput(**{**vars(t), "restarting_s": 0.0}) for t in trials], None)
        if advice["mtbf_interval_s"] is None:
            return None
        low, high = advice["mtbf_interval_s"]
        return not low <= 3000.0 <= high, render_advice(advice) if "interval_s" in advice else ""

    return trial


def slow_workers(noise: Callable[[Chance, int], Floats]) -> Trial:
    """Ask whether a worker of a job without a change is named."""
    return lambda c: (bool(make_job(np.array([noise(c, 200) for _ in range(8)]).T).find_slowdowns()), ASSUMED)


WATCH: dict[str, tuple[Trial, str]] = {
    **{
        name: (slow_workers(law), "if noise is normal, and as large and lasting for all workers")
        for name, (law, _) in NOISE.items() if law is not recovering
    },
    "a rank that is always 30 % slower": (
        lambda c: (bool(make_job(0.02 * c.standard_normal((200, 8)) + 0.3 * (np.arange(8) == 3)).find_slowdowns()), ASSUMED), "",
    ),
    "one worker ten times as noisy": (
        lambda c: (bool(make_job(c.standard_normal((200, 8)) * np.where(np.arange(8) == 3, 0.2, 0.02)).find_slowdowns()), ASSUMED),
        "if noise is normal, and as large and lasting for all workers",
    ),
}  # fmt: skip


def slow_ranks(noise: Callable[[Chance, int], Floats]) -> Trial:
    """Ask whether one of equal ranks is named."""
    text = "noise that lasts as long as the run looks the same"
    return lambda c: (judge_ranks(np.exp(np.array([noise(c, 20) for _ in range(8)]).T)).is_slow, text)


SLOW = {
    name: (slow_ranks(law), "noise that lasts as long as the run")
    for name, (law, _) in NOISE.items()
    if law is not recovering
}


def list_rows() -> Iterator[tuple[str, str, float, bool, Trial, str]]:
    """List door, truth, stated rate, whether it is one of intervals that hold, a trial, and words that name what fails."""
    for name, (trial, named) in COMPARE.items():
        yield "compare", name, 0.05, False, trial, named or "neither side"
    for name, (law, _) in NOISE.items():
        yield "score", name, 0.95, True, score(law), "for normal noise and independent runs on equal days"
    for name, (trial, named) in HISTORY.items():
        yield "history", name, 0.01, False, trial, named or "correlate by at most"
    for name, (trial, named) in SCALING.items():
        yield "scaling", name, 0.90, True, trial, named or LIMIT
    for name, gap in GAPS.items():
        yield "failures", name, 0.90, True, fail(gap), "if failures come at a constant rate"
    for name, (trial, named) in WATCH.items():
        yield "watch", name, 0.01, False, trial, named or "-"
    for name, (trial, named) in SLOW.items():
        yield "slow rank", name, 0.05, False, trial, named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--door", metavar="TEXT", default="", help="only rows whose door begins so [all]")
    given = parser.parse_args()
    print(f"python benchmarks/unseen_truths.py --runs {given.runs}, seed 20261129")
    print("| door | truth | stated | seen | n | holds | named |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = failed = 0
    for door, truth, stated, hold, trial, words in list_rows():
        if not door.startswith(given.door):
            continue
        chance = np.random.default_rng(20261129)
        found = [each for _ in range(given.runs) if (each := trial(chance)) is not None]
        wrong = [text for is_wrong, text in found if is_wrong]
        count = len(found) - len(wrong) if hold else len(wrong)
        low, high = wilson(count, len(found)) if found else (0.0, 1.0)
        holds = high >= stated if hold else low <= stated
        named = sum(words in text for text in wrong)
        said = "-" if holds else f'"{words}": {named} of {len(wrong)}'
        share = f"{100 * count / len(found):.1f} % [{100 * low:.1f}, {100 * high:.1f}]" if found else "nothing was said"
        rows, failed = rows + 1, failed + (not holds and named < len(wrong))
        cells = (
            door,
            truth,
            f"{100 * stated:g} % {'hold' if hold else 'wrong'}",
            share,
            len(found),
            "yes" if holds else "no",
            said,
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"\n{failed} of {rows} rows neither hold nor are named")


if __name__ == "__main__":
    main()
