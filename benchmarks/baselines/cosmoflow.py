"""Baselines without a network: the mean of the targets; ridge regressions and boosting on moments and spectra.

They read the counts alone and use nothing of the generator.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from benchmarks.baselines import LIGHTGBM, Baseline, compute_mean
from mlhpc.suite.data.shards import ShardReader
from mlhpc.workloads.cosmoflow.config import REDSHIFTS

MAX_TRAIN_VOXELS = 1 << 27  # bounds the time of the regressor: seconds at mini, a minute at small
MIN_TRAIN_SAMPLES = 200  # with fewer the regression cannot be fitted and is left out
BLOCK_VOXELS = 1 << 17
RIDGE_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)  # penalties on standardised features, per sample
HELD_OUT_EVERY = 5  # every fifth training sample chooses the penalty
JOINT_DEGREE = 3  # the largest degree of a joint moment: 34 products of four channels
BOOSTING_TREES = 300
BOOSTING = LIGHTGBM | {"objective": "l1"}  # the metric
VARIANCE_EPS = 1e-6  # added to variances: a channel where no particle has left its voxel has none

Floats = NDArray[np.floating[Any]]


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure the mean absolute error on the validation split of predictors without a network.

    They are the mean of the targets, four ridge regressions and one boosting.

    ``one_point_ridge`` sees moments of the counts and of their logarithms, ``joint_moments_ridge`` the joint moments of
    the four logarithms at one voxel, ``power_spectrum_ridge`` auto and cross spectra of counts and logarithms.
    ``all_statistics_ridge`` and ``all_statistics_boosting`` see them all.

    Each is fitted to evenly spaced samples of the training split, at most `MAX_TRAIN_VOXELS`. It is left out if these
    are fewer than `MIN_TRAIN_SAMPLES` samples.
    """
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    y_train, y_validation = _targets(train), _targets(validation)
    results = {"train_mean": _mean_error(y_train.mean(axis=0), y_validation)}
    voxels = int(np.prod(train.read([0])["x"].shape[1:4]))
    affordable = min(len(train), MAX_TRAIN_VOXELS // voxels)
    if affordable < MIN_TRAIN_SAMPLES:
        return results
    chosen = np.linspace(0, len(train) - 1, affordable).astype(np.int64)
    fitted, tested = _read_features(train, chosen), _read_features(validation, np.arange(len(validation)))
    moments, joint = count_moments(len(REDSHIFTS)), count_joint_moments(len(REDSHIFTS))
    everything = slice(None)
    predictors = [
        # the columns of `compute_features`, in its order
        ("one_point_ridge", slice(0, moments), fit_best_ridge),
        ("joint_moments_ridge", slice(moments, moments + joint), fit_best_ridge),
        ("power_spectrum_ridge", slice(moments + joint, None), fit_best_ridge),
        ("all_statistics_ridge", everything, fit_best_ridge),
        ("all_statistics_boosting", everything, fit_boosting),
    ]
    for name, columns, fit in predictors:
        predict = fit(fitted[:, columns], y_train[chosen])
        # targets lie in [-1, 1], and a linear predictor may leave that interval
        results[name] = _mean_error(predict(tested[:, columns]).clip(-1, 1), y_validation)
    return results


def compute_features(counts_NDHWC: NDArray[np.int16]) -> Floats:
    """Compute per sample: one-point moments, joint moments, then spectra.

    One-point moments, of the counts and of log(1 + counts): log variance, skewness and log kurtosis of every channel.
    Joint moments: the mean over voxels of every product of up to `JOINT_DEGREE` logarithms. Spectra, of counts and
    logarithms: log auto spectra, and correlation coefficients of every two channels, per shell of |k|.
    """
    samples, n, *_, channels = counts_NDHWC.shape
    x_NCV = np.ascontiguousarray(np.moveaxis(counts_NDHWC, -1, 1), dtype=np.float32).reshape(samples, channels, -1)
    logs_NCV = np.log1p(x_NCV)
    contrast = x_NCV / x_NCV.mean(axis=2, keepdims=True) - 1
    one_point = [_moments(x_NCV), _moments(logs_NCV), _joint_moments(logs_NCV)]
    columns = [*one_point, *_spectra(contrast, n), *_spectra(logs_NCV, n)]
    return np.concatenate([column.reshape(samples, -1) for column in columns], axis=1)


def count_moments(channels: int) -> int:
    """Count the moments among the features: three of each channel, of the counts and of their logarithms."""
    return 2 * 3 * channels


def count_joint_moments(channels: int) -> int:
    """Count the joint moments among the features: the products of 1 to `JOINT_DEGREE` channels, in any order."""
    return sum(math.comb(channels + degree - 1, degree) for degree in range(1, JOINT_DEGREE + 1))


def fit_best_ridge(x: Floats, y: Floats) -> Any:
    """Fit `fit_ridge` to all samples, with the penalty that is best on held-out ones.

    Every `HELD_OUT_EVERY`-th sample is held out. Returns ``f(x) -> y``.
    """
    held = np.arange(len(x)) % HELD_OUT_EVERY == 0
    errors = [np.abs(fit_ridge(x[~held], y[~held], penalty)(x[held]) - y[held]).mean() for penalty in RIDGE_PENALTIES]
    return fit_ridge(x, y, RIDGE_PENALTIES[int(np.argmin(errors))])


def fit_ridge(x: Floats, y: Floats, penalty: float) -> Any:
    """Fit ridge regression on standardised features and their squares. Returns the predictor ``f(x) -> y``."""
    # 1e-6: a constant feature has no deviation to divide by
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-6

    def expand(raw: Floats) -> Floats:
        scaled = (raw - mean) / std
        # minus 1: the mean of squares of standardised values, which is the intercept's part
        return np.concatenate([np.ones((len(raw), 1)), scaled, scaled**2 - 1], axis=1)

    design = expand(x)
    diagonal = np.eye(design.shape[1]) * penalty * len(x)
    # the intercept has no penalty
    diagonal[0, 0] = 0
    weights = np.linalg.solve(design.T @ design + diagonal, design.T @ y)
    return lambda raw: expand(raw) @ weights


def fit_boosting(x: Floats, y: Floats) -> Any:
    """Fit gradient-boosted trees, one model per target. Returns ``f(x) -> y``."""
    import lightgbm

    models = [lightgbm.train(BOOSTING, lightgbm.Dataset(x, target), BOOSTING_TREES) for target in y.T]
    return lambda raw: np.stack([model.predict(raw) for model in models], axis=1)


def _spectra(fields_NCV: Floats, n: int) -> tuple[Floats, Floats]:
    """Compute log auto spectra and the correlation coefficients of every two channels, per shell of |k|."""
    samples, channels, _ = fields_NCV.shape
    modes = fft.rfftn(fields_NCV.reshape(samples, channels, n, n, n), axes=(2, 3, 4)).reshape(samples, channels, -1)
    real, imaginary = np.ascontiguousarray(modes.real), np.ascontiguousarray(modes.imag)
    bins = _bins(n)
    first, second = np.triu_indices(channels)
    # a spectrum is the real part of one mode times the conjugate of the other; the imaginary part is not needed
    products = (real[:, i] * real[:, j] + imaginary[:, i] * imaginary[:, j] for i, j in zip(first, second, strict=True))
    spectra = np.stack([product @ bins for product in products], axis=1)
    auto = spectra[:, first == second] + VARIANCE_EPS
    cross = (spectra / np.sqrt(auto[:, first] * auto[:, second]))[:, first != second]
    return np.log(auto), cross


def _mean_error(predicted: Floats, truth_NT: Floats) -> Baseline:
    return compute_mean(np.abs(predicted - truth_NT).mean(axis=1))


def _read_features(reader: ShardReader, indices: NDArray[np.int64]) -> Floats:
    side = reader.read([0])["x"].shape[1]
    # the features of a block need several float copies of its counts at once
    step = max(1, BLOCK_VOXELS // side**3)
    return np.concatenate(
        [compute_features(reader.read(indices[i : i + step])["x"]) for i in range(0, len(indices), step)]
    )


def _targets(reader: ShardReader) -> Floats:
    parts = [reader.read(np.arange(i, min(i + 1024, len(reader))))["y"] for i in range(0, len(reader), 1024)]
    return np.concatenate(parts).astype(np.float64)


def _moments(x_NCV: Floats) -> Floats:
    """Compute log variance, skewness and log kurtosis over the voxels."""
    centred = x_NCV - x_NCV.mean(axis=2, keepdims=True)
    square = centred * centred
    variance = square.mean(axis=2) + VARIANCE_EPS
    third = np.einsum("ncv,ncv->nc", square, centred) / x_NCV.shape[2]
    fourth = np.einsum("ncv,ncv->nc", square, square) / x_NCV.shape[2]
    return np.stack([np.log(variance), third / variance**1.5, np.log(fourth / variance**2 + VARIANCE_EPS)], axis=-1)


def _joint_moments(x_NCV: Floats) -> Floats:
    """Compute the mean over voxels of every product of one, two or three channels, a channel perhaps repeatedly."""
    channels = range(x_NCV.shape[1])
    wanted = [
        chosen for degree in range(1, JOINT_DEGREE + 1) for chosen in combinations_with_replacement(channels, degree)
    ]
    return np.stack([np.prod(x_NCV[:, chosen], axis=1).mean(axis=1) for chosen in wanted], axis=-1)


@lru_cache(maxsize=2)
def _bins(n: int) -> NDArray[np.float32]:
    """Return the matrix (modes, bins) that averages modes over shells of |k|; a shell is one fundamental mode wide."""
    full, half = np.fft.fftfreq(n) * n, np.arange(n // 2 + 1)
    k = np.sqrt(full[:, None, None] ** 2 + full[None, :, None] ** 2 + half**2).ravel()
    # the corners of the cube of modes reach sqrt(3) n / 2: its last, sparse shells are joined into one
    shell = np.minimum(np.rint(k).astype(int), n // 2 + n // 4)
    # rfftn stores one of each pair of conjugate modes, except on the planes 0 and n / 2, where it stores both
    weight = np.where((np.tile(half, n * n) == 0) | (np.tile(half, n * n) == n // 2), 1.0, 2.0)
    matrix = np.zeros((len(k), shell.max() + 1), dtype=np.float32)
    matrix[np.arange(len(k)), shell] = weight
    matrix = matrix[:, 1:]  # drop the mean mode
    matrix /= matrix.sum(axis=0)
    return matrix
