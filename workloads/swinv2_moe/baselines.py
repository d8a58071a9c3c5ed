"""Baselines without a network: the commonest class, and linear classifiers on pixels and on power spectra."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from suite.data.shards import ShardReader
from suite.workload import Baseline

MAX_TRAIN_PIXELS = 1 << 25  # bounds the time of the classifiers: seconds
MAX_FEATURES = 4096  # with more features a classifier would need more samples than it gets
# penalties on standardised features, per sample; the best on the validation split counts
RIDGE_PENALTIES = (1e-2, 1e-1, 1.0, 10.0)

Floats = NDArray[np.floating[Any]]


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure the accuracy on the validation split of ``commonest`` and of ridge classifiers on one-hot classes.

    ``compute_pixel_features`` sees the image, ``compute_log_spectrum`` the logarithm of its two-dimensional power
    spectrum. ``compute_shell_features`` sees that averaged over directions, its variation over them, and all products
    of two. Each sees at most `MAX_TRAIN_PIXELS` of the training split. Its penalty is chosen on the validation split.
    """
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    pixels = int(np.prod(train.read([0])["image"].shape[1:]))
    chosen = np.linspace(0, len(train) - 1, min(len(train), MAX_TRAIN_PIXELS // pixels)).astype(np.int64)
    train_arrays, validation_arrays = train.read(chosen), validation.read(np.arange(len(validation)))
    counts = np.bincount(train_arrays["label"])
    results = {"commonest": Baseline.mean(validation_arrays["label"] == counts.argmax())}
    for name, features in FEATURES.items():
        x = features(train_arrays["image"])
        if x.shape[1] <= MAX_FEATURES:
            results[name] = measure_best_ridge(
                x, train_arrays["label"], features(validation_arrays["image"]), validation_arrays["label"]
            )
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
    return max(Baseline.mean(score.argmax(axis=1) == y_test) for score in scores)


def compute_pixel_features(images: NDArray[np.uint8]) -> Floats:
    """Flatten the images."""
    return images.reshape(len(images), -1).astype(np.float64)


def compute_log_spectrum(images: NDArray[np.uint8]) -> Floats:
    """Compute the log power of every mode of the half plane."""
    return np.log(_power(images)).reshape(len(images), -1)


def compute_shell_features(images: NDArray[np.uint8]) -> Floats:
    """Compute log mean power and log relative variation per shell of wave numbers. Add the products of every two."""
    power = _power(images).reshape(len(images), -1)
    n = images.shape[1]
    k = np.hypot(np.fft.fftfreq(n)[:, None] * n, np.arange(n // 2 + 1)).ravel()
    shell = np.minimum(np.rint(k).astype(int), n // 2)
    bins = np.zeros((len(k), n // 2 + 1))
    bins[np.arange(len(k)), shell] = 1
    # without the mean mode, which is the same in all images
    bins = bins[:, 1:] / bins[:, 1:].sum(axis=0)
    mean = power @ bins
    variation = np.log(1e-3 + (power**2 @ bins) / mean**2)
    first = np.concatenate([np.log(mean), variation], axis=1)
    first = (first - first.mean(axis=0)) / (first.std(axis=0) + 1e-6)
    i, j = np.triu_indices(first.shape[1])
    return np.concatenate([first, first[:, i] * first[:, j]], axis=1)


FEATURES: dict[str, Callable[[NDArray[np.uint8]], Floats]] = {
    "pixels_linear": compute_pixel_features,
    "spectrum_linear": compute_log_spectrum,
    "spectrum_quadratic": compute_shell_features,
}


def _power(images: NDArray[np.uint8]) -> Floats:
    # + 1: logarithms of the power follow, and a mode may have none
    result: Floats = np.abs(fft.rfft2(images.astype(np.float64) - 127.5)) ** 2 + 1.0
    return result
