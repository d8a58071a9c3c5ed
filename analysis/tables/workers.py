"""Spreads work over forked processes. Results keep the order of items."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_PROCESSES = 16


def run_in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    chunk: int = 1,
    *,
    tell: Callable[[int, int], None] = lambda done, total: None,
    alone: bool = False,
) -> list[Result]:
    """Call ``work`` for every item, in as many processes as there are cores. Only items and results are pickled.

    ``tell`` is called with items done and in total. With ``alone`` this process does it all, which is faster for little
    work. An exception of the work is raised here. OSError if a process ends before its work, as one does that is out of
    memory.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if alone or count < 2 or multiprocessing.current_process().daemon:
        # A daemon may not start processes (Python forbids it)
        return _collect(map(work, items), len(items), tell)
    # Processes and not threads, because decoding holds the GIL. They are forked, because a spawned process would import
    # all modules again and could not be given a closure or a table without pickling it.
    pool = ProcessPoolExecutor(
        # No more processes than chunks
        min(count, MOST_PROCESSES, -(-len(items) // chunk)),
        multiprocessing.get_context("fork"),
        initializer=_start,
        initargs=(work,),
    )
    try:
        with warnings.catch_warnings():
            # The children only read and compute; no thread of the parent matters to them.
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            results = pool.map(_call, items, chunksize=chunk)
        return _collect(results, len(items), tell)
    except BrokenProcessPool:
        raise OSError("a process that was to share the work ended before it: is there enough memory?") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(results: Iterator[Result], total: int, tell: Callable[[int, int], None]) -> list[Result]:
    found = []
    for result in results:
        found.append(result)
        tell(len(found), total)
    return found


_work: Callable[[Any], Any]  # of a worker, which inherits it: a pool would pickle what it is given to call


def _start(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its children


def _call(item: Any) -> Any:
    return _work(item)
