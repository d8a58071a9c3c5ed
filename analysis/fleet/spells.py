"""Times of nodes between incidents: what the selector of checks learns from, and what state every node is in now.

A spell begins when a node is known to be healthy: it was repaired, entered service, or passed its checks. It ends in an incident,
or is cut short: a check found the node degraded and it was repaired, it was removed, it passed its checks again, or it still lasts.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from suite.documents import plain
from suite.errors import InputError
from suite.files import read_bytes
from suite.log.limits import limits

OPEN, INCIDENT = "open", "incident"
COLUMNS = ("node", "hours", "incidents", "ended")


class Spell(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One spell of a node, or, where ``ended`` is open, the state that it is in now.

    ``incidents`` are those that the node had before; ``slower`` the part of the speed of the others that it lacked in its worst
    metric when the spell began (`mlhpc preflight judge`), negative if it was faster; None: not known.
    """

    version: Literal[1] = 1
    node: Annotated[str, Meta(min_length=1)]
    hours: Annotated[float, Meta(ge=0, le=1e7)]
    incidents: Annotated[int, Meta(ge=0, le=1_000_000)]
    ended: Literal["incident", "repaired", "removed", "passed", "open"]
    slower: Annotated[float, Meta(gt=-1000, lt=1)] | None = None


def read_spells(paths: Sequence[Path]) -> list[Spell]:
    """Read files of spells, JSON Lines or CSV with the same names as columns. InputError names the line and the field.

    It also refuses a node with two open spells, an incident after 0 hours, and files in which no spell is open.
    """
    found = []
    running: dict[str, str] = {}
    for path in paths:
        for number, row in _rows(path):
            spell = _spell(row, f"{path}:{number}")
            if spell.ended == INCIDENT and spell.hours == 0.0:
                raise InputError(f"{path}:{number}: hours = 0: an incident comes after some time")
            if spell.ended == OPEN:
                if spell.node in running:
                    raise InputError(
                        f"{path}:{number}: node {spell.node!r} has an open spell in {running[spell.node]} too"
                    )
                running[spell.node] = f"{path}:{number}"
            found.append(spell)
    if not running:
        raise InputError(f"{paths[0]}: no spell is open, so no node is in service (ended: {OPEN})")
    return found


def _rows(path: Path) -> list[tuple[int, Any]]:
    """The rows of a file with their lines: bytes of JSON, or the cells of a CSV file by column."""
    content = read_bytes(path, limits().events)
    if not content.strip():
        raise InputError(f"{path}: no spell: expected a JSON object in each line, or CSV with {', '.join(COLUMNS)}")
    if content.lstrip()[:1] in (b"{", b"["):
        return [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
    reader = csv.DictReader(io.StringIO(content.decode("utf-8", "replace"), newline=""))
    try:
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"{path}:1: no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
        return [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not CSV: {error}") from None


def _spell(row: Any, where: str) -> Spell:
    try:
        if isinstance(row, bytes):
            return msgspec.json.decode(row, type=Spell)
        if None in row or None in row.values():
            raise InputError(f"{where}: not as many cells as columns")
        cells = {name: text.strip() for name, text in row.items() if text.strip()}
        return msgspec.convert(cells, Spell, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: {error}") from None


def render(spells: Sequence[Spell]) -> str:
    """The text of a file of spells."""
    return "".join(json.dumps(plain(spell, without_none=True)) + "\n" for spell in spells)
