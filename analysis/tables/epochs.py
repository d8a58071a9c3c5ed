"""Counts epochs: what ``epoch_num`` means in a log, and how many epochs an evaluation or a run stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.log.timeline import Evaluation, Interval, Timeline

LARGEST_PLAUSIBLE = 1e12  # of any count or time that a log states; larger numbers are left out and named


@dataclass(frozen=True)
class EpochCount:
    """Says how a log numbers its epochs. ``samples_per_epoch`` is None if ``epoch_num`` counts epochs; else it counts
    samples.

    OpenFold's logs give each block of steps the number of samples seen by its end.
    """

    zero_based: bool
    samples_per_epoch: float | None

    @staticmethod
    def of(record: RunRecord, line: Timeline) -> EpochCount:
        """Find how a log counts.

        Numbers that rise by at least a global batch from one block to the next count samples.
        """
        batch, samples = record.global_batch_size or 0, record.train_samples or 0
        numbers = [epoch.number for epoch in line.epochs if epoch.number is not None]
        # Repeated or falling numbers, as after a restart, say nothing about the unit
        steps = [later - earlier for earlier, later in pairwise(numbers) if later > earlier]
        counts_samples = bool(steps) and 0 < samples <= LARGEST_PLAUSIBLE and min(steps) >= batch > 1
        return EpochCount(line.zero_based, float(samples) if counts_samples else None)

    def at(self, evaluation: Evaluation | None) -> float | None:
        """Compute the epochs trained when an evaluation was made. None: not known."""
        if evaluation is None or evaluation.number is None:
            return None
        if self.samples_per_epoch:
            epochs = evaluation.number / self.samples_per_epoch
        else:
            # The evaluation after epoch 0 has seen one epoch
            epochs = evaluation.number + (1.0 if self.zero_based else 0.0)
        return epochs if 0.0 <= epochs <= LARGEST_PLAUSIBLE else None

    def of_run(self, epochs: Sequence[Interval], evals: Sequence[Evaluation], *, overlapping: bool) -> float | None:
        """Compute the epochs that the run's training time was spent on: those of the last evaluation.

        If evaluations overlap training, they are all epochs that began: the last ones were never evaluated.
        """
        if self.samples_per_epoch is None and overlapping:
            return float(len(epochs))
        return self.at(evals[-1]) if evals else None
