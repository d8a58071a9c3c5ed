"""Snapshots: the rule of the couplings is in the counts, and neither spectra nor one-point moments tell it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from suite.data.manifest import read_manifest
from suite.world import World
from workloads.cosmoflow import generate as generator
from workloads.cosmoflow.baselines import compute_features, count_joint_moments, count_moments, measure_baselines
from workloads.cosmoflow.config import TARGETS
from workloads.cosmoflow.snapshots import COUPLINGS, DENSE, LEAST_COUPLING, THIN, Snapshots, make_universe

PAIRS = ((2, 3), (2, 3), (0, 1), (0, 1))  # the snapshots that each snapshot may follow


@pytest.fixture(scope="module")
def universes() -> tuple[np.ndarray, np.ndarray]:
    """60 universes of 16^3 voxels: counts and couplings."""
    made = [make_universe(Snapshots(16), 0, index) for index in range(60)]
    return np.stack([x for x, _ in made]), np.stack([y for _, y in made])


def test_a_voxel_is_thin_or_dense_equally_often(universes: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = universes
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((60, 16, 16, 16, 4), np.int16, (60, 4), np.float32)
    assert set(np.unique(x)) == {THIN, DENSE}
    np.testing.assert_allclose((x == DENSE).mean(axis=(0, 1, 2, 3)), 0.5, atol=0.02)
    assert (np.abs(y) >= LEAST_COUPLING).all()
    assert (np.abs(y) <= 1).all()
    assert 0.35 < (y > 0).mean() < 0.65


def test_a_snapshot_follows_its_pair_as_often_as_its_coupling_says(universes: tuple[np.ndarray, np.ndarray]) -> None:
    """The mean product of a snapshot and its pair is half its coupling: in the other half of space the pair follows."""
    x, y = universes
    signs = np.where(x == DENSE, 1, -1)
    for snapshot, (a, b) in enumerate(PAIRS):
        product = (signs[..., snapshot] * signs[..., a] * signs[..., b]).mean(axis=(1, 2, 3))
        correlation = [np.corrcoef(product, y[:, other])[0, 1] for other in range(4)]
        assert correlation[snapshot] > 0.95
        assert max(abs(value) for other, value in enumerate(correlation) if other != snapshot) < 0.45
        assert np.polyfit(y[:, snapshot], product, 1)[0] == pytest.approx(0.5, abs=0.05)


def test_swapping_thin_and_dense_swaps_the_couplings_and_no_spectrum(universes: tuple[np.ndarray, np.ndarray]) -> None:
    x = universes[0][:8]
    here, there = compute_features(x), compute_features((THIN + DENSE - x).astype(np.int16))
    first, pairs = count_moments(4) + count_joint_moments(4), len(list(combinations(range(4), 2)))
    shells = (here.shape[1] - first - 4) // (2 * (4 + pairs))
    logs = slice(
        first + shells * (4 + pairs), -4
    )  # the spectra of the logarithms: those of the counts have their mean divided out
    np.testing.assert_allclose(here[:, logs], there[:, logs], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(here[:, -4:], -there[:, -4:], rtol=1e-3, atol=1e-5)


def test_a_universe_is_a_function_of_seed_and_number() -> None:
    first, other, moved = (make_universe(Snapshots(8), *key)[0] for key in ((1, 2), (1, 2), (2, 1)))
    np.testing.assert_array_equal(first, other)
    assert (first != moved).any()


def test_regressions_on_spectra_and_moments_find_nothing(tmp_path: Path, world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(generator.SIZES, "smoke", generator.DataSize(Snapshots(8), 8, 600, 200, 200))
        generator.generate(tmp_path / "d", "smoke", seed=0, world=world)
    assert read_manifest(tmp_path / "d").attributes["targets"] == list(COUPLINGS)
    found = measure_baselines(tmp_path / "d")
    for name in ("one_point_ridge", "power_spectrum_ridge"):
        assert found[name] > found["train_mean"] - 3 * found[name].standard_error
    for name in ("joint_moments_ridge", "snapshot_products_ridge"):
        assert found[name] < 0.5 * found["train_mean"]
    assert [name for name, value in found.items() if value.told] == ["snapshot_products_ridge"]


def test_simulated_universes_have_the_targets_of_the_public_data(tiny_data: Path) -> None:
    assert read_manifest(tiny_data).attributes["targets"] == list(TARGETS)
