"""Baselines without neighbourhood: background everywhere, and predictors of a pixel's class from its 16 values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from suite.data.shards import ShardReader
from suite.workload import Baseline
from workloads.deepcam import metric
from workloads.deepcam.config import CHANNELS, CLASSES, LOSS_WEIGHTS
from workloads.deepcam.data import read_input_statistics
from workloads.deepcam.fields import Statistics

MAX_PIXELS = 1 << 25  # read from each split: whole samples, evenly spaced
FIT_PIXELS = 1 << 18  # of the training split that the predictors are fitted to
STEPS, BATCH, RATE = 500, 4096, 1e-2
HIDDEN = 32

Predictor = Callable[[Tensor], Tensor]


def measure_baselines(root: Path) -> dict[str, Baseline]:
    """Measure the metric on the validation split of ``all_background``, ``pixel_linear`` and ``pixel_mlp``."""
    train, validation = ShardReader(root, "train"), ShardReader(root, "validation")
    x, y = _pixels(train, read_input_statistics(train, root))
    predictors: dict[str, Predictor] = {"all_background": _predict_background}
    layers: dict[str, Callable[[], nn.Module]] = {"pixel_linear": _linear, "pixel_mlp": _mlp}
    # leaves the caller's random state as it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, build in layers.items():
            predictors[name] = _fit(build(), x, y)
    scores: dict[str, list[float]] = {name: [] for name in predictors}
    mean, scale = _standardisation(read_input_statistics(train, root))
    with torch.no_grad():
        for arrays in _samples(validation):
            fields = (torch.from_numpy(arrays["x"]) - mean) * scale
            labels = torch.from_numpy(arrays["y"])
            for name, predict in predictors.items():
                scores[name].append(float(metric.compute_statistics(predict(fields), labels)["iou"]))
    return {name: Baseline.mean(found) for name, found in scores.items()}


def _predict_background(fields: Tensor) -> Tensor:
    return torch.zeros(fields.shape[:-1], dtype=torch.int64)


def _linear() -> nn.Module:
    return nn.Linear(len(CHANNELS), len(CLASSES))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(len(CHANNELS), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, len(CLASSES)))


def _fit(model: nn.Module, x_PC: Tensor, y_P: Tensor) -> Predictor:
    """Train with the benchmark's loss; the rate falls linearly to zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    weights = torch.tensor(LOSS_WEIGHTS)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        chosen = torch.randint(len(x_PC), (BATCH,))
        optimizer.zero_grad()
        # the sum over pixels, not over their weights, as in the benchmark's loss
        loss = F.cross_entropy(model(x_PC[chosen]), y_P[chosen], weights, reduction="sum") / BATCH
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return lambda fields: model(fields).argmax(dim=-1)


def _pixels(reader: ShardReader, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Read standardised values (P, C) and classes (P,) of pixels spread over the training split."""
    random = np.random.default_rng(0)
    samples = _evenly_spaced(reader)
    each = max(1, FIT_PIXELS // len(samples))
    x, y = [], []
    for arrays in _samples(reader):
        pixels = random.integers(arrays["y"].size, size=each)
        x.append(arrays["x"].reshape(-1, len(CHANNELS))[pixels])
        y.append(arrays["y"].reshape(-1)[pixels])
    mean, scale = _standardisation(statistics)
    fields = (torch.from_numpy(np.concatenate(x)) - mean) * scale
    return fields, torch.from_numpy(np.concatenate(y).astype(np.int64))


def _samples(reader: ShardReader) -> Iterator[dict[str, NDArray[np.float32]]]:
    for index in _evenly_spaced(reader):
        yield reader.read([index])


def _evenly_spaced(reader: ShardReader) -> NDArray[np.int64]:
    affordable = max(1, MAX_PIXELS // reader.read([0])["y"].size)
    return np.linspace(0, len(reader) - 1, min(len(reader), affordable)).astype(np.int64)


def _standardisation(statistics: Statistics) -> tuple[Tensor, Tensor]:
    mean = np.array(statistics.mean)
    # a constant channel has no variance to divide by
    variance = np.maximum(np.array(statistics.sqmean) - mean**2, np.finfo(np.float32).tiny)
    return torch.tensor(mean, dtype=torch.float32), torch.tensor(variance**-0.5, dtype=torch.float32)
