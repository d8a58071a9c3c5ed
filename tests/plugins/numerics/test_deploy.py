"""A deployment's change is evaluated on trained models, and one that acts on nothing says so."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mlhpc.plugins.numerics.deploy import DEPLOYMENTS, Deployment, Trained, list_rows


def test_weights_of_eight_bits_have_255_values_for_each_output() -> None:
    model = nn.Sequential(nn.Linear(300, 4))
    before = model[0].weight.detach().clone()
    DEPLOYMENTS["int8 weights"].alter(model)
    for row, old in zip(model[0].weight.detach(), before, strict=True):
        assert len(row.unique()) <= 255
        assert (row - old).abs().max() <= old.abs().max() / 254 * 1.001


def test_integers_are_stored_in_their_range() -> None:
    batch = {"x": torch.tensor([[[0, 255, 300]]], dtype=torch.int16), "y": torch.tensor([[[300]]])}
    stored = DEPLOYMENTS["stored as uint8"].data(batch)
    assert stored["x"].tolist() == [[[0, 255, 255]]]
    assert stored["y"] is batch["y"]


class Numbers:
    """Four samples; the metric of a model is the mean of what it makes of them."""

    config = SimpleNamespace(eval_batch_size=3)
    target = SimpleNamespace(metric="mean", direction="min")

    def __init__(self, weight: float) -> None:
        model = nn.Sequential(nn.Linear(1, 1, bias=False))
        nn.init.constant_(model[0].weight, weight)
        self.workload = self
        self.state = SimpleNamespace(evaluated=lambda: nullcontext(model))

    def __len__(self) -> int:
        return 4

    def load(self, indices: Sequence[int], *, seed: int, epoch: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([[[float(each)]] for each in indices])}

    def eval_stats(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": model(batch["x"]).sum(), "count": torch.tensor(len(batch["x"]))}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        return {"mean": totals["sum"] / totals["count"]}


def test_each_seed_is_evaluated_before_and_after_and_less_of_an_error_is_better() -> None:
    trained = [Trained(made, made, lambda batch: batch) for made in map(Numbers, (1.0, 2.0, 4.0))]  # type: ignore[arg-type]
    changes = {
        "double": Deployment("data", data=lambda batch: {"x": 2 * batch["x"]}),
        "nothing": Deployment("data"),
        "int8 weights": DEPLOYMENTS["int8 weights"],
        "padding circular": DEPLOYMENTS["padding circular"],
    }
    rows = {row.change: row for row in list_rows(trained, changes)}
    assert [each.value for each in trained] == [1.5, 3.0, 6.0]
    assert rows["double"].deltas == (-1.5, -3.0, -6.0)
    assert rows["double"].low < rows["double"].mean == -3.5 < rows["double"].high  # type: ignore[operator]
    assert {name for name, row in rows.items() if row.why} == {"nothing", "padding circular", "int8 weights"}


@pytest.mark.parametrize("decoder", ["pillow", "opencv", "simplejpeg"])
def test_the_decoders_read_one_image_alike(decoder: str) -> None:
    pytest.importorskip("cv2")
    pytest.importorskip("simplejpeg")
    from mlhpc.plugins.numerics.images import decode, encode, resize

    image = np.add.outer(np.arange(48), np.arange(48)).astype(np.uint8)
    for filter_ in ("pillow bilinear", "opencv area"):
        seen = resize(decode(encode(image), decoder), 48, filter_)
        assert np.abs(seen.astype(int) - image).mean() < 2
