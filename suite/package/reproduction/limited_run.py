"""Runs a command of this suite within limits of time and memory: a stranger's configuration may ask for anything."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.errors import NO_MEMORY
from suite.files import byte_text, duration_text, make_folder
from suite.launch.local import suite_command
from suite.log.record import RunRecord
from suite.processes import end_with_parent

TIMES = 10.0  # a run may take this multiple of the package's longest run
SHORTEST_S, LONGEST_S = 600.0, 7200.0  # bounds of that limit; --limit-minutes sets any other
SHARE = 0.8  # of the free memory, for all ranks together
GRACE_S = 60.0  # between SIGTERM and SIGKILL; `mlhpc run` gives its ranks 30 s to save
TAIL = 2**16  # bytes at the end of a command's output that are read
_NO_MEMORY = re.compile(rf"{NO_MEMORY.pattern}|ended by signal 9 |Thread creation failed")


@dataclass(frozen=True)
class Bounds:
    """Limits of a command: seconds, the source of that number, and bytes of private memory per process."""

    seconds: float
    source: str
    memory: int | None


@dataclass(frozen=True)
class Done:
    """How a command ended: exit code, the last line it printed, and the limit that ended it, in words or None."""

    code: int
    last: str
    over: str | None = None


def find_bounds(records: Iterable[RunRecord], ranks: int, free: int | None, stated_s: float | None = None) -> Bounds:
    """Return the limits of a run here: ``stated_s`` or a multiple of the package's longest run, and memory per rank.

    Each rank has its share of ``free`` bytes. A log may state any time, so the multiple has a ceiling.
    """
    memory = None if free is None else max(1, int(free * SHARE) // ranks)
    if stated_s is not None:
        return Bounds(stated_s, "--limit-minutes", memory)
    took = max((_seconds(record) for record in records), default=0.0)
    seconds = min(LONGEST_S, max(SHORTEST_S, TIMES * took))
    return Bounds(seconds, f"the package's longest run took {duration_text(took)}; --limit-minutes N sets it", memory)


def execute(words: Sequence[str], log: Path, bounds: Bounds | None = None, ranks: Path | None = None) -> Done:
    """Run ``mlhpc WORDS`` with its output in ``log``, a new file. At its time limit it gets SIGTERM, then SIGKILL.

    It also ends with this process. ``ranks`` is the file with the output of its ranks. The memory limit is for the
    writable private memory of each process (RLIMIT_DATA).
    """
    make_folder(log.parent)
    over, memory = None, None if bounds is None else _allowed(bounds.memory)
    with log.open("xb") as file:
        process = subprocess.Popen(
            suite_command(*words),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=_prepare(memory, end_with_parent(os.getpid())),
        )
        with process:
            for limit_s, end in ((bounds.seconds if bounds else None, process.terminate), (GRACE_S, process.kill)):
                try:
                    process.wait(limit_s)
                    break
                except subprocess.TimeoutExpired:
                    assert bounds is not None
                    over = f"it was ended after {duration_text(bounds.seconds)} ({bounds.source})"
                    end()
    text = _tail(log) + ("" if ranks is None else _tail(ranks))
    if over is None and process.returncode and memory is not None and _NO_MEMORY.search(text):
        over = f"it needed more memory than the {byte_text(memory)} that each rank may use here"
    # Lines that begin with the output folder are the summary that a run prints last.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(str(words[-1]))]
    last = (lines[-1] if lines else "no output").removeprefix("mlhpc: ").removeprefix(f"{words[-1]} trial 0: ")
    return Done(process.returncode, last[:300], over)


def _seconds(record: RunRecord) -> float:
    """Compute the seconds from init_start to run_stop, as far as the log has them."""
    seconds = record.init_s or 0.0
    if record.run_start_s and record.run_stop_s:
        seconds += max(0.0, record.run_stop_s - record.run_start_s)
    return seconds


def _allowed(memory: int | None) -> int | None:
    """Return the bytes to allow a process: no more than this process may use itself."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    return memory if memory is None or most == resource.RLIM_INFINITY else min(memory, most)


def _prepare(memory: int | None, ask: Callable[[], None] | None) -> Callable[[], None]:
    """Return the function that the new process calls before it becomes the command."""

    def prepare() -> None:
        if ask is not None:
            ask()
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    return prepare


def _tail(log: Path) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return file.read(TAIL).decode("utf-8", "replace")
