"""Generates SwinV2-MoE data sets of snapshots. processes.py has the physics; there are no public data.

The workload's descriptor names this module, so it also has ``convert`` and ``fetch``, which refuse.

Simulates reaction and diffusion of two species on a torus (Gray-Scott), and a camera that sees the second one.

A snapshot is a function of (seed, index). Only sums and products in float32: every processor makes the same images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.data.build import Arrays, Count, Generator, Progress, Synthetic
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.swinv2_moe.config import CLASSES

Fields = NDArray[np.float32]

# feed and kill rate, named after Pearson's patterns, doi:10.1126/science.261.5118.189
REGIMES = {
    "delta": (0.038, 0.0585),
    "theta": (0.038, 0.0605),
    "kappa": (0.054, 0.063),
    "mu": (0.050, 0.065),
    "lambda": (0.034, 0.065),
}
WIDTH = (0.001, 0.0005)  # each snapshot's rates differ from these by at most that
DIFFUSION = (0.08, 0.04)  # pixels squared per time unit; Pearson's ratio
STEP, STEPS = 2.0, 800  # time units, explicit
PATCH = 4  # pixels a side; an eighth of the torus begins with the second species
DARK, BRIGHT = -0.2, 0.6  # concentrations of the bytes 0 and 255
NOISE = 0.02  # standard deviation of the camera's white noise, a concentration
AT_ONCE = 1 << 16  # pixels that are simulated together: they fit the caches


def make_snapshots(seed: int, numbers: range, pixels: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Generate images (N, pixels, pixels) and labels of samples, as positions in ``CLASSES``; they take turns."""
    # counter-based: the numbers depend on seed and index alone, not on what was drawn before
    randoms = [np.random.Generator(np.random.Philox(key=[seed, number])) for number in numbers]
    labels = np.array([number % len(CLASSES) for number in numbers], dtype=np.uint8)
    centres = np.array([REGIMES[CLASSES[label]] for label in labels])
    rates = centres + np.array([random.uniform(-1, 1, 2) * WIDTH for random in randoms])
    fields = simulate(rates[:, 0], rates[:, 1], np.stack([_seed(random, pixels) for random in randoms]), STEPS)
    noise = np.stack([random.standard_normal((pixels, pixels)) for random in randoms])
    return np.rint((fields + NOISE * noise - DARK) * (255 / (BRIGHT - DARK))).clip(0, 255).astype(np.uint8), labels


def simulate(feed_N: NDArray[np.float64], kill_N: NDArray[np.float64], v_NPP: Fields, steps: int) -> Fields:
    """Solve du/dt = D lap u - u v^2 + F (1 - u), dv/dt = D' lap v + u v^2 - (F + k) v.

    It begins with u = 1 - 2 v and returns v.
    """
    feed, kill = (STEP * np.stack([feed_N, kill_N])).astype(np.float32)[:, :, None, None]
    u, v = 1 - 2 * v_NPP, v_NPP.copy()
    spread_u, spread_v = (STEP * each for each in DIFFUSION)
    keep_u, keep_v = 1 - 4 * spread_u - feed, 1 - 4 * spread_v - feed - kill
    reaction, neighbours = np.empty_like(u), np.empty_like(u)
    for _ in range(steps):
        np.multiply(u, v, out=reaction)
        reaction *= v
        reaction *= STEP
        _add_neighbours(u, neighbours)
        neighbours *= spread_u
        u *= keep_u
        u += neighbours
        u += feed
        u -= reaction
        _add_neighbours(v, neighbours)
        neighbours *= spread_v
        v *= keep_v
        v += neighbours
        v += reaction
    return v


def _seed(random: np.random.Generator, pixels: int) -> Fields:
    patches = random.random((pixels // PATCH, pixels // PATCH)) < 1 / 8
    return np.kron(patches, np.full((PATCH, PATCH), 0.25)).astype(np.float32)


def _add_neighbours(x: Fields, total: Fields) -> None:
    """Sum the four neighbours of each pixel of the torus."""
    total[:, 1:] = x[:, :-1]
    total[:, 0] = x[:, -1]
    total[:, :-1] += x[:, 1:]
    total[:, -1] += x[:, 0]
    total[:, :, 1:] += x[:, :, :-1]
    total[:, :, 0] += x[:, :, -1]
    total[:, :, :-1] += x[:, :, 1:]
    total[:, :, -1] += x[:, :, 0]


__all__ = ["SIZES", "DataSize", "convert", "fetch", "generate"]

GENERATOR_VERSION = 2  # raised when the same seed gives other data


@dataclass(frozen=True)
class DataSize:
    """The data set of one size: square images, equally many of each class."""

    pixels: int
    train_samples: int
    validation_samples: int
    samples_per_shard: int


# pixels, training and validation samples, samples per shard
SIZES: dict[str, DataSize] = {
    "smoke": DataSize(32, 1_000, 800, 100),
    "mini": DataSize(48, 2_000, 1_000, 250),
    "small": DataSize(96, 60_000, 5_000, 500),
    "full": DataSize(192, 400_000, 10_000, 500),
}


def convert(
    source: Path, root: Path, *, world: World, size: str | None = None, progress: Progress | None = None
) -> None:
    """Always raise InputError: there are no public data to convert."""
    raise InputError(
        "swinv2_moe has no public data to convert; generate them: mlhpc data generate swinv2_moe --size SIZE"
    )


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Always raise InputError: there are no public data to fetch."""
    raise InputError(
        "swinv2_moe has no public data to fetch; generate them: mlhpc data generate swinv2_moe --size SIZE"
    )


def _shard(settings: DataSize, seed: int, numbers: range, count: Count) -> Arrays:
    parts, at_once = [], max(1, AT_ONCE // settings.pixels**2)
    for first in range(0, len(numbers), at_once):
        some = numbers[first : first + at_once]
        parts.append(make_snapshots(seed, some, settings.pixels))
        count(len(some))
    image, label = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"image": image, "label": label}


def _count_samples(arrays: Arrays) -> list[int]:
    return np.bincount(arrays["label"], minlength=len(CLASSES)).tolist()  # type: ignore[no-any-return]


def _attributes(summaries: Mapping[str, Sequence[list[int]]]) -> dict[str, Any]:
    per_class = {f"{split}_per_class": np.sum(parts, axis=0).tolist() for split, parts in summaries.items()}
    return {"classes": list(CLASSES), "periodic": True, **per_class}


def _snapshots(settings: DataSize, seed: int) -> Synthetic[list[int]]:
    return Synthetic(
        settings.train_samples,
        settings.validation_samples,
        settings.samples_per_shard,
        partial(_shard, settings, seed),
        _count_samples,
        _attributes,
    )


generate = Generator("swinv2_moe", GENERATOR_VERSION, SIZES, _snapshots, name="processes").generate
