"""The exit code that a worker leaves in a file."""

from __future__ import annotations

from pathlib import Path

from suite.files import read_bytes
from suite.log.limits import EXIT_CODE_BYTES

WORKER_CODES = (0, 1, 2, 3)


def read_code(path: Path | None) -> int | None:
    """Read an exit code of a worker from a file. None if there is no such file, or it holds something else."""
    try:
        text = "" if path is None else read_bytes(path, EXIT_CODE_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() and int(text) in WORKER_CODES else None
