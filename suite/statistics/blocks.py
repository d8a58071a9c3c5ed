"""The engine of both comparisons: in each block every entry has one turn, so a drift from block to block hits all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Turn:
    """One entry in one block. Blocks count from 1."""

    block: int
    entry: str


def alternate(block: int, entries: Sequence[str]) -> list[str]:
    """Return the order of a block of two sides: reversed in every second one. A drift within a block then cancels out."""
    return list(entries) if block % 2 else list(reversed(entries))


def draw(block: int, entries: Sequence[str], seed: int) -> list[str]:
    """Draw the order of a block.

    Orders are independent, none is balanced by force: only so are times of equal entries exchangeable within each block, whatever
    the machine does meanwhile, and the stated error of a race holds.
    """
    drawn = sorted(entries)
    random.Random(f"{seed}/{block}").shuffle(drawn)  # noqa: S311  no secret
    return drawn


def run_block(
    block: int, order: Sequence[str], run: Callable[[Turn], Result], known: Mapping[Turn, Result] | None = None
) -> dict[str, Result]:
    """Run all turns of a block, one after the other; those that are ``known`` already are not run again."""
    found: dict[str, Result] = {}
    for entry in order:
        turn = Turn(block, entry)
        found[entry] = known[turn] if known is not None and turn in known else run(turn)
    return found
