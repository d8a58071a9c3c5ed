"""Decodes lines that are one event in the form this suite and mlcommons/logging write. Imported once there is enough to decode.

msgspec decodes such lines about four times as fast as json and makes the same of them; all that it refuses (NaN, surrogates,
numbers too large, other names) is left to `suite.log.decoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec


class _Record(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The names of an event, all of them there and no others."""

    namespace: Any
    time_ms: float
    event_type: str
    key: Annotated[str, msgspec.Meta(min_length=1)]
    value: Any
    metadata: dict[str, Any]


NAMES = len(_Record.__struct_fields__)
_DECODE = msgspec.json.Decoder(_Record).decode


def decode(lines: Sequence[bytes]) -> list[_Record] | None:
    """Decode lines of JSON, each by itself. None if any is not one event in the standard form."""
    try:
        return list(map(_DECODE, lines))
    except (ValueError, RecursionError):
        return None
