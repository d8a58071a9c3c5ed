"""The patterns are those of Gray-Scott, and a snapshot depends on (seed, index) alone."""

import numpy as np
import pytest

from mlhpc.workloads.swinv2_moe import generate
from mlhpc.workloads.swinv2_moe.config import CLASSES
from mlhpc.workloads.swinv2_moe.generate import REGIMES, make_snapshots, simulate


def fields(name: str, pixels: int = 32) -> np.ndarray:
    """Eight final fields of a regime."""
    starts = np.stack([generate._seed(np.random.default_rng(seed), pixels) for seed in range(8)])
    feed, kill = (np.full(8, rate) for rate in REGIMES[name])
    return simulate(feed, kill, starts, generate.STEPS)


def test_the_labels_are_the_regimes() -> None:
    assert set(REGIMES) == set(CLASSES)
    for first in (0, 4, 2**32):
        assert make_snapshots(0, range(first, first + 3), 12)[1].tolist() == [(first + i) % 5 for i in range(3)]


def test_a_snapshot_depends_on_seed_and_index_alone() -> None:
    images, labels = make_snapshots(7, range(20, 26), 32)
    assert images.dtype == labels.dtype == np.uint8
    alone, _ = make_snapshots(7, range(24, 25), 32)
    np.testing.assert_array_equal(images[4], alone[0])
    for seed, index in ((7, 29), (8, 24)):  # of the same class
        assert (make_snapshots(seed, range(index, index + 1), 32)[0] != alone).mean() > 0.8


def test_one_step_is_the_equations() -> None:
    feed, kill = 0.03, 0.06
    v = np.random.default_rng(0).uniform(0, 0.25, (8, 8))
    u = 1 - 2 * v

    def laplacian(x: np.ndarray) -> np.ndarray:
        return sum(np.roll(x, shift, axis) for shift in (1, -1) for axis in (0, 1)) - 4 * x  # type: ignore[no-any-return]

    change = u * v**2 - (feed + kill) * v + generate.DIFFUSION[1] * laplacian(v)
    stepped = simulate(np.array([feed]), np.array([kill]), v[None].astype(np.float32), 1)[0]
    assert stepped.dtype == np.float32
    np.testing.assert_allclose(stepped, v + generate.STEP * change, atol=1e-6)


def test_without_the_second_species_nothing_happens_and_a_uniform_mixture_is_at_rest() -> None:
    feed, kill = REGIMES["theta"]
    assert not simulate(np.array([feed]), np.array([kill]), np.zeros((1, 8, 8), dtype=np.float32), 100).any()
    v = fields("delta").mean()
    feed, kill = REGIMES["delta"]
    rest = feed * (1 + np.sqrt(1 - 4 * (feed + kill) ** 2 / feed)) / (2 * (feed + kill))  # the outer fixed point
    assert v == pytest.approx(rest, rel=0.25)  # holes in it


@pytest.mark.parametrize("name", CLASSES)
def test_no_pattern_dies_out_or_grows_without_bound(name: str) -> None:
    found = fields(name)
    assert found.std(axis=(1, 2)).min() > 0.02
    assert 0.2 < found.max() < 0.5
    assert found.min() >= 0


def test_spots_cover_less_than_stripes_and_stripes_less_than_a_plane_with_holes() -> None:
    spots, worms, stripes, holes = ((fields(name) > 0.15).mean() for name in ("lambda", "mu", "theta", "delta"))
    assert 0.1 < spots < worms < stripes < holes < 0.95
