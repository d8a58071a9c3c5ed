"""Criteria learned from a fleet: the most typical node's sample, and the nodes that are unlike it (after Anubis)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.fleet.similarity import one_sided, similarity_matrix

ALPHA = 0.95  # least similarity to the criterion


@dataclass(frozen=True)
class Criterion:
    """The criterion of one metric: ``values`` is the sample of ``node``, the most similar one to all that were kept.

    ``repeatability`` is the mean similarity of every two kept samples, None for one. A metric whose repeatability is below
    ``alpha`` cannot have that alpha: `usable` says so.
    """

    node: str
    values: tuple[float, ...]
    alpha: float
    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    repeatability: float | None

    @property
    def usable(self) -> bool:
        """Whether most nodes were kept, and these are as alike as ``alpha`` asks."""
        return len(self.kept) > len(self.left_out) and (self.repeatability is None or self.repeatability >= self.alpha)


def learn(samples: Mapping[str, Sequence[float]], *, more_is_better: bool, alpha: float = ALPHA) -> Criterion:
    """Learn the criterion of one metric from the samples of at least one node.

    The centroid is the sample with the largest sum of similarities to all others. Nodes that are worse than it and less similar
    than ``alpha`` are left out, and the centroid is found anew, until nothing changes. Nodes that are better stay.
    """
    kept = sorted(samples)
    while True:
        matrix = similarity_matrix([samples[node] for node in kept])
        centre = kept[int(np.argmax(matrix.sum(axis=1)))]
        alike = [
            node for node in kept if one_sided(samples[node], samples[centre], more_is_better=more_is_better) >= alpha
        ]
        if len(alike) == len(kept):
            break
        kept = alike
    count = len(kept)
    return Criterion(
        node=centre,
        values=tuple(samples[centre]),
        alpha=alpha,
        kept=tuple(kept),
        left_out=tuple(sorted(set(samples) - set(kept))),
        repeatability=float((matrix.sum() - count) / (count * (count - 1))) if count > 1 else None,
    )
