"""Spread work over forked processes. They read the parent's memory and share nothing else; results keep the order of items."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_PROCESSES = 16
AHEAD = 2  # chunks that a process has been given: it never waits for the next one


@contextmanager
def uncollected() -> Iterator[None]:
    """Within the body no garbage is looked for: it would look through all results again and again, and they have no cycles.

    What the body leaves counts as old afterwards, else the next object that is made would have all of it looked through.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else what the program has frozen would count as old
            gc.freeze()
            gc.unfreeze()
        if on:
            gc.enable()


def mapped(
    work: Callable[[Shared, Item], Result],
    shared: Shared,
    items: Sequence[Item],
    chunk: int = 1,
    *,
    tell: Callable[[int, int], None] = lambda done, total: None,
    alone: bool = False,
) -> list[Result]:
    """Call ``work(shared, item)`` for every item, in as many processes as there are cores. Only results are pickled.

    ``tell`` is called with items done and in total. With ``alone`` this process does it all, which is faster for little work.
    An exception of the work is raised here. OSError if a process ends before its work, as one does that is out of memory.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if alone or count < 2 or multiprocessing.current_process().daemon:
        results = []
        for done, item in enumerate(items, start=1):
            results.append(work(shared, item))
            tell(done, len(items))
        return results
    begins, found = range(0, len(items), chunk), dict[int, list[Result]]()

    def of_chunk(begin: int) -> list[Result]:
        return [work(shared, item) for item in items[begin : begin + chunk]]

    with uncollected(), _started(of_chunk, min(count, MOST_PROCESSES, len(begins))) as children:
        for begin, results in _answers(children, begins):
            found[begin] = results
            tell(min(len(found) * chunk, len(items)), len(items))
    return [result for begin in begins for result in found[begin]]


def _answers(children: Sequence[Connection], begins: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Give out the chunks and yield each with its results as they come."""
    waiting = iter(begins)
    for _ in range(AHEAD):
        for child in children:
            _give(child, next(waiting, None))
    for _ in begins:
        ready = wait(children)[0]
        assert isinstance(ready, Connection)
        try:
            begin, results, error = pickle.loads(ready.recv_bytes())  # noqa: S301  from our own child
        except (EOFError, ConnectionError):
            raise OSError("a process that was to share the work ended before it: is there enough memory?") from None
        if error is not None:
            raise error
        _give(ready, next(waiting, None))
        yield begin, results


def _give(child: Connection, begin: int | None) -> None:
    if begin is not None:
        child.send(begin)


@contextmanager
def _started(of_chunk: Callable[[int], Any], count: int) -> Iterator[list[Connection]]:
    """Fork processes that answer the begin of a chunk with its results; they end with the body."""
    context = multiprocessing.get_context("fork")
    processes, ours = [], list[Connection]()
    try:
        for _ in range(count):
            own, theirs = context.Pipe()
            ours.append(own)
            processes.append(context.Process(target=_serve, args=(theirs, of_chunk, tuple(ours)), daemon=True))
            with warnings.catch_warnings():
                # The children only read and compute; no thread of the parent matters to them.
                warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
                processes[-1].start()
            theirs.close()
        yield ours
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        for own in ours:
            own.close()


def _serve(asked: Connection, of_chunk: Callable[[int], Any], of_parent: Sequence[Connection]) -> None:
    """Answer until the parent ends this process or has ended."""
    gc.disable()  # a child lives for this work only, and what it makes has no cycles
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its children
    for own in of_parent:
        own.close()  # else nobody sees that the parent has ended
    while True:
        try:
            begin = asked.recv()
        except EOFError:
            return
        try:
            answer: tuple[int, Any, Exception | None] = (begin, of_chunk(begin), None)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = (begin, None, error)
        asked.send_bytes(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
