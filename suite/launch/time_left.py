"""Predicts how long runs still take: the expected epochs at the pace so far. Each number states its assumption."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from mlhpc.suite.card import SizeCard, read_reference_points
from mlhpc.suite.descriptor import describe_card, load_descriptor
from mlhpc.suite.documents import parse_yaml
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes, render_duration
from mlhpc.suite.launch.cost import Epochs, estimate_epochs
from mlhpc.suite.log.limits import read_limits
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.run_folder import RunFolder

MIN_CONVERGED_TRIALS = 3  # runs that reached the target, from which they say more than the reference points
_EPOCH = re.compile(r"epoch (\d+):")  # how a line of a rank about an evaluation begins (mlhpc.suite.training.loop)


@dataclass(frozen=True)
class Expectation:
    """The card of a size, and the epochs that a trial is expected to take."""

    card: SizeCard
    epochs: Epochs


def find_expectation(folder: RunFolder) -> Expectation | None:
    """Find the expectation for a run folder. None if the workload is not installed here, or there is no run.json."""
    try:
        info = folder.read_info()
        # A person's own loop has its card in its folder.
        own = info.loop is not None and folder.card_path.is_file()
        chosen = describe_card(folder.card_path) if own else load_descriptor(info.workload)
        card = chosen.card().size(info.size)
    except InputError:
        return None  # its log is shown all the same
    config = _read_config(folder.config_path)
    max_epochs, batch = config.get("max_epochs"), config.get("global_batch_size")
    points = read_reference_points(chosen.folder, info.size)
    unit = card.train_samples if card.eval_every_steps else 1  # what epoch_num counts in an epoch
    limit = max_epochs * unit if isinstance(max_epochs, int) else sys.maxsize
    return Expectation(card, estimate_epochs(points, batch if isinstance(batch, int) else 0, limit))


def estimate_eta_s(record: RunRecord, expected: Epochs, now_s: float) -> float | None:
    """Estimate the seconds to the end of a running trial, at the mean pace of its complete epochs.

    None before the first complete epoch.
    """
    complete = [epoch for epoch in record.epochs if epoch.complete]
    if not complete or record.run_start_s is None:
        return None
    epoch_s = sum(epoch.stop_s - epoch.start_s for epoch in complete) / len(complete)
    done = max((epoch.number or 0.0 for epoch in complete), default=0.0)
    # The time that the present epoch has taken so far.
    since_s = max(0.0, now_s - record.run_start_s - complete[-1].stop_s)
    return max(0.0, (expected.count - done) * epoch_s - since_s)


class SeriesTimeEstimator:
    """Predicts the time left of a series of trials, from the lines that their ranks print.

    Assumes ``expected`` epochs per trial until `MIN_CONVERGED_TRIALS` trials have reached the target here, then their
    mean. Assumes equal start-up times.
    """

    def __init__(self, trials: int, expected: Epochs | None, clock: Callable[[], float]) -> None:
        self._trials, self._expected, self._clock = trials, expected, clock
        self._finished: list[float] = []  # epochs of trials that reached the target
        self._ended = 0
        self._paced = (0.0, 0.0)  # seconds and epochs between lines of one trial
        self._firsts: list[
            tuple[float, float]
        ] = []  # seconds from the beginning of a trial to its first line; its epoch
        self._begin = clock()
        self._last: tuple[float, float] | None = None  # time and epoch of the newest line

    def end(self, *, reached: bool) -> None:
        """Count a trial as ended, or as left unchanged. The next one begins."""
        self._ended += 1
        if reached and self._last is not None:
            self._finished.append(self._last[1])
        self._begin, self._last = self._clock(), None

    def line(self, text: str) -> str | None:
        """Return the time left, as text, after a line of a rank.

        None if the line names no epoch, or nothing is expected.
        """
        match = _EPOCH.match(text)
        if match is None or int(match.group(1)) == 0:
            return None
        now, epoch = self._clock(), float(match.group(1))
        if self._last is not None and epoch > self._last[1]:
            seconds, epochs = self._paced
            self._paced = seconds + now - self._last[0], epochs + epoch - self._last[1]
        if self._last is None:
            self._firsts.append((now - self._begin, epoch))
        self._last = now, epoch
        seconds, epochs = self._paced
        if epochs:
            return self._left(epoch, seconds / epochs, "about")
        return self._left(epoch, (now - self._begin) / epoch, "at most")  # the start is in this pace

    def _left(self, epoch: float, pace: float, about: str) -> str | None:
        many = len(self._finished)
        if many and (self._expected is None or many >= MIN_CONVERGED_TRIALS):
            count, basis = sum(self._finished) / many, f"mean of {many} run{'s' if many > 1 else ''} here"
        elif self._expected is not None:
            count, basis = self._expected.count, re.split(r",| with ", self._expected.source)[0]
        else:
            return None
        others = self._trials - self._ended - 1
        # A trial's first line comes after start-up and some epochs; without the epochs start-up is left.
        start_s = sum(max(0.0, wait - first * pace) for wait, first in self._firsts) / len(self._firsts)
        left = max(0.0, count - epoch) * pace + others * (start_s + count * pace)
        so_far = render_duration(self._clock() - self._begin)
        of = "the run" if self._trials == 1 else f"{self._trials} runs"
        when = f"{about} {render_duration(left)} left of {of}" if left else f"past the expected end of {of}"
        return f"{so_far}; {when} (epoch {count:.4g}, {basis})"


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        data = parse_yaml(read_bytes(path, read_limits().json).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}
