"""How alike two samples of a benchmark are: one minus the area between their distribution functions.

The area is divided by the larger of the two means, so that the similarity of two samples is 1 - W1 / mean, with W1 the first
Wasserstein distance. A sample that is worse everywhere differs by the difference of the means; samples of equal means differ
if their spread does. The idea is that of Anubis (USENIX ATC'24), whose paper divides by the range of both samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def similarity(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """Similarity of two samples of non-negative numbers: 1 if they are equal, 0 or more, the same for (b, a)."""
    first, second = _sorted(a), _sorted(b)
    at, below_a, below_b = _distributions(first, second)
    return _similar(float(np.abs(below_a - below_b) @ np.diff(at)), first, second)


def one_sided(sample: Sequence[float] | Floats, criterion: Sequence[float] | Floats, *, more_is_better: bool) -> float:
    """Similarity in which only what is worse than ``criterion`` counts: 1 for a sample that is nowhere worse."""
    first, second = _sorted(sample), _sorted(criterion)
    at, below, wanted = _distributions(first, second)
    worse = below - wanted if more_is_better else wanted - below
    return _similar(float(np.maximum(worse, 0.0) @ np.diff(at)), first, second)


def similarity_matrix(samples: Sequence[Sequence[float] | Floats]) -> Floats:
    """Similarities (N, N) of every two of N samples. Fast if all have as many values."""
    if len({len(sample) for sample in samples}) == 1:
        values = np.sort(
            np.asarray(samples, dtype=np.float64), axis=1
        )  # (N, n): of equal sizes, W1 pairs the sorted values
        means = values.mean(axis=1)
        rows = []
        for row, mean in zip(values, means, strict=True):
            larger = np.maximum(means, mean)
            distance = np.abs(values - row).mean(axis=1)
            rows.append(1.0 - np.divide(distance, larger, out=np.zeros_like(larger), where=larger > 0.0))
        return np.stack(rows)
    matrix = np.ones((len(samples), len(samples)))
    for i in range(len(samples)):
        for j in range(i):
            matrix[i, j] = matrix[j, i] = similarity(samples[i], samples[j])
    return matrix


def _sorted(sample: Sequence[float] | Floats) -> Floats:
    return np.sort(np.asarray(sample, dtype=np.float64))


def _distributions(a: Floats, b: Floats) -> tuple[Floats, Floats, Floats]:
    """Where either distribution function steps, and both between the steps."""
    at = np.sort(np.concatenate([a, b]))
    below = [np.searchsorted(sample, at[:-1], side="right") / len(sample) for sample in (a, b)]
    return at, below[0], below[1]


def _similar(area: float, a: Floats, b: Floats) -> float:
    mean = max(a.mean(), b.mean())
    return 1.0 - area / float(mean) if mean > 0.0 else 1.0
