"""The command `mlhpc preflight watch`: names the workers of one job that became slower while it ran.

A worker's level is its median logarithm of time in a window of steps, minus the lower quartile over all workers. So a
cause that slows all of them is ignored, and one that slows half of them is found. A slowdown begins if three conditions
hold. The level lies above the median of the worker's own earlier levels by more than ``effect``. It lies above it by
more than noise explains. It lies above the other workers by more than ``effect``. Noise is the larger of two: the change of this
worker from one window to the next, and the usual distance of all workers' levels from their own earlier ones. So noise
that lasts for many windows is noise, if most workers have it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from mlhpc.plugins.fleet.samples import read_table
from mlhpc.suite.cli.options import JSON, PercentRange, format_option
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, render_printable, render_repr
from mlhpc.suite.log.reader import parse_float
from mlhpc.suite.statistics.power import find_smallest_effect

EFFECT = 0.15  # a slowdown is larger than this part, against the worker's past and against the others
FALSE_ALARM_RATE = 0.01  # of false alarms per job, for normal noise that is alike for all workers
# A median of five steps ignores two that were disturbed
WINDOW_STEPS = 5  # steps
MOST_BASELINE_WINDOWS = 20  # windows of a worker that a level is compared with, at most
LEAST_BASELINE_WINDOWS = 4  # at least
EFFICIENCY = 0.25  # degrees of freedom per window of a median of changes: 0.37 of a variance's; changes overlap
MAD_TO_STD = 1.4826  # standard deviation of a normal distribution in units of its median deviation
MEAN_TO_STD = 1.2533  # and of its mean one
MOST_VISIBLE = 10.0  # the largest slowdown that is tried for what could have been seen
TRIED_WORKERS = 8  # that are made slow for it, at most
ASSUMED = "of jobs without a change 1 in 100 is named, if noise is normal, and as large and lasting for all workers"
COLUMNS = ("worker", "step", "time")
Floats = NDArray[np.float64]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--effect",
    type=PercentRange(1, 1000),
    default=f"{100 * EFFECT:g}%",
    metavar="PERCENT",
    show_default=True,
    help="Smallest slowdown to report.",
)
@format_option()
def watch(file: Path, effect: float, style: str) -> None:
    """Name the workers of one job that became slower while it ran, from when to when.

    FILE is a CSV file with the columns worker, step and time, one row per worker and step.

    Exit code 0 if none became slower, else 1.
    """
    job = Job.create(read_times(file), FALSE_ALARM_RATE, effect)
    found = job.find_slowdowns()
    if style == JSON:
        visible = {} if found else {"visible": job.find_visible()}
        print_line(json.dumps({"version": 1, "slowdowns": [asdict(each) for each in found], **visible}, indent=1))
    else:
        for each in found:
            end = "to the end" if each.last is None else f"until step {each.last:g}"
            text = f"worker {each.worker}: {each.times:.2f} times as slow as before from step {each.first:g} {end}"
            print_line(render_printable(text))
        print_line(ASSUMED if found else job.describe_silence())
    raise click.exceptions.Exit(ExitCode.FINDINGS if found else ExitCode.OK)


@dataclass(frozen=True)
class Slowdown:
    """``worker`` became slower at step ``first`` and recovered at step ``last``; None: it did not recover.

    ``times``: its time over that of the others, relative to the same ratio before.
    """

    worker: str
    first: float
    last: float | None
    times: float


def read_times(path: Path) -> dict[str, dict[float, float]]:
    """Read a CSV file with the columns of `COLUMNS`: times by worker and step. InputError names the line."""
    found: dict[str, dict[float, float]] = {}
    for where, row in read_table(path, COLUMNS):
        steps = found.setdefault(row["worker"], {})
        step, time = (_number(row[name], f"{where}: {name}") for name in ("step", "time"))
        if time <= 0.0 or step in steps:
            repeated = f"step {step:g} occurs twice; expected one row for each worker and step"
            what = repeated if time > 0.0 else f"time = {time:g}: expected a positive number"
            raise InputError(f"{where}: worker {render_repr(row['worker'])}: {what}")
        steps[step] = time
    if len(found) < 3:
        raise InputError(
            f"{path}: {len(found)} workers; expected at least 3, because workers are compared with each other"
        )
    return found


def find_slowdowns(
    times: Mapping[str, Mapping[float, float]], rate: float = FALSE_ALARM_RATE, effect: float = EFFECT
) -> list[Slowdown]:
    """Find the slowdowns of a job, by their first step."""
    return Job.create(times, rate, effect).find_slowdowns()


@dataclass(frozen=True)
class Job:
    """The ``levels`` of each worker by window, NaN if it took no step in it, and the ``first`` step of each window.

    ``limit``: of a change, in units of its noise. ``lasting``: noise of a level against earlier ones, of all workers.
    """

    workers: Sequence[str]
    levels: Floats
    first: Sequence[float]
    limit: float
    lasting: float
    effect: float

    @staticmethod
    def create(times: Mapping[str, Mapping[float, float]], rate: float, effect: float) -> Job:
        """Compute the levels of all workers, and their noise."""
        steps = sorted(set().union(*times.values()))
        starts = range(0, len(steps) - WINDOW_STEPS + 1, WINDOW_STEPS)
        workers = sorted(times)
        logs = np.log([[times[worker].get(step, math.nan) for step in steps] for worker in workers])
        levels = np.array([_median(logs[:, at : at + WINDOW_STEPS]) for at in starts]).T.reshape(len(workers), -1)
        # Relative to the faster workers: what slows all of them is not the fault of one
        levels = levels - np.nanquantile(levels, 0.25, axis=0) if levels.size else levels
        # Bonferroni over all workers and windows
        limit = float(stats.t.isf(rate / max(1, levels.size), max(1.0, EFFICIENCY * len(starts))))
        moved = [each for level in levels for each in _compare_with_earlier(level[~np.isnan(level)])]
        lasting = MAD_TO_STD * float(np.median(np.abs(moved))) if moved else 0.0
        return Job(workers, levels, [steps[at] for at in starts], limit, lasting, effect)

    def find_slowdowns(self) -> list[Slowdown]:
        """Find the slowdowns of the job, by their first step."""
        found = [
            each for worker, level in zip(self.workers, self.levels, strict=True) for each in self._find(worker, level)
        ]
        return sorted(found, key=lambda each: each.first)

    def find_visible(self) -> float | None:
        """Find the smallest slowdown from about the middle on that is found in 8 of 10 cases. None: not even 11 times.

        Workers of this job are made slower, so that the noise is its own.
        """
        count = len(self.first)
        chosen = self.levels[:: max(1, len(self.levels) // TRIED_WORKERS)]
        # The noise of another such job would be known as well only to about 20 %
        cases = [
            (replace(self, limit=factor * self.limit), level, count // 2 + shift * count // 8)
            for level in chosen
            for shift, factor in ((-1, 0.85), (0, 1.0), (1, 1.25))
        ]

        def find_share(effect: float) -> float:
            step = math.log1p(effect)
            return sum(bool(job._find("", level + step * (np.arange(count) >= at))) for job, level, at in cases) / len(
                cases
            )

        return find_smallest_effect(find_share, MOST_VISIBLE) if count > LEAST_BASELINE_WINDOWS else None

    def describe_silence(self) -> str:
        """Say what could have been seen."""
        visible, least = self.find_visible(), WINDOW_STEPS * (LEAST_BASELINE_WINDOWS + 1)
        blind = f"nothing can be found before step {least}"
        if len(self.first) <= LEAST_BASELINE_WINDOWS:
            return f"no verdict: {blind} of a job"
        if visible is None:
            much = f"{MOST_VISIBLE + 1:g} times as slow"
            return f"no verdict: these times are too few or too noisy to find a worker that becomes {much}"
        return (
            f"no worker is known to have become slower; one that became slower by {100 * visible:.2g} % or more"
            " around the"
            f" middle would have been named in 8 of 10 cases; {blind}"
        )

    def _find(self, worker: str, level: Floats) -> list[Slowdown]:
        """Find the slowdowns of one worker."""
        seen, first = np.flatnonzero(~np.isnan(level)), self.first
        noise = _measure_noise(np.abs(np.diff(level[seen]))) / math.sqrt(2.0)
        # A level is compared with a median of levels, whose variance is pi / 2 times that of their mean
        noise *= math.sqrt(1.0 + math.pi / 2 / LEAST_BASELINE_WINDOWS)
        least = max(math.log1p(self.effect), self.limit * max(noise, self.lasting))
        found: list[Slowdown] = []
        before: list[float] = []
        slow: list[float] = []  # levels of the slowdown that goes on
        begin, base = 0, 0.0
        for place in seen.tolist():
            here = float(level[place])
            if slow:
                # Half of the threshold: a level near the threshold would begin and end a slowdown in every window
                if here - base < least / 2:
                    found.append(Slowdown(worker, first[begin], first[place], math.exp(float(np.median(slow)) - base)))
                    slow = []
                else:
                    slow.append(here)
                    continue
            # Infinite until there are enough windows: nothing can be slower than that
            enough = len(before) >= LEAST_BASELINE_WINDOWS
            base = float(np.median(before[-MOST_BASELINE_WINDOWS:])) if enough else math.inf
            if here - base > least and here > math.log1p(self.effect):
                slow, begin = [here], place
            else:
                before.append(here)
        if slow:
            found.append(Slowdown(worker, first[begin], None, math.exp(float(np.median(slow)) - base)))
        return found


def _measure_noise(changes: Floats) -> float:
    """Measure the deviation of noise from sizes of changes: the usual one, or their mean without the two largest.

    A slowdown begins and ends with a large one. Of times that take few values most changes are 0.
    """
    rest = np.sort(changes)[:-2]
    return max(MAD_TO_STD * float(np.median(changes)), MEAN_TO_STD * float(rest.mean())) if len(rest) else 0.0


def _compare_with_earlier(level: Floats) -> list[float]:
    """Return the distance of each level from the median of the earlier ones."""
    places = range(LEAST_BASELINE_WINDOWS, len(level))
    return [float(level[at] - np.median(level[max(0, at - MOST_BASELINE_WINDOWS) : at])) for at in places]


def _median(values: Floats) -> Floats:
    """Compute the median of each row without its NaN; NaN for a row that has nothing else."""
    known = ~np.isnan(values)
    return np.array([np.median(row[here]) if here.any() else math.nan for row, here in zip(values, known, strict=True)])


def _number(text: object, where: str) -> float:
    value = parse_float(text)
    if value is None:
        raise InputError(f"{where} = {render_repr(text)}: expected a number")
    return value
