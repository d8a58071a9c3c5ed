"""TrialPlan: what one trial is to do. It is the same on every rank and is made before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from suite.card import SizeCard, Target
from suite.config import RunConfig
from suite.descriptor import Descriptor
from suite.log.run_folder import RunFolder


@dataclass(frozen=True)
class TrialPlan:
    """Trial number ``trial`` of the ``runs`` of a run folder. ``mode`` is strong (time to train) or weak (throughput).

    ``base_seed`` None: the seed is drawn from the operating system. ``resume``: continue the trial, in the worker from
    wherever it stands (suite.log.resume), in `run_trial` from its checkpoint. ``replace_failed``: a run that began
    and failed runs again.
    """

    descriptor: Descriptor
    config: RunConfig
    folder: RunFolder
    trial: int
    runs: int = 1
    mode: str = "strong"
    base_seed: int | None = None
    resume: bool = False
    replace_failed: bool = False

    @property
    def size_card(self) -> SizeCard:
        """The card of the config's size."""
        return self.descriptor.card().size(self.config.size)

    @property
    def target(self) -> Target:
        """What the trial must reach."""
        return self.descriptor.card().target(self.config.size)
