"""Parses Slurm's short form of node names, ``node[1-3,7],login``. Containers have no scontrol for that."""

from __future__ import annotations

import re
from collections.abc import Iterator

from suite.errors import InputError

MOST = 1_000_000  # nodes of one list
_PART = re.compile(r"([^\[\],]*)(?:\[([^\]]*)\])?([^\[\],]*)(?:,|$)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")


def expand_nodes(text: str) -> tuple[str, ...]:
    """All names of a list. InputError if it is not one: a bracket has numbers and ranges, one bracket a name."""
    found: list[str] = []
    place = 0
    while place < len(text):
        match = _PART.match(text, place)
        if match is None or not match.group().strip(","):
            raise InputError(f"{text[:200]!r}: expected a Slurm node list such as node[1-3,7]")
        head, inside, tail = match.groups()
        for name in [head + tail] if inside is None else (head + number + tail for number in _numbers(inside, text)):
            found.append(name)
            if len(found) > MOST:
                raise InputError(f"{text[:200]!r}: more than {MOST:,} nodes")
        place = match.end()
    if not found or len(set(found)) < len(found):
        raise InputError(f"{text[:200]!r}: expected a list of different nodes")
    return tuple(found)


def _numbers(inside: str, text: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.match(part)
        if match is None:
            raise InputError(f"{text[:200]!r}: [{inside[:80]}]: expected numbers and ranges such as 1-3,7")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
