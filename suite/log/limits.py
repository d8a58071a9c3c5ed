"""Limits how much is read of a file that a stranger may have made. MLHPC_LIMITS changes single limits."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from functools import cache

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import LIMITS

EXIT_CODE_BYTES = 64  # the largest file that is read as an exit code
HEAD_BYTES = 2**18  # the beginning of a log: enough for the events that name the ruleset and for run_start
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_FACTORS = {"": 1, "KiB": _KIB, "MiB": _MIB, "GiB": _GIB}


@dataclass(frozen=True)
class Limits:
    """Largest sizes in bytes.

    The largest published log has 20 MB, its longest line 2 kB; the largest manifest has a line per file. ``file``: any
    file, logs too. ``line``: a line of a log with the MLLOG token. ``events``: all lines of a log that are kept as
    events, which need about five times as much memory. ``json``: a system description or another small JSON file.
    """

    file: int = 4 * _GIB
    line: int = 4 * _MIB
    events: int = 64 * _MIB
    json: int = 4 * _MIB
    manifest: int = 64 * _MIB


def read_limits() -> Limits:
    """Return the limits of this process. InputError for a setting that is not like ``file=8GiB,line=16MiB``."""
    return _parse(os.environ.get(LIMITS, ""))


@cache
def _parse(text: str) -> Limits:
    known = [item.name for item in fields(Limits)]
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)=(\d{1,15})(KiB|MiB|GiB|)", part)
        if match is None or match[1] not in known:
            raise InputError(f"{LIMITS}: {part!r}: expected SIZE=NUMBER[KiB|MiB|GiB], SIZE one of {', '.join(known)}")
        found[match[1]] = int(match[2]) * _FACTORS[match[3]]
    return Limits(**found)
