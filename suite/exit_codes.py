"""Defines the exit codes of `mlhpc` and of its workers."""

from __future__ import annotations

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """How a process ended. Two names share a number where no command can mean both."""

    OK = 0
    FAILED = 1  # a run that missed its target or failed, an error of the machine
    FINDINGS = 1  # the command worked, and what it looked at is at fault: errors of a log, a slower result, a bad node
    USAGE = 2  # a mistake on the command line or in a file of the user
    STOPPED = 3  # of a worker: a signal stopped the trial, and a checkpoint is left
    NO_SCORE = 3  # of compare and history: one side is not a score
    INCONCLUSIVE = 4  # what was measured does not decide
    WRONG = 5  # of preflight: a node computes wrong results
    TAKEN_OVER = 6  # of a worker: it was suspended, and another process goes on with its trial
    DEFECT = 70  # EX_SOFTWARE of sysexits.h: an error of mlhpc itself, never of its user
    TIMED_OUT = 124  # as timeout(1) has it
    INTERRUPTED = 130  # as shells have it: 128 + SIGINT


# Errors of a path that a person named and that does not exist or may not be used. A full or broken disk is the
# machine's.
_USAGE_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    | {errno.ENAMETOOLONG, errno.ELOOP}
)


def choose_exit_code(error: Exception) -> ExitCode:
    """Return the exit code of a command that an error ends: USAGE for a person's mistake, else FAILED."""
    wrong_place = isinstance(error, OSError) and error.errno in _USAGE_ERRNOS
    return ExitCode.USAGE if isinstance(error, ValueError) or wrong_place else ExitCode.FAILED


WORKER_CODES = frozenset({ExitCode.OK, ExitCode.FAILED, ExitCode.USAGE, ExitCode.STOPPED})
