"""The start of a rank: how long its process has existed, and an end to it if it cannot be connected with the others."""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from suite.config import Watching


def process_age_s() -> float:
    """Seconds since the kernel started this process (Linux; resolution one clock tick, usually 10 ms)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): start time after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


@contextmanager
def watched_start(settings: Watching) -> Iterator[None]:
    """Print this rank's Python stack to stderr, and end it with exit code 1, if what is done inside takes too long.

    Limit and action are the watchdog's, which needs connected ranks. A thread of C does it: MPI's start, which has been seen
    to wait for ever, holds Python's lock.
    """
    if settings.silence_s is not None:
        faulthandler.dump_traceback_later(settings.silence_s, exit=settings.action == "end")
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
