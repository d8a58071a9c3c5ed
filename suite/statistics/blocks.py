"""Runs comparisons in blocks. Every entry has one turn in each block, so a drift between blocks affects all equally."""

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


def make_alternating_order(block: int, entries: Sequence[str]) -> list[str]:
    """Return the order of a block of two sides, reversed in every second one.

    A drift within a block then cancels out.
    """
    return list(entries) if block % 2 else list(reversed(entries))


def make_random_order(block: int, entries: Sequence[str], seed: int) -> list[str]:
    """Draw the order of a block.

    Orders are independent and not balanced. Only then can times of equal entries be exchanged within each block,
    whatever the machine does. The stated error of a race rests on that.
    """
    drawn = sorted(entries)
    random.Random(f"{seed}/{block}").shuffle(drawn)  # noqa: S311  no secret
    return drawn


def run_block(
    block: int, order: Sequence[str], run: Callable[[Turn], Result], known: Mapping[Turn, Result] | None = None
) -> dict[str, Result]:
    """Run all turns of a block, one after the other. The ``known`` turns are not run again."""
    known = known or {}
    turns = [Turn(block, entry) for entry in order]
    return {turn.entry: known[turn] if turn in known else run(turn) for turn in turns}
