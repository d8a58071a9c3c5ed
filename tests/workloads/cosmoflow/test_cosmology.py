"""The synthetic universes obey the physics they claim."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from benchmarks import voxel_power
from mlhpc.workloads.cosmoflow import cosmology
from mlhpc.workloads.cosmoflow.config import REDSHIFTS
from mlhpc.workloads.cosmoflow.cosmology import Cosmology, Simulation

FIDUCIAL = Cosmology(0.3089, 0.8159, 0.9667, 67.74)
K = np.array([1e-3, 0.01, 0.05, 0.1, 0.3, 1.0, 5.0])


def test_transfer_is_eisenstein_and_hu() -> None:
    """Against colossus 1.4, modelEisenstein98 with the same densities, h = 0.6774, T = 2.7255 K."""
    expected = [0.99220845, 0.77956272, 0.27086241, 0.1308978, 0.030343508, 0.0046796544, 0.00030564493]
    np.testing.assert_allclose(cosmology.compute_transfer(K, FIDUCIAL), expected, rtol=1e-7)


def test_power_is_normalised_to_sigma_8() -> None:
    """Against colossus 1.4, matterPowerSpectrum with the same parameters, in (Mpc/h)^3."""
    expected = [3798.6353, 21718.26, 12425.489, 5671.3409, 881.48476, 67.135045, 1.3572343]
    np.testing.assert_allclose(cosmology.compute_power(K, FIDUCIAL), expected, rtol=1e-4)


@pytest.mark.parametrize(("z", "expected"), [(0.0, 1.0), (0.5, 0.77064), (1.5, 0.49757), (3.0, 0.31677)])
def test_growth(z: float, expected: float) -> None:
    """Against colossus 1.4, which integrates the growth equation; Carroll, Press & Turner fit it to 0.2 %."""
    assert cosmology.compute_growth(1 / (1 + z), 0.3089) == pytest.approx(expected, rel=3e-3)


def test_growth_is_the_scale_factor_in_an_einstein_de_sitter_universe() -> None:
    assert cosmology.compute_growth(0.25, 1.0) == pytest.approx(0.25, rel=1e-12)
    assert cosmology.compute_second_order_growth(0.25, 1.0) == pytest.approx(-3 / 7 / 16, rel=1e-12)


def test_targets_span_thirty_percent_around_the_fiducial_universe() -> None:
    low, middle, high = (cosmology.make_cosmology(np.full(4, u)) for u in (-1, 0, 1))
    assert (low.omega_m, middle.sigma_8, high.h_0) == pytest.approx((0.21623, 0.8159, 88.062))


def test_density_has_the_variance_of_its_spectrum() -> None:
    n, box = 32, 256.0
    noise = np.random.default_rng(0).standard_normal((n, n, n), dtype=np.float32)
    density = np.fft.irfftn(cosmology.compute_linear_modes(noise, FIDUCIAL, box), s=(n,) * 3, axes=(0, 1, 2))
    wave = 2 * np.pi / box * np.sqrt(sum(np.meshgrid(*(np.fft.fftfreq(n) * n,) * 3)[i] ** 2 for i in range(3))).ravel()
    expected = cosmology.compute_power(wave[1:], FIDUCIAL).sum() / box**3
    assert density.var() == pytest.approx(expected, rel=0.1)


def three_waves(amplitude: float, n: int = 32) -> np.ndarray:
    """delta = amplitude * (cos x + cos y + cos z) on one period: isotropic, so spherical, near the origin."""
    wave = np.cos(2 * np.pi * np.arange(n) / n)
    return amplitude * (wave[:, None, None] + wave[None, :, None] + wave[None, None, :]).astype(np.float32)


@pytest.mark.parametrize("amplitude", [0.05, -0.05])
def test_second_order_has_the_sign_and_size_of_spherical_collapse(amplitude: float) -> None:
    """A sphere's density is 1 + d + 17/21 d^2, of which 2LPT's second order gives 1/7 d^2: contraction for either sign."""
    first, second = cosmology.compute_displacements(np.fft.rfftn(three_waves(amplitude)).astype(np.complex64))
    cell = 2 * np.pi / 32  # displacements are in cells; the waves have period 2 pi

    def stretch(field: np.ndarray) -> float:  # d psi_x / d q_x at the origin
        return float(field[0, 1, 0, 0] - field[0, -1, 0, 0]) / 2 / np.sin(cell) * cell

    delta = 3 * amplitude
    assert stretch(first) == pytest.approx(-delta / 3, rel=1e-3)
    d2 = cosmology.compute_second_order_growth(1.0, 1.0)
    assert d2 * stretch(second) == pytest.approx(-(delta**2) / 21, rel=1e-2)
    side = 1 + stretch(first) + d2 * stretch(second)
    assert side**-3 == pytest.approx(1 + delta + 17 / 21 * delta**2, abs=abs(delta) ** 3)


def test_a_plane_wave_has_no_second_order() -> None:
    wave = np.tile(np.cos(2 * np.pi * np.arange(16) / 16)[:, None, None], (1, 16, 16)).astype(np.float32)
    _, second = cosmology.compute_displacements(np.fft.rfftn(0.1 * wave).astype(np.complex64))
    assert abs(second).max() < 1e-6


def test_first_order_displacement_diverges_by_the_density() -> None:
    n = 32
    first, _ = cosmology.compute_displacements(np.fft.rfftn(three_waves(0.1, n)).astype(np.complex64))
    k = 2 * np.pi * np.fft.fftfreq(n)
    modes = np.fft.fftn(first, axes=(1, 2, 3))
    divergence = np.fft.ifftn(1j * (k[:, None, None] * modes[0] + k[:, None] * modes[1] + k * modes[2])).real
    np.testing.assert_allclose(divergence, -three_waves(0.1, n), atol=1e-5)


def test_mesh_force_on_a_small_wave_is_its_displacement() -> None:
    """To first order -grad laplace^-1 delta is the Zel'dovich displacement itself."""
    n = 32
    first, _ = cosmology.compute_displacements(np.fft.rfftn(three_waves(0.02, n)).astype(np.complex64))
    start = np.stack(np.meshgrid(*(np.arange(n, dtype=np.float32) + np.float32(0.5),) * 3, indexing="ij"))
    force = cosmology.compute_mesh_force(start + first)
    assert np.sum(force * first) / np.sum(first * first) == pytest.approx(1, abs=0.05)
    assert np.corrcoef(force.ravel(), first.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("steps", ["cola10", "cola4"])
def test_particle_mesh_steps_follow_2lpt_while_structure_is_linear(monkeypatch: pytest.MonkeyPatch, steps: str) -> None:
    monkeypatch.setattr(cosmology, "FIDUCIAL", cosmology.FIDUCIAL * [1, 0.05, 1, 1])
    monkeypatch.setattr(cosmology, "REDSHIFTS", (0.0,))
    linear, _ = cosmology.make_universe(Simulation(16, 8, 400.0, "2lpt"), 0, 0)
    stepped, _ = cosmology.make_universe(Simulation(16, 8, 400.0, steps), 0, 0)
    assert (linear != stepped).mean() < 0.02


def test_particle_mesh_steps_keep_clustering_after_shells_cross() -> None:
    """At 2 Mpc/h pure 2LPT disperses what has collapsed: its variance falls from z = 0.5 to 0, which is wrong."""
    variance = {}
    for steps in ("2lpt", "cola10"):
        x, _ = cosmology.make_universe(Simulation(32, 32, 64.0, steps), 0, 1)
        variance[steps] = x.reshape(-1, 4).astype(float).var(axis=0)
    assert variance["2lpt"][3] < variance["2lpt"][2]
    assert (np.diff(variance["cola10"]) > 0).all()


def test_four_steps_agree_with_ten_on_voxels_of_8_mpc_h() -> None:
    """As `smoke` has them."""
    few, many = (
        cosmology.make_universe(Simulation(32, 32, 256.0, steps), 0, 1)[0].reshape(-1, 4).astype(float)
        for steps in ("cola4", "cola10")
    )
    np.testing.assert_allclose(few.var(axis=0), many.var(axis=0), rtol=0.05)
    # lowest at z = 3, where few particles have left their voxel
    assert min(np.corrcoef(few[:, channel], many[:, channel])[0, 1] for channel in range(4)) > 0.88


@pytest.mark.parametrize("steps", ["2lpt", "cola10", "cola4"])
def test_every_particle_is_counted_once_per_redshift(steps: str) -> None:
    x, y = cosmology.make_universe(Simulation(16, 8, 64.0, steps), 5, 7)
    assert x.shape == (8, 8, 8, len(REDSHIFTS))
    assert x.reshape(-1, 4).sum(axis=0).tolist() == [16**3] * 4
    assert x.dtype == np.int16
    assert y.dtype == np.float32
    assert (abs(y) <= 1).all()


def test_a_universe_is_a_function_of_seed_and_index() -> None:
    simulation = Simulation(16, 8, 128.0, "2lpt")
    samples = {key: cosmology.make_universe(simulation, *key)[0].tobytes() for key in ((0, 0), (0, 1), (1, 0), (1, 1))}
    assert len(set(samples.values())) == 4
    assert samples[(1, 0)] == cosmology.make_universe(simulation, 1, 0)[0].tobytes()


@pytest.mark.long
def test_rounding_moves_no_particle_into_another_voxel_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the counts of `smoke` are the same on every processor. In float32 the last bit is enough to move some."""
    original, random = cosmology.compute_displacements, np.random.default_rng(0)

    def nudged(modes: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(
            field * (1 + np.finfo(field.dtype).eps * random.integers(-4, 5, field.shape).astype(field.dtype))
            for field in original(modes)
        )

    moved = {}
    for precision in ("float64", "float32"):
        simulation = Simulation(16, 16, 128.0, "cola4", precision)
        universes = [cosmology.make_universe(simulation, 0, index)[0] for index in range(50)]
        with monkeypatch.context() as patch:
            patch.setattr(cosmology, "compute_displacements", nudged)
            again = [cosmology.make_universe(simulation, 0, index)[0] for index in range(50)]
        moved[precision] = sum(int((a != b).sum()) for a, b in zip(universes, again, strict=True))
    assert moved["float64"] == 0
    assert moved["float32"] > 0


@pytest.mark.parametrize(
    ("size", "universes", "points"),
    [("smoke", 8, 8), ("mini", 2, 8), ("mini", 2, 1), ("small", 1, 1), ("full", 1, 1)],
)
def test_the_largest_scales_of_the_counts_have_the_power_of_linear_theory(
    size: str, universes: int, points: Literal[1, 8]
) -> None:
    """At each redshift, but that one particle a voxel shows the lattice before z = 0.5: `mini` is made so.

    Against the modes that a universe began with, so few universes suffice.
    """
    shipped = voxel_power.SIMULATIONS[size]
    simulation = replace(shipped, points=points)
    made = [voxel_power.make_counts(simulation, number) for number in range(universes)]
    ratios = np.mean([voxel_power.compute_ratios(*each) for each in made], axis=0)[:, :2]
    right = ((ratios > 0.75) & (ratios < 1.3)).all(axis=1)
    assert right.tolist() == ([False, False, True, True] if (size, points) == ("mini", 1) else [True] * 4), ratios
    assert size == "mini" or simulation == shipped


def test_eight_points_of_a_particle_fill_its_cell_evenly() -> None:
    points = cosmology.POINTS * 8 + 3.5
    assert np.sort(points, axis=0).tolist() == [[place] * 3 for place in range(8)]
    assert len({tuple(octant) for octant in (points > 3.5).tolist()}) == 8
    np.testing.assert_allclose(points + points[::-1], 7)  # the same seen from the other side
    simulation = Simulation(16, 16, 128.0, "2lpt", points=8)
    assert cosmology.make_universe(simulation, 5, 7)[0].sum(axis=(0, 1, 2)).tolist() == [8 * 16**3] * 4
