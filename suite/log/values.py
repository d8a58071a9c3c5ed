"""Converts JSON values from logs to a number or None, never an error. Computes with stretches of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Stretch = tuple[float, float]  # begin and end in seconds


def finite(value: object) -> float | None:
    """Convert a JSON number to float. None for text, true, NaN, infinity and integers too large for a float."""
    if type(value) is float:  # nearly all
        return value if math.isfinite(value) else None
    if type(value) is bool or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def number(value: object) -> float | None:
    """Convert as `finite`, and also a text that is a number: OpenFold's logs write their seed as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return finite(value)


def whole(value: object) -> int | None:
    """Convert to an integer of at most 64 bits, also from text or from 512.0. None for anything else."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    result = finite(value)
    return int(result) if result is not None and result == int(result) and abs(result) < 2.0**63 else None


def exact(value: object) -> int | None:
    """Convert as `whole`, but to an integer of any size: seeds of more than 64 bits differ too."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) else whole(value)


def clip_stretches(spans: Sequence[Stretch], window: Stretch) -> list[Stretch]:
    """Return the parts of the spans inside the window, merged."""
    low, high = window
    clipped = [(max(low, begin), min(high, end)) for begin, end in spans]
    return merge_stretches((begin, end) for begin, end in clipped if end > begin)


def merge_stretches(spans: Iterable[Stretch]) -> list[Stretch]:
    """Return the spans in order; overlapping or touching ones become one."""
    ordered = sorted(spans)
    merged: list[Stretch] = []
    for begin, end in ordered:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def subtract_stretches(spans: Sequence[Stretch], holes: Sequence[Stretch]) -> list[Stretch]:
    """Subtract the holes from the spans. Both must be merged: one pass over each is then enough."""
    if not holes:
        return list(spans)
    left: list[Stretch] = []
    first = 0
    for begin, end in spans:
        at = begin
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        for index in range(first, len(holes)):
            low, high = holes[index]
            if low >= end:
                break
            if low > at:
                left.append((at, low))
            at = max(at, high)
        if at < end:
            left.append((at, end))
    return left


def length_of(spans: Iterable[Stretch]) -> float:
    """Return the length of all spans, summed exactly."""
    return math.fsum(end - begin for begin, end in spans)
