"""Predicts how long runs still take: the expected epochs at the pace so far. Each number states its assumption.

Estimates what a job will cost: time, node-hours, disk, files. Closed forms over the card; each states its source.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from mlhpc.suite.card import ReferencePoints, SizeCard, read_reference_points
from mlhpc.suite.descriptor import describe_card, load_descriptor
from mlhpc.suite.documents import parse_yaml
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import LEAST_S, LEAST_SHARE, read_bytes, render_bytes, render_duration
from mlhpc.suite.launch.job import LONGEST_S
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.run_folder import RunFolder

if TYPE_CHECKING:
    from mlhpc.suite.log.record import RunRecord


FILES_PER_TRIAL = 2  # log and output
FILES_PER_RUN = 5  # run.json, config.yaml, job.sbatch, job.json, exit file


@dataclass(frozen=True)
class DataSize:
    """Bytes and files of the data set. ``source`` says whether they were counted or computed."""

    bytes: int
    files: int | None
    source: str


@dataclass(frozen=True)
class Pace:
    """Seconds per epoch of one trial, including its evaluation, and the source of that number."""

    epoch_s: float
    source: str


@dataclass(frozen=True)
class Epochs:
    """The epochs that a trial is expected to take, and the source of that number."""

    count: float
    source: str


@dataclass(frozen=True)
class Cost:
    """The modelled cost of one job. ``pace``, ``job_s`` and ``node_hours`` are None if the pace is unknown."""

    epochs: Epochs
    pace: Pace | None
    trials_in_sequence: int
    nodes: int
    data: DataSize
    staged_bytes: int
    files_written: int

    @property
    def run_s(self) -> float | None:
        """Seconds of training of one run."""
        return None if self.pace is None else self.pace.epoch_s * self.epochs.count

    @property
    def job_s(self) -> float | None:
        """Seconds of training in the job; set-up, staging and queueing are not included."""
        return None if self.run_s is None else self.run_s * self.trials_in_sequence

    @property
    def node_hours(self) -> float | None:
        """Nodes times hours."""
        return None if self.job_s is None else self.job_s * self.nodes / 3600


def estimate_epochs(points: ReferencePoints | None, global_batch_size: int, max_epochs: int) -> Epochs:
    """Return the mean of the reference point with the nearest batch size, else the configuration's epoch limit."""
    known = [point for point in points.points if point.epochs] if points else []
    if not known:
        return Epochs(max_epochs, "max_epochs, an upper bound: no reference convergence point")
    point = min(known, key=lambda item: abs(item.global_batch_size - global_batch_size))
    return Epochs(
        # A run of this configuration ends after max_epochs.
        min(point.mean, max_epochs),
        f"mean of {len(point.epochs)} reference runs with global batch size {point.global_batch_size}",
    )


def compute_pace_from_rate(card: SizeCard, ranks: int, flops_per_s_per_rank: float) -> Pace:
    """Compute the pace of ranks that all sustain a stated rate."""
    flops = card.train_samples * card.training_flops_per_sample + card.eval_samples * card.forward_flops_per_sample
    return Pace(flops / (ranks * flops_per_s_per_rank), f"{flops_per_s_per_rank:.3g} FLOP/s per rank as stated")


def compute_pace_from_record(record: RunRecord, ranks: int) -> Pace:
    """Compute the pace from an earlier run, assuming throughput in proportion to ranks.

    InputError if no epoch is complete.
    """
    complete = [epoch for epoch in record.epochs if epoch.complete]
    if not complete or not record.ranks:
        raise InputError(f"{record.path}: no complete epoch to estimate from; give --estimate-from another run folder")
    epoch_s = sum(epoch.stop_s - epoch.start_s for epoch in complete) / len(complete)
    return Pace(
        epoch_s * record.ranks / ranks,
        f"{render_duration(epoch_s)} per epoch on {record.ranks} ranks in {record.path}, in proportion to ranks",
    )


