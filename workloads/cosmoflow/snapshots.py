"""Synthetic snapshots: four epochs of a universe whose couplings by threes neither spectra nor one-point moments show.

A voxel is thin or dense at each redshift. One coupling c in [-1, 1] belongs to each snapshot and a pair of the others.
With probability (1 + c) / 2 its voxel is dense where the pair is equal, thin where it differs. Otherwise it is thin
where the pair is equal and dense where it differs. In one half of space the pair is the late snapshots and the early
ones follow. In the other half the late ones follow.

To swap dense and thin everywhere swaps the signs of all four couplings and changes no spectrum. Two densities have the
same moments and spectra, up to a scale, as their logarithms. So no such statistic tells the signs. The rule is made up,
not physics. The fields are integers, so that the bits are the same on every processor. A universe is a function of
(settings, seed, index).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COUPLINGS = ("coupling_z3", "coupling_z1_5", "coupling_z0_5", "coupling_z0")
THIN, DENSE = 4, 12  # particles in a voxel; 8 on average, as the simulated universes have at 16 Mpc/h
LEAST_COUPLING = 0.5  # of a coupling's size: the sign is what has to be found
PATCHES, HALVES = 2, 2  # times that white noise is smoothed for the patches of a snapshot, and for the halves of space
NOISE = 512  # integer white noise lies in [-NOISE, NOISE]
CHANCES = 1 << 16  # steps of a probability

Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Snapshots:
    """How large a universe of snapshots is: a periodic box of mesh^3 voxels."""

    mesh: int


def make_universe(settings: Snapshots, seed: int, index: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Generate particle counts per cell (mesh, mesh, mesh, 4 redshifts) and what a network predicts from them.

    That is the coupling of each snapshot with a pair of the others (see the module): four numbers in the order of
    `COUPLINGS`.
    """
    # counter-based: the numbers depend on seed and index alone, not on what was drawn before
    random = np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
    signs, sizes = random.integers(0, 2, 4) * 2 - 1, random.uniform(LEAST_COUPLING, 1, 4)
    couplings = signs * sizes
    shape = (settings.mesh,) * 3
    free = _smooth(random.integers(-NOISE, NOISE + 1, (4, *shape)), PATCHES) >= 0  # True: dense
    early_follow = _smooth(random.integers(-NOISE, NOISE + 1, shape), HALVES) >= 0
    # probabilities become integers, so that the comparison gives the same bits everywhere
    thresholds = np.rint((1 + couplings) / 2 * CHANCES).astype(np.int64)
    kept = random.integers(0, CHANCES, (4, *shape)) < thresholds[:, None, None, None]
    dense = np.empty((*shape, 4), dtype=bool)
    for snapshot, (follows, pair) in enumerate([(early_follow, free[2:])] * 2 + [(~early_follow, free[:2])] * 2):
        dense[..., snapshot] = np.where(follows, kept[snapshot] == (pair[0] == pair[1]), free[snapshot])
    counts = dense.astype(np.int16)
    counts *= DENSE - THIN
    counts += THIN
    return counts, couplings.astype(np.float32)


def _smooth(noise: Integers, times: int) -> Integers:
    """Weight each voxel's neighbourhood (1, 2, 1) along the last three axes, ``times`` times, on the periodic box.

    The weights are 1 and 1 of a voxel and its left neighbour, then of its right one. Values stay below NOISE *
    64^times.
    """
    smoothed = noise.astype(np.int32)
    for _ in range(times):
        for axis in (-3, -2, -1):
            moved = np.moveaxis(smoothed, axis, 0)
            both = np.empty_like(moved)
            np.add(moved[1:], moved[:-1], out=both[1:])
            np.add(moved[0], moved[-1], out=both[0])
            # the second pass may overwrite its source: it reads only `both`
            np.add(both[:-1], both[1:], out=moved[:-1])
            np.add(both[-1], both[0], out=moved[-1])
    return smoothed
