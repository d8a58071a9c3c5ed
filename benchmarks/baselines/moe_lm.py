"""Baselines without a network, in bits per byte: compressors and byte models after the training text.

Byte models mix counts of contexts of several lengths, as PPM does. The contexts are the last bytes (`compute_ppm_bits`),
or earlier bytes that a search picks (`compute_tree_bits`).
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines import Baseline, compute_mean
from mlhpc.suite.data.shards import ShardReader
from mlhpc.workloads.moe_lm.generate import Language, Lexicon

ORDERS = (0, 1, 2, 3, 4, 5, 6, 8, 12)  # bytes of context
BLOCK_BYTES = 2**22  # of training text in memory at once
TREE_BYTES = 2**21  # of training text that the context tree counts
GZIP_REACH, BZIP2_REACH, XZ_REACH = 2**15, 900_000, 2**26  # bytes that gzip -9, bzip2 -9 and xz -9 look back

DISCOUNT = 0.5  # taken from every count for what has not followed yet (PPMD's escape)
FORGETTING_FACTOR = 0.98  # of the mixture: how much of its past a row's next byte remembers
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no byte of a context is lost modulo 2^64
FILTER_BITS = 22  # of a context's key, to pass over most that the rows do not have

LAGS = range(1, 13)  # bytes back that may extend a context of the tree, beside the first byte of the row
BEFORE = 256  # stands for a byte before the row
DEPTH = 8  # bytes of the tree's longest context
LEAST_GAIN = 5.0  # bits that an extension must save on the held-out rows

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Chances = NDArray[np.float64]


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure ``gzip``, ``bzip2``, ``xz``, ``ppm_<bytes of context>``, ``ppm_mixed`` and ``context_tree`` on the validation rows.

    Byte models have standard errors over the rows; a compressor adds one number for all rows. In a generated language
    ``known_language`` is the oracle baseline, which knows the language's tables.
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
    found |= {name: compute_mean(bits.mean(axis=1)) for name, bits in models.items()}
    recipe = validation.manifest.generator
    if recipe.get("language"):
        bits = Language(recipe["seed"], Lexicon(**recipe["language"])).bits(rows)
        found["known_language"] = compute_mean(bits / (rows.shape[1] - 1))
    return found


def compute_compressor_bits(training: bytes, text: bytes) -> dict[str, Baseline]:
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
    return {name: Baseline(8 * size / len(text)) for name, size in sizes.items()}


def _count_added_bytes(size: Callable[[bytes], int], before: bytes, text: bytes) -> int:
    return min(size(before + text) - size(before), size(text))


def _last(train: ShardReader, length: int) -> bytes:
    """Return the last bytes of the training text."""
    rows = -(-length // train.read([0])["text"].shape[1])
    return bytes(train.read(np.arange(max(0, len(train) - rows), len(train)))["text"].tobytes())


def compute_ppm_bits(
    training: Callable[[], Iterable[Bytes]], rows: Bytes, orders: Sequence[int]
) -> dict[str, NDArray[np.float64]]:
    """Compute the bits of each byte of ``rows`` (N, L) by model. The first byte of a row has none: (N, L - 1).

    ``ppm_<order>`` counts what followed each context of that many bytes within a row. It counts in the training rows
    and in the rows and bytes before. It falls back on the next shorter order in ``orders``, which ascend. ``ppm_mixed``
    mixes all, weighted by how well each did on the row so far. ``training()`` yields blocks of rows, once for each
    order.
    """
    chances = np.full((len(rows), rows.shape[1] - 1), 1 / 256)
    bits = {}
    for order in orders:
        chances = _refine(chances, training(), rows, order)
        bits[f"ppm_{order}"] = -np.log2(chances)
    bits["ppm_mixed"] = _mix(np.stack(list(bits.values())))
    return bits


def _refine(chances: NDArray[np.float64], training: Iterable[Bytes], rows: Bytes, order: int) -> NDArray[np.float64]:
    """Refine the chances of next bytes by counts after ``order`` bytes. The first bytes of a row stay unchanged."""
    # the first byte of a row has no context and is not predicted
    begin = max(order, 1)
    keys = _keys(rows, order)[:, begin - order :]
    known, context = np.unique(keys, return_inverse=True)
    context, following = context.ravel(), rows[:, begin:].astype(np.int64).ravel()
    counts = _count_following(known, training, order)
    pair = context * 256 + following
    new = (counts[context, following] == 0) & (_count_earlier(pair) == 0)
    hits = counts[context, following] + _count_earlier(pair)
    total = counts.sum(axis=1)[context] + _count_earlier(context)
    distinct = (counts > 0).sum(axis=1)[context] + _count_earlier(context, new)
    shorter = chances[:, begin - 1 :].ravel()
    found = (np.maximum(hits - DISCOUNT, 0) + DISCOUNT * distinct * shorter) / np.maximum(total, 1)
    refined = chances.copy()
    refined[:, begin - 1 :] = np.where(total > 0, found, shorter).reshape(len(rows), -1)
    return refined


def _count_following(known: NDArray[np.uint64], training: Iterable[Bytes], order: int) -> NDArray[np.int64]:
    """Count what follows each of the ``known`` contexts: (contexts, 256)."""
    counts = np.zeros((len(known), 256), dtype=np.uint32)
    shift = np.uint64(64 - FILTER_BITS)
    wanted = np.zeros(1 << FILTER_BITS, dtype=bool)
    wanted[known >> shift] = True
    for block in training:
        keys, following = _keys(block, order).ravel(), block[:, order:].ravel()
        candidates = np.flatnonzero(wanted[keys >> shift])
        keys, following = keys[candidates], following[candidates]
        place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        same = known[place] == keys
        # not counts[...] += 1: that would count a pair that occurs twice only once
        np.add.at(counts, (place[same], following[same]), 1)
    return counts.astype(np.int64)


def _keys(rows: Bytes, order: int) -> NDArray[np.uint64]:
    """Number the context of ``order`` bytes before each byte that has one: (N, L - order)."""
    width = rows.shape[1] - order
    keys = np.zeros((len(rows), width), dtype=np.uint64)
    for position in range(order):
        keys += rows[:, position : position + width]
        keys += np.uint64(1)
        keys *= np.uint64(MULTIPLIER)
    return keys


def _count_earlier(groups: NDArray[np.int64], counted: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Count the earlier members of each element's group, or those of them that are ``counted``."""
    order = np.argsort(groups, kind="stable")
    ones = np.ones(len(groups), dtype=np.int64) if counted is None else counted[order].astype(np.int64)
    running = np.cumsum(ones) - ones
    first = np.flatnonzero(np.diff(groups[order], prepend=-1))
    result = np.empty(len(groups), dtype=np.int64)
    result[order] = running - np.repeat(running[first], np.diff(first, append=len(groups)))
    return result


