"""States what one trial is to do, before torch is imported. It is the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from mlhpc.suite.card import SizeCard, Target
from mlhpc.suite.config import RunConfig
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.log.run_folder import RunFolder


@dataclass(frozen=True)
class TrialPlan:
    """Trial number ``trial`` of the ``runs`` of a run folder.

    ``mode``: strong (time to train) or weak (throughput). ``base_seed`` None: the operating system draws the seed.
    ``resume``: continue the trial. The worker decides from where (mlhpc.suite.log.resume); `run_trial` loads its checkpoint.
    ``replace_failed``: repeat a run that began and failed.
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
        """The metric's value that the trial must reach."""
        return self.descriptor.card().target(self.config.size)
