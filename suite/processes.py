"""Starts Pythons of ours, finds and ends the processes of a launch, and ends with a parent.

mpiexec starts each rank in a session of its own, out of reach of signals to a process group. A rank outlives mpiexec's
proxy. So ranks are found by a token in their environment, not by their parents.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mlhpc.suite import LAUNCH

if TYPE_CHECKING:
    import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def make_python_command(*words: str, python: str = sys.executable) -> list[str]:
    """Return the command line of a Python of ours; its words begin with -m or -c. No other code makes one.

    With -P the current folder is not on the import path: a ``mpi4py.py`` in a downloaded folder is not run.
    """
    return [python, "-P", *words]


def find_by_token(token: str, *, ranks_only: bool = False) -> list[psutil.Process]:
    """Find the living processes with the token in their environment; with ``ranks_only`` only MPI ranks."""
    import psutil

    found = []
    for process in psutil.process_iter(["environ"]):
        environ = process.info["environ"] or {}  # None: it is another user's, a zombie, or ended meanwhile
        if environ.get(LAUNCH) == token and (not ranks_only or "PMI_RANK" in environ):
            found.append(process)
    return found


def is_running_here(variables: Mapping[str, str]) -> bool:
    """Return True if a visible living process has all these environment variables."""
    import psutil

    environs = (process.info["environ"] or {} for process in psutil.process_iter(["environ"]))
    return any(variables.items() <= environ.items() for environ in environs)


def signal_by_token(token: str, number: int) -> bool:
    """Send a signal to every process with this launch's token. False if there is none."""
    import psutil

    processes = find_by_token(token)
    for process in processes:
        # It may end between the search and the signal.
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return bool(processes)


def kill_by_token(token: str, *, tries: int = 20) -> None:
    """Send SIGKILL to every process with this launch's token, until none is left."""
    for _ in range(tries):
        if not signal_by_token(token, signal.SIGKILL):
            return
        time.sleep(0.05)  # not psutil's wait: it would take the exit code of a child from subprocess


def has_children(pid: int) -> bool:
    """Return True if a process has a living child; zombies are not living."""
    import psutil

    try:
        return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return False


def read_start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot. None if there is none, or it has ended.

    psutil's create_time follows the wall clock. After the clock was set, a living process would look like another.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # proc(5): field 3 is the state, field 22 the start


def load_parent_signal() -> Callable[[int], None] | None:
    """Load the function that requests a signal for the parent's end (0: none). None on systems other than Linux.

    The C library is loaded here. Between fork and exec a child must not load anything, but may call the function.
    """
    if sys.platform != "linux":  # prctl is Linux's
        return None
    libc = ctypes.CDLL(None)

    def ask(number: int) -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)

    return ask


def make_parent_death_hook(parent: int) -> Callable[[], None] | None:
    """Return a function with which a child asks Linux for SIGTERM when its parent dies. None on other systems."""
    signalled = load_parent_signal()
    if signalled is None:
        return None

    def ask() -> None:
        signalled(signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return ask
