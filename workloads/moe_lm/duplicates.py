"""Near copies among documents: the share of a document's shingles, runs of words, that earlier documents have too."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

SHINGLE_WORDS = 8
SAMPLE_EVERY = 4  # one shingle in so many is looked at, chosen by its hash: the same ones in every document
LEAST_SHINGLES = 4  # looked at, for a document to be judged by them
NEAR_COPY_SHARE = 0.5  # share of the shingles from which on a document is a near copy
WORD_MULTIPLIER, SHINGLE_MULTIPLIER = np.uint64(0x100000001B3), np.uint64(0x9E3779B97F4A7C15)  # odd

Shingles = NDArray[np.uint64]

_CLASS = np.zeros(256, dtype=np.uint64)  # 0: no part of a word; letters of both cases are equal
for _byte in range(256):
    if chr(_byte).isalnum() or _byte == ord("_") or _byte >= 128:
        _CLASS[_byte] = ord(chr(_byte).lower()) + 1 if _byte < 128 else _byte + 1


def compute_shingles(content: bytes) -> Shingles:
    """Hash the runs of `SHINGLE_WORDS` words of a text, and return the distinct hashes that are looked at, sorted.

    Words are letters, digits and underscores; case, spaces, line ends and signs do not matter.
    """
    classes = _CLASS[np.frombuffer(content, dtype=np.uint8)]
    inside = np.concatenate(([False], classes > 0, [False]))
    begins, ends = np.flatnonzero(inside[1:] & ~inside[:-1]), np.flatnonzero(inside[:-1] & ~inside[1:])
    if len(begins) < SHINGLE_WORDS:
        return np.empty(0, dtype=np.uint64)
    words = _words(classes, begins, ends)
    runs = np.zeros(len(words) - SHINGLE_WORDS + 1, dtype=np.uint64)
    for place in range(SHINGLE_WORDS):
        runs = (runs + words[place : place + len(runs)]) * SHINGLE_MULTIPLIER
        # a product carries bits only upwards; the sample below is chosen by the lowest bits
        runs ^= runs >> np.uint64(29)
    return np.unique(runs[runs % np.uint64(SAMPLE_EVERY) == 0])


def _words(classes: Shingles, begins: NDArray[np.intp], ends: NDArray[np.intp]) -> Shingles:
    """Hash each word: a polynomial of its bytes, modulo 2^64."""
    powers = np.cumprod(np.full(int((ends - begins).max()), WORD_MULTIPLIER, dtype=np.uint64))
    lengths = ends - begins
    last = np.repeat(ends - 1, lengths)
    inside = np.flatnonzero(classes)
    terms = classes[inside] * powers[last - inside]
    result: Shingles = np.add.reduceat(terms, np.concatenate(([0], np.cumsum(lengths)[:-1])))
    return result


def find_near_copies(documents: Iterable[Shingles]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Judge documents in their order.

    Returns which are near copies, and what share of each one's shingles an earlier one has.

    A document with fewer than `LEAST_SHINGLES` has share 0.
    """
    lists = list(documents)
    lengths = np.array([len(each) for each in lists], dtype=np.int64)
    owner = np.repeat(np.arange(len(lists), dtype=np.int64), lengths)
    joined = np.concatenate([*lists, np.empty(0, dtype=np.uint64)])
    order = np.argsort(joined, kind="stable")  # equal hashes stay in the order of their documents
    ranked = joined[order]
    earlier = np.zeros(len(joined), dtype=bool)
    # the hashes of a document are distinct, so an equal one before is of an earlier document
    earlier[order[1:]] = ranked[1:] == ranked[:-1]
    seen = np.bincount(owner[earlier], minlength=len(lists))
    shares = np.where(lengths >= LEAST_SHINGLES, seen / np.maximum(lengths, 1), 0.0)
    return shares >= NEAR_COPY_SHARE, shares
