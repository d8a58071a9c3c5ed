"""Writes a run's log around its training: facts, caches, init, run_start, run_stop. The order of events stands here.

Trials of the harness and own loops use it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from mlhpc.suite.data.lock import suspensions
from mlhpc.suite.data.manifest import Verification
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_line
from mlhpc.suite.log import mllog
from mlhpc.suite.log.goodput import find_goodput, find_recovery
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.machine.facts import write_facts
from mlhpc.suite.machine.page_cache import drop_page_caches
from mlhpc.suite.machine.probes.collect import collect_facts
from mlhpc.suite.training.records import OtherWork
from mlhpc.suite.training.statement import RunHeader, Startup, TrialPlan, log_run_header
from mlhpc.suite.world import World


class RunSession:
    """One run from its facts to run_stop. All ranks make the calls in the order of the methods; rank 0's log writes.

    ``plan`` may get another configuration until `log_header`. ``staged_s`` are the seconds of staging before the run.
    ``in_run`` is true from run_start to run_stop. ``wall_ms`` is the clock of the log.
    """

    def __init__(
        self, plan: TrialPlan, world: World, startup: Startup, path: Path, wall_ms: Callable[[], int] | None = None
    ) -> None:
        self.plan, self.world = plan, world
        self.staged_s, self.in_run = 0.0, False
        # Of a run that goes on: when it began to read its checkpoint (Unix ms), and the seconds that took
        self.reloaded: tuple[float, float] | None = None
        self.log = EventLog(path if world.is_first else None, wall_ms=wall_ms, later=True)
        self._startup = startup

    def collect_facts(self) -> None:
        """Write the facts of every node into the run folder. InputError on every rank if one cannot be written."""
        folder, error = self.plan.folder, None
        if self.world.local_rank == 0:
            try:
                write_facts(collect_facts(os.environ, run_folder=folder.root), folder.root)
            except OSError as caught:
                error = InputError(f"{folder.facts}: cannot be written: {caught.strerror}")
        self.world.check_together(error)

    def drop_caches(self, data_bytes: int) -> None:
        """Drop the page caches. What reads the data for their checksum must come before."""
        self._caches = drop_page_caches(self.plan.config.cache_drop_command, data_bytes, self.world)

    def open_log(self) -> None:
        """Create the file of the log if it is not there yet. Events wait for it.

        InputError on every rank if that fails.
        """
        error = None
        try:
            self.log.open()
        except FileExistsError as caught:
            error = InputError(f"{caught.filename}: exists already; a trial never writes over an earlier one")
        except OSError as caught:
            error = InputError(f"{caught.filename}: cannot be written: {caught.strerror}")
        self.world.check_together(error)

    def begin_init(self) -> None:
        """Write init_start, and what became of the page caches."""
        self.log.event(mllog.CACHE_STATE, self._caches.state, metadata=asdict(self._caches))
        self.log.start(mllog.INIT)
        self.log.event(mllog.CACHE_CLEAR, self._caches.state == "dropped")

    def log_header(self, header: RunHeader) -> None:
        """Write the events that name the run."""
        log_run_header(self.log, self.plan, self.world, header)

    def log_data(self, read: Verification | None, about: str) -> None:
        """Write what was read to compare the data with their checksum, and where. None: ``about`` says why not."""
        if read is not None:
            self.log.event(mllog.DATA_VERIFIED, read.value(), metadata={"place": about})
        else:
            self.log.event(mllog.DATA_VERIFIED, metadata={"reason": about})

    def end_init(self, *, train_samples: int, eval_samples: int) -> None:
        """Write the sizes of the splits, how long the ranks took to start until now, and init_stop."""
        self.log.event(mllog.TRAIN_SAMPLES, train_samples)
        self.log.event(mllog.EVAL_SAMPLES, eval_samples)
        # Staging is copied data, logged as its own duration.
        init_s = time.perf_counter() - self._startup.imported_at - self.staged_s
        seconds = {"interpreter": self._startup.interpreter_s, "imports": self._startup.imports_s, "init": init_s}
        self.log.event(mllog.STARTUP, {name: self.world.summary(each) for name, each in seconds.items()})
        self.log.stop(mllog.INIT)

    def begin_run(self) -> None:
        """Write run_start, once the slowest rank is ready. Otherwise its set-up would count as time of the run."""
        self.world.barrier()
        self._others = OtherWork(self.world)
        self.log.start(mllog.RUN)
        self.in_run = True
        if self.reloaded is not None and self.world.is_first:
            with suppress(OSError):  # a log of an earlier attempt that cannot be read ends no run
                if found := find_recovery(self.plan.folder, self.plan.trial, *self.reloaded):
                    self.log.event(mllog.RECOVERY, found)

    def end_run(
        self, reached: bool, reason: str, *, first_block: int = 1, finish: Callable[[], None] = lambda: None
    ) -> None:
        """Write run_stop, once the last rank is ready and its background work is finished."""
        self.world.barrier()
        finish()
        self._others.log(self.log)
        if suspensions:  # of the first rank, which holds the lock
            self.log.event(mllog.SUSPENDED, sum(suspensions))
        self.stop(reached, reason, first_block=first_block)

    def stop(self, reached: bool, reason: str, *, first_block: int = 1) -> None:
        """Write run_stop at once and print the reason. An error that ends the run comes here too.

        ``reached``: an evaluation reached the target.
        """
        self.log_stop(reached, reason, first_block=first_block)
        self.say(reason)

    def log_stop(self, reached: bool, reason: str, *, first_block: int = 1) -> None:
        """Write run_stop, then how the trial's time was spent."""
        # Before logging: what goes wrong there must not write a second run_stop.
        self.in_run = False
        # The only two words that MLPerf's rules allow.
        status = "success" if reached else "aborted"
        self.log.stop(mllog.RUN, metadata={"status": status, "reason": reason, "first_block": first_block})
        if self.world.is_first:
            with suppress(OSError):  # a log of an earlier attempt that cannot be read ends no run
                # After run_stop, which it reads from the log as the end of the run.
                found = find_goodput(self.plan.folder, self.plan.trial)
                self.log.event(mllog.GOODPUT, None if found is None else found.logged())

    def say(self, text: str) -> None:
        """Print a line, on rank 0 only."""
        if self.world.is_first:
            print_line(text, result=False)


def describe_error(error: BaseException) -> str:
    """Return the first line of an error, with its type: the reason of a run that it ended."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
