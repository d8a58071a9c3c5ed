"""Text: what is generated has a known entropy, what is fetched is the pinned package, and splits go by path."""

from __future__ import annotations

import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from suite.config import load_config
from suite.data.manifest import read_manifest
from suite.data.shards import ShardReader
from suite.errors import InputError
from suite.world import World
from workloads.moe_lm import DESCRIPTOR
from workloads.moe_lm import generate as generator
from workloads.moe_lm.baselines import baselines
from workloads.moe_lm.data import TextData
from workloads.moe_lm.generate import SIZES, DataSize, convert, fetch, generate, training_rows, validation_rows
from workloads.moe_lm.text import Language, in_validation, read_text
from workloads.moe_lm.workload import MoELM


@pytest.fixture(scope="module")
def world() -> World:
    return World.create(None)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    root = tmp_path_factory.mktemp("moe_lm") / "smoke"
    generate(root, "smoke", seed=1, world=world)
    return root


def test_the_entropy_rate_is_that_of_the_text() -> None:
    """A long text's successors, counted, give the rate of the closed form."""
    language = Language(3)
    words = language.text(400_000, 0).split(b" ")[:-1]
    index = {word[:-1]: number for number, word in enumerate(language.words)}
    chain = np.array([index[word] for word in words[1:]])
    ranks = [int(np.flatnonzero(language.successors[a] == b)[0]) for a, b in pairwise(chain)]
    bits = -np.log2(language.chances[ranks]).sum()
    assert bits / sum(len(word) + 1 for word in words[2:]) == pytest.approx(language.entropy_rate(), rel=0.03)


def test_the_same_seed_is_the_same_data_and_another_another(smoke: Path, tmp_path: Path, world: World) -> None:
    generate(tmp_path / "again", "smoke", seed=1, world=world)
    steps: list[tuple[int, int]] = []
    generate(tmp_path / "other", "smoke", seed=2, world=world, progress=lambda *step: steps.append(step))
    assert steps == [(1, 2), (2, 2)]
    assert read_manifest(tmp_path / "again").sha256 == read_manifest(smoke).sha256
    assert read_manifest(tmp_path / "other").sha256 != read_manifest(smoke).sha256
    with pytest.raises(InputError, match="holds other data"):
        generate(tmp_path / "again", "smoke", seed=2, world=world)


def test_the_card_counts_the_samples(smoke: Path) -> None:
    card = DESCRIPTOR.card().size("smoke")
    manifest = read_manifest(smoke)
    assert (manifest.samples("train"), manifest.samples("validation")) == (card.train_samples, card.eval_samples)


def test_the_workload_has_the_splits_of_the_card_and_the_baselines(smoke: Path) -> None:
    workload = MoELM(load_config(DESCRIPTOR, "smoke"))
    card = DESCRIPTOR.card().size("smoke")
    assert [len(workload.dataset(split, smoke)) for split in ("train", "validation")] == [
        card.train_samples,
        card.eval_samples,
    ]
    assert workload.baselines(smoke) == baselines(smoke)


def test_longer_contexts_predict_better_and_nothing_beats_the_entropy(smoke: Path) -> None:
    found = baselines(smoke)
    assert found["bytes_0"] > found["bytes_2"] > found["bytes_4"] > found["entropy_rate"]
    assert found["bytes_2"] > DESCRIPTOR.card().size("smoke").threshold > found["entropy_rate"]


def test_validation_rows_predict_disjoint_bytes() -> None:
    settings = DataSize(4, 8, None, 3)
    rows = validation_rows(bytes(range(25)), settings)
    assert rows[:, 1:].tolist() == [[1, 2, 3, 4], [9, 10, 11, 12], [17, 18, 19, 20]]
    with pytest.raises(InputError, match="gives 2 rows"):
        validation_rows(bytes(9), settings)


def test_training_rows_are_the_text() -> None:
    assert training_rows(bytes(range(20)), DataSize(4, 8, None, 1)).tolist() == [list(range(8)), list(range(8, 16))]


def test_a_piece_depends_on_seed_epoch_and_index_alone(smoke: Path) -> None:
    data = TextData(smoke, "train", load_config(DESCRIPTOR, "smoke").hyperparameters)  # type: ignore[arg-type]
    pieces = data.load(range(600), seed=1, epoch=2)["bytes"]
    assert torch.equal(data.load([7, 300], seed=1, epoch=2)["bytes"], pieces[[7, 300]])
    assert (pieces != data.load(range(600), seed=1, epoch=3)["bytes"]).any(dim=1).float().mean() > 0.9
    rows = ShardReader(smoke, "train").read(range(600))["text"]
    begins = [row.tobytes().find(piece.numpy().tobytes()) for row, piece in zip(rows, pieces, strict=True)]
    assert min(begins) >= 0
    assert np.histogram(begins, bins=8, range=(0, rows.shape[1] - pieces.shape[1] + 1))[0].min() > 40


def test_a_folder_of_text_is_split_by_path(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(100):
        (source / f"{number}.txt").write_bytes(f"{number} ".encode() * 50)
    text = read_text(source)
    for number in range(100):
        held = text.validation if in_validation(f"{number}.txt") else text.train
        assert f"{number} {number} ".encode() in held
    monkeypatch.setitem(SIZES, "mini", DataSize(16, 32, None, 4))
    convert(source, tmp_path / "data", world=world)
    assert ShardReader(tmp_path / "data", "train").read([0])["text"].shape == (1, 32)
    assert read_manifest(tmp_path / "data").size == "mini"


def test_only_the_pinned_archive_is_taken(tmp_path: Path) -> None:
    wrong = tmp_path / "Django-5.2.tar.gz"
    with tarfile.open(wrong, "w:gz"):
        pass
    with pytest.raises(InputError, match="sha256 is"):
        fetch(tmp_path / "here", source=str(wrong))
    with pytest.raises(InputError, match="sha256 is"):
        read_text(wrong)
    with pytest.raises(InputError, match="does not exist"):
        fetch(tmp_path / "here", source=str(tmp_path / "none.tar.gz"))


def test_real_text_is_not_generated(tmp_path: Path, world: World) -> None:
    with pytest.raises(InputError, match="mlhpc data fetch moe_lm"):
        generator.generate(tmp_path, "mini", seed=0, world=world)
    with pytest.raises(InputError, match="sizes: smoke"):
        generator.generate(tmp_path, "huge", seed=0, world=world)
