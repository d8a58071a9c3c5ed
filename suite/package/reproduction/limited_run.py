"""Runs a command of this suite within limits of time and memory. A stranger's configuration may ask for anything."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite.errors import NO_MEMORY
from mlhpc.suite.files import make_folder, render_bytes, render_duration
from mlhpc.suite.launch.local import make_suite_command
from mlhpc.suite.log.record import RunRecord
from mlhpc.suite.processes import make_parent_death_hook

LIMIT_FACTOR = 10.0  # a run may take this multiple of the package's longest run
SHORTEST_S, LONGEST_S = 600.0, 7200.0  # bounds of that limit; --limit-minutes sets any other
MEMORY_SHARE = 0.8  # of the free memory, for all ranks together
GRACE_S = 60.0  # between SIGTERM and SIGKILL; `mlhpc run` gives its ranks 30 s to save
TAIL_BYTES = 2**16  # bytes at the end of a command's output that are read
# Signal 9 is what Linux sends when memory runs out; threads cannot be made at a limit of private memory.
_NO_MEMORY = re.compile(rf"{NO_MEMORY.pattern}|ended by signal 9 |Thread creation failed")


@dataclass(frozen=True)
class RunLimits:
    """Limits of a command: seconds, the source of that number, and bytes of private memory per process."""

    seconds: float
    source: str
    memory: int | None


@dataclass(frozen=True)
class CommandResult:
    """The end of a command: exit code and last printed line. ``over`` names the limit that ended it, or is None."""

    code: int
    last: str
    over: str | None = None


def find_run_limits(
    records: Iterable[RunRecord], ranks: int, free: int | None, stated_s: float | None = None
) -> RunLimits:
    """Return the limits of a run here. Its time is ``stated_s``, or a multiple of the package's longest run.

    Each rank has its share of ``free`` bytes. A log may state any time, so the multiple has a ceiling.
    """
    memory = None if free is None else max(1, int(free * MEMORY_SHARE) // ranks)
    if stated_s is not None:
        return RunLimits(stated_s, "--limit-minutes", memory)
    took = max((_sum_run_seconds(record) for record in records), default=0.0)
    seconds = min(LONGEST_S, max(SHORTEST_S, LIMIT_FACTOR * took))
    return RunLimits(
        seconds, f"the package's longest run took {render_duration(took)}; --limit-minutes N sets it", memory
    )


def run_limited(
    words: Sequence[str], log: Path, bounds: RunLimits | None = None, ranks: Path | None = None
) -> CommandResult:
    """Run ``mlhpc WORDS`` with its output in ``log``, a new file. At its time limit it gets SIGTERM, then SIGKILL.

    It also ends with this process. ``ranks`` is the file with the output of its ranks. The memory limit is for the
    writable private memory of each process (RLIMIT_DATA).
    """
    make_folder(log.parent)
    over, memory = None, None if bounds is None else _limit_memory(bounds.memory)
    # x: the log of an earlier attempt is never overwritten.
    with log.open("xb") as file:
        process = subprocess.Popen(
            make_suite_command(*words),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=_make_child_setup(memory, make_parent_death_hook(os.getpid())),
        )
        with process:
            # First the time limit, then the time to save after SIGTERM.
            for limit_s, end in ((bounds.seconds if bounds else None, process.terminate), (GRACE_S, process.kill)):
                try:
                    process.wait(limit_s)
                    break
                except subprocess.TimeoutExpired:
                    assert bounds is not None
                    over = f"it was ended after {render_duration(bounds.seconds)} ({bounds.source})"
                    end()
    text = _read_tail(log) + ("" if ranks is None else _read_tail(ranks))
    if over is None and process.returncode and memory is not None and _NO_MEMORY.search(text):
        over = f"it needed more memory than the {render_bytes(memory)} that each rank may use here"
    # Lines that begin with the output folder are the summary that a run prints last.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(str(words[-1]))]
    last = (lines[-1] if lines else "no output").removeprefix("mlhpc: ").removeprefix(f"{words[-1]} trial 0: ")
    return CommandResult(process.returncode, last[:300], over)


def _sum_run_seconds(record: RunRecord) -> float:
    """Compute the seconds from init_start to run_stop, as far as the log has them."""
    seconds = record.init_s or 0.0
    if record.run_start_s and record.run_stop_s:
        seconds += max(0.0, record.run_stop_s - record.run_start_s)
    return seconds


def _limit_memory(memory: int | None) -> int | None:
    """Return the bytes to allow a process: no more than this process may use itself."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    return memory if memory is None or most == resource.RLIM_INFINITY else min(memory, most)


def _make_child_setup(memory: int | None, ask: Callable[[], None] | None) -> Callable[[], None]:
    """Return the function that the new process calls before it becomes the command."""

    def prepare() -> None:
        if ask is not None:
            ask()
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    return prepare


def _read_tail(log: Path) -> str:
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode("utf-8", "replace")
