"""Converts JSON values from logs to a number or None, never an error. Computes with stretches of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Span = tuple[float, float]  # begin and end in seconds


def convert_to_float(value: object) -> float | None:
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


def parse_float(value: object) -> float | None:
    """Convert as `convert_to_float`, and also a text that is a number: OpenFold's logs write their seed as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return convert_to_float(value)


def parse_int64(value: object) -> int | None:
    """Convert to an integer of at most 64 bits, also from text or from 512.0. None for anything else."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            return None
    result = convert_to_float(value)
    return int(result) if result is not None and result == int(result) and abs(result) < 2.0**63 else None


def parse_int(value: object) -> int | None:
    """Convert as `parse_int64`, but to an integer of any size: seeds of more than 64 bits differ too."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) else parse_int64(value)


def compute_spans_inside(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of the spans inside the window, merged."""
    low, high = window
    clipped = [(max(low, begin), min(high, end)) for begin, end in spans]
    return merge_spans((begin, end) for begin, end in clipped if end > begin)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order; overlapping or touching ones become one."""
    ordered = sorted(spans)
    merged: list[Span] = []
    for begin, end in ordered:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def remove_holes(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Subtract the holes from the spans. Both must be merged: one pass over each is then enough."""
    if not holes:
        return list(spans)
    left: list[Span] = []
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


def sum_lengths(spans: Iterable[Span]) -> float:
    """Return the length of all spans, summed exactly."""
    return math.fsum(end - begin for begin, end in spans)
