"""What only snapshots have: statistics of channels and classes."""

from pathlib import Path

import numpy as np
import pytest

from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.workloads.deepcam import generate as generator
from mlhpc.workloads.deepcam.climate import make_snapshot
from mlhpc.workloads.deepcam.config import CHANNELS


def test_the_result_is_described(tiny_data: Path, tiny: generator.DataSize) -> None:
    manifest = read_manifest(tiny_data)
    train = ShardReader(tiny_data, "train").read(range(12))
    found = manifest.attributes["statistics"]
    x = train["x"].reshape(-1, len(CHANNELS))
    np.testing.assert_array_equal(found["minval"], x.min(axis=0))
    np.testing.assert_array_equal(found["maxval"], x.max(axis=0))
    np.testing.assert_allclose(found["mean"], x.mean(axis=0, dtype=float), rtol=1e-9)
    np.testing.assert_allclose(found["sqmean"], (x.astype(float) ** 2).mean(axis=0), rtol=1e-9)
    assert found["count"] == 12
    shares = np.bincount(train["y"].ravel(), minlength=3) / train["y"].size
    np.testing.assert_allclose(manifest.attributes["train_class_frequencies"], shares)
    fields, labels = make_snapshot(tiny.domain, 3, 6)
    np.testing.assert_array_equal(train["x"][6], fields)
    np.testing.assert_array_equal(train["y"][6], labels)


@pytest.mark.parametrize("size", list(generator.SIZES))
def test_the_generator_makes_what_the_card_states(size: str) -> None:
    from mlhpc.workloads.deepcam import DESCRIPTOR

    card, settings = DESCRIPTOR.card().size(size), generator.SIZES[size]
    assert (card.train_samples, card.eval_samples) == (settings.train_samples, settings.validation_samples)
    assert card.sample_bytes == settings.domain.height * settings.domain.width * 65
