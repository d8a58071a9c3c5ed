"""Finds the data set of a trial, stages it before or during training, and opens its splits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlhpc.suite.config import RunConfig, choose_default_data_root
from mlhpc.suite.data.build import find_data
from mlhpc.suite.data.manifest import Manifest
from mlhpc.suite.data.staging import StagingReport, create_own_world, stage
from mlhpc.suite.data.verification import Verification, verify_shards
from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.training.parallel.sharing import Parallel
from mlhpc.suite.training.parallel.slabs import cut
from mlhpc.suite.training.plan import TrialPlan
from mlhpc.suite.workload import Dataset, Workload
from mlhpc.suite.world import World


def open_data(config: RunConfig, world: World) -> tuple[Path, Manifest]:
    """Find the data root and read its manifest, on rank 0 only. ValueError says how to make the data."""
    root = config.data or choose_default_data_root(config.workload, config.size)
    return root, world.compute_on_first(partial(find_data, root, config.workload, config.size), Manifest)


def verify_source(
    config: RunConfig, root: Path, manifest: Manifest, world: World, tick: Callable[[], None]
) -> Verification | None:
    """Compare the shards of the run with their checksums. ValueError names a damaged shard.

    None if the config forbids it, or if the run reads a staged copy. Call it before caches are dropped: it reads all
    data.
    """
    # Staging compares what arrives on each node, so the source need not be read twice.
    staged = config.staging.directory is not None and not config.staging.overlap
    return verify_shards(root, manifest.shards, world, tick) if config.verify_data and not staged else None


class RunData:
    """Opens the splits of a data set, from the data root. Once it is staged, from node-local storage."""

    def __init__(
        self, plan: TrialPlan, workload: Workload, source: Path, world: World, log: EventLog, parallel: Parallel
    ) -> None:
        self._workload, self._source, self._trial = workload, source, plan.trial
        self._config, self._world, self._log = plan.config, world, log
        self._root, self._parallel = source, parallel
        # The root that a split was opened from tells whether it is still the present one.
        self._open: dict[str, tuple[Path, Dataset]] = {}
        self._thread: threading.Thread | None = None
        self._report: StagingReport | None = None
        self._error: Exception | None = None
        self.staged_s = 0.0
        # Background staging and training call collectives at the same time. On shared communicators they would mix.
        self._staging_world = create_own_world(world)

    def open_or_stage(self, verified: Verification | None) -> None:
        """Stage the data if the config says so, then open both splits. Errors are raised here, not during training.

        ``verified``: the result of `verify_source`.
        """
        directory = self._config.staging.directory
        if directory is not None and not self._config.staging.overlap:
            begin = time.perf_counter()
            self._log.start(mllog.STAGING)
            self._stage()
            self.staged_s = time.perf_counter() - begin
            self._log_staged(overlapped=False)
        # After staging, because its report says whether the copies were verified.
        self._log_verified(verified)
        for split in ("train", "validation"):
            self._split(split)

    def _log_verified(self, verified: Verification | None) -> None:
        if not self._config.verify_data:
            self._log.event(mllog.DATA_VERIFIED, metadata={"reason": "verify_data is false"})
        elif verified is not None:
            self._log.event(mllog.DATA_VERIFIED, verified.value(), metadata={"place": "data root"})
        elif self._report is not None:
            shards = self._report.manifest.shards
            staged = Verification(self._report.manifest.bytes, len(shards), self._report.seconds)
            self._log.event(mllog.DATA_VERIFIED, staged.value(), metadata={"place": "staged copy of each node"})

    def begin_overlapped(self) -> None:
        """Start background staging, if the config asks for it."""
        if self._config.staging.directory is not None and self._config.staging.overlap:
            self._log.start(mllog.STAGING)
            # A daemon, so that a failed training does not wait for the copy.
            self._thread = threading.Thread(target=self._stage_guarded, name="staging", daemon=True)
            self._thread.start()

    def train(self, block: int) -> Dataset:
        """Return the training data of a block.

        Before the second block, waits for background staging and changes over to the copy.
        """
        # The first block reads from the source. All ranks change over at the same block, because `finish` is a
        # collective.
        if self._thread is not None and block > 1:
            self.finish()
        return self._split("train")

    def validation(self, block: int) -> Dataset:
        """Return the evaluation data."""
        return self._split("validation")

    def finish(self) -> None:
        """Wait for background staging. Its error is raised here, on every rank."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        # Staging may have failed on one node only; the others would wait for it in the next collective.
        self._world.check_together(self._error)
        self._log_staged(overlapped=True)

    def _split(self, split: str) -> Dataset:
        opened = self._open.get(split)
        if opened is None or opened[0] != self._root:
            error, dataset = None, None
            try:
                # With a plan that splits samples, this rank reads only its part of each.
                slabs = self._parallel.slabs(evaluation=split != "train")
                dataset = cut(self._workload.dataset(split, self._root), slabs)
            except (ValueError, OSError) as caught:
                error = caught
            self._world.check_together(error)
            assert dataset is not None
            opened = self._open[split] = (self._root, dataset)
        return opened[1]

    def _stage(self) -> None:
        directory = self._config.staging.directory
        assert directory is not None
        # Trials that run at the same time on one node need different folders.
        place = Path(str(directory).replace("{trial}", str(self._trial)))
        self._report = stage(self._source, place, self._staging_world, verify=self._config.verify_data)

    def _stage_guarded(self) -> None:
        try:
            self._stage()
        # Kept for `finish`: an error raised in this thread would reach nobody.
        except (ValueError, OSError) as error:
            self._error = error

    def _log_staged(self, *, overlapped: bool) -> None:
        report = self._report
        assert report is not None
        self._root = report.root
        self._log.stop(mllog.STAGING, metadata={"staging_duration": report.seconds})
        self._log.event(mllog.STAGING_STATS, report.stats(overlapped=overlapped))
