"""Numbers from logs: a JSON value becomes a number or None, never an error."""

from __future__ import annotations

import math


def finite(value: object) -> float | None:
    """Convert a JSON number to float; None for anything else (text, true, NaN, infinity, an integer too large for a float)."""
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
    """Convert to an integer of at most 64 bits, also from text or from 512.0; None for anything else."""
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
