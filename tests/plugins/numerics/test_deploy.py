"""A deployment's change is evaluated on trained models, and one that acts on nothing says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mlhpc.plugins.numerics.deploy import DEPLOYMENTS
from tests.fixtures.cli import mlhpc


def test_weights_of_eight_bits_have_255_values_for_each_output() -> None:
    model = nn.Sequential(nn.Linear(300, 4))
    before = model[0].weight.detach().clone()
    assert DEPLOYMENTS["int8 weights"].alter(model)
    for row, old in zip(model[0].weight.detach(), before, strict=True):
        assert len(row.unique()) <= 255
        assert (row - old).abs().max() <= old.abs().max() / 254 * 1.001


def test_a_change_without_a_layer_to_change_does_not_apply() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    assert not any(
        DEPLOYMENTS[name].alter(model) for name in ("padding circular", "epsilon 1e-3", "upsampling by one pixel")
    )


def test_integers_are_stored_in_their_range() -> None:
    batch = {"x": torch.tensor([[[0, 255, 300]]], dtype=torch.int16), "y": torch.tensor([[[300]]])}
    stored = DEPLOYMENTS["stored as uint8"].data(batch)
    assert stored["x"].tolist() == [[[0, 255, 255]]]
    assert stored["y"] is batch["y"]


def test_the_command_evaluates_each_seed(tmp_path: Path, smoke_data: Path) -> None:
    words = ("numerics", "deploy", "cosmoflow", "--size", "smoke", "--seeds", "2", "--set", "max_epochs=1")
    done = mlhpc(*words, "--data", smoke_data / "cosmoflow-smoke", "-o", "a.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["change"]: row for row in json.loads((tmp_path / "a.json").read_text())["deployed"]}
    assert len(rows["int4 weights"]["deltas"]) == 2
    assert rows["statistics of the batch"]["why"] == "no bit of the evaluation changes"
    assert "padding: " in done.stdout


@pytest.mark.parametrize("decoder", ["pillow", "opencv", "simplejpeg"])
def test_the_decoders_read_one_image_alike(decoder: str) -> None:
    pytest.importorskip("cv2")
    pytest.importorskip("simplejpeg")
    from mlhpc.plugins.numerics.images import decode, encode, resize

    image = np.add.outer(np.arange(48), np.arange(48)).astype(np.uint8)
    for filter_ in ("pillow bilinear", "opencv area"):
        seen = resize(decode(encode(image), decoder), 48, filter_)
        assert np.abs(seen.astype(int) - image).mean() < 2
