"""Finds and ends the processes of one launch. mpiexec starts each rank in a session of its own, out of reach of signals to a
process group, so ranks are found by a token in their environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from suite import LAUNCH
from suite.machine.probes.parent import load_parent_signal


def kill_marked(token: str, *, tries: int = 20) -> None:
    """Send SIGKILL to every process that has this launch's token, until none is left."""
    for _ in range(tries):
        pids = list(list_marked(token))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.05)


def signal_marked(token: str, number: int) -> None:
    """Send a signal to every process that has this launch's token."""
    for pid in list(list_marked(token)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def list_marked(token: str, *, ranks_only: bool = False) -> Iterator[int]:
    """List the processes whose environment has the token, or of those the ranks that mpiexec's proxies started.

    A zombie's environment is empty, so zombies are not listed.
    """
    needle = f"{LAUNCH}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        if needle in words and (not ranks_only or any(word.startswith(b"PMI_RANK=") for word in words)):
            yield int(entry.name)


def has_children(pid: int) -> bool:
    """True if a process has a living child; zombies are not living."""

    def lives(child: str) -> bool:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    try:
        return any(lives(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:  # ended meanwhile, or a kernel that does not list children
        return False


def end_with_parent(parent: int) -> Callable[[], None] | None:
    """A function that the child calls to get SIGTERM from Linux when its parent dies. None on other systems."""
    signalled = load_parent_signal()
    if signalled is None:
        return None

    def ask() -> None:
        signalled(signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return ask
