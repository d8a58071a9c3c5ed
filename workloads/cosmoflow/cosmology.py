"""Synthetic universes: power spectrum, growth, second-order displacements, particle-mesh steps, counts in voxels.

Lengths are comoving Mpc/h, wave numbers h/Mpc; the scale factor a and the growth are 1 today. A universe is a function
of (settings, seed, index). So it is the same on any rank and in any order. No files, no MPI. Vectors are arrays of
shape (3, n, n, n). Arrays have the precision of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from mlhpc.workloads.cosmoflow.config import REDSHIFTS

Floats = NDArray[np.floating[Any]]

# Public CosmoFlow data: parameters uniform within 30 % of these (Omega_m, sigma_8, n_s, H_0).
FIDUCIAL = np.array([0.3089, 0.8159, 0.9667, 67.74])
HALF_WIDTH = 0.3
OMEGA_B_H2 = 0.0223
CMB_KELVIN = 2.7255
SIGMA_8_RADIUS = 8.0
_K_TABLE = np.geomspace(1e-4, 20, 512)  # h/Mpc; sigma_8 to 1e-4

SLABS_PER_BLOCK = 16

# Eight points of a cell, in cells from its centre: one in each octant, with eight distinct places along each axis. A
# lattice of one particle a voxel shows no displacement below half a voxel; these show a sixteenth.
POINTS = (np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 4, 5, 2, 3, 6, 7], [1, 4, 0, 5, 2, 7, 3, 6]]).T - 3.5) / 8

# Scale factors of the particle-mesh steps: they pass through all four redshifts.
PM_SCALE_FACTORS = {
    "cola10": (0.1, 0.175, 0.25, 0.325, 0.4, 0.5, 0.5 + 1 / 12, 2 / 3, 2 / 3 + 1 / 9, 2 / 3 + 2 / 9, 1.0),
    "cola4": (0.1, 0.25, 0.4, 2 / 3, 1.0),
}
COLA_EXPONENT = -2.5  # u(a) = a^n of the modified leapfrog, Tassev, Zaldarriaga & Eisenstein 2013, appendix A


@dataclass(frozen=True)
class Simulation:
    """How to simulate a universe: particles^3 in a periodic box, counted on a mesh.

    ``steps`` is "2lpt" (no particle-mesh steps), "cola10" (ten of them) or "cola4" (one before each redshift). In
    float64 rounding moves no particle into another voxel, so counts are the same on every processor. float32 has half
    the bytes. ``points``: each particle is counted once, or as the eight POINTS of its cell, which move with it.
    """

    particles: int
    mesh: int
    box_mpc_h: float
    steps: Literal["2lpt", "cola10", "cola4"]
    precision: Literal["float32", "float64"] = "float32"
    points: Literal[1, 8] = 1


@dataclass(frozen=True)
class Cosmology:
    """A flat LCDM universe."""

    omega_m: float
    sigma_8: float
    n_s: float
    h_0: float

    @property
    def h(self) -> float:
        """Return H_0 in units of 100 km/s/Mpc."""
        return self.h_0 / 100


def make_cosmology(unit: Floats) -> Cosmology:
    """Convert targets in [-1, 1]^4 to a cosmology."""
    return Cosmology(*(FIDUCIAL * (1 + HALF_WIDTH * np.asarray(unit, dtype=np.float64))).tolist())


def make_universe(simulation: Simulation, seed: int, index: int) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Simulate one universe. Returns counts (mesh, mesh, mesh, 4 redshifts) and the four targets."""
    # counter-based: the numbers depend on seed and index alone, not on what was drawn before
    random = np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
    unit = random.uniform(-1, 1, 4).astype(np.float32)
    noise = random.standard_normal((simulation.particles,) * 3, dtype=simulation.precision)
    cosmology = make_cosmology(unit)
    first, second = compute_displacements(compute_linear_modes(noise, cosmology, simulation.box_mpc_h))
    evolve = _evolve_2lpt if simulation.steps == "2lpt" else _evolve_cola
    return evolve(first, second, cosmology, simulation), unit


