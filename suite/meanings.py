"""Finds the name of ours for a word that another tool uses: of sbatch, torchrun, mpiexec, pytest, hydra, wandb, docker.

To add a habit, add its word to the line of its meaning in `meanings.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml


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


def has_word(words: str, name: str) -> bool:
    """Return True if a name is one of the words."""
    return simplify(name) in _split(words)


def find_same_meaning(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that means the same. None if there is none."""
    each: dict[str, str] = {}
    for item in known:
        each.setdefault(simplify(item), item)
    wanted = simplify(name)
    if wanted in each:
        return each[wanted]
    for line in read_meanings()["names"]:
        words = _split(line)
        if wanted in words and (same := next((each[word] for word in words if word in each), None)):
            return same
    return None
