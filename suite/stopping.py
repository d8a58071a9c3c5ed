"""Handles Ctrl-C and SIGTERM of a command at any moment: one line, and exit code 128 + the signal's number.

A signal raises KeyboardInterrupt, so that files and child processes are cleaned up. While modules are imported, or
after the command has ended, nothing could catch it. Then the process ends at once. Imports only what Python has loaded
already.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from mlhpc.suite import LAUNCH

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A signal so soon after the first is the same request: timeout(1) sends it to the process and its group, and people type
# ^C twice
REPEAT_WINDOW_S = 1.0
RERAISE_AFTER_S = 0.02  # after which an interrupt is raised again that Python could only report


class _State:
    """The state of this process's end."""

    process = 0  # which installed the handlers: a forked child inherits them
    catching = False  # somebody catches KeyboardInterrupt
    number: int | None = None  # of the first signal
    at_s = 0.0
    stopped = False  # the command has ended by it, and has said so


def register_handlers() -> None:
    """Handle the signals from now on. A signal that the caller of this process ignores stays ignored.

    A rank that this suite started ends by the signal itself, without a line. Its launcher prints one.
    """
    _State.process = os.getpid()
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL if LAUNCH in os.environ else _handle_signal)
    if LAUNCH not in os.environ:
        atexit.register(_exit_now)  # the first that is registered is the last that is called
        signal.signal(signal.SIGALRM, _raise_again)
        sys.unraisablehook = _raise_later


def find_first_signal() -> int | None:
    """Return the number of the signal that asked this process to end. None if there was none."""
    return _State.number


@contextmanager
def use_keyboard_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt in the body, and end the process at once after it."""
    _State.catching = True
    try:
        yield
    finally:
        _State.catching = False
        # No interrupt may be raised again when nobody catches it any more.
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def use_default_handlers() -> Iterator[None]:
    """End the process by the signal itself in the body. In C code that waits, Python would handle it late."""
    try:
        before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_by_signal(number: int) -> None:
    """End this command like a signal that was handled elsewhere."""
    _State.number = number
    raise KeyboardInterrupt


def render_end_line() -> str:
    """Return what to print at the end; "" on all ranks but the first.

    The process then exits with `compute_exit_code`.
    """
    _State.stopped = True
    launcher = sys.modules.get("mlhpc.suite.launcher")
    launch = launcher.find_launch() if launcher is not None else None
    return "" if launch is not None and launch.rank else f"mlhpc: stopped by {signal.Signals(_State.number or 2).name}"


def compute_exit_code() -> int:
    """Return 128 plus the number of the signal, as shells do."""
    return 128 + (_State.number or signal.SIGINT)


def _exit_now() -> None:
    """Allow nothing between the end of the command and the end of the process."""
    if os.getpid() != _State.process:
        return
    if _State.stopped:
        # Python itself ends by SIGINT if an interrupt once came while it ran a string, whatever the exit code is
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(compute_exit_code())
    if "mpi4py" not in sys.modules:  # whose end may wait for other ranks
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # Python restores other handlers while it shuts down


def _handle_signal(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _State.process:
        # A forked child has this handler too, but nothing that would catch its interrupt.
        os._exit(128 + number)
    again = _State.number is not None
    if again and time.monotonic() - _State.at_s < REPEAT_WINDOW_S:
        return
    _State.number, _State.at_s = _State.number or number, time.monotonic()
    if again or not _State.catching:
        if text := render_end_line():
            os.write(2, f"{text}\n".encode())
        os._exit(compute_exit_code())
    raise KeyboardInterrupt


def _raise_again(number: int, frame: FrameType | None) -> None:
    if _State.catching and _State.number is not None and os.getpid() == _State.process:
        raise KeyboardInterrupt


def _raise_later(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt again that came in a callback of Python's own, such as a weak reference's.

    Nothing catches it there.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt) and _State.number is not None:
        signal.setitimer(signal.ITIMER_REAL, RERAISE_AFTER_S)
    else:
        sys.__unraisablehook__(unraisable)
