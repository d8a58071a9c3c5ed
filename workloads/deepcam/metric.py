"""Intersection over union (IoU), per sample as in the reference and over all pixels, from additive sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mlhpc.workloads.deepcam.config import CLASSES

N_CLASSES = len(CLASSES)


def count_confusion(predicted_NHW: Tensor, true_NHW: Tensor) -> Tensor:
    """Count pixels of each sample per true class (rows) and predicted class (columns): (N, classes, classes) int64.

    Does not use bincount, which waits for a GPU: the shape of its result depends on the largest value.
    """
    samples = len(true_NHW)
    pairs = (true_NHW.long() * N_CLASSES + predicted_NHW).view(samples, -1)
    counts = pairs.new_zeros(samples, N_CLASSES**2).scatter_add_(1, pairs, torch.ones_like(pairs))
    return counts.view(samples, N_CLASSES, N_CLASSES)


def compute_statistics(predicted_NHW: Tensor, true_NHW: Tensor) -> dict[str, Tensor]:
    """Compute the sums that are added over batches and ranks."""
    counts = count_confusion(predicted_NHW, true_NHW).double()
    both = counts.diagonal(dim1=1, dim2=2)
    either = counts.sum(dim=1) + counts.sum(dim=2) - both
    # a class in neither counts as perfect, as in the reference
    iou = torch.where(either > 0, both / either.clamp(min=1), 1.0)
    stats = {"iou": iou.mean(dim=1).sum(), "samples": torch.full_like(iou[0, 0], len(true_NHW))}
    total = counts.sum(dim=0)
    return stats | {_make_pair_name(t, p): total[t, p] for t in range(N_CLASSES) for p in range(N_CLASSES)}


def compute_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Compute the benchmark's metric, each class's IoU over all pixels and their mean. An absent class has IoU 1."""
    result = {"eval_accuracy": totals["iou"] / totals["samples"]}
    for number, name in enumerate(CLASSES):
        either = sum(totals[_make_pair_name(number, p)] + totals[_make_pair_name(p, number)] for p in range(N_CLASSES))
        # pixels that have this class and were predicted so are in the sum twice
        either -= totals[_make_pair_name(number, number)]
        result[f"iou_{name}"] = totals[_make_pair_name(number, number)] / either if either else 1.0
    result["iou_micro"] = sum(result[f"iou_{name}"] for name in CLASSES) / N_CLASSES
    return result


def _make_pair_name(true: int, predicted: int) -> str:
    return f"pixels_{true}_as_{predicted}"
