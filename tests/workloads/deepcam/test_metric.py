"""The metric is the reference's per-sample IoU; it does not depend on how samples are batched."""

import pytest
import torch

from mlhpc.workloads.deepcam.metric import compute_metrics, compute_statistics, count_confusion


def numbers(stats: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in stats.items()}


def some(samples: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    true = torch.randint(3, (samples, 8, 12), generator=generator, dtype=torch.uint8)
    predicted = torch.where(torch.rand(true.shape, generator=generator) < 0.6, true, 0).long()
    true[0] = 0  # a sample of background only, some of it missed
    true[1][true[1] == 2] = 1  # one without rivers, where none is seen either
    predicted[1][predicted[1] == 2] = 1
    return predicted, true


def slow_reference(predicted: torch.Tensor, true: torch.Tensor) -> float:
    """Per sample and class, intersection over union with sets; a class in neither counts 1."""
    total = 0.0
    for p, t in zip(predicted, true, strict=True):
        for label in range(3):
            a = {i for i, value in enumerate(p.flatten().tolist()) if value == label}
            b = {i for i, value in enumerate(t.flatten().tolist()) if value == label}
            total += len(a & b) / len(a | b) / 3 if a | b else 1 / 3
    return total / len(true)


def test_the_metric_is_the_slow_one() -> None:
    predicted, true = some()
    found = compute_metrics(numbers(compute_statistics(predicted, true)))
    assert found["eval_accuracy"] == pytest.approx(slow_reference(predicted, true), rel=1e-12)


def test_a_class_that_is_absent_and_not_seen_counts_as_found() -> None:
    nothing = torch.zeros(1, 4, 4, dtype=torch.uint8)
    assert compute_metrics(numbers(compute_statistics(nothing.long(), nothing)))["eval_accuracy"] == 1.0
    missed = nothing.clone()
    missed[0, 0, 0] = 1
    assert compute_metrics(numbers(compute_statistics(nothing.long(), missed)))["eval_accuracy"] == pytest.approx(
        (15 / 16 + 0 + 1) / 3
    )


def test_micro_iou_counts_pixels_of_all_samples() -> None:
    predicted, true = some()
    found = compute_metrics(numbers(compute_statistics(predicted, true)))
    both = ((predicted == 1) & (true == 1)).sum().item()
    either = ((predicted == 1) | (true == 1)).sum().item()
    assert found["iou_tropical_cyclone"] == pytest.approx(both / either)
    classes = [found[f"iou_{name}"] for name in ("background", "tropical_cyclone", "atmospheric_river")]
    assert found["iou_micro"] == pytest.approx(sum(classes) / 3)


def test_confusion_counts_every_pixel_once() -> None:
    predicted, true = some()
    counts = count_confusion(predicted, true)
    assert counts.sum().item() == true.numel()
    assert counts[3, 2, 0].item() == ((true[3] == 2) & (predicted[3] == 0)).sum().item()
