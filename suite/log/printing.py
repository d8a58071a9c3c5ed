"""Prints lines for people in a way that never ends the work: a reader that has gone, or a full disk, costs the line only."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def print_line(text: str, *, error: bool = False) -> None:
    """Print a line to standard output, or to standard error. Once that fails, later output goes nowhere.

    Otherwise Python would fail once more with the same bytes when it ends.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        with suppress(OSError, ValueError):  # a stream without a descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
