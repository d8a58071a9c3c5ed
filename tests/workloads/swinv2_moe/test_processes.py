"""Each process does what its equation says, a snapshot depends on (seed, index) alone, and no histogram tells it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import fft

from workloads.swinv2_moe import processes
from workloads.swinv2_moe.config import CLASSES
from workloads.swinv2_moe.processes import (
    ISING_CRITICAL,
    PROCESSES,
    SURROGATE_SOURCES,
    convert_to_image,
    make_snapshot,
    make_surrogate,
    swendsen_wang,
)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_labels_are_the_processes() -> None:
    assert {*PROCESSES, *SURROGATE_SOURCES} == set(CLASSES)
    assert [make_snapshot(0, index, 12)[1] for index in (0, 9, 10, 2**32)] == [0, 9, 0, 2**32 % 10]


def test_a_snapshot_depends_on_seed_and_index_alone() -> None:
    image, label = make_snapshot(7, 24, 32)
    again, _ = make_snapshot(7, 24, 32)
    assert label == 4
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, again)
    assert (image != make_snapshot(7, 34, 32)[0]).mean() > 0.9
    assert (image != make_snapshot(8, 24, 32)[0]).mean() > 0.9


@pytest.mark.parametrize("index", range(len(CLASSES)))
def test_every_image_has_the_same_histogram(index: int) -> None:
    image, _ = make_snapshot(0, index, 32)
    assert np.bincount(image.ravel(), minlength=256).tolist() == [4] * 256


@pytest.mark.parametrize("name", PROCESSES)
def test_no_field_is_flat_or_infinite(name: str) -> None:
    for seed in range(3):
        field = PROCESSES[name](random(seed), 32)
        assert np.isfinite(field).all()
        assert field.std() > 1e-3


def test_a_surrogate_has_the_histogram_and_the_power_of_its_twin() -> None:
    image = convert_to_image(processes.stripes(random(), 48), random(1))
    twin = make_surrogate(image, random(2))
    assert np.array_equal(np.bincount(twin.ravel()), np.bincount(image.ravel()))
    powers = [np.abs(fft.rfft2(each - 127.5)) ** 2 for each in (image, twin)]
    strong = powers[0] > np.quantile(powers[0], 0.9)
    np.testing.assert_allclose(powers[1][strong], powers[0][strong], rtol=0.2)
    assert powers[1].sum() == pytest.approx(powers[0].sum(), rel=1e-3)
    assert abs(np.corrcoef(image.ravel(), twin.ravel())[0, 1]) < 0.3

    def kurtosis(x: np.ndarray) -> float:
        """Of the smoothed image, a fourth-order statistic: phases of a pattern lie near two levels."""
        smooth = processes._filter(x - 127.5, np.exp(-(processes._wave_number(48) ** 2)))
        return float((smooth**4).mean() / (smooth**2).mean() ** 2)

    assert kurtosis(image) < kurtosis(twin) - 0.2


def test_ising_energies_are_onsagers() -> None:
    """-sqrt(2) per spin at the critical point, -1.7456 at T = 2 (doi:10.1103/PhysRev.65.117); couplings of a torus."""

    def energy(temperature: float, seed: int) -> float:
        spins = 2 * swendsen_wang(random(seed), 48, temperature, sweeps=40) - 1
        return float(-(spins * np.roll(spins, 1, 0) + spins * np.roll(spins, 1, 1)).mean())

    assert np.mean([energy(ISING_CRITICAL, seed) for seed in range(12)]) == pytest.approx(-np.sqrt(2), abs=0.05)
    assert np.mean([energy(2.0, seed) for seed in range(6)]) == pytest.approx(-1.7456, abs=0.02)


def test_cahn_hilliard_conserves_and_allen_cahn_does_not() -> None:
    """What a quench begins with is mean + 0.3 noise; the noise has its own mean."""
    begun = 0.0 + 0.3 * np.random.default_rng(5).standard_normal((32, 32))

    def end(rate: np.ndarray, duration: float, step: float) -> np.ndarray:
        return processes._quench(random(5), 32, mean=0.0, duration=duration, step=step, rate=rate, kappa=0.7)

    k = processes._wave_number(32)
    conserved, free = end(k**2, 100, 1.0), end(np.ones_like(k), 12, 0.2)
    assert conserved.mean() == pytest.approx(begun.mean(), abs=1e-12)
    assert abs(free.mean() - begun.mean()) > 1e-3
    for field in (conserved, free):
        assert np.abs(field).mean() > 0.6  # domains of both phases
        assert np.abs(field).max() < 1.3


def test_an_anisotropic_field_is_longer_one_way() -> None:
    def ratio(field: np.ndarray) -> float:
        """Of the larger and smaller principal mean square gradient."""
        gx, gy = np.roll(field, 1, 0) - field, np.roll(field, 1, 1) - field
        tensor = np.array([[(gx * gx).mean(), (gx * gy).mean()], [(gx * gy).mean(), (gy * gy).mean()]])
        low, high = np.linalg.eigvalsh(tensor)
        return float(high / low)

    stretched = [ratio(processes.anisotropic(random(seed), 48)) for seed in range(10)]
    round_ = [ratio(processes.allen_cahn(random(seed), 48)) for seed in range(10)]
    assert np.median(stretched) > 1.7 * np.median(round_)  # a round field of few modes is longer some way, too


def test_spots_cover_less_than_stripes() -> None:
    spots = np.mean([(f > f.max() / 2).mean() for f in (processes.spots(random(s), 48) for s in range(4))])
    stripes = np.mean([(f > f.max() / 2).mean() for f in (processes.stripes(random(s), 48) for s in range(4))])
    assert 0.02 < spots < stripes < 0.8