def compute_transfer(k: Floats, cosmology: Cosmology) -> Floats:
    """Compute the matter transfer function with baryon oscillations, Eisenstein & Hu 1998 (astro-ph/9709112), equations
    2 to 24.
    """
    # scales: equality, the sound horizon at the drag epoch, Silk damping (equations 2 to 7)
    om = cosmology.omega_m * cosmology.h**2
    fb = OMEGA_B_H2 / om
    theta = CMB_KELVIN / 2.7
    k = np.asarray(k, dtype=np.float64) * cosmology.h  # 1/Mpc
    z_eq = 2.5e4 * om / theta**4
    k_eq = 7.46e-2 * om / theta**2
    b1 = 0.313 * om**-0.419 * (1 + 0.607 * om**0.674)
    b2 = 0.238 * om**0.223
    z_drag = 1291 * om**0.251 / (1 + 0.659 * om**0.828) * (1 + b1 * OMEGA_B_H2**b2)
    r_drag, r_eq = (31.5e3 * OMEGA_B_H2 / theta**4 / z for z in (z_drag, z_eq))
    sound = 2 / (3 * k_eq) * np.sqrt(6 / r_eq)
    sound *= np.log((np.sqrt(1 + r_drag) + np.sqrt(r_drag + r_eq)) / (1 + np.sqrt(r_eq)))
    k_silk = 1.6 * OMEGA_B_H2**0.52 * om**0.73 * (1 + (10.4 * om) ** -0.95)
    q = k / (13.41 * k_eq)

    # cold dark matter (equations 10 to 12 and 17 to 20)
    a1 = (46.9 * om) ** 0.670 * (1 + (32.1 * om) ** -0.532)
    a2 = (12.0 * om) ** 0.424 * (1 + (45.0 * om) ** -0.582)
    alpha_c = a1**-fb * a2 ** (-(fb**3))
    c1 = 0.944 / (1 + (458 * om) ** -0.708)
    c2 = (0.395 * om) ** -0.0266
    beta_c = 1 / (1 + c1 * ((1 - fb) ** c2 - 1))
    ks = k * sound
    logarithm = np.log(np.e + 1.8 * beta_c * q)
    tail = 386 / (1 + 69.9 * q**1.08)
    c_plain, c_alpha = 14.2 + tail, 14.2 / alpha_c + tail
    f = 1 / (1 + (ks / 5.4) ** 4)
    t_c = f * logarithm / (logarithm + c_plain * q**2) + (1 - f) * logarithm / (logarithm + c_alpha * q**2)

    # baryons: acoustic oscillations, damped (equations 14, 15 and 21 to 24)
    y = (1 + z_eq) / (1 + z_drag)
    root = np.sqrt(1 + y)
    g = y * (-6 * root + (2 + 3 * y) * np.log((root + 1) / (root - 1)))
    alpha_b = 2.07 * k_eq * sound * (1 + r_drag) ** -0.75 * g
    beta_b = 0.5 + fb + (3 - 2 * fb) * np.sqrt((17.2 * om) ** 2 + 1)
    beta_node = 8.41 * om**0.435
    s_tilde = sound / np.cbrt(1 + (beta_node / ks) ** 3)
    unit_log = np.log(np.e + 1.8 * q)
    t_pressureless = unit_log / (unit_log + (14.2 + tail) * q**2)
    damped = alpha_b / (1 + (beta_b / ks) ** 3) * np.exp(-((k / k_silk) ** 1.4))
    # numpy's sinc(x) is sin(pi x) / (pi x)
    t_b = (t_pressureless / (1 + (ks / 5.2) ** 2) + damped) * np.sinc(k * s_tilde / np.pi)
    total: Floats = fb * t_b + (1 - fb) * t_c
    return total


def compute_power(k: Floats, cosmology: Cosmology) -> Floats:
    """Compute the linear matter power spectrum today in (Mpc/h)^3, normalised to sigma_8."""
    everywhere = np.concatenate([_K_TABLE, np.asarray(k, dtype=np.float64)])
    shape = everywhere**cosmology.n_s * compute_transfer(everywhere, cosmology) ** 2
    table = shape[: len(_K_TABLE)]
    # sigma_8 is the deviation of the contrast in spheres of 8 Mpc/h: a top hat, Fourier transformed
    kr = _K_TABLE * SIGMA_8_RADIUS
    window = 3 * (np.sin(kr) - kr * np.cos(kr)) / kr**3
    variance = np.trapezoid(table * window**2 * _K_TABLE**3, np.log(_K_TABLE)) / (2 * np.pi**2)
    return shape[len(_K_TABLE) :] * (cosmology.sigma_8**2 / variance)


