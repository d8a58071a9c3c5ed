"""Encodes messages between ranks as msgpack, and checks their type when they are read.

Unlike a pickle, a received message executes nothing. Messages carry no signature: they hold numbers, short texts and
records of them. A message of an unexpected type is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_origin

import msgspec


def encode(value: Any) -> bytes:
    """Encode numbers, texts, bytes, lists, dicts, data classes, Structs, paths and numpy arrays."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_other)


def decode(data: bytes, kind: Any = Any) -> Any:
    """Decode a message as a value of this type. ConnectionError if it is none.

    Without a type, tuples and sets become lists, data classes become dicts, and paths become texts.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_other)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConnectionError(f"a message between ranks is not a {getattr(kind, '__name__', kind)}: {error}") from None


def convert(value: Any, kind: Any) -> Any:
    """Convert a value that was decoded without a type into this type."""
    return msgspec.convert(value, kind, dec_hook=_decode_other)


def _encode_other(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.ndarray):
        # `str` includes the byte order, which the name of a dtype leaves out.
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to other ranks")


def _decode_other(kind: Any, value: Any) -> Any:
    import numpy as np

    if get_origin(kind) is np.ndarray:
        dtype, shape, data = value
        # The array is a view of the message and cannot be written to.
        return np.frombuffer(data, dtype).reshape(shape)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} cannot be received from other ranks")
