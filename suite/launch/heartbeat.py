"""Records the last attempt at a trial: a heartbeat while its local launcher lives, then the exit code."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.exit_codes import WORKER_CODES
from mlhpc.suite.files import make_folder, read_bytes, read_json
from mlhpc.suite.log.limits import EXIT_CODE_BYTES, read_limits
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.processes import read_start_time
from mlhpc.suite.world import find_node_name

DEAD_AFTER_S = 60.0  # of no heartbeat, where the process cannot be looked at


@dataclass(frozen=True)
class AttemptState:
    """The state of the last attempt at a trial: exit code if it ended, else whether its launcher lives.

    Both are None if there was no local launcher, or it left nothing.
    """

    code: int | None = None
    alive: bool | None = None


@contextmanager
def keep_heartbeat(path: Path, what: str) -> Iterator[None]:
    """Keep a file, which is a lock, while the body runs. LockedError if another living launcher has it.

    If the disk cannot hold the file, the body runs without it.
    """
    with ExitStack() as stack:
        # Only the disk's errors: a LockedError of another launcher still ends this one.
        with suppress(OSError):
            make_folder(path.parent)
            stack.enter_context(create_lock(path, what))
        yield


def read_attempt_state(folder: RunFolder, trial: int, *, now_s: float | None = None) -> AttemptState:
    """Read what the last attempt at a trial left. A damaged file counts as none."""
    path = folder.running(trial)
    try:
        data = read_json(path, read_limits().json)
        touched_s = path.stat().st_mtime
        host, pid, started = str(data["host"]), int(data["pid"]), data["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return AttemptState(code=read_exit_code(folder.exit_code(trial)))
    # On this host the process itself can be looked at; from elsewhere only the age of its file.
    if host in (socket.gethostname(), find_node_name()):
        # The kernel reuses process numbers; the start time tells the launcher from a later process.
        return AttemptState(alive=started is not None and read_start_time(pid) == started)
    return AttemptState(alive=(time.time() if now_s is None else now_s) - touched_s < DEAD_AFTER_S)


def read_exit_code(path: Path | None) -> int | None:
    """Read a worker's exit code from a file. None if there is no such file, or it holds something else."""
    try:
        text = "" if path is None else read_bytes(path, EXIT_CODE_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() and int(text) in WORKER_CODES else None
