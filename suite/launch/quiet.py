"""Waits until other programs leave this machine's CPUs alone: on a busy machine a measured time says little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_duration
from mlhpc.suite.log.other_work import OtherWork
from mlhpc.suite.machine.probes.allowance import read_usable_resources
from mlhpc.suite.machine.probes.cpu_time import compute_use, read_node_times, read_own_s
from mlhpc.suite.machine.probes.processor import find_machine_root

MEASURE_S = 10.0  # of one look: counters have ticks of 10 ms, and a program may pause for seconds


def measure_other_work(seconds: float = MEASURE_S) -> OtherWork | None:
    """Measure what others take of the CPUs that this process may use. None if Linux does not show it."""
    root = find_machine_root(os.environ)
    begin, own_s = read_node_times(root), read_own_s(root)
    time.sleep(seconds)
    # This process's own time is not other work.
    own_s = read_own_s(root) - own_s
    end, allowed = read_node_times(root), read_usable_resources(root)
    passed = end.at_s - begin.at_s
    use = compute_use(begin, end, allowed.cpus, own_s, allowed.cores)
    if use.absent is not None or passed <= 0:
        return None
    return OtherWork(0, use.cpus, (use.other_s + use.stolen_s) / passed, use.stolen_s / passed, passed)


def wait_for_quiet(
    tell: Callable[[str], None],
    limit_s: float,
    measure: Callable[[], OtherWork | None] = measure_other_work,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until others take no more CPU time than a log's ``other_work`` accepts. InputError after ``limit_s``
    seconds.

    ``tell`` gets a line after each measurement that found too much.
    """
    begin = clock()
    while (found := measure()) is not None and found.counts:
        waited = clock() - begin
        if waited >= limit_s:
            raise InputError(
                f"{found.text} after {render_duration(waited)} of waiting: end the other programs and continue with "
                f"--resume; or leave --wait-for-quiet out, and do not trust the time"
            )
        tell(f"{found.text}: waiting for quiet, at most {render_duration(limit_s - waited)} more")
    if found is None:
        tell("this machine does not show what other programs use of its CPUs: not waiting")
