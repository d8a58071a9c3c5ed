"""Runs commands that measure on all ranks. Starts the ranks with mpiexec, or runs as a rank of a launcher."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlhpc.suite.exit_codes import ExitCode, choose_exit_code
from mlhpc.suite.files import print_line, render_error
from mlhpc.suite.launch.local import make_suite_command, run_local
from mlhpc.suite.path_kinds import add_kind
from mlhpc.suite.stopping import end_by_signal

if TYPE_CHECKING:
    from mlhpc.suite.launcher import Launch
    from mlhpc.suite.world import World

GRACE_S = 1.0  # between SIGTERM and SIGKILL to ranks that are stopped: they have nothing to save


def _print_error(text: str) -> None:
    print_line(text, error=True)


def start_ranks(
    words: Sequence[str],
    ranks: int,
    *,
    limit_s: float | None = None,
    echo: Callable[[str], None] = print_line,
    complain: Callable[[str], None] = _print_error,
) -> int:
    """Run ``mlhpc WORDS`` on ``ranks`` ranks of this machine and return the exit code. ``echo`` gets their output.

    ``complain`` gets one line about an abnormal end. After ``limit_s`` seconds the ranks are ended, with exit code 1. A
    signal ends them too, then raises KeyboardInterrupt.
    """
    # A signal to this process: `run_local` passes it on to the ranks, as it does a person's.
    late = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGTERM)) if limit_s is not None else None
    begun = time.monotonic()
    signals: list[int] = []
    try:
        # `run_local` needs a log, which nobody reads here: `echo` prints every line.
        with tempfile.TemporaryDirectory(prefix="mlhpc-ranks-") as folder:
            log = Path(folder) / "ranks.log"

            def say(text: str) -> None:
                if not signals:  # ranks that were ended from here ended by no fault of theirs
                    complain(f"mlhpc: {text.removesuffix(f': see {log}')}")  # the log is removed

            if late is not None:
                late.start()
            code = run_local(
                make_suite_command(*words),
                ranks=ranks,
                log=log,
                say=say,
                echo=echo,
                grace_s=GRACE_S,
                on_stop=signals.append,
            )
    finally:
        if late is not None:
            late.cancel()
    # After the time limit the signal is the timer's own.
    if signals and (limit_s is None or time.monotonic() - begun < limit_s):
        end_by_signal(signals[0])
    return code


def run_as_rank(launch: Launch | None, check: Callable[[], None], body: Callable[[World], None]) -> int:
    """Run as one rank: rank 0 calls ``check``, then all ranks run ``body``. Return the exit code.

    A ValueError or OSError of ``check`` is printed once and ends all ranks. An error of ``body`` on one rank is printed
    by that rank and ends all.
    """
    from mlhpc.suite.world import World

    world = World.create(launch)
    problem: Exception | None = None
    if world.is_first:
        try:
            check()
        except (ValueError, OSError) as error:
            problem = error
    try:
        world.check_together(problem)
    except ValueError as error:
        if world.is_first:
            print_line(f"mlhpc: {add_kind(render_error(error))}", error=True)
        return ExitCode.USAGE
    try:
        body(world)
        world.barrier()
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        where = "" if world.size == 1 else f" [rank {world.rank}]"
        print_line(f"mlhpc: {add_kind(render_error(error))}{where}", error=True)
        code = choose_exit_code(error)
        if world.size > 1:
            world.transport.abort(code)
        return code
    return ExitCode.OK