def render_cost(cost: Cost, time_limit_s: int) -> list[str]:
    """Render the cost as lines for a person."""
    lines = [f"epochs per run   {cost.epochs.count:.4g} ({cost.epochs.source})"]
    if cost.job_s is None or cost.node_hours is None or cost.pace is None:
        lines.append(
            "time             unknown: give --estimate-from RUN, or resources.flops_per_s_per_rank in the system"
        )
    else:
        lines.append(f"time             {render_duration(cost.job_s)} of training, modelled ({cost.pace.source})")
        lines.append(
            f"node-hours       {cost.node_hours:.3g}, modelled; the time limit allows"
            f" {_render_limit(cost, time_limit_s)}"
        )
    files = "" if cost.data.files is None else f" in {cost.data.files} files"
    lines.append(f"data set         {render_bytes(cost.data.bytes)}{files} ({cost.data.source})")
    if cost.staged_bytes:
        each, total = render_bytes(cost.data.bytes), render_bytes(cost.staged_bytes)
        lines.append(f"staged copies    {each} on each of {cost.nodes} nodes, {total} in all")
    lines.append(f"files written    about {cost.files_written} in the run folder")
    return lines


def find_obstacles(cost: Cost, time_limit_s: int, *, trials: int, required: int, array: bool) -> list[str]:
    """List why a plan cannot give a score, according to the estimate. ``trials``: scored runs of the job."""
    found = []
    if trials < required:
        found.append(f"{trials} run{'s' if trials > 1 else ''} planned; a score of this size needs {required}")
    if cost.run_s is None:
        return found
    limit, run = render_duration(time_limit_s), render_duration(cost.run_s)
    # Only whole runs count: a run that is cut is resumed and not scored.
    fit = int(time_limit_s // cost.run_s) if cost.run_s > 0 else trials
    if fit == 0 and 1.25 * cost.run_s > LONGEST_S:
        years = cost.run_s * cost.nodes / (365.25 * 86400)
        found.append(f"this cannot finish here: one run needs about {years:.2g} node-years, on {cost.nodes} nodes")
    elif fit == 0:
        found.append(
            f"one run takes about {run}, the time limit is {limit}: every run would be stopped and resumed, "
            f"and resumed runs are never scored; ask for --time-limit {_suggest_time_limit(cost.run_s)} or more nodes"
        )
    elif not array and fit < cost.trials_in_sequence:
        found.append(
            f"about {fit} of {cost.trials_in_sequence} runs of {run} fit in the time limit of {limit}: the one that is"
            f" cut would be resumed and not scored; {_suggest_longer(cost.job_s or 0.0)}--array"
        )
    return found


def _suggest_longer(seconds: float) -> str:
    return f"ask for --time-limit {_suggest_time_limit(seconds)}, or " if 1.25 * seconds <= LONGEST_S else "use "


def _suggest_time_limit(seconds: float) -> str:
    """Return a time limit in minutes for this training: a quarter more, for what the estimate leaves out."""
    # Floor division of the negative number rounds up.
    return str(max(1, -int(-1.25 * seconds // 60)))


def _render_limit(cost: Cost, time_limit_s: int) -> str:
    return f"{cost.nodes * time_limit_s / 3600:.3g}"


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
        self._begin = self._series_begin = clock()
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
        done = sum(self._finished) + epoch
        if self._clock() - self._series_begin < LEAST_S or done < LEAST_SHARE * count * self._trials:
            return so_far  # the first epochs and seconds say little about the others
        of = "the run" if self._trials == 1 else f"{self._trials} runs"
        when = f"{about} {render_duration(left)} left of {of}" if left else f"past the expected end of {of}"
        return f"{so_far}; {when} (epoch {count:.4g}, {basis})"


def _read_config(path: Path) -> Mapping[str, object]:
    try:
        data = parse_yaml(read_bytes(path, read_limits().json).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}