def compute_growth(a: float, omega_m: float) -> float:
    """Compute the linear growth relative to today, Carroll, Press & Turner 1992, equation 29."""
    return a * _suppression(compute_matter_fraction(a, omega_m)) / _suppression(omega_m)


def compute_second_order_growth(a: float, omega_m: float) -> float:
    """Compute the growth of the second-order displacement, negative (Bouchet et al. 1995): it multiplies +grad phi2."""
    return float(-3 / 7 * compute_growth(a, omega_m) ** 2 * compute_matter_fraction(a, omega_m) ** (-1 / 143))


def compute_matter_fraction(a: float, omega_m: float) -> float:
    """Return Omega_m at scale factor a."""
    return omega_m / (omega_m + (1 - omega_m) * a**3)


def compute_linear_modes(noise: Floats, cosmology: Cosmology, box_mpc_h: float) -> NDArray[np.complex64]:
    """Compute the Fourier modes (n, n, n//2 + 1) of today's linear density contrast from unit white noise."""
    n = noise.shape[0]
    grid = _grid(n)
    k = grid.distinct_k * (2 * np.pi / box_mpc_h)
    amplitude = np.zeros(len(k), dtype=noise.dtype)
    # modes of unit white noise have variance n^3, those of the contrast P n^6 / box^3
    amplitude[1:] = np.sqrt(compute_power(k[1:], cosmology) * (n / box_mpc_h) ** 3)  # the mean mode is zero
    return fft.rfftn(noise) * amplitude[grid.which]  # type: ignore[no-any-return]


def compute_displacements(modes: NDArray[np.complex64]) -> tuple[Floats, Floats]:
    """Compute first and second order displacement fields today, in grid cells. x = q + D1 * first + D2 * second, with
    D2 < 0.

    first = -grad phi1 with laplace phi1 = delta; second = +grad phi2 with laplace phi2 = sum_{i<j} (phi1_ii phi1_jj -
    phi1_ij^2).
    """
    n = modes.shape[0]
    grid = _grid(n)
    per_k2 = modes * grid.inverse_k2  # -phi1
    first = fft.irfftn(1j * grid.k * per_k2[None], s=(n,) * 3, axes=(1, 2, 3), overwrite_x=True)
    pairs = np.empty((6, *modes.shape), dtype=modes.dtype)
    for slot, (i, j) in enumerate(((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))):
        # the second derivatives of phi1: -k_i k_j phi1
        np.multiply(grid.k[i] * grid.k[j], per_k2, out=pairs[slot])
    xx, yy, zz, xy, xz, yz = fft.irfftn(pairs, s=(n,) * 3, axes=(1, 2, 3), overwrite_x=True)
    source = xx * (yy + zz) + yy * zz - xy * xy - xz * xz - yz * yz
    source_modes = fft.rfftn(source, overwrite_x=True) * grid.inverse_k2
    second = fft.irfftn(-1j * grid.k * source_modes[None], s=(n,) * 3, axes=(1, 2, 3), overwrite_x=True)
    # wave vectors are in units of 2 pi / box; a displacement goes with their inverse, and the box has n cells
    first *= n / (2 * np.pi)
    second *= n / (2 * np.pi)
    return first, second


def count(positions: Sequence[Floats], simulation: Simulation) -> NDArray[np.int16]:
    """Count particles per nearest grid point: (mesh, mesh, mesh, channels), one array of positions per channel.

    Positions (3, n, n, n) are in units of particle cells. A voxel is the half-open interval of mesh coordinates that
    starts at its index.
    """
    channels, mesh = len(positions), simulation.mesh
    points = POINTS if simulation.points == len(POINTS) else np.zeros((1, 3))
    total = np.zeros(mesh**3 * channels, dtype=np.int64)
    for (channel, position), point in product(enumerate(positions), points.astype(simulation.precision)):
        cells = (position + point[:, None, None, None]) * (mesh / simulation.particles)
        x, y, z = np.floor(cells).astype(np.int32) % mesh
        total += np.bincount((((x * mesh + y) * mesh + z) * channels + channel).ravel(), minlength=len(total))
    assert total.max() <= np.iinfo(np.int16).max
    return total.astype(np.int16).reshape(mesh, mesh, mesh, channels)


