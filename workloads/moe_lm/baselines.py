"""Baselines without a network, in bits per byte: compressors and byte models after the training text."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.workload import Baseline
from mlhpc.workloads.moe_lm.language import Language, Lexicon
from mlhpc.workloads.moe_lm.ppm import Bytes, compute_ppm_bits, compute_tree_bits

ORDERS = (0, 1, 2, 3, 4, 5, 6, 8, 12)  # bytes of context
BLOCK_BYTES = 2**22  # of training text in memory at once
TREE_BYTES = 2**21  # of training text that the context tree counts
GZIP_REACH, BZIP2_REACH, XZ_REACH = 2**15, 900_000, 2**26  # bytes that gzip -9, bzip2 -9 and xz -9 look back


def measure_baselines(root: Path) -> dict[str, float]:
    """Measure ``gzip``, ``bzip2``, ``xz``, ``ppm_<bytes of context>``, ``ppm_mixed`` and ``context_tree`` on the validation rows.

    Byte models have standard errors over the rows; a compressor adds one number for all rows. In a generated language
    ``known_language`` is the oracle.
    """
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    rows: Bytes = validation.read(np.arange(len(validation)))["text"]
    step = max(1, BLOCK_BYTES // train.read([0])["text"].shape[1])

    def blocks() -> Iterator[Bytes]:
        for begin in range(0, len(train), step):
            yield train.read(np.arange(begin, min(begin + step, len(train))))["text"]

    found = compute_compressor_bits(_last(train, XZ_REACH), rows.tobytes())
    models = compute_ppm_bits(blocks, rows, ORDERS)
    first = max(2, TREE_BYTES // train.read([0])["text"].shape[1])
    models["context_tree"] = compute_tree_bits(train.read(np.arange(min(first, len(train))))["text"], rows)
    found |= {name: Baseline.mean(bits.mean(axis=1)) for name, bits in models.items()}
    return found | _measure_oracle(validation.manifest.generator, rows)


def _measure_oracle(recipe: Mapping[str, Any], rows: Bytes) -> dict[str, float]:
    """Measure ``known_language``, the oracle that knows the tables of a generated language. Empty for real text."""
    if not recipe.get("language"):
        return {}
    bits = Language(recipe["seed"], Lexicon(**recipe["language"])).bits(rows)
    known = Baseline.mean(bits / (rows.shape[1] - 1))
    return {"known_language": Baseline(known, known.standard_error, told=True)}


def compute_compressor_bits(training: bytes, text: bytes) -> dict[str, float]:
    """Compute the bits per byte of ``text`` by three compressors.

    A compressor counts what ``text`` adds to the end of the training text, as far as it can look back. If the size of
    ``text`` alone is less, it is that.
    """
    room = max(BZIP2_REACH - len(text) - 1000, 0)  # bzip2 sorts whole blocks: both must be in one
    sizes = {
        "gzip": _count_added_bytes(lambda data: len(gzip.compress(data, 9)), training[-GZIP_REACH:], text),
        "bzip2": _count_added_bytes(
            lambda data: len(bz2.compress(data, 9)), training[len(training) - room :] if room else b"", text
        ),
        "xz": _count_added_bytes(lambda data: len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)), training, text),
    }
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def _count_added_bytes(size: Callable[[bytes], int], before: bytes, text: bytes) -> int:
    return min(size(before + text) - size(before), size(text))


def _last(train: ShardReader, length: int) -> bytes:
    """Return the last bytes of the training text."""
    rows = -(-length // train.read([0])["text"].shape[1])
    return bytes(train.read(np.arange(max(0, len(train) - rows), len(train)))["text"].tobytes())
