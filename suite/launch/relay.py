"""Passes the output of a trial's ranks on to the log and the launcher. It is a process that outlives the launcher.

If the launcher read the output itself, it would be lost with the launcher. A rank that prints would then end before its
checkpoint is saved. A full disk or a dead launcher costs only lines. Ranks that still run a grace period after the
launcher's end are killed.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

from mlhpc.suite.files import render_reason
from mlhpc.suite.processes import kill_by_token

CHUNK_BYTES = 65536


def run_output_relay(log: Path, token: str, grace_s: float) -> None:
    """Copy standard input to the log and to standard output, until all writers have gone."""
    source, launcher = sys.stdin.fileno(), sys.stdout.fileno()
    keeper = _LogWriter(log)
    watch = select.poll()
    watch.register(source, select.POLLIN)
    watch.register(launcher, 0)  # POLLERR when the launcher has gone
    gone_at: float | None = None
    problem: str | None = None
    while True:
        # A second at most: the grace period is checked even if no rank prints.
        ready = dict(watch.poll(1000))
        if gone_at is None and launcher in ready:
            gone_at = time.monotonic()
            # Its POLLERR would end every further wait at once.
            watch.unregister(launcher)
        if gone_at is not None and time.monotonic() - gone_at > grace_s:
            kill_by_token(token)
        if source not in ready:
            continue
        data = os.read(source, CHUNK_BYTES)
        if not data:
            return
        problem = keeper.keep(data) or problem
        if gone_at is None:
            try:
                _write_all(launcher, data)
                if problem and data.endswith(b"\n"):  # not in the middle of what a rank prints
                    _write_all(launcher, f"mlhpc: {problem}; output is shown and not kept\n".encode())
                    problem = None
            except BrokenPipeError:
                continue  # poll says so too


class _LogWriter:
    """Appends to the log. Output that cannot be written is dropped, and reported once."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._told = False

    def keep(self, data: bytes) -> str | None:
        """Append ``data``. Returns what went wrong, the first time only."""
        try:
            with self._log.open("ab", buffering=0) as file:
                _write_all(file.fileno(), data)
        except OSError as error:
            if not self._told:
                self._told = True
                return f"{self._log}: {render_reason(error, self._log)}"
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    run_output_relay(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