def _evolve_2lpt(first: Floats, second: Floats, cosmology: Cosmology, simulation: Simulation) -> NDArray[np.int16]:
    start = _grid(simulation.particles).positions
    positions = [start + _lpt_shift(first, second, 1 / (1 + z), cosmology.omega_m) for z in REDSHIFTS]
    return count(positions, simulation)


def _evolve_cola(first: Floats, second: Floats, cosmology: Cosmology, simulation: Simulation) -> NDArray[np.int16]:
    """COLA: particle-mesh forces on the difference to the 2LPT trajectory, kick-drift-kick (arXiv:1301.0322)."""
    n, om = simulation.particles, cosmology.omega_m
    start = _grid(n).positions
    residual, velocity = np.zeros_like(first), np.zeros_like(first)
    wanted = [1 / (1 + z) for z in REDSHIFTS]
    channels: list[NDArray[np.int16]] = []
    scale_factors = PM_SCALE_FACTORS[simulation.steps]
    a = scale_factors[0]
    force = _residual_force(start + _lpt_shift(first, second, a, om), first, second, a, om)
    for a, a_next in pairwise(scale_factors):
        middle = np.sqrt(a * a_next)
        # half a kick, a whole drift, then half a kick by the new force
        velocity += _kick(a, middle, a, om) * force
        residual += _drift(a, a_next, middle, om) * velocity
        position = start + _lpt_shift(first, second, a_next, om) + residual
        force = _residual_force(position, first, second, a_next, om)
        velocity += _kick(middle, a_next, a_next, om) * force
        # 1 / (1 + z) and the table's sums of fractions differ in the last bit
        if any(math.isclose(a_next, each) for each in wanted):
            channels.append(count([position], simulation))
    return np.concatenate(channels, axis=-1)


def _lpt_shift(first: Floats, second: Floats, a: float, omega_m: float) -> Floats:
    return compute_growth(a, omega_m) * first + compute_second_order_growth(a, omega_m) * second


def _residual_force(position: Floats, first: Floats, second: Floats, a: float, omega_m: float) -> Floats:
    """Compute T^2 of the residual: the particle-mesh force minus the acceleration of the 2LPT trajectory
    (arXiv:1301.0322).
    """
    d1, d2 = compute_growth(a, omega_m), compute_second_order_growth(a, omega_m)
    force = compute_mesh_force(position)
    force -= d1 * first
    force -= (d2 - d1**2) * second
    force *= 1.5 * omega_m * a
    return force


def compute_mesh_force(position: Floats) -> Floats:
    """Compute -grad laplace^-1 delta at each particle, in cells: cloud-in-cell assignment, spectral gradient.

    The smoothing by cloud-in-cell, once of the mass and once of the force, is divided out.
    """
    n = position.shape[1]
    grid = _grid(n)
    modes = fft.rfftn(_assign_mass(position)) * grid.sharpened_inverse_k2
    # the three components of a cell lie together, so that one gather per corner fetches them
    fields = np.stack([fft.irfftn(1j * each * modes, s=(n,) * 3) for each in grid.k], axis=-1).reshape(n**3, 3)
    fields *= n / (2 * np.pi)
    force = np.empty_like(position)
    for block in _list_slabs(n):
        total = np.zeros((*position[0, block].shape, 3), dtype=position.dtype)
        for row, column, weight in _list_cloud_in_cell(position[:, block], n):
            total += np.take(fields, row % n * n**2 + column, axis=0) * weight[..., None]
        force[:, block] = np.moveaxis(total, -1, 0)
    return force


def _assign_mass(position: Floats) -> Floats:
    """Compute the density contrast on a mesh with as many cells as particles."""
    n = position.shape[1]
    # the mean is one particle per cell: density minus 1 is the contrast
    density = np.full((n, n**2), -1.0)
    for block in _list_slabs(n):
        first = int(np.floor(position[0, block].min()))
        # only the rows that this block of the lattice reaches
        rows = int(np.floor(position[0, block].max())) + 2 - first
        window = np.zeros(rows * n**2)
        for row, column, weight in _list_cloud_in_cell(position[:, block], n):
            index = (row - first) * n**2 + column
            window += np.bincount(index.ravel(), weight.ravel(), minlength=len(window))
        for i, layer in enumerate(window.reshape(rows, n**2), start=first):
            density[i % n] += layer
    return density.astype(position.dtype).reshape(n, n, n)


