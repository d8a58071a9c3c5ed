"""Intersection over union, per sample as the reference has it and over all pixels. Additive sums; knows no model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workloads.deepcam.config import CLASSES

N_CLASSES = len(CLASSES)


def confusion(predicted_NHW: Tensor, true_NHW: Tensor) -> Tensor:
    """Pixels of each sample per true class (rows) and predicted class (columns): (N, classes, classes) int64.

    Not by bincount, which on a GPU waits for the largest value to learn the shape of its result.
    """
    samples = len(true_NHW)
    pairs = (true_NHW.long() * N_CLASSES + predicted_NHW).view(samples, -1)
    counts = pairs.new_zeros(samples, N_CLASSES**2).scatter_add_(1, pairs, torch.ones_like(pairs))
    return counts.view(samples, N_CLASSES, N_CLASSES)


def statistics(predicted_NHW: Tensor, true_NHW: Tensor) -> dict[str, Tensor]:
    """What is added over batches and ranks."""
    counts = confusion(predicted_NHW, true_NHW).double()
    both = counts.diagonal(dim1=1, dim2=2)
    either = counts.sum(dim=1) + counts.sum(dim=2) - both
    iou = torch.where(either > 0, both / either.clamp(min=1), 1.0)  # a class that is in neither counts as found
    stats = {"iou": iou.mean(dim=1).sum(), "samples": torch.full_like(iou[0, 0], len(true_NHW))}
    total = counts.sum(dim=0)
    return stats | {_pair(t, p): total[t, p] for t in range(N_CLASSES) for p in range(N_CLASSES)}


def metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """The benchmark's metric, and beside it each class's IoU over all pixels with their mean. A class that is nowhere has 1."""
    result = {"eval_accuracy": totals["iou"] / totals["samples"]}
    for number, name in enumerate(CLASSES):
        either = sum(totals[_pair(number, p)] + totals[_pair(p, number)] for p in range(N_CLASSES))
        either -= totals[_pair(number, number)]
        result[f"iou_{name}"] = totals[_pair(number, number)] / either if either else 1.0
    result["iou_micro"] = sum(result[f"iou_{name}"] for name in CLASSES) / N_CLASSES
    return result


def _pair(true: int, predicted: int) -> str:
    return f"pixels_{true}_as_{predicted}"