def _mix(bits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mix the bits of models (M, N, L).

    A model's weight is the chance that it gave to the row's earlier bytes, with a fading memory.
    """
    past = np.zeros(bits.shape[:2])
    mixed = np.empty(bits.shape[1:])
    for position in range(bits.shape[2]):
        # relative to the best model: powers of the sums themselves underflow to 0
        weights = np.exp2(past.min(axis=0) - past)
        chances = (weights * np.exp2(-bits[:, :, position])).sum(axis=0) / weights.sum(axis=0)
        mixed[:, position] = -np.log2(chances)
        past = FORGETTING_FACTOR * past + bits[:, :, position]
    return mixed


def compute_tree_bits(training: Bytes, rows: Bytes) -> NDArray[np.float64]:
    """Compute the bits of each byte of ``rows`` (N, L). The first byte of a row has none: (N, L - 1).

    A context is the values of some earlier bytes. A greedy search extends each context by the byte that saves most bits,
    until none saves ``LEAST_GAIN``. It counts in one half of the training rows and tries on the other. Then all are
    counted. Counts are mixed with those of the shorter context.
    """
    parts = (training[::2], training[1::2], rows)
    part = np.repeat(np.arange(3), [each[:, 1:].size for each in parts])
    following = np.concatenate([each[:, 1:].ravel() for each in parts]).astype(np.int64)
    earlier = np.stack([np.concatenate([_find_earlier(each, lag) for each in parts]) for lag in (0, *LAGS)])
    # of the held-out rows by one half, of `rows` by all training rows
    chances, context = np.full(len(following), 1 / 256), np.zeros(len(following), dtype=np.int64)
    alive = np.arange(len(following))  # what is in a context that was extended
    for _ in range(DEPTH + 1):
        keys = context[alive]
        for counted, wanted in ((part == 0, part == 1), (part < 2, part == 2)):
            of, to = counted[alive], wanted[alive]
            place = alive[to]
            chances[place] = _extend(keys[of], following[alive[of]], keys[to], following[place], chances[place])
        choice = _choose_extensions(keys, following[alive], part[alive], chances[alive], earlier[:, alive])
        extended = choice[keys] >= 0
        alive, chosen = alive[extended], choice[keys[extended]]
        if not len(alive):
            break
        longer = keys[extended] * (BEFORE + 1) + earlier[chosen, alive]
        context[alive] = np.unique(longer, return_inverse=True)[1]
    bits: NDArray[np.float64] = -np.log2(chances[part == 2]).reshape(len(rows), -1)
    return bits


def _find_earlier(rows: Bytes, lag: int) -> NDArray[np.uint16]:
    """Find what is ``lag`` bytes before each byte but the first of its row. Lag 0: the first byte of the row."""
    found = np.full((len(rows), rows.shape[1] - 1), BEFORE, dtype=np.uint16)
    found[:, max(lag - 1, 0) :] = rows[:, : rows.shape[1] - lag] if lag else rows[:, :1]
    return found.ravel()


def _choose_extensions(
    keys: Numbers, following: Numbers, part: Numbers, chances: Chances, earlier: NDArray[np.uint16]
) -> Numbers:
    """Choose the row of ``earlier`` that extends each context, or -1."""
    of, to = part == 0, part == 1
    contexts = keys.max() + 1
    choice, best = np.full(contexts, -1), np.full(contexts, LEAST_GAIN)
    for number, values in enumerate(earlier):
        longer = keys * (BEFORE + 1) + values
        found = _extend(longer[of], following[of], longer[to], following[to], chances[to])
        gain = np.bincount(keys[to], np.log2(found / chances[to]), contexts)
        choice[gain > best] = number
        best = np.maximum(best, gain)
    return choice


def _extend(keys: Numbers, following: Numbers, wanted: Numbers, then: Numbers, shorter: Chances) -> Chances:
    """Compute the chances of ``then`` in the contexts ``wanted``, by what follows ``keys`` and by ``shorter``."""
    if not len(keys):
        return shorter
    pairs, count = np.unique(keys * 256 + following, return_counts=True)
    known, first = np.unique(pairs >> 8, return_index=True)
    total, distinct = np.add.reduceat(count, first), np.diff(first, append=len(pairs))
    place, same = _look_up(known, wanted)
    pair, met = _look_up(pairs, wanted * 256 + then)
    hits = np.where(met, count[pair], 0)
    found = (np.maximum(hits - DISCOUNT, 0) + DISCOUNT * distinct[place] * shorter) / total[place]
    return np.where(same, found, shorter)


def _look_up(known: Numbers, wanted: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """Look up the place of each number among ``known``, which ascend, and whether it is there."""
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return place, known[place] == wanted
