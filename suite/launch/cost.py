"""Estimates what a job will cost: time, node-hours, disk, files. Closed forms over the card; each states its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlhpc.suite.card import ReferencePoints, SizeCard
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_bytes, render_duration

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
            "time             unknown: give --estimate-from RUN, or launcher.flops_per_s_per_rank in the system"
        )
    else:
        lines.append(f"time             {render_duration(cost.job_s)} of training, modelled ({cost.pace.source})")
        lines.append(
            f"node-hours       {cost.node_hours:.3g}, modelled; the time limit allows {_render_limit(cost, time_limit_s)}"
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
    if fit == 0:
        found.append(
            f"one run takes about {run}, the time limit is {limit}: every run would be stopped and resumed, "
            f"and resumed runs are never scored; ask for --time-limit {_suggest_time_limit(cost.run_s)} or more nodes"
        )
    elif not array and fit < cost.trials_in_sequence:
        found.append(
            f"about {fit} of {cost.trials_in_sequence} runs of {run} fit in the time limit of {limit}: the one that "
            "is cut "
            f"would be resumed and not scored; ask for --time-limit {_suggest_time_limit(cost.job_s or 0.0)}, or --array"
        )
    return found


def _suggest_time_limit(seconds: float) -> str:
    """Return a time limit in minutes for this training: a quarter more, for what the estimate leaves out."""
    # Floor division of the negative number rounds up.
    return str(max(1, -int(-1.25 * seconds // 60)))


def _render_limit(cost: Cost, time_limit_s: int) -> str:
    return f"{cost.nodes * time_limit_s / 3600:.3g}"
