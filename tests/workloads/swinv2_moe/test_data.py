"""Images as batches: augmentation is a symmetry of the torus, wrong data are refused."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from mlhpc.suite.config import load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.sampling import draws
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.swinv2_moe import DESCRIPTOR
from mlhpc.workloads.swinv2_moe import generate as generator
from mlhpc.workloads.swinv2_moe.config import CLASSES, SwinV2MoEConfig
from mlhpc.workloads.swinv2_moe.data import ImageData, augment


def own(*overrides: str) -> SwinV2MoEConfig:
    settings = ("hyperparameters.pixels=16", "hyperparameters.window=2", *overrides)
    return load_config(DESCRIPTOR, "smoke", settings).hyperparameters  # type: ignore[return-value]


def test_the_data_set_is_described(tiny_data: Path) -> None:
    manifest = read_manifest(tiny_data)
    assert manifest.attributes["classes"] == list(CLASSES)
    assert manifest.attributes["train_per_class"] == [8] * 5
    assert manifest.attributes["validation_per_class"] == [4] * 5
    assert [entry.samples for entry in manifest.splits["train"]] == [15, 15, 10]


@pytest.mark.parametrize("size", ["smoke", "mini", "small", "full"])
def test_the_card_counts_the_samples(size: str) -> None:
    card, settings = DESCRIPTOR.card().size(size), generator.SIZES[size]
    assert (settings.train_samples, settings.validation_samples) == (card.train_samples, card.eval_samples)
    assert settings.pixels**2 + 1 == card.sample_bytes
    own: SwinV2MoEConfig = load_config(DESCRIPTOR, size).hyperparameters  # type: ignore[assignment]
    assert (own.pixels, own.classes) == (settings.pixels, CLASSES)
    assert settings.train_samples % len(own.classes) == settings.validation_samples % len(own.classes) == 0


def test_augmentation_is_one_of_all_symmetries_of_the_torus() -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 4), dtype=np.uint8)
    moved = augment(np.tile(image, (4000, 1, 1)), draws(1, 2, np.arange(4000)))
    expected = set()
    for turns, mirrored, y, x in product(range(4), (False, True), range(4), range(4)):
        turned = np.rot90(image.T if mirrored else image, turns)
        expected.add(np.roll(turned, (y, x), (0, 1)).tobytes())
    found, counts = np.unique(moved.reshape(4000, -1), axis=0, return_counts=True)
    assert len(expected) == 128
    assert {each.tobytes() for each in found} == expected
    assert counts.min() > 10


def test_augmentation_depends_on_seed_epoch_and_index_alone(tiny_data: Path) -> None:
    data = ImageData(tiny_data, "train", own())
    one = data.load([3], seed=1, epoch=2)["image"][0]
    assert torch.equal(one, data.load([7, 3, 0], seed=1, epoch=2)["image"][1])
    assert not torch.equal(one, data.load([3], seed=1, epoch=3)["image"][0])
    plain = ImageData(tiny_data, "train", own("hyperparameters.augmentation=false")).load([3], seed=1, epoch=2)
    assert torch.equal(plain["image"][0], torch.from_numpy(ShardReader(tiny_data, "train").read([3])["image"][0]))
    assert plain["label"].tolist() == [3]
    validation = ImageData(tiny_data, "validation", own())
    assert torch.equal(validation.load([1], seed=0, epoch=0)["image"], validation.load([1], seed=5, epoch=3)["image"])


def test_data_that_do_not_fit_the_config_are_refused(tiny_data: Path, tmp_path: Path, world: World) -> None:
    with pytest.raises(InputError, match="shard_00000.h5: dataset .* expected"):
        ImageData(tiny_data, "train", own("hyperparameters.pixels=32"))
    with pytest.raises(
        InputError, match="the data have the classes delta, theta, .*; hyperparameters.classes expects mu, beta"
    ):
        ImageData(tiny_data, "train", own("hyperparameters.classes=[mu, beta]"))
    with pytest.raises(InputError, match="no public data"):
        generator.convert(tmp_path, tmp_path / "new", world=world)
    with pytest.raises(InputError, match="no public data"):
        generator.fetch(tmp_path)
