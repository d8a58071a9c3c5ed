"""Entries of a tier in memory, least recently used out first, within a budget of bytes. A thread loads ahead.

All loads run in that thread, one after another, as one channel would. A second thread writes what is new. Entries that
the tier need not have yet are written when room gets short. What the training thread waits is counted: for loads, for
writes that make room, and for either thread's hold of the lock.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mlhpc.plugins.offload.tier import Entry, Key, Tier

_INDEX = Key(-1, -1, "index")  # no entry's


def count_bytes(entry: Entry) -> int:
    """Count the bytes of an entry's tensors."""
    return sum(tensor.nbytes for tensor in entry.values())


class Cache:
    """The entries of a tier, some of them in memory. ``budget`` bounds ``held``: the entries, and what was reserved."""

    def __init__(self, tier: Tier, budget: int) -> None:
        self._tier, self.budget = tier, budget
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # the least recently used first
        self._sizes: dict[Key, int] = {}  # of all entries of the tier, too
        self._dirty: set[Key] = set()  # not in the tier yet
        self._ahead: set[Key] = set()  # loaded, and not asked for yet
        self._clean = 0  # bytes of entries that are neither
        self._unwritten: deque[Key | None] = deque()  # of them what is to be written; None: the index
        self._kept_back: deque[Key] = deque()  # of the dirty ones those that need not be written while there is room
        self._writing: Key | None = None
        self._queue: deque[Key] = deque()
        self._wanted: Key | None = None  # what the training thread waits for
        self._loading: Key | None = None
        self._error: Exception | None = None
        self._closed = False
        self._state = threading.Condition(threading.RLock())
        self.held = self.peak = 0
        self.counts: Counter[str] = Counter()
        self.wait_s = 0.0
        self._threads = [
            threading.Thread(target=each, name=f"offload, {each.__name__}", daemon=True)
            for each in (self._load, self._write)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Hold the lock. All time in the body is a wait for the tier: the rest of it takes microseconds."""
        began = time.perf_counter()
        with self._state:
            try:
                yield
            finally:
                self.wait_s += time.perf_counter() - began

    def get(self, key: Key) -> Entry:
        """Return an entry, at once or after its load. What goes wrong in the thread is raised here."""
        with self._waiting():
            if key in self._entries:
                self.counts["hits" if key not in self._ahead else "ahead"] += 1
            else:
                self.counts["misses"] += 1
                self._wanted = key
                while key not in self._entries:
                    self._raise_error()
                    if key != self._loading:
                        self._queue.appendleft(key)
                        self._state.notify_all()
                    self._state.wait()
                self._wanted = None
            self._entries.move_to_end(key)
            self._tag(self._ahead, key, False)
            return self._entries[key]

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Load entries ahead, as far as there is room for them."""
        with self._waiting():
            self._queue.extend(key for key in keys if key not in self._entries and key not in self._queue)
            self._state.notify_all()

    def put(self, key: Key, entry: Entry, *, spare: int | None = None) -> None:
        """Add or replace an entry. The tier gets it soon, or when no ``spare`` bytes more would fit into memory.

        What goes wrong while it is written is raised by a later call.
        """
        with self._waiting():
            self._raise_error()
            self._forget(key)
            self._make_room(count_bytes(entry))
            self._forget(key)  # a former value that was loaded meanwhile
            if key == self._loading:
                self._loading = None
            self._add(key, entry)
            self._tag(self._dirty, key, True)
            self._kept_back.append(key)
            if spare is None:
                self._unwritten.append(self._kept_back.pop())
            elif not self._has_room(spare):  # later these would have to be waited for
                self._unwritten.extend(self._kept_back)
                self._kept_back.clear()
            self._state.notify_all()

    def commit(self) -> None:
        """Make what was put the tier's present state, soon."""
        with self._waiting():
            self._unwritten.append(None)
            self._state.notify_all()

    def settle(self) -> None:
        """Wait until all is written."""
        with self._waiting():
            while self._unwritten or self._writing is not None:
                self._raise_error()
                self._state.wait()
            self._raise_error()

    def has(self, key: Key) -> bool:
        """Return True if there is such an entry, in memory or in the tier."""
        with self._waiting():
            return key in self._entries or self._tier.has(key)

    def drop(self, key: Key) -> None:
        """Remove an entry from memory and tier."""
        with self._waiting():
            self._forget(key)
            self._loading = None if key == self._loading else self._loading
            self._tier.remove(key)

    def reserve(self, size: int) -> None:
        """Count bytes that are about to be used outside of the cache; a negative number gives them back."""
        with self._waiting():
            if size > 0:
                self._make_room(size)
            self._hold(size)

    def close(self) -> None:
        """End the thread and forget everything."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join()
        self._entries.clear()

    def flush(self) -> dict[str, Any]:
        """Return what happened since the last call."""
        with self._state:
            found: dict[str, Any] = {name: self.counts[name] for name in ("hits", "ahead", "misses")}
            found |= {"wait_s": self.wait_s, "peak_bytes": self.peak}
            self.counts.clear()
            self.wait_s, self.peak = 0.0, self.held
            return found

    def _load(self) -> None:
        while True:
            with self._state:
                while not self._queue and not self._closed:
                    self._state.wait()
                if self._closed:
                    return
                key = self._queue.popleft()
                try:
                    size = self._sizes[key]
                    # There may be room once something is written
                    while key != self._wanted and not self._has_room(size) and self._is_writing() and not self._closed:
                        self._state.wait()
                    there = key in self._entries or not self._tier.has(key)
                    if there or (key != self._wanted and not self._has_room(size)):
                        continue
                    self._loading = key
                    self._make_room(size)
                    if key != self._loading:  # replaced or dropped, while a write was waited for
                        continue
                    self._hold(size)
                except Exception as caught:
                    self._fail(caught)
                    continue
            entry: Entry | None = None
            error: Exception | None = None
            try:
                entry = self._tier.read(key)
            except Exception as caught:
                error = caught
            with self._state:
                self._hold(-size)
                fresh, self._loading = key == self._loading, None  # not replaced or dropped meanwhile
                if fresh and error is not None:
                    self._fail(error)
                elif fresh and entry is not None and key not in self._entries:
                    self._add(key, entry)
                    self._tag(self._ahead, key, True)
                self._state.notify_all()

    def _write(self) -> None:
        """Write what is new, in order, until the cache is closed or a write fails."""
        while True:
            with self._state:
                while not self._unwritten and not self._closed:
                    self._state.wait()
                if self._closed:
                    return
                key = self._unwritten.popleft()
                entry = None if key is None else self._entries[key]
                self._writing = key or _INDEX
            try:
                if key is None or entry is None:
                    self._tier.commit()
                else:
                    self._tier.write(key, entry)
            except Exception as error:
                self._fail(error)
                return
            with self._state:
                self._writing = None
                if key is not None:
                    self._tag(self._dirty, key, False)
                self._state.notify_all()

    def _is_writing(self) -> bool:
        return self._error is None and bool(self._unwritten or self._writing is not None)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        with self._state:
            self._error = error
            self._state.notify_all()

    def _has_room(self, size: int) -> bool:
        """Return True if there is room without entries that were loaded ahead, and without writing."""
        return self.held - self._clean + size <= self.budget

    def _make_room(self, size: int) -> None:
        """Let entries go, those that were loaded ahead last."""
        while self._entries and self.held + size > self.budget:
            key = next((each for each in self._entries if each not in self._ahead), next(iter(self._entries)))
            self._await_write(key)
            if key in self._dirty:
                self._tier.write(key, self._entries[key])
            self._forget(key)

    def _add(self, key: Key, entry: Entry) -> None:
        self._entries[key] = entry
        self._sizes[key] = count_bytes(entry)
        self._clean += self._sizes[key]
        self._hold(self._sizes[key])

    def _forget(self, key: Key) -> None:
        self._await_write(key)
        if key in self._entries:
            for tags in (self._ahead, self._dirty):
                self._tag(tags, key, False)
            del self._entries[key]
            self._clean -= self._sizes[key]
            self._hold(-self._sizes[key])

    def _await_write(self, key: Key) -> None:
        """Wait for a write that has begun. One that has not is left out: the entry goes, or is written at once."""
        while key == self._writing and self._error is None:
            self._state.wait()
        for queue in (self._unwritten, self._kept_back):
            if key in queue:
                queue.remove(key)

    def _tag(self, tags: set[Key], key: Key, on: bool) -> None:
        """Add a key to `_ahead` or `_dirty`, or remove it, and keep the sum of entries that are in neither."""
        before = key in self._ahead or key in self._dirty
        (tags.add if on else tags.discard)(key)
        after = key in self._ahead or key in self._dirty
        self._clean += self._sizes[key] * (before - after) if key in self._entries else 0

    def _hold(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)
