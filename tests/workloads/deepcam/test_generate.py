"""A data set depends on its recipe alone: not on ranks, order or interruptions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from suite.distributed import World
from suite.shards import ShardReader, read_manifest, verify
from workloads.deepcam import generate as generator
from workloads.deepcam.climate import snapshot
from workloads.deepcam.config import CHANNELS

MPIEXEC = Path(sys.executable).parent / "mpiexec"

TWO_RANKS = """
import sys
from pathlib import Path
from suite.distributed import World
from workloads.deepcam import generate as generator
from workloads.deepcam.climate import Domain
generator.SIZES["smoke"] = generator.DataSize(Domain(32, 48, 4, 52, 72, 1.2, 1.5, 1.5, 1.2, 1.5, 1.2), 12, 5, 4)
generator.generate(Path(sys.argv[1]), "smoke", seed=3, world=World.create())
"""


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside python: pip install mpich")
def test_two_ranks_write_the_bytes_of_one(tiny_data: Path, tmp_path: Path) -> None:
    other = tmp_path / "two"
    subprocess.run([MPIEXEC, "-n", "2", sys.executable, "-c", TWO_RANKS, other], check=True, timeout=120)
    assert contents(other) == contents(tiny_data)


def test_the_result_is_complete_and_described(tiny_data: Path, tiny: generator.DataSize) -> None:
    manifest = read_manifest(tiny_data)
    assert verify(tiny_data, deep=True) == []
    assert {split: manifest.samples(split) for split in manifest.splits} == {"train": 12, "validation": 5}
    train = ShardReader(tiny_data, "train").read(range(12))
    found = manifest.attributes["statistics"]
    x = train["x"].reshape(-1, len(CHANNELS))
    np.testing.assert_array_equal(found["minval"], x.min(axis=0))
    np.testing.assert_array_equal(found["maxval"], x.max(axis=0))
    np.testing.assert_allclose(found["mean"], x.mean(axis=0, dtype=float), rtol=1e-9)
    np.testing.assert_allclose(found["sqmean"], (x.astype(float) ** 2).mean(axis=0), rtol=1e-9)
    assert found["count"] == [12 * 32 * 48] * 16
    shares = np.bincount(train["y"].ravel(), minlength=3) / train["y"].size
    np.testing.assert_allclose(manifest.attributes["train_class_frequencies"], shares)
    fields, labels = snapshot(tiny.domain, 3, 6)
    np.testing.assert_array_equal(train["x"][6], fields)
    np.testing.assert_array_equal(train["y"][6], labels)


def test_validation_shares_no_snapshot_with_training(tiny_data: Path) -> None:
    train, validation = (ShardReader(tiny_data, split) for split in ("train", "validation"))
    seen = {x.tobytes() for x in train.read(range(12))["x"]}
    assert not seen & {x.tobytes() for x in validation.read(range(5))["x"]}


def test_a_killed_generation_is_continued_to_the_same_bytes(tiny_data: Path, tmp_path: Path, world: World) -> None:
    root = tmp_path / "killed"

    def until_the_sixth(done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(root, "smoke", seed=3, world=world, progress=until_the_sixth)
    assert not (root / "manifest.json").exists()
    finished = root / "train" / "shard_00000.h5"
    before = finished.stat().st_ino
    made = []
    generator.generate(root, "smoke", seed=3, world=world, progress=lambda done, total: made.append(done))
    assert len(made) == 17 - 4  # the finished shard of four snapshots is kept
    assert finished.stat().st_ino == before
    assert contents(root) == contents(tiny_data)


def test_a_complete_data_set_is_left_alone(tiny_data: Path, world: World) -> None:
    before = contents(tiny_data)
    generator.generate(tiny_data, "smoke", seed=3, world=world, progress=lambda done, total: pytest.fail("made again"))
    assert contents(tiny_data) == before


def test_a_folder_with_other_content_is_refused(tiny_data: Path, tmp_path: Path, world: World) -> None:
    with pytest.raises(ValueError, match="holds other data: seed is 3, not 4"):
        generator.generate(tiny_data, "smoke", seed=4, world=world)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(ValueError, match="not empty"):
        generator.generate(tmp_path / "mine", "smoke", seed=3, world=world)
    with pytest.raises(ValueError, match="unknown size 'huge'; sizes: smoke, mini"):
        generator.generate(tmp_path / "new", "huge", seed=3, world=world)
    with pytest.raises(ValueError, match="seed -1"):
        generator.generate(tmp_path / "new", "smoke", seed=-1, world=world)


@pytest.mark.parametrize("size", list(generator.SIZES))
def test_the_generator_makes_what_the_card_states(size: str) -> None:
    from workloads.deepcam import DESCRIPTOR

    card, settings = DESCRIPTOR.card().size(size), generator.SIZES[size]
    assert (card.train_samples, card.eval_samples) == (settings.train_samples, settings.validation_samples)
    assert card.sample_bytes == settings.domain.height * settings.domain.width * 65
