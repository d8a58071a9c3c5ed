"""Entries of a tier in memory, least recently used out first, within a budget of bytes. A thread loads ahead.

All loads run in that thread, one after another, as one channel would. What the training thread waits for them is
counted. Entries that the tier does not have yet (``dirty``) are written when they have to go.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from mlhpc.plugins.offload.tier import Entry, Key, Tier


def count_bytes(entry: Entry) -> int:
    """Count the bytes of an entry's tensors."""
    return sum(tensor.nbytes for tensor in entry.values())


class Cache:
    """The entries of a tier, some of them in memory. ``budget`` bounds ``held``: the entries, and what was reserved."""

    def __init__(self, tier: Tier, budget: int) -> None:
        self._tier, self.budget = tier, budget
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # the least recently used first
        self._sizes: dict[Key, int] = {}  # of all entries of the tier, too
        self._dirty: set[Key] = set()
        self._ahead: set[Key] = set()  # loaded, and not asked for yet
        self._queue: deque[Key] = deque()
        self._wanted: Key | None = None  # what the training thread waits for
        self._loading: Key | None = None
        self._error: Exception | None = None
        self._closed = False
        self._state = threading.Condition(threading.RLock())
        self.held = self.peak = 0
        self.counts: Counter[str] = Counter()
        self.wait_s = 0.0
        self._thread = threading.Thread(target=self._load, name="offload", daemon=True)
        self._thread.start()

    def get(self, key: Key) -> Entry:
        """Return an entry, at once or after its load. What goes wrong in the thread is raised here."""
        with self._state:
            if key in self._entries:
                self.counts["hits" if key not in self._ahead else "ahead"] += 1
            else:
                self.counts["misses"] += 1
                began = time.perf_counter()
                self._wanted = key
                while key not in self._entries:
                    if self._error is not None:
                        raise self._error
                    if key != self._loading:
                        self._queue.appendleft(key)
                        self._state.notify_all()
                    self._state.wait()
                self._wanted = None
                self.wait_s += time.perf_counter() - began
            self._entries.move_to_end(key)
            self._ahead.discard(key)
            return self._entries[key]

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Load entries ahead, as far as there is room for them."""
        with self._state:
            self._queue.extend(key for key in keys if key not in self._entries and key not in self._queue)
            self._state.notify_all()

    def put(self, key: Key, entry: Entry, *, dirty: bool = False) -> None:
        """Add or replace an entry; in the tier at once, or if ``dirty`` when it has to go."""
        with self._state:
            self._forget(key)
            self._make_room(count_bytes(entry))
            self._add(key, entry)
            if dirty:
                self._dirty.add(key)
        if not dirty:
            self._tier.write(key, entry)

    def has(self, key: Key) -> bool:
        """Return True if there is such an entry, in memory or in the tier."""
        with self._state:
            return key in self._entries or self._tier.has(key)

    def drop(self, key: Key) -> None:
        """Remove an entry from memory and tier."""
        with self._state:
            self._forget(key)
            self._tier.remove(key)

    def reserve(self, size: int) -> None:
        """Count bytes that are about to be used outside of the cache; a negative number gives them back."""
        with self._state:
            if size > 0:
                self._make_room(size)
            self._hold(size)

    def close(self) -> None:
        """End the thread and forget everything."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
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
                    if key in self._entries or (key != self._wanted and not self._has_room(size)):
                        continue
                    self._make_room(size)
                    self._hold(size)
                    self._loading = key
                except OSError as error:
                    self._fail(error)
                    continue
            try:
                entry = self._tier.read(key)
            except (ValueError, OSError) as error:
                self._fail(error)
                continue
            with self._state:
                self._hold(-size)
                self._loading = None
                if key not in self._entries:
                    self._add(key, entry)
                    self._ahead.add(key)
                self._state.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._state:
            self._error = error
            self._state.notify_all()

    def _has_room(self, size: int) -> bool:
        """Return True if there is room without entries that were loaded ahead, and without writing."""
        free = sum(self._sizes[key] for key in self._entries if key not in self._ahead and key not in self._dirty)
        return self.held - free + size <= self.budget

    def _make_room(self, size: int) -> None:
        """Let entries go, those that were loaded ahead last."""
        for spared in (self._ahead, set[Key]()):
            for key in [each for each in self._entries if each not in spared]:
                if self.held + size <= self.budget:
                    return
                if key in self._dirty:
                    self._tier.write(key, self._entries[key])
                self._forget(key)

    def _add(self, key: Key, entry: Entry) -> None:
        self._entries[key] = entry
        self._sizes[key] = count_bytes(entry)
        self._hold(self._sizes[key])

    def _forget(self, key: Key) -> None:
        if self._entries.pop(key, None) is not None:
            self._hold(-self._sizes[key])
        self._ahead.discard(key)
        self._dirty.discard(key)

    def _hold(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)
