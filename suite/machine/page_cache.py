"""Drops the page caches of all nodes before a run, by the site's own command, and reports their state."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlhpc.suite.world import World

COLD_BY_SIZE_FACTOR = 5  # data over memory from which no cache can hold it (rule of MLPerf Storage)
COMMAND_TIMEOUT_S = 300


@dataclass(frozen=True)
class CacheState:
    """The state of the page caches at the start of a run; logged as the metadata of ``cache_state``.

    ``dropped``: the command ended with exit code 0 on every node. ``cold-by-size``: the data set is too large for any
    cache. ``unverified``: neither. ``exit_codes`` has each exit code once.
    """

    state: Literal["dropped", "cold-by-size", "unverified"]
    command: str | None
    exit_codes: tuple[int, ...]
    data_bytes: int
    memory_bytes: int


def drop_page_caches(
    command: str | None, data_bytes: int, world: World, environ: Mapping[str, str] = os.environ
) -> CacheState:
    """Run the site's command on every node, unless the job script reports that it ran one. All ranks call it.

    A job script can run the command before the ranks start. It reports in MLHPC_CACHE_DROP_COMMAND and
    MLHPC_CACHE_DROP_RC.
    """
    code = None
    if "MLHPC_CACHE_DROP_COMMAND" in environ:
        command, reported = environ["MLHPC_CACHE_DROP_COMMAND"], environ.get("MLHPC_CACHE_DROP_RC", "")
        code = int(reported) if reported.lstrip("-").isdigit() else None
    elif command and world.local_rank == 0:
        code = _run_command(command)
    exit_codes = tuple(sorted({each for each in world.allgather(code) if each is not None}))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    state = judge_state(command, exit_codes, data_bytes, memory_bytes)
    return CacheState(state, command, exit_codes, data_bytes, memory_bytes)


def judge_state(
    command: str | None, exit_codes: tuple[int, ...], data_bytes: int, memory_bytes: int
) -> Literal["dropped", "cold-by-size", "unverified"]:
    """Judge the state of the caches by what the command left and by the size of the data."""
    if command and exit_codes == (0,):
        return "dropped"
    return "cold-by-size" if data_bytes > COLD_BY_SIZE_FACTOR * memory_bytes else "unverified"


def _run_command(command: str) -> int:
    """Return the exit code of a command; 127, as in a shell, if it cannot start or does not end in time."""
    try:
        words = shlex.split(command)
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S
        ).returncode
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 127
