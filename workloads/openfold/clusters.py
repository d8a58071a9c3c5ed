"""Groups chains of similar sequence: from a cluster file, or by sequence identity.

Relatives in both splits would leak the fold to validation. Identity is counted in an alignment whose overhanging ends
cost nothing. Short alignments are identical by chance. So a shorter alignment needs more identity (Rost 1999, Protein
Engineering 12, 85: equation 2).

Draws training chains with replacement, weighted by length and cluster size, in the reference's order.

AlphaFold 2's supplement 1.2.5. The n-th sample of a run is the n-th draw, whatever the number of ranks.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.suite.data.sampling import compute_epoch_order
from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.mmcif import read_text

IDENTITY = 0.4  # as in the cluster file of the benchmark
COVERAGE = 0.5  # of the shorter chain that must be aligned
MATCH, MISMATCH, GAP = 2, -1, 2
WORD = 3
BAND = 8  # diagonals that are counted together
SHARED_WORDS = 3  # on one band, for a pair to be aligned

Types = NDArray[np.int8]


def read_clusters(path: Path) -> dict[str, int]:
    """Read a cluster file: each line has the names of one cluster. Returns 0-based lines by name in upper case.

    InputError for a name on two lines.
    """
    clusters: dict[str, int] = {}
    for number, line in enumerate(read_text(path).strip().splitlines()):
        for name in map(str.upper, line.split()):
            if clusters.setdefault(name, number) != number:
                raise InputError(f"{path}: line {number + 1}: {name} is on line {clusters[name] + 1} too")
    return clusters


def group_by_similarity(chains: Sequence[Types]) -> list[int]:
    """Group chains by sequence identity; numbers rise from 0 in order of the first chain of each group.

    Greedy, longest first: a chain joins the first representative that it resembles.
    """
    order = sorted(range(len(chains)), key=lambda number: -len(chains[number]))
    group_of = [-1] * len(chains)
    words: dict[int, list[tuple[int, int]]] = defaultdict(list)  # word to representative and place
    for number in order:
        found = next(
            (each for each in _candidates(chains[number], words) if is_similar(chains[each], chains[number])), None
        )
        if found is None:
            for place, word in enumerate(_words(chains[number])):
                words[word].append((number, place))
        group_of[number] = number if found is None else found
    numbers: dict[int, int] = {}
    return [numbers.setdefault(group, len(numbers)) for group in group_of]


def is_similar(one: Types, other: Types) -> bool:
    """Tell whether two chains have more identical residues, aligned, than unrelated ones would."""
    if np.array_equal(one, other):
        return True
    pairs = find_alignment(one, other)
    if len(pairs) < COVERAGE * min(len(one), len(other)):
        return False
    left, right = one[pairs[:, 0]], other[pairs[:, 1]]
    return bool(np.mean((left == right) & (left < residues.UNKNOWN)) >= compute_needed_identity(len(pairs)))


def compute_needed_identity(length: int) -> float:
    """Compute the identity, 0 to 1, above which chains aligned over ``length`` residues count as similar."""
    by_chance: float = 4.8 * float(length) ** (-0.32 * (1 + math.exp(-length / 1000)))
    return min(1.0, max(IDENTITY, by_chance))


def find_alignment(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.int64]:
    """Align two sequences from end to end, gaps at the ends free. Returns the aligned places (pairs, 2), in order."""
    down, across = len(one), len(other)
    score = np.zeros((down + 1, across + 1), np.int32)
    ramp = GAP * np.arange(across + 1, dtype=np.int32)
    for row in range(1, down + 1):
        best = score[row - 1] - GAP
        # a gap at the beginning costs nothing
        best[0] = 0
        equal = np.where(other == one[row - 1], MATCH, MISMATCH)
        best[1:] = np.maximum(best[1:], score[row - 1, :-1] + equal)
        score[row] = np.maximum.accumulate(best + ramp) - ramp  # the best gap in this row that ends here
    # nor one at the end: the alignment may end anywhere in the last row or column
    last_row, last_column = int(score[-1].argmax()), int(score[:, -1].argmax())
    i, j = (down, last_row) if score[-1, last_row] >= score[last_column, -1] else (last_column, across)
    pairs: list[tuple[int, int]] = []
    while i and j:
        if score[i, j] == score[i - 1, j - 1] + (MATCH if one[i - 1] == other[j - 1] else MISMATCH):
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif score[i, j] == score[i - 1, j] - GAP:
            i -= 1
        else:
            j -= 1
    return np.array(pairs[::-1], np.int64).reshape(-1, 2)


def _words(chain: Types) -> list[int]:
    """List the numbers of the words of a chain, one for each place where one begins."""
    codes = chain.astype(np.int64)
    if len(codes) < WORD:
        return [-1 - int(np.polyval(codes, residues.MSA_CLASSES))]  # the whole chain is one word
    windows = np.lib.stride_tricks.sliding_window_view(codes, WORD)
    numbers: list[int] = (windows @ (residues.MSA_CLASSES ** np.arange(WORD))).tolist()
    return numbers


def _candidates(chain: Types, words: dict[int, list[tuple[int, int]]]) -> list[int]:
    """List the representatives that share words with a chain along one diagonal, the first made first."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    mine = _words(chain)
    for place, word in enumerate(mine):
        for number, there in words.get(word, ()):
            band = (there - place) // BAND
            counts[number, band] += 1
            counts[number, band + 1] += 1  # bands overlap by half, so that a diagonal is never cut off
    found = {number for (number, _), count in counts.items() if count >= min(SHARED_WORDS, len(mine))}
    return sorted(found)


SAMPLING, BY_CLUSTER = "train_sampling", "by cluster, with replacement"  # attribute of a data set, and its value
SHORTEST, LONGEST = 256, 512  # residues: weights rise between these


def compute_weights(lengths: NDArray[np.integer[Any]], clusters: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Compute each chain's weight: its length, clipped, over 512, over the square root of its cluster's size."""
    _, number, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    result: NDArray[np.float64] = np.clip(lengths, SHORTEST, LONGEST) / LONGEST * (1 / np.sqrt(sizes[number]))
    return result


class ClusterSampling:
    """Says which chain stands at each place of an epoch's order. A function of seed and epoch; threads may share it."""

    def __init__(self, chain_weights: NDArray[np.float64], global_batch_size: int) -> None:
        self._weights = torch.from_numpy(chain_weights)
        self._steps = len(chain_weights) // global_batch_size
        self._batch = global_batch_size
        self._lock = threading.Lock()
        self._epoch: tuple[int, int] | None = None
        self._chains = np.empty(0, np.int64)

    def chains(self, places: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Look up the chain that is drawn for each of the harness's indices in an epoch."""
        with self._lock:
            if self._epoch != (seed, epoch):
                self._epoch, self._chains = (seed, epoch), self._draw(seed, epoch)
            drawn: NDArray[np.int64] = self._chains[places]
        return drawn

    def _draw(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Draw a chain for every index of an epoch.

        The k-th sample that the harness hands out in the run is the k-th draw.
        """
        samples = len(self._weights)
        before = (epoch - 1) * self._steps * self._batch
        generator = torch.Generator().manual_seed(seed)
        # drawn from the first epoch on, so that these follow the draws of the epochs before
        draws = torch.multinomial(self._weights, before + samples, replacement=True, generator=generator).numpy()
        chains = np.empty(samples, np.int64)
        chains[compute_epoch_order(samples, seed=seed, epoch=epoch)] = draws[before:]
        return chains
