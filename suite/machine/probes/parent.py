"""The signal that Linux sends to a process when its parent ends (PR_SET_PDEATHSIG of prctl(2))."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def load_parent_signal() -> Callable[[int], None] | None:
    """Load the function that asks for a signal when this process's parent ends; 0 asks for none. None on other systems.

    The C library is loaded here: between fork and exec a child must not load anything, but may call the function.
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def ask(number: int) -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)

    return ask
