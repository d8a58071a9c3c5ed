"""The reference's on-disk form, byte for byte, and every kind of damage answered with file and offset."""

import gzip
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from mlhpc.suite.errors import InputError
from mlhpc.workloads.cosmoflow.convert import compute_masked_crc32c, decode_example, read_tfrecord
from tests.fixtures.export_cosmoflow import encode_example, write_tfrecord

X = np.arange(-4, 4, dtype=np.int16).repeat(4).reshape(2, 2, 2, 4)
Y = np.array([0.5, -0.25, 1.0, -1.0], dtype=np.float32)


def sample(side: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.poisson(3, (side,) * 3 + (4,)).astype(np.int16), random.uniform(-1, 1, 4).astype(np.float32)


def test_masked_crc_of_the_crc32c_check_value() -> None:
    """CRC-32C of "123456789" is e3069283 (RFC 3720, B.4); TFRecord rotates right by 15 and adds a282ead8."""
    rotated = (0xE3069283 >> 15 | 0xE3069283 << 17) & 0xFFFFFFFF
    assert compute_masked_crc32c(b"123456789") == (rotated + 0xA282EAD8) % 2**32


def test_golden_example() -> None:
    """Written out by hand from the protobuf schema of tf.train.Example."""
    counts, targets = X.tobytes(), Y.tobytes()
    x_entry = b"\x0a\x01x" + b"\x12\x44" + b"\x0a\x42" + b"\x0a\x40" + counts
    y_entry = b"\x0a\x01y" + b"\x12\x14" + b"\x12\x12" + b"\x0a\x10" + targets
    features = b"\x0a\x49" + x_entry + b"\x0a\x19" + y_entry
    assert encode_example(X, Y) == b"\x0a\x66" + features


def test_a_record_has_the_71_bytes_more_than_its_data_that_the_public_files_have(tmp_path: Path) -> None:
    x = np.zeros((128, 128, 128, 4), dtype=np.int16)
    write_tfrecord(tmp_path / "one.tfrecord", [(x, Y)], compressed=False)
    assert (tmp_path / "one.tfrecord").stat().st_size == 16_777_287


@pytest.mark.parametrize("compressed", [True, False])
def test_round_trip(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "two.tfrecord"
    written = [sample(8, 1), sample(8, 2)]
    write_tfrecord(path, written, compressed=compressed)
    for (x, y), (x_read, y_read) in zip(written, read_tfrecord(path), strict=True):
        np.testing.assert_array_equal(x, x_read)
        np.testing.assert_array_equal(y, y_read)
        assert x_read.dtype == np.int16
        assert y_read.dtype == np.float32
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == compressed


def test_features_in_another_order_and_unpacked_floats_are_the_same_sample() -> None:
    x_feature = b"\x0a\x42" + b"\x0a\x40" + X.tobytes()
    y_list = b"".join(b"\x0d" + struct.pack("<f", value) for value in Y)
    y_feature = b"\x12" + bytes([len(y_list)]) + y_list
    entries = [b"\x0a\x01" + name + b"\x12" + bytes([len(f)]) + f for name, f in ((b"y", y_feature), (b"x", x_feature))]
    features = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in entries)
    x, y = decode_example(b"\x0a" + bytes([len(features)]) + features)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


@pytest.mark.parametrize("compressed", [True, False])
def test_no_flipped_bit_changes_a_sample_and_no_cut_goes_unnoticed(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "s.tfrecord"
    write_tfrecord(path, [(X, Y)], compressed=compressed)
    good = path.read_bytes()
    unnoticed = 0
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        message = None
        try:
            samples = list(read_tfrecord(path))
        except ValueError as error:
            message = str(error)
        if message is not None:
            assert re.fullmatch(r".*s\.tfrecord: (record at )?offset \d+: .*", message)
            continue
        unnoticed += 1
        np.testing.assert_array_equal(samples[0][0], X)
        np.testing.assert_array_equal(samples[0][1], Y)
    assert unnoticed <= (12 if compressed else 0)  # gzip has a time stamp, flags and padding bits that carry no data
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(InputError, match=r"s\.tfrecord: offset \d+"):
            list(read_tfrecord(path))


def test_the_second_record_is_named_by_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "s.tfrecord"
    write_tfrecord(path, [(X, Y), (X, Y)], compressed=False)
    data = bytearray(path.read_bytes())
    second = len(data) // 2
    data[second + 40] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"offset {second + 12}: payload of 104 bytes fails its crc32c"):
        list(read_tfrecord(path))


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.zeros((2, 2, 3, 4), np.int16), Y, "96 bytes, expected 2 x 4 x n"),
        (np.zeros((2, 2, 2, 4), np.int32), Y, None),
        (X, np.zeros(3, np.float32), "'y' has 12 bytes, expected 4 floats"),
        (X, np.array([0, 0, np.nan, 0], np.float32), "expected finite numbers"),
    ],
)
def test_a_sample_of_another_shape_is_refused(tmp_path: Path, x: np.ndarray, y: np.ndarray, words: str | None) -> None:
    path = tmp_path / "s.tfrecord"
    write_tfrecord(path, [(x, y)])
    if words is None:
        assert next(read_tfrecord(path))[0].dtype == np.int16
        return
    with pytest.raises(InputError, match=words):
        list(read_tfrecord(path))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.tfrecord"
    for content in (b"", b"hello world, this is not a record", gzip.compress(b"neither is this one here")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"offset 0"):
            list(read_tfrecord(path))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_tfrecord(tmp_path / "missing.tfrecord"))
    with pytest.raises(InputError, match="no feature 'x'; features: z"):
        decode_example(b"\x0a\x07\x0a\x05\x0a\x01z\x12\x00")
