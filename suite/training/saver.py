"""Saves checkpoints of a trial in the background: at intervals, or when it has to stop.

All ranks copy their part to host memory before the same step. A thread of each writes it while training goes on.
About once a second the ranks agree whether all have written (mlhpc.suite.training.agreement). A checkpoint that cannot be
written is a warning. Training goes on, and the next one is tried when it is due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlhpc.suite.files import print_line, render_error
from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.training.checkpoint import Checkpoint, Snapshot
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.world import World

DUE, WRITTEN, FAILED = "checkpoint_due", "checkpoint_written", "checkpoint_failed"


@dataclass
class _PendingCheckpoint:
    """One rank's view of a checkpoint that is being written."""

    snapshot: Snapshot
    where: dict[str, int]
    began: float
    stall_s: float
    thread: threading.Thread | None = None
    written: bytes = b""
    write_s: float = 0.0
    done: bool = False
    error: Exception | None = None

    def write(self) -> None:
        """Write in the thread. An error is kept for the next agreement."""
        begin = time.perf_counter()
        try:
            self.written = self.snapshot.write()
        # Whatever the disk does, training goes on.
        except Exception as caught:
            self.error = caught
        self.write_s = time.perf_counter() - begin
        self.done = True


class CheckpointSaver:
    """Saves a trial's checkpoints every ``interval_s`` seconds of rank 0's clock (None: only on request).

    Every rank makes every call, except `votes`. ``warn`` gets one line, on rank 0.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        world: World,
        log: EventLog,
        interval_s: float | None,
        warn: Callable[[str], None] = lambda text: print_line(f"mlhpc: warning: {text}", error=True),
    ) -> None:
        self._checkpoint, self._world, self._log, self._warn = checkpoint, world, log, warn
        self._interval_s = interval_s
        self._last = time.perf_counter()
        self._took_s = 0.0
        self._writing: _PendingCheckpoint | None = None
        self._cleaning: threading.Thread | None = None

    def votes(self) -> dict[str, float]:
        """Return what this rank contributes to the next agreement."""
        writing = self._writing
        return {
            # Rank 0's clock alone decides, because the clocks of ranks differ.
            DUE: float(self._world.is_first and writing is None and self._is_due()),
            WRITTEN: float(writing is not None and writing.done and writing.error is None),
            FAILED: float(writing is not None and writing.done and writing.error is not None),
        }

    def settle(self, agreed: Mapping[str, float]) -> bool | None:
        """Finish the checkpoint that is being written, once all ranks have done their part. ``agreed``: the sums of
        `votes`.

        True: it is the trial's checkpoint now. False: it failed. None: ranks are still writing, or there is none.
        """
        writing = self._writing
        # Each rank votes once its thread has ended, so this is the first check at which all have.
        if writing is None or agreed[WRITTEN] + agreed[FAILED] < self._world.size:
            return None
        self._writing = None
        begin = time.perf_counter()
        problem = None if writing.error is None else render_error(writing.error)
        if not agreed[FAILED]:
            size, every = 0, self._world.gather(writing.written, bytes)
            if every is not None:
                try:
                    size = writing.snapshot.commit(every)
                except (OSError, ValueError) as caught:
                    problem = render_error(caught)
            # Commit can fail on rank 0 only; all must know before they log or clean.
            problem = self._world.broadcast(problem)
            if problem is None:
                self._log_saved(writing, size, time.perf_counter() - begin)
                self._took_s = time.perf_counter() - writing.began
                self._clean(writing.snapshot.token)
                return True
        texts = self._world.allgather(problem)
        writing.snapshot.discard()
        text = next(text for text in texts if text is not None)
        self._log.event(mllog.CHECKPOINT_FAILED, text, metadata=writing.where)
        if self._world.is_first:
            self._warn(f"checkpoint not written: {text}")
        return False

    def begin(self, state: TrainingState, position: Position, epoch_num: int) -> None:
        """Copy the training to host memory and start writing. Training stands still only for the copy."""
        begin = time.perf_counter()
        # The cleaning removes all files except the former checkpoint's. It must end before any rank writes, and ranks
        # write only after rank 0 has come to `snapshot`.
        self._join_cleaning()
        snapshot = self._checkpoint.snapshot(self._world, state, position)
        where = {"epoch_num": epoch_num, "next_step": position.step}
        writing = _PendingCheckpoint(snapshot, where, begin, time.perf_counter() - begin)
        # A daemon: a trial that ends with an error must not wait for the disk.
        writing.thread = threading.Thread(target=writing.write, name="checkpoint", daemon=True)
        writing.thread.start()
        self._writing, self._last = writing, begin

    def save(self, state: TrainingState, position: Position, epoch_num: int) -> bool:
        """Save now and wait for the disk.

        False if the trial has no checkpoint afterwards, neither a new nor a former one.
        """
        self._wait()
        self.begin(state, position, epoch_num)
        saved = self._wait()
        self._join_cleaning()
        # A trial that stops may be resumed from a former checkpoint, too.
        return bool(saved or self._world.broadcast(self._checkpoint.exists()))

    def close(self) -> None:
        """Discard a checkpoint that is being written, after training.

        No collective; no file is written after it returns.
        """
        if self._writing is not None:
            assert self._writing.thread is not None
            self._writing.thread.join()
            # A trial that came to its end needs no checkpoint; half a checkpoint helps nobody.
            self._writing.snapshot.discard()
            self._writing = None
        self._join_cleaning()

    def _is_due(self) -> bool:
        """True early enough that the new checkpoint is whole when the former one is ``interval_s`` old."""
        if self._interval_s is None:
            return False
        # If writing takes longer than half the interval, checkpoints would otherwise follow each other without a pause.
        return time.perf_counter() - self._last >= max(self._interval_s / 2, self._interval_s - self._took_s)

    def _wait(self) -> bool | None:
        if self._writing is None:
            return None
        assert self._writing.thread is not None
        self._writing.thread.join()
        return self.settle(self._world.sum(self.votes()))

    def _log_saved(self, writing: _PendingCheckpoint, size: int, commit_s: float) -> None:
        value = {
            "stall_s": writing.stall_s + commit_s,
            "write_s": writing.write_s,
            "bytes": size,
            "files": self._world.size + 2,  # one per rank, DCP's metadata, the index
        }
        self._log.event(mllog.CHECKPOINT, value, metadata=writing.where)

    def _clean(self, token: str) -> None:
        """Remove the former checkpoint's files in the background: there is one per rank."""
        if self._world.is_first:
            self._join_cleaning()
            self._cleaning = threading.Thread(target=self._checkpoint.remove_others, args=(token,), daemon=True)
            self._cleaning.start()

    def _join_cleaning(self) -> None:
        if self._cleaning is not None:
            self._cleaning.join()
            self._cleaning = None
