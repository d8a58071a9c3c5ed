"""Reads the reference's TFRecord files (gzip or plain) of tf.train.Example, without TensorFlow.

A record is a length (u64), its checksum, the payload, its checksum; checksums are masked CRC-32C. The payload is an
Example with two features. ``x`` is one byte string: little-endian int16 counts, channels last. ``y`` is four floats.
Formats: tensorflow.org/tutorials/load_data/tfrecord, protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.workloads.cosmoflow.config import REDSHIFTS, TARGETS

GZIP_MAGIC = b"\x1f\x8b"
HEADER_BYTES, FOOTER_BYTES = 12, 4

Sample = tuple[NDArray[np.int16], NDArray[np.float32]]


def read_tfrecord(path: Path) -> Iterator[Sample]:
    """Read the samples of one file: x (n, n, n, 4) int16 and y (4,) float32.

    InputError names the file and the offset (in the uncompressed stream) of a damaged or unexpected record.
    """
    for offset, payload in _records(path, _content(path)):
        try:
            yield decode_example(payload)
        except ValueError as error:
            raise InputError(f"{path}: record at offset {offset}: {error}") from None


def decode_example(payload: bytes) -> Sample:
    """Parse a serialised tf.train.Example. InputError if it is damaged or has other features."""
    # Example.features is field 1 and Features.feature field 1: a map, of entries with key (1) and value (2)
    features: dict[bytes, memoryview] = {}
    for body in _fields(memoryview(payload), 1):
        for entry in _fields(body, 1):
            key = b"".join(bytes(part) for part in _fields(entry, 1))
            for value in _fields(entry, 2):
                features[key] = value
    missing = [name for name in ("x", "y") if name.encode() not in features]
    if missing:
        present = ", ".join(sorted(key.decode("utf-8", "replace") for key in features)) or "none"
        raise InputError(f"not a CosmoFlow sample: no feature {missing[0]!r}; features: {present}")
    # Feature.bytes_list is field 1 and Feature.float_list field 2; the values of either list are field 1
    counts = [value for part in _fields(features[b"x"], 1) for value in _fields(part, 1)]
    targets = [value for part in _fields(features[b"y"], 2) for value in _fields(part, 1)]
    return _counts(counts), _targets(targets)


def _counts(values: list[memoryview]) -> NDArray[np.int16]:
    if len(values) != 1:
        raise InputError(f"feature 'x' has {len(values)} byte strings, expected 1")
    size = len(values[0])
    channels = len(REDSHIFTS)
    side = round((size / (2 * channels)) ** (1 / 3))
    if side == 0 or size != 2 * channels * side**3:
        raise InputError(
            f"feature 'x' has {size} bytes, expected 2 x {channels} x n^3: a cube of {channels} int16 channels"
        )
    # astype copies: the array of frombuffer is read-only
    return np.frombuffer(values[0], dtype="<i2").reshape(side, side, side, channels).astype(np.int16)


def _targets(values: list[memoryview]) -> NDArray[np.float32]:
    # a writer may pack the floats in one field or write a field for each: the bytes are the same
    packed = b"".join(bytes(value) for value in values)
    if len(packed) != 4 * len(TARGETS):
        raise InputError(f"feature 'y' has {len(packed)} bytes, expected {len(TARGETS)} floats")
    targets = np.frombuffer(packed, dtype="<f4").astype(np.float32)
    if not np.isfinite(targets).all():
        raise InputError(f"feature 'y' is {targets.tolist()}, expected finite numbers")
    return targets


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        if not content.startswith(GZIP_MAGIC):
            return content
        # 31: a gzip header and trailer around a window of 2^15. gzip.decompress would not show where the stream ends
        stream = zlib.decompressobj(wbits=31)
        data = stream.decompress(content)
        complete = stream.eof
    except zlib.error as error:
        raise InputError(f"{path}: offset 0: gzip stream is damaged: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not complete:
        raise InputError(f"{path}: offset {len(data)}: gzip stream is truncated after {len(content)} compressed bytes")
    if stream.unused_data:
        raise InputError(f"{path}: offset {len(data)}: {len(stream.unused_data)} bytes follow the gzip stream")
    return data


def _records(path: Path, content: bytes) -> Iterator[tuple[int, bytes]]:
    if not content:
        raise InputError(f"{path}: offset 0: empty, expected a TFRecord file")
    offset = 0
    while offset < len(content):
        if offset + HEADER_BYTES > len(content):
            raise InputError(f"{path}: offset {offset}: truncated record header")
        length, check = struct.unpack_from("<QI", content, offset)
        if compute_masked_crc32c(content[offset : offset + 8]) != check:
            raise InputError(f"{path}: offset {offset}: record length fails its crc32c; damaged or not a TFRecord file")
        begin = offset + HEADER_BYTES
        if begin + length + FOOTER_BYTES > len(content):
            raise InputError(
                f"{path}: offset {offset}: truncated: record of {length} bytes, {len(content) - begin} left"
            )
        payload = content[begin : begin + length]
        if compute_masked_crc32c(payload) != struct.unpack_from("<I", content, begin + length)[0]:
            raise InputError(f"{path}: offset {begin}: payload of {length} bytes fails its crc32c")
        yield offset, payload
        offset = begin + length + FOOTER_BYTES


def compute_masked_crc32c(data: bytes) -> int:
    """Compute the CRC-32C, rotated and shifted as TFRecord stores it."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _fields(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """Return the values of one field of a message, in order; other fields are skipped.

    Lengths or 32-bit values only.
    """
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        field, wire_type = key >> 3, key & 7
        # wire types: 0 varint, 1 eight bytes, 2 a length and its bytes, 5 four bytes
        if wire_type == 0:
            _, position = _read_varint(message, position)
            continue
        if wire_type == 2:
            length, position = _read_varint(message, position)
        else:
            length = {1: 8, 5: 4}.get(wire_type, -1)
        if length < 0 or position + length > len(message):
            raise InputError("not a serialised tf.train.Example")
        if field == wanted:
            yield message[position : position + length]
        position += length


def _read_varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    # ten bytes of seven bits hold 64 bits
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise InputError("not a serialised tf.train.Example")
