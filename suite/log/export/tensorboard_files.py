"""Event files of TensorBoard, one folder for each log: TFRecords of serialised tf.Event messages with scalars.

A record is its length (u64), the masked CRC-32C of that, the message, its masked CRC-32C. Fields of the messages:
tensorflow/core/util/event.proto and framework/summary.proto. TensorBoard and TensorFlow are not needed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from suite.errors import InputError
from suite.files import write_whole
from suite.log.export.series import Point, RunSeries

_VERSION = b"brain.Event:2"
_MASK = 0xA282EAD8


def write_tensorboard(run: RunSeries, folder: Path) -> Path:
    """Write the event file of one log and return its path. InputError if it exists, or google-crc32c is not installed."""
    crc32c = _load_crc32c()
    times = [point.time_ms for points in run.series.values() for point in points]
    target = folder / run.label / f"events.out.tfevents.{min(times, default=0) // 1000:010d}.mlhpc"
    content = b"".join(_record(message, crc32c) for message in _messages(run, min(times, default=0)))
    try:
        write_whole(target, content, overwrite=False)
    except FileExistsError:
        raise InputError(f"{target}: exists already; choose another folder with -o") from None
    return target


def _load_crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError:
        raise InputError("export tensorboard needs google-crc32c: pip install 'mlhpc[run]'") from None
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def _messages(run: RunSeries, begin_ms: int) -> Iterator[bytes]:
    """The version of the file, then a message for each point in order of time."""
    yield _double(1, begin_ms / 1e3) + _bytes(3, _VERSION)
    points = ((point, name) for name, series in run.series.items() for point in series)
    for point, name in sorted(points, key=lambda item: item[0].time_ms):
        yield _scalar(name, point)


def _scalar(tag: str, point: Point) -> bytes:
    """An Event with wall_time (1), step (2) and a Summary (5) of one Value (1) with tag (1) and simple_value (2)."""
    value = _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", _single(point.value))
    return _double(1, point.time_ms / 1e3) + b"\x10" + _varint(point.step) + _bytes(5, _bytes(1, value))


def _single(value: float) -> float:
    """The value as single precision can hold it: the largest number for a larger one."""
    largest = 3.4028234663852886e38
    return max(min(value, largest), -largest)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _record(message: bytes, crc32c: Callable[[bytes], int]) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + _masked(crc32c(length)) + message + _masked(crc32c(message))


def _masked(crc: int) -> bytes:
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)