def _list_slabs(n: int) -> list[slice]:
    """List slabs of the particle lattice: thin enough for small temporaries, thick enough to revisit few mesh rows."""
    return [slice(begin, begin + SLABS_PER_BLOCK) for begin in range(0, n, SLABS_PER_BLOCK)]


def _list_cloud_in_cell(position: Floats, n: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], Floats]]:
    """Yield the eight mesh points around each particle by corner: x index (not wrapped), flat yz index, weight."""
    floor = np.floor(position)
    # x stays unwrapped: `_assign_mass` adds a slab to a window of consecutive rows
    upper = position - floor
    weights = (1 - upper, upper)
    low = floor.astype(np.int32)
    wrapped = (low[1:] % n, (low[1:] + 1) % n)
    for j, k in product((0, 1), repeat=2):
        column = wrapped[j][0] * np.int32(n) + wrapped[k][1]
        weight = weights[j][1] * weights[k][2]
        for i in (0, 1):
            yield low[0] + np.int32(i), column, weights[i][0] * weight


def _rate(a: Floats | float, omega_m: float) -> Any:
    """Return Q(a) = a^3 H(a) / H_0: the particle-mesh velocity is Q dx/da."""
    return a**1.5 * np.sqrt(omega_m + (1 - omega_m) * a**3)


def _drift(begin: float, end: float, center: float, omega_m: float) -> float:
    a = np.linspace(begin, end, 129)
    return float(np.trapezoid((a / center) ** COLA_EXPONENT / _rate(a, omega_m), a))


def _kick(begin: float, end: float, center: float, omega_m: float) -> float:
    slope = COLA_EXPONENT * center ** (COLA_EXPONENT - 1) * _rate(center, omega_m)
    return float((end**COLA_EXPONENT - begin**COLA_EXPONENT) / slope)


def _suppression(omega: float) -> float:
    vacuum = 1 - omega
    return float(2.5 * omega / (omega ** (4 / 7) - vacuum + (1 + omega / 2) * (1 + vacuum / 70)))


@dataclass(frozen=True)
class _Grid:
    """Wave vectors of an n^3 mesh, in units of 2 pi / box, and the unperturbed particles at cell centres."""

    k: Floats  # (3, n, n, n // 2 + 1), zero at the Nyquist frequency, where a real field has no gradient
    inverse_k2: Floats  # (n, n, n // 2 + 1), zero for the mean
    sharpened_inverse_k2: Floats  # inverse_k2 over the square of the window of cloud-in-cell
    distinct_k: Floats  # the lengths |k| that occur, ascending
    which: NDArray[np.int32]  # (n, n, n // 2 + 1), position of each mode's |k| in distinct_k
    positions: Floats  # (3, n, n, n)


@lru_cache(maxsize=2)
def _grid(n: int) -> _Grid:
    full = np.rint(np.fft.fftfreq(n) * n).astype(np.int32)
    half = np.arange(n // 2 + 1, dtype=np.int32)
    k2 = full[:, None, None] ** 2 + full[None, :, None] ** 2 + half[None, None, :] ** 2
    # few distinct lengths occur, so the power spectrum is computed once for each of them
    distinct, which = np.unique(k2, return_inverse=True)
    odd_full, odd_half = (np.where(2 * abs(axis) == n, 0, axis).astype(np.float32) for axis in (full, half))
    k = np.stack(np.meshgrid(odd_full, odd_full, odd_half, indexing="ij"))
    inverse = np.divide(1, k2, out=np.zeros(k2.shape, dtype=np.float32), where=k2 > 0)
    along_full, along_half = (np.sinc(axis / n) ** 2 for axis in (full, half))  # cloud-in-cell is a box, twice
    window = along_full[:, None, None] * along_full[None, :, None] * along_half
    sharpened = (inverse / window**2).astype(np.float32)
    positions = np.stack(np.meshgrid(*(np.arange(n, dtype=np.float32) + np.float32(0.5),) * 3, indexing="ij"))
    return _Grid(k, inverse, sharpened, np.sqrt(distinct), which.astype(np.int32).reshape(k2.shape), positions)
