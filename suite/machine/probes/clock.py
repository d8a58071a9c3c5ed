"""Compares the node's clock with that of the file server, and asks the kernel whether the clock is synchronised."""

from __future__ import annotations

import ctypes
import tempfile
import time
from pathlib import Path

STA_UNSYNC = 5  # TIME_ERROR of adjtimex(2)


def measure_clock_skew(folder: Path) -> float | None:
    """Return by how many seconds a new file in ``folder`` is newer than this node's clock. None if none can be written.

    A shared file system stamps files with its server's clock. A local one uses this node's, so the result is about 0.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mlhpc-clock-") as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            written = Path(file.name).stat().st_mtime
            after = time.time()
    except OSError:
        return None
    return written - min(max(written, before), after)  # what lies between is no difference


def is_synchronised() -> bool | None:
    """Return True if a time service keeps the kernel's clock; None if unknown (containers, other systems)."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes 0: only read
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != STA_UNSYNC
