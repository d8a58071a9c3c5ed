"""Parses Slurm's short form of node names, ``rack[1-2]node[01-16],login``. Containers have no scontrol for it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from mlhpc.suite.errors import InputError

MAX_NODES = 1_000_000  # nodes of one list
# Characters and brackets, in any order. No node has one of the others: they are a shell's, a file's or a user's
_NAME = re.compile(r"""(?:[^\s\[\],@{}()<>/\\*?'"`$;&|=]|\[[^\s\[\]]*\])+""")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
Range = tuple[int, int, int]  # first number, last number, width to which zeros fill it
Part = str | list[Range]  # of a name: literal text, or what stands in a bracket


def parse_node_list(text: str) -> tuple[str, ...]:
    """Return all names of a list. InputError if it is no list, has a name twice or more than `MAX_NODES`."""
    names = _parse(text)
    # Counted before the names are made: a short text can stand for billions.
    if sum(math.prod(map(_count, parts)) for parts in names) > MAX_NODES:
        raise InputError(f"{text[:200]!r}: names more than {MAX_NODES:,} nodes, the most that a list may have")
    # As in Slurm the last bracket of a name counts fastest
    found = tuple("".join(chosen) for parts in names for chosen in itertools.product(*map(_list_texts, parts)))
    if len(set(found)) < len(found):
        raise InputError(f"{text[:200]!r}: names a node twice; expected a list of different nodes")
    return found


def parse_first_node(text: str) -> str:
    """Return the first name of a list. InputError if it is no list."""
    return "".join(next(_list_texts(part)) for part in _parse(text)[0])


def _parse(text: str) -> list[list[Part]]:
    """Split a list into names, and each name into parts. Blanks may surround a comma."""
    names: list[list[Part]] = []
    place = 0
    for match in _NAME.finditer(text):
        if text[place : match.start()].strip() != ("," if names else ""):
            break
        # What stood in a bracket is at the odd places
        parts = enumerate(_BRACKET.split(match.group()))
        names.append([_ranges(part, text) if odd % 2 else part for odd, part in parts])
        place = match.end()
    if not names or text[place:].strip():
        raise InputError(f"{text[:200]!r}: expected a Slurm node list such as node[1-3,7]")
    return names


def _ranges(inside: str, text: str) -> list[Range]:
    found = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"{text[:200]!r}: [{inside[:80]}]: expected numbers and rising ranges such as 1-3,7")
        found.append((int(match[1]), int(match[2] or match[1]), len(match[1])))
    return found


def _count(part: Part) -> int:
    return 1 if isinstance(part, str) else sum(last - first + 1 for first, last, _ in part)


def _list_texts(part: Part) -> Iterator[str]:
    if isinstance(part, str):
        return iter((part,))
    return (str(number).zfill(width) for first, last, width in part for number in range(first, last + 1))
