"""Spread work over forked processes. They read the parent's memory and share nothing else; results keep the order of items."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")

_held: list[Any] = []  # in a child: the work and what it reads


def mapped(
    work: Callable[[Shared, Item], Result],
    shared: Shared,
    items: Sequence[Item],
    chunk: int = 1,
    *,
    tell: Callable[[int, int], None] = lambda done, total: None,
    alone: bool = False,
) -> list[Result]:
    """Call ``work(shared, item)`` for every item, in as many processes as there are cores. Only items and results are pickled.

    ``tell`` is called with items done and in total. With ``alone`` this process does it all, which is faster for little work.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if alone or count < 2 or multiprocessing.current_process().daemon:
        return list(_told((work(shared, item) for item in items), len(items), tell))
    with warnings.catch_warnings():
        # The children only read and compute; no thread of the parent matters to them.
        warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
        context = multiprocessing.get_context("fork")
        with context.Pool(min(count, 16, len(items)), initializer=_hold, initargs=(work, shared)) as pool:
            return list(_told(pool.imap(_call, items, chunksize=chunk), len(items), tell))


def _told(results: Iterable[Result], total: int, tell: Callable[[int, int], None]) -> Iterator[Result]:
    for done, result in enumerate(results, start=1):
        tell(done, total)
        yield result


def _hold(work: Any, shared: Any) -> None:
    gc.disable()  # a child lives for this work only, and what it makes has no cycles
    _held[:] = [work, shared]


def _call(item: Any) -> Any:
    work, shared = _held
    return work(shared, item)
