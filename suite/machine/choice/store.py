"""Caches measurements in one JSON file of the user: per host, processor, torch and suite. It may be lost.

The file is read and written whole. If it cannot be read, or holds something else, measurements are repeated and it is
replaced. If two runs write at once, one entry is lost and measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlhpc.suite.files import read_json, write_file_atomically

VERSION = 1
NAME = "choices.json"  # in the user's cache folder
MAX_BYTES = 2**20  # bytes that are read
MAX_ENTRIES = 512  # entries; the oldest go first


class ChoiceCache:
    """JSON objects by a text key, newest last. ``folder`` None: nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / NAME

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the entry of a key, or None."""
        entry = self._entries().get(key)
        return entry if isinstance(entry, dict) else None

    def keep(self, key: str, entry: Mapping[str, Any]) -> None:
        """Write an entry. A failed write is ignored."""
        if self.path is None:
            return
        entries = self._entries()
        entries.pop(key, None)
        entries[key] = dict(entry)
        newest = dict(list(entries.items())[-MAX_ENTRIES:])
        with suppress(OSError, ValueError):
            write_file_atomically(
                self.path, json.dumps({"version": VERSION, "entries": newest}, indent=1, allow_nan=False) + "\n"
            )

    def _entries(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            found = {} if self.path.is_symlink() else read_json(self.path, MAX_BYTES)
        except (OSError, ValueError):
            return {}
        entries = found.get("entries") if isinstance(found, dict) and found.get("version") == VERSION else None
        return entries if isinstance(entries, dict) else {}
