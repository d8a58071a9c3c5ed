"""The journal of a tournament: a file for what was started and what ended, each with the sum of the file before it.

Files are only ever added. Who deletes a run, adds one, or edits a log afterwards contradicts it; who writes a whole new journal
does not, so a journal proves nothing against its own keeper.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from analysis.tournament.folder import Tournament, read_plain
from analysis.tournament.race import Turn
from suite.documents import as_json, read_json_document
from suite.errors import InputError
from suite.files import write_whole

VERSION: Final = 1
OPENED: Final = "opened"
STARTED: Final = "started"
ENDED: Final = "ended"


class Note(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file. ``opened`` has the sums of settings and entries, ``ended`` that of the log: None if the run left none."""

    version: Literal[1] = VERSION
    number: Annotated[int, Meta(ge=0)]
    previous: str | None = None
    time: Annotated[str, Meta(max_length=40)]
    what: Literal["opened", "started", "ended"]
    block: int | None = None
    entry: str | None = None
    exit_code: int | None = None
    log_sha256: str | None = None
    digests: dict[str, str] = {}


@dataclass
class Journal:
    """The notes of a folder in order. ``broken`` has a line for each file that does not follow from the one before it."""

    folder: Path
    notes: list[Note] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    _last: str | None = None

    @property
    def digests(self) -> dict[str, str]:
        """The sums of settings and entries when the first run was started; empty before."""
        return next((note.digests for note in self.notes if note.what == OPENED), {})

    def turns(self, what: str) -> Iterator[tuple[Turn, Note]]:
        """The turns that were started or ended, in order."""
        for note in self.notes:
            if note.what == what and note.block is not None and note.entry is not None:
                yield Turn(note.block, note.entry), note

    def started(self) -> list[Turn]:
        """The turns whose run was started: each counts."""
        return [turn for turn, _ in self.turns(STARTED)]

    def finished(self) -> list[Turn]:
        """The turns whose run was started, without one that still runs, or whose tournament was killed: `run` ends it."""
        ended = {turn for turn, _ in self.turns(ENDED)}
        return [turn for turn in self.started() if turn in ended]

    def open(self, tournament: Tournament) -> None:
        """Note the sums of settings and entries. InputError if they are no longer those of the first run."""
        digests = tournament.digests()
        if not self.notes:
            self._add(Note(number=0, time=_now(), what=OPENED, digests=digests))
        for text in changed(self.digests, digests):
            raise InputError(f"{tournament.root}: {text}: a tournament goes on as it began")

    def start(self, turn: Turn) -> None:
        """Note that a run is about to be started."""
        self._add(
            Note(
                number=len(self.notes),
                previous=self._last,
                time=_now(),
                what=STARTED,
                block=turn.block,
                entry=turn.entry,
            )
        )

    def end(self, turn: Turn, exit_code: int | None, log_sha256: str | None) -> None:
        """Note how a run ended. ``exit_code`` is None for a run whose tournament was killed."""
        self._add(
            Note(
                number=len(self.notes), previous=self._last, time=_now(), what=ENDED, block=turn.block, entry=turn.entry,
                exit_code=exit_code, log_sha256=log_sha256,
            )
        )  # fmt: skip

    def _add(self, note: Note) -> None:
        text = as_json(note) + "\n"
        write_whole(self.folder / f"{note.number:06d}.json", text, overwrite=False)
        self.notes.append(note)
        self._last = hashlib.sha256(text.encode()).hexdigest()


def read_journal(folder: Path) -> Journal:
    """Read the journal of a tournament; an empty one if there is none. InputError for a file that is no note."""
    journal = Journal(folder)
    if folder.is_symlink():
        raise InputError(f"{folder}: is a symbolic link, which is not followed")
    paths = sorted(path for path in folder.glob("*.json") if not path.name.startswith(".")) if folder.is_dir() else []
    for number, path in enumerate(paths):
        content = read_plain(path)
        note = read_json_document(path, Note, "a note of a tournament", VERSION)
        if path.name != f"{number:06d}.json" or note.number != number:
            journal.broken.append(
                f"{folder.name}/{path.name}: note {note.number}; expected note {number}: one before it is missing"
            )
        elif note.previous != journal._last:
            journal.broken.append(
                f"{folder.name}/{path.name}: does not follow from the note before it: one of them was changed"
            )
        journal.notes.append(note)
        journal._last = hashlib.sha256(content).hexdigest()
    return journal


def changed(before: dict[str, str], now: dict[str, str]) -> Iterator[str]:
    """A clause for each file of settings and entries that is not as it was when the first run was started."""
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            yield f"{name} was there when the first run was started and is gone"
        elif name not in before:
            yield f"{name} was added after the first run was started"
        elif before[name] != now[name]:
            yield f"{name} was changed after the first run was started"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
