"""Finds the name of ours for a word that another tool uses: of sbatch, torchrun, mpiexec, pytest, hydra, wandb, docker.

A word means what its line in `meanings.yaml` says. Else it is a tool's own there, and the tool's answer holds. Else a
part of it has a meaning: `--performance-report` is a report.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

SLIP = 0.85  # a name as similar as this was meant and mistyped
LETTERS = 4  # shorter names are alike by chance

# Parts of names that say nothing alone
_WEAK = "all any auto default disable enable every for from full log max min mode new no num only per set show the type use with"


@cache
def simplify(name: str) -> str:
    """Return a name without dashes and section, in small letters, but a single letter as it is."""
    last = name.rpartition(".")[2] if re.fullmatch(r"[a-z_]+(\.[a-z_]\w*)+", name) else name
    bare = re.sub(r"[^A-Za-z0-9]", "", last)
    return bare.lower() if len(bare) > 1 else bare


@cache
def read_meanings() -> Mapping[str, Any]:
    """Read the file. Only a mistake needs it."""
    found: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("meanings.yaml").read_text(encoding="utf-8"))
    return found


@cache
def _split(words: str) -> tuple[str, ...]:
    return tuple(map(simplify, words.split()))


@cache
def _list_words() -> frozenset[str]:
    """Return all words of options and arguments: what is one of them was not mistyped."""
    found = read_meanings()
    lines = [*found["names"], *found["arguments"].values(), *(each.get("options", "") for each in found["tools"])]
    return frozenset(word for line in (*lines, *(words for words, _ in found["texts"])) for word in _split(line))


def has_word(words: str, name: str) -> bool:
    """Return True if a name is one of the words."""
    return simplify(name) in _split(words)


def find_same_meaning(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that means the same, also of a mistyped name. None if there is none."""
    each: dict[str, str] = {}
    for item in known:
        each.setdefault(simplify(item), item)
    wanted = simplify(name)
    if wanted in each:
        return each[wanted]
    lines = read_meanings()["names"]
    if len(wanted) > LETTERS and wanted not in _list_words():
        known = {*each, *(word for line in lines for word in _split(line))}
        swapped = (word for word in sorted(known) if sorted(word) == sorted(wanted))
        wanted = next(swapped, next(iter(difflib.get_close_matches(wanted, known, 1, SLIP)), wanted))
        if wanted in each:
            return each[wanted]
    for line in lines:
        words = _split(line)
        if wanted in words and (same := next((each[word] for word in words if word in each), None)):
            return same
    return None


def split_parts(name: str) -> list[str]:
    """Return the parts of a name of several, the last first: it says most."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)
    return [part for part in reversed(parts) if len(parts) > 1 and len(part) > 2 and not has_word(_WEAK, part)]


def find_tool(kind: str, name: str, given: str = "") -> str:
    """Return the answer for another tool's own word (``options``, ``commands``), ``given`` so. "" if it is none's."""
    tools = read_meanings()["tools"]
    return next((each["text"].format(given or name) for each in tools if has_word(each.get(kind, ""), name)), "")
