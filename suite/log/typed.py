"""Decodes lines that are one event in the form this suite and mlcommons/logging write. Imported once there is enough to decode.

msgspec decodes such lines about four times as fast as json and makes the same of them; all that it refuses (NaN, surrogates,
numbers too large, other names) is left to `suite.log.decoding`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec


class _Record(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The names of an event, all of them there and no others."""

    namespace: Literal[""]
    time_ms: float
    event_type: Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]
    key: Annotated[str, msgspec.Meta(min_length=1)]
    value: Any
    metadata: dict[str, Any]


NAMES = len(_Record.__struct_fields__)
_DECODER = msgspec.json.Decoder(_Record)
_BETWEEN = b'}\n{"'  # as no value has it: after its brace comes a comma, a bracket or a brace


def decode(text: bytes, lines: int, *, whole: bool = False) -> list[_Record] | None:
    """Decode so many lines of JSON, each by itself. None if any is not one event in the standard form.

    ``whole``: each line is known to begin and to end with a brace; spaces may be before it.
    """
    try:
        if whole or text.count(_BETWEEN) == lines - 1:  # each line begins one value or more, and ends with one
            records = _DECODER.decode_lines(text)
            return records if len(records) == lines else None
        return list(map(_DECODER.decode, text.split(b"\n")))
    except (ValueError, RecursionError):
        return None
