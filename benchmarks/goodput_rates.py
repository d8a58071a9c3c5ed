"""How right `mlhpc status --goodput` is about simulated trials of which the truth is known.

    python benchmarks/goodput_rates.py [--runs 200] [--truth TEXT]

A row is a truth. A run is five trials that are killed at random times, go on from their last checkpoint, and may die for good.
"error" is that of the share of time that counts, in points: the mean over runs, and the largest. "holds" is how often the
90 % interval of the time between failures holds the truth, "ratio" the learned time over it (median), "interruptions" how
many a run has. The fast form is in tests/suite/log/test_goodput.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.verdict_rates import wilson
from mlhpc.suite.log.goodput import estimate_mtbf_s, find_goodput
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.runs import describe

BEGIN_MS = 1_700_000_000_000
TRIALS = 5


@dataclass(frozen=True)
class Truth:
    """How trials go, in seconds. ``gap``: draws the time up until the next failure, 1 on average."""

    training: float = 8000.0
    mtbf: float = 3000.0
    gap: Callable[[np.random.Generator], float] = lambda chance: chance.exponential()
    interval: float = 600.0
    stall: float = 1.0
    write: float = 20.0
    starting: float = 60.0
    heartbeat: float = 10.0  # between events of the log
    dies: float = 0.2  # share of failures after which nothing goes on


TRUTHS: dict[str, Truth] = {
    "constant rate": Truth(),
    "none dies for good": Truth(dies=0.0),
    "every failure is the last": Truth(dies=1.0),
    "checkpoints stall for 60 s": Truth(stall=60.0),
    "no checkpoint": Truth(interval=math.inf, training=4000.0),
    "killed while starting, one in four": Truth(mtbf=400.0, starting=100.0, interval=60.0, training=1500.0),
    "few failures": Truth(mtbf=30000.0),
    "an event every 5 min": Truth(heartbeat=300.0),
    "failures in clusters (Weibull, shape 0.6)": Truth(
        gap=lambda chance: chance.weibull(0.6) / math.gamma(1 + 1 / 0.6)
    ),
}


@dataclass
class Trial:
    """What really happened to one trial, and the events of each attempt: (seconds, key, value, metadata)."""

    logs: list[list[tuple[float, str, object, dict[str, object]]]] = field(default_factory=list)
    resumed: list[bool] = field(default_factory=list)
    wall: float = 0.0
    useful: float = 0.0
    up: float = 0.0
    failures: int = 0


def simulate(chance: np.random.Generator, truth: Truth) -> Trial:
    """Run one trial until it is done or dies."""
    trial, now, kept = Trial(), 0.0, 0.0  # kept: seconds of training that a checkpoint has
    while True:
        begin, start = now, now + truth.starting
        fails = begin + truth.mtbf * truth.gap(chance)
        events = [(begin, "init_start", None, {})]
        if kept:
            events.append((start, "run_resumed", None, {"next_step": round(kept)}))
        events.append((start, "run_start", None, {}))
        at, done, saved, last_saved = start, kept, kept, start
        while done < truth.training and at < fails:
            step = min(truth.training - done, last_saved + truth.interval - at)
            at, done = at + step, done + step
            if done < truth.training:
                event = (at + truth.stall + truth.write, "checkpoint_saved")
                value = {"stall_s": truth.stall, "write_s": truth.write}
                events.append((*event, value, {"next_step": round(done)}))
                if event[0] <= fails:
                    saved = done
                last_saved = at = at + truth.stall
        end = min(at, fails)
        events += [(beat, "epoch_start", None, {}) for beat in np.arange(start, end, truth.heartbeat).tolist()]
        ended = at <= fails
        if ended:
            events.append((end, "run_stop", None, {"status": "success"}))
        trial.logs.append(sorted((each for each in events if each[0] <= end), key=lambda each: each[0]))
        trial.resumed.append(bool(kept))
        trial.up += end - begin
        trial.failures += not ended
        kept = truth.training if ended else saved
        if ended or chance.random() < truth.dies:
            trial.wall, trial.useful = end, kept
            return trial
        now = end + chance.uniform(10.0, 600.0)


def write(root: Path, number: int, trial: Trial) -> None:
    """Write the logs of a trial as attempts leave them: those that nothing went on from are moved aside."""
    again = 0
    for place, (events, resumed) in enumerate(zip(trial.logs, trial.resumed, strict=True)):
        replaced = place + 1 < len(trial.logs) and not trial.resumed[place + 1]
        again += resumed
        name = f"failed_{number}_{place + 1}.txt" if replaced else f"result_{number}.txt"
        lines = [
            ":::MLLOG "
            + json.dumps(
                {
                    "namespace": "",
                    "time_ms": BEGIN_MS + round(1000 * at),
                    "event_type": "POINT_IN_TIME",
                    "key": key,
                    "value": value,
                    "metadata": {"file": "x", "lineno": 1, **metadata},
                }
            )
            for at, key, value, metadata in events
        ]
        (root / (f"resumed_{number}_{again}.txt" if resumed else name)).write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class Outcome:
    """What was said of one run. ``error``: of the share that counts; ``mtbf_s``: mean and ends of the interval."""

    error: float
    mtbf_s: tuple[float, float, float]
    interruptions: int


def look(chance: np.random.Generator, truth: Truth) -> Outcome:
    """Simulate one run, and read what the suite says of it."""
    trials = [simulate(chance, truth) for _ in range(TRIALS)]
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for number, trial in enumerate(trials):
            write(root, number, trial)
        describe(root, count=TRIALS)
        found = [find_goodput(RunFolder(root), number) for number in range(TRIALS)]
    said = [each for each in found if each is not None]
    ratio = sum(each.useful_s for each in said) / sum(each.wall_s for each in said)
    true = sum(each.useful for each in trials) / sum(each.wall for each in trials)
    interruptions = sum(each.interruptions for each in said)
    assert interruptions == sum(each.failures for each in trials)
    return Outcome(ratio - true, estimate_mtbf_s(sum(each.up_s for each in said), interruptions), interruptions)


def row(name: str, runs: int) -> str:
    """Measure one truth."""
    truth = TRUTHS[name]
    chance = np.random.default_rng(20261127)
    found = [look(chance, truth) for _ in range(runs)]
    held = sum(low <= truth.mtbf <= high for _, low, high in (each.mtbf_s for each in found))
    low, high = wilson(held, runs)
    errors = [100 * each.error for each in found]
    ratio = statistics.median(each.mtbf_s[0] for each in found) / truth.mtbf
    return (
        f"| {name} | {statistics.fmean(errors):+.2f} | {max(errors, key=abs):+.2f} | {100 * held / runs:.1f} % | "
        f"{100 * low:.1f} to {100 * high:.1f} % | {ratio:.2f} | {statistics.median(e.interruptions for e in found):g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--truth", action="append", metavar="TEXT", help="only truths that begin so; repeatable [all]")
    given = parser.parse_args()
    print(f"python benchmarks/goodput_rates.py --runs {given.runs}: five trials each, 90 % stated, seed 20261127")
    print("| truth | error, mean | largest | holds | Wilson | ratio | interruptions |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in TRUTHS:
        if given.truth is None or name.startswith(tuple(given.truth)):
            print(row(name, given.runs), flush=True)


if __name__ == "__main__":
    main()
