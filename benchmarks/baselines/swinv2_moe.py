"""Baselines without a network: the commonest class; linear classifiers and boosting on pixels, spectra and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from benchmarks.baselines import LIGHTGBM, Baseline, compute_mean
from mlhpc.suite.data.shards import ShardReader

MAX_TRAIN_PIXELS = 1 << 25  # bounds the time of the classifiers: seconds
MAX_FEATURES = 4096  # with more features a classifier would need more samples than it gets
# penalties on standardised features, per sample; the best on the validation split counts
RIDGE_PENALTIES = (1e-2, 1e-1, 1.0, 10.0)
HISTOGRAM_BINS = 64  # over the range -256 to 256 of values, differences and gradients
BOOSTING_TREES = 200
BOOSTING = LIGHTGBM | {"objective": "multiclass"}

Floats = NDArray[np.floating[Any]]


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure the accuracy on the validation split of ``commonest`` and of classifiers.

    They are ridge regressions on one-hot classes and one boosting.
    ``pixels_linear`` sees the image, ``spectrum_quadratic`` sees `compute_shell_features`. ``statistics_linear`` and
    ``statistics_boosting`` see `compute_statistics`. Each sees at most `MAX_TRAIN_PIXELS` of the training split.
    The penalty of a ridge is chosen on the validation split.
    """
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    pixels = int(np.prod(train.read([0])["image"].shape[1:]))
    chosen = np.linspace(0, len(train) - 1, min(len(train), MAX_TRAIN_PIXELS // pixels)).astype(np.int64)
    train_arrays, validation_arrays = train.read(chosen), validation.read(np.arange(len(validation)))
    counts = np.bincount(train_arrays["label"])
    results = {"commonest": compute_mean(validation_arrays["label"] == counts.argmax())}
    for name, (features, measure) in PREDICTORS.items():
        x = features(train_arrays["image"])
        if x.shape[1] > MAX_FEATURES:
            continue
        test = features(validation_arrays["image"])
        results[name] = measure(x, train_arrays["label"], test, validation_arrays["label"])
    return results


def measure_best_ridge(x: Floats, y: NDArray[np.integer], x_test: Floats, y_test: NDArray[np.integer]) -> Baseline:
    """Measure the accuracy of the linear classifier with the best penalty."""
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-6
    design, test = (x - mean) / std, (x_test - mean) / std
    # classes are equally frequent: minus the mean, so that there is no intercept
    target = np.eye(int(y.max()) + 1)[y] - 1 / (int(y.max()) + 1)
    # one eigendecomposition serves all penalties
    values, vectors = np.linalg.eigh(design.T @ design)
    projected, test = vectors.T @ (design.T @ target), test @ vectors
    scores = (test @ (projected / (values + ridge * len(x))[:, None]) for ridge in RIDGE_PENALTIES)
    return max(compute_mean(score.argmax(axis=1) == y_test) for score in scores)


def measure_boosting(x: Floats, y: NDArray[np.integer], x_test: Floats, y_test: NDArray[np.integer]) -> Baseline:
    """Measure the accuracy of gradient-boosted trees."""
    import lightgbm

    trees = lightgbm.train(BOOSTING | {"num_class": int(y.max()) + 1}, lightgbm.Dataset(x, y), BOOSTING_TREES)
    return compute_mean(np.argmax(trees.predict(x_test), axis=1) == y_test)


def compute_pixel_features(images: NDArray[np.uint8]) -> Floats:
    """Flatten the images."""
    return images.reshape(len(images), -1).astype(np.float64)


def compute_statistics(images: NDArray[np.uint8]) -> Floats:
    """Compute four moments and the histogram of pixels, differences along two axes, and gradients' lengths."""
    x = images.astype(np.float32)
    across, along = x - np.roll(x, 1, 1), x - np.roll(x, 1, 2)
    parts = [part for field in (x, across, along, np.hypot(across, along)) for part in _describe(field)]
    return np.concatenate(parts, axis=1)


def compute_shell_features(images: NDArray[np.uint8]) -> Floats:
    """Compute log mean power and log relative variation per shell of wave numbers. Add the products of every two."""
    power = _power(images).reshape(len(images), -1)
    n = images.shape[1]
    k = np.hypot(np.fft.fftfreq(n)[:, None] * n, np.arange(n // 2 + 1)).ravel()
    shell = np.minimum(np.rint(k).astype(int), n // 2)
    bins = np.zeros((len(k), n // 2 + 1))
    bins[np.arange(len(k)), shell] = 1
    # without the mean mode
    bins = bins[:, 1:] / bins[:, 1:].sum(axis=0)
    mean = power @ bins
    variation = np.log(1e-3 + (power**2 @ bins) / mean**2)
    first = np.concatenate([np.log(mean), variation], axis=1)
    first = (first - first.mean(axis=0)) / (first.std(axis=0) + 1e-6)
    i, j = np.triu_indices(first.shape[1])
    return np.concatenate([first, first[:, i] * first[:, j]], axis=1)


PREDICTORS: dict[str, tuple[Callable[[NDArray[np.uint8]], Floats], Callable[..., Baseline]]] = {
    "pixels_linear": (compute_pixel_features, measure_best_ridge),
    "statistics_linear": (compute_statistics, measure_best_ridge),
    "spectrum_quadratic": (compute_shell_features, measure_best_ridge),
    "statistics_boosting": (compute_statistics, measure_boosting),
}


def _power(images: NDArray[np.uint8]) -> Floats:
    # + 1: logarithms of the power follow, and a mode may have none
    result: Floats = np.abs(fft.rfft2(images.astype(np.float64) - 127.5)) ** 2 + 1.0
    return result


def _describe(field_NPP: Floats) -> Iterator[Floats]:
    flat = field_NPP.reshape(len(field_NPP), -1)
    mean, deviation = flat.mean(axis=1, keepdims=True), flat.std(axis=1, keepdims=True) + 1e-6
    scaled = (flat - mean) / deviation
    yield np.concatenate([mean, deviation, *((scaled**n).mean(axis=1, keepdims=True) for n in (3, 4))], axis=1)
    bins = ((flat + 256) * (HISTOGRAM_BINS / 512)).astype(np.int64).clip(0, HISTOGRAM_BINS - 1)
    bins += HISTOGRAM_BINS * np.arange(len(flat))[:, None]
    counts = np.bincount(bins.ravel(), minlength=HISTOGRAM_BINS * len(flat))
    yield counts.reshape(len(flat), HISTOGRAM_BINS) / flat.shape[1]
