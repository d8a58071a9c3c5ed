"""Baselines without a network: byte models that count what follows the last few bytes, in bits per byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suite.data.manifest import read_manifest
from suite.data.shards import ShardReader
from suite.workload import Baseline

PRIOR = 4.0  # weight of the shorter context's distribution, in counts
ORDERS = range(5)  # bytes of context


def baselines(root: Path) -> dict[str, float]:
    """Measure ``bytes_<n>``, interpolated counts with n bytes of context; ``entropy_rate`` if the language is generated."""
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    text = train.read(np.arange(len(train)))["text"]
    rows = validation.read(np.arange(len(validation)))["text"]
    chances = np.full((len(rows), rows.shape[1] - 1), 1 / 256)
    results: dict[str, float] = {}
    for order in ORDERS:
        chances = refine(chances, text, rows, order)
        results[f"bytes_{order}"] = Baseline.mean(-np.log2(chances).mean(axis=1))
    rate = read_manifest(root).attributes.get("entropy_rate")
    return results if rate is None else results | {"entropy_rate": float(rate)}


def refine(
    chances: NDArray[np.float64], text: NDArray[np.uint8], rows: NDArray[np.uint8], order: int
) -> NDArray[np.float64]:
    """Refine the probabilities of next bytes by counts with ``order`` bytes of context; ``chances`` is the prior.

    Positions with fewer than ``order`` bytes before them are unchanged.
    """
    seen, counts = np.unique(_keys(text, order + 1), return_counts=True)
    before, totals = np.unique(_keys(text[:, :-1], order), return_counts=True) if order else (None, None)
    queries = _keys_by_row(rows, order + 1)[:, 0 if order else 1 :]
    hits = _look_up(queries, seen, counts)
    if order:
        assert before is not None
        assert totals is not None
        total = _look_up(_keys_by_row(rows[:, :-1], order), before, totals)
    else:
        total = np.full(hits.shape, float(text.size))
    refined = chances.copy()
    begin = max(order - 1, 0)
    refined[:, begin:] = (hits + PRIOR * chances[:, begin:]) / (total + PRIOR)
    return refined


def _keys(rows: NDArray[np.uint8], length: int) -> NDArray[np.int64]:
    return _keys_by_row(rows, length).ravel()


def _keys_by_row(rows: NDArray[np.uint8], length: int) -> NDArray[np.int64]:
    """Encode each run of ``length`` bytes within a row as one integer."""
    width = rows.shape[1] - length + 1
    key = np.zeros((len(rows), width), dtype=np.int64)
    for position in range(length):
        key = key * 256 + rows[:, position : position + width]
    return key


def _look_up(queries: NDArray[np.int64], keys: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.float64]:
    position = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[position] == queries, values[position], 0).astype(np.float64)
