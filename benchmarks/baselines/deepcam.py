"""Baselines without a convolution: background everywhere, and predictors of a pixel's class from itself and boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter
from torch import nn

from benchmarks.baselines import LIGHTGBM, Baseline, compute_mean
from mlhpc.suite.data.shards import ShardReader
from mlhpc.workloads.deepcam import metric
from mlhpc.workloads.deepcam.climate import Statistics
from mlhpc.workloads.deepcam.config import CLASSES, LOSS_WEIGHTS
from mlhpc.workloads.deepcam.data import read_input_statistics

MAX_PIXELS = 1 << 24  # read from each split: whole samples, evenly spaced
FIT_PIXELS = 1 << 17  # of the training split that the predictors are fitted to
BOXES = (5, 11, 21)  # pixels on a side
SMOOTHINGS = (3, 5, 7, 9)  # pixels on a side of the box that probabilities are averaged over
HELD_OUT_EVERY = 10  # every tenth training sample chooses the smoothing
STEPS, BATCH, RATE = 500, 4096, 1e-2
HIDDEN = 32
BOOSTING_ROUNDS = 60
BOOSTING = LIGHTGBM | {
    "objective": "multiclass",
    "num_class": len(CLASSES),
    "learning_rate": 0.1,
    "num_leaves": 31,
    "bagging_fraction": 0.5,
    "feature_fraction": 0.5,
    "max_bin": 63,
}

Floats = NDArray[np.floating[Any]]
Predictor = Callable[[Floats], Floats]  # features (pixels, features) to probabilities (pixels, classes)
Sample = tuple[Floats, NDArray[np.uint8]]  # standardised fields (H, W, C) and classes (H, W)


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure the metric on the validation split of predictors of one pixel's class.

    ``pixel_mlp`` sees the pixel's 16 values; ``box_mlp`` and ``box_boosting`` see the means
    of `BOXES` around it too. Of each there is a ``_smoothed`` one, whose probabilities are averaged over a box.
    """
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    statistics = read_input_statistics(train, root)
    chosen = _evenly_spaced(train)
    held_out = chosen[::HELD_OUT_EVERY]
    fitted = np.setdiff1d(chosen, held_out) if len(chosen) > 1 else chosen
    tested = _evenly_spaced(validation)
    background = _score(_samples(validation, tested, statistics), _predict_background, (), [1])
    results = {"all_background": compute_mean(background[:, 0])}
    predictors: list[tuple[str, Sequence[int], Callable[..., Predictor]]] = [
        ("pixel_mlp", (), _fit_mlp),
        ("box_mlp", BOXES, _fit_mlp),
        ("box_boosting", BOXES, _fit_boosting),
    ]
    for name, boxes, fit in predictors:
        each = max(1, FIT_PIXELS // len(fitted))
        predict = fit(*_draw_pixels(_samples(train, fitted, statistics), boxes, each))
        found = _score(_samples(train, held_out, statistics), predict, boxes, SMOOTHINGS)
        width = SMOOTHINGS[int(np.argmax(found.mean(axis=0)))]
        scores = _score(_samples(validation, tested, statistics), predict, boxes, [1, width])
        results |= {name: compute_mean(scores[:, 0]), f"{name}_smoothed": compute_mean(scores[:, 1])}
    return results


def compute_features(fields_HWC: Floats, boxes: Sequence[int]) -> Floats:
    """Compute the features of each pixel (H W, features): its values, and what they differ by from means over boxes.

    The outermost pixels are repeated beyond the edges.
    """
    differences = [fields_HWC - uniform_filter(fields_HWC, (side, side, 1), mode="nearest") for side in boxes]
    return np.concatenate([fields_HWC, *differences], axis=-1).reshape(fields_HWC[..., 0].size, -1)


def _score(
    samples: Iterator[Sample], predict: Predictor, boxes: Sequence[int], smoothings: Sequence[int]
) -> NDArray[np.float64]:
    """Compute the metric (samples, smoothings), with probabilities averaged over a box of each side."""
    scores = []
    for fields, classes in samples:
        probabilities = predict(compute_features(fields, boxes)).reshape(*classes.shape, len(CLASSES))
        truth = torch.from_numpy(classes[None])
        predicted = [uniform_filter(probabilities, (side, side, 1), mode="nearest").argmax(-1) for side in smoothings]
        found = [metric.compute_statistics(torch.from_numpy(each[None]), truth)["iou"] for each in predicted]
        scores.append([float(each) for each in found])
    return np.array(scores)


def _predict_background(features: Floats) -> Floats:
    return np.eye(len(CLASSES))[np.zeros(len(features), dtype=np.int64)]


def _fit_mlp(x_PF: Floats, y_P: NDArray[np.int64]) -> Predictor:
    """Fit a perceptron with one hidden layer, with the benchmark's loss; the rate falls linearly to zero."""
    x, y, weights = torch.from_numpy(x_PF), torch.from_numpy(y_P), torch.tensor(LOSS_WEIGHTS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, len(CLASSES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        chosen = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        # the sum over pixels, not over their weights, as in the benchmark's loss
        F.cross_entropy(model(x[chosen]), y[chosen], weights, reduction="sum").div(BATCH).backward()
        optimizer.step()
    model.requires_grad_(False)
    return lambda features: np.asarray(model(torch.from_numpy(features)).softmax(-1).numpy())


def _fit_boosting(x_PF: Floats, y_P: NDArray[np.int64]) -> Predictor:
    """Fit gradient-boosted trees, with the benchmark's weights of classes."""
    import lightgbm

    model = lightgbm.train(BOOSTING, lightgbm.Dataset(x_PF, y_P, weight=np.array(LOSS_WEIGHTS)[y_P]), BOOSTING_ROUNDS)
    return lambda features: np.asarray(model.predict(features))


def _draw_pixels(samples: Iterator[Sample], boxes: Sequence[int], each: int) -> tuple[Floats, NDArray[np.int64]]:
    """Draw the features (P, F) and classes (P,) of ``each`` pixels of every sample."""
    random = np.random.default_rng(0)
    x, y = [], []
    for fields, classes in samples:
        pixels = random.integers(classes.size, size=each)
        x.append(compute_features(fields, boxes)[pixels])
        y.append(classes.reshape(-1)[pixels])
    return np.concatenate(x), np.concatenate(y).astype(np.int64)


def _samples(reader: ShardReader, indices: NDArray[np.int64], statistics: Statistics) -> Iterator[Sample]:
    mean = np.array(statistics.mean)
    # a constant channel has no variance to divide by
    scale = np.maximum(np.array(statistics.sqmean) - mean**2, np.finfo(np.float32).tiny) ** -0.5
    for index in indices:
        arrays = reader.read([index])
        yield (arrays["x"][0] - mean.astype(np.float32)) * scale.astype(np.float32), arrays["y"][0]


def _evenly_spaced(reader: ShardReader) -> NDArray[np.int64]:
    affordable = max(1, MAX_PIXELS // reader.read([0])["y"].size)
    return np.linspace(0, len(reader) - 1, min(len(reader), affordable)).astype(np.int64)
