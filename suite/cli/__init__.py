"""`mlhpc` as a process: what is done before the command line is loaded, and how the process ends."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import NoReturn

YOUNG_OBJECTS = 20_000  # before garbage is looked for: of the modules that a command loads nothing is
UNTOUCHED = ("torch", "mpi4py", "h5py")  # what these began they end themselves


def program() -> NoReturn:
    """`mlhpc` as a process: `main`, and then its end at once."""
    gc.set_threshold(YOUNG_OBJECTS)
    from suite.cli.main import main

    code: object = None
    try:
        main()
    except SystemExit as end:
        code = end.code
    _leave(code)  # here, where nothing holds what a failed command held: its files are closed
    gc.freeze()  # else Python's end looks through all that torch has loaded for garbage: a quarter of a second
    sys.exit(code)  # type: ignore[arg-type]


def _leave(code: object) -> None:
    """End this process as Python would, but for taking apart all that is loaded: a seventh of what a small command takes.

    Handlers of atexit run and output is written. Returns, for Python to do it all, where somebody waits for the usual end (a
    thread, a tracer, a profiler, a prompt), output cannot be written, or a library is loaded that has more to end.
    """
    threads = sys.modules.get("threading")
    monitoring = getattr(sys, "monitoring", None)  # of Python 3.12
    tools = [] if monitoring is None else [*filter(None, map(monitoring.get_tool, range(6)))]
    watched = sys.gettrace() or sys.getprofile() or tools or sys.flags.interactive or sys.flags.inspect
    if (
        watched
        or (threads is not None and threads.active_count() > 1)
        or any(name in sys.modules for name in UNTOUCHED)
    ):
        return
    if code is not None and type(code) is not int:
        return
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return
    os._exit((code or 0) & 0xFF)
