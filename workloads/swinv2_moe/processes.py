"""Simulates processes on a torus and a camera that observes them. A snapshot is a function of (seed, index).

Two of the ten classes are random fields. They have the histogram and the power spectrum of a snapshot of a nonlinear
process. So neither statistic separates them from that process. All lengths are pixels. Every field is periodic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from workloads.swinv2_moe.config import CLASSES

Field = NDArray[np.float64]
Random = np.random.Generator

ISING_CRITICAL = 2 / np.log(1 + np.sqrt(2))  # temperature in units of the coupling, doi:10.1103/PhysRev.65.117
BLUR = (0.5, 1.0)  # standard deviation of the camera's point spread, pixels
SURROGATE_STEPS = 20
NOISE = (0.1, 0.5)  # standard deviation of its white noise, in standard deviations of the field


def make_snapshot(
    seed: int, index: int, pixels: int, classes: Sequence[str] = CLASSES
) -> tuple[NDArray[np.uint8], int]:
    """Generate the image (pixels, pixels) and the class of sample ``index``, as a position in ``classes``."""
    label = index % len(classes)
    # counter-based: the numbers depend on seed and index alone, not on what was drawn before
    random = np.random.Generator(np.random.Philox(key=[seed, index]))
    name = classes[label]
    if name in PROCESSES:
        return convert_to_image(PROCESSES[name](random, pixels), random), label
    processes = [process for process in SURROGATE_SOURCES[name] if process.__name__ in classes]
    process = processes[random.integers(len(processes))]
    return make_surrogate(convert_to_image(process(random, pixels), random), random), label


def convert_to_image(field: Field, random: Random) -> NDArray[np.uint8]:
    """Observe a field: blur, noise of random strength, random polarity, then ranks: all images share a histogram."""
    n = len(field)
    blurred = _filter(field, np.exp(-0.5 * _wave_number(n) ** 2 * random.uniform(*BLUR) ** 2))
    # all spins may be equal: then there is no deviation
    blurred = (blurred - blurred.mean()) / max(float(blurred.std()), 1e-12)
    noisy = random.choice([-1.0, 1.0]) * blurred + random.uniform(*NOISE) * random.standard_normal((n, n))
    return (_ranks(noisy) * 256 // (n * n)).astype(np.uint8)


def make_surrogate(image: NDArray[np.uint8], random: Random) -> NDArray[np.uint8]:
    """Make a random image with the same histogram and power spectrum (doi:10.1103/PhysRevLett.77.635).

    Amplitudes and ranks are imposed in turn. The histogram is exact, the spectrum correct to a few percent.
    """
    n = len(image)
    amplitude = np.abs(fft.rfft2(image - image.mean()))
    # a copy of the histogram: assigned by rank, it is the same in the surrogate
    levels = np.sort(image, axis=None)
    surrogate = random.permutation(levels).reshape(n, n)
    for _ in range(SURROGATE_STEPS):
        modes = fft.rfft2(surrogate - 127.5)
        surrogate = levels[_ranks(fft.irfft2(amplitude * modes / np.maximum(np.abs(modes), 1e-9), (n, n)))]
    return surrogate


def anisotropic(random: Random, n: int) -> Field:
    """Make a Gaussian random field whose correlations are 1.7 to 3 times longer along one direction than across."""
    kx, ky = _wave_vector(n)
    angle, stretch = random.uniform(0, np.pi), random.uniform(1.7, 3.0)
    along, across = kx * np.cos(angle) + ky * np.sin(angle), ky * np.cos(angle) - kx * np.sin(angle)
    k2 = along**2 * stretch + across**2 / stretch
    outer = 2 * np.pi / (n * random.uniform(0.3, 1.0))
    return _make_random_field(random, (k2 + outer**2) ** (-random.uniform(1.5, 3.5) / 2))


def ising(random: Random, n: int) -> Field:
    """Make spins near criticality: T from 0.98 to 1.06 of the critical one."""
    return swendsen_wang(random, n, ISING_CRITICAL * random.uniform(0.98, 1.06), sweeps=40)


def swendsen_wang(random: Random, n: int, temperature: float, *, sweeps: int) -> Field:
    """Make spins (0 or 1) of the Ising model after cluster updates from disorder, doi:10.1103/PhysRevLett.58.86.

    The dynamic exponent is about 0.3, so 40 sweeps equilibrate a few hundred pixels.
    """
    bond = 1 - np.exp(-2 / temperature)
    spins = random.integers(0, 2, (n, n)).astype(bool)
    site = np.arange(n * n).reshape(n, n)
    neighbours = [np.roll(site, -1, axis) for axis in (0, 1)]
    for _ in range(sweeps):
        ends = []
        for axis, neighbour in enumerate(neighbours):
            # equal neighbours are bonded at random; each cluster of bonds then gets a new random spin
            bonded = (spins == np.roll(spins, -1, axis)) & (random.random((n, n)) < bond)
            ends.append((site[bonded], neighbour[bonded]))
        a, b = (np.concatenate(part) for part in zip(*ends, strict=True))
        graph = coo_matrix((np.ones(len(a), dtype=np.int8), (a, b)), shape=(n * n, n * n))
        clusters, cluster = connected_components(graph, directed=False)
        spins = random.integers(0, 2, clusters).astype(bool)[cluster].reshape(n, n)
    return spins.astype(np.float64)


def allen_cahn(random: Random, n: int) -> Field:
    """Make a quench without conservation (model A): domains may come and go.

    It solves du/dt = u - u^3 + kappa lap u.
    """
    kappa, duration = random.uniform(0.5, 1.0), random.uniform(6, 20)
    return _quench(random, n, mean=0.0, duration=duration, step=0.2, rate=np.ones_like(_wave_number(n)), kappa=kappa)


def spinodal(random: Random, n: int) -> Field:
    """Solve Cahn-Hilliard with equal parts: the same domains under conservation (model B).

    It is du/dt = lap(u^3 - u - kappa lap u).
    """
    return _cahn_hilliard(random, n, random.uniform(-0.1, 0.1))


def droplets(random: Random, n: int) -> Field:
    """Solve Cahn-Hilliard with unequal parts."""
    return _cahn_hilliard(random, n, random.uniform(0.3, 0.42))


def spots(random: Random, n: int) -> Field:
    """Solve Gray-Scott where spots divide (Pearson's lambda, doi:10.1126/science.261.5118.189)."""
    return _gray_scott(
        random,
        n,
        feed=random.uniform(0.030, 0.036),
        kill=random.uniform(0.0635, 0.0650),
        scale=random.uniform(0.2, 0.8),
    )


def stripes(random: Random, n: int) -> Field:
    """Solve Gray-Scott where stripes fold into a labyrinth (Pearson's kappa and theta)."""
    return _gray_scott(
        random,
        n,
        feed=random.uniform(0.036, 0.044),
        kill=random.uniform(0.0600, 0.0615),
        scale=random.uniform(0.3, 1.4),
    )


def turbulence(random: Random, n: int) -> Field:
    """Make the vorticity of decaying two-dimensional turbulence: pseudo-spectral, 2/3 rule, hyperviscosity."""
    kx, ky = _wave_vector(n)
    k = _wave_number(n)
    k2 = np.where(k == 0, 1.0, k**2)
    limit = 2 * np.pi / 3
    # 2/3 rule: products of kept modes cause no alias among kept modes
    kept = (np.abs(kx) < limit) & (np.abs(ky) < limit)
    peak = 2 * np.pi / random.uniform(10, 16)
    vorticity = _make_random_field(random, k**4 * np.exp(-2 * (k / peak) ** 2))
    speed = np.hypot(*(fft.irfft2(1j * q * fft.rfft2(vorticity) / k2, (n, n)) for q in (ky, -kx)))
    # speed 1 on average: a step of 0.2 moves the flow by a fifth of a pixel
    vorticity /= np.sqrt((speed**2).mean())
    dt, steps = 0.2, random.integers(90, 160)
    damping = np.where(kept, np.exp(-dt * 0.6 * (k / limit) ** 8), 0.0)

    def advected(modes: NDArray[np.complex128]) -> NDArray[np.complex128]:
        flow = modes / k2
        u, v, along, across = fft.irfft2(1j * np.stack([ky * flow, -kx * flow, kx * modes, ky * modes]), (n, n))
        result: NDArray[np.complex128] = modes - dt * fft.rfft2(u * along + v * across)
        return result

    modes = fft.rfft2(vorticity) * kept
    for _ in range(steps):  # doi:10.1016/0021-9991(88)90177-5: third order, strong stability preserving
        second = 0.75 * modes + 0.25 * advected(advected(modes))
        modes = damping * (modes + 2 * advected(second)) / 3
    result: Field = fft.irfft2(modes, (n, n))
    return result


PROCESSES: dict[str, Callable[[Random, int], Field]] = {
    process.__name__: process
    for process in (anisotropic, ising, allen_cahn, spinodal, droplets, spots, stripes, turbulence)
}
SURROGATE_SOURCES = {  # classes of surrogates, and the processes whose snapshots they are surrogates of
    "scale_free": (ising, allen_cahn, turbulence),
    "banded": (spinodal, droplets, spots, stripes),
}


def _cahn_hilliard(random: Random, n: int, mean: float) -> Field:
    kappa, duration = random.uniform(0.2, 0.8), random.uniform(40, 200)
    return _quench(random, n, mean=mean, duration=duration, step=1.0, rate=_wave_number(n) ** 2, kappa=kappa)


def _quench(random: Random, n: int, *, mean: float, duration: float, step: float, rate: Field, kappa: float) -> Field:
    """Solve du/dt = -rate(k) (u^3 - u + kappa k^2 u) from noise, by Eyre's stable splitting
    (doi:10.1557/PROC-529-39).
    """
    k2 = _wave_number(n) ** 2
    # 2 u is added to the implicit part and taken from the explicit one, u^3 - 3 u: stable at any step
    implicit = 1 / (1 + step * rate * (2 + kappa * k2))
    u = mean + 0.3 * random.standard_normal((n, n))
    for _ in range(round(duration / step)):
        u = fft.irfft2(implicit * (fft.rfft2(u) - step * rate * fft.rfft2(u**3 - 3 * u)), (n, n))
    return u


def _gray_scott(random: Random, n: int, *, feed: float, kill: float, scale: float) -> Field:
    """Solve Gray-Scott and return its second species after 1,600 to 2,400 time units.

    It begins with patches over a third of the torus. Diffusion is implicit.

    ``scale`` multiplies Pearson's diffusivities on a mesh of one pixel: lengths go with its square root.
    """
    step = 4.0
    k2 = _wave_number(n) ** 2
    # explicit diffusion would be unstable at this step: step * D * k^2 is above 2 for the shortest waves
    implicit = np.stack([1 / (1 + step * diffusion * scale * k2) for diffusion in (0.16, 0.08)])
    patches = _filter(random.standard_normal((n, n)), np.exp(-0.5 * k2 * 2.0**2))
    # a third of a Gaussian lies above 0.43 deviations
    seeded = (patches > 0.43 * patches.std()).astype(np.float64)
    uv = np.stack([1 - 0.5 * seeded, 0.25 * seeded + 0.02 * random.random((n, n))])
    for _ in range(random.integers(400, 600)):
        u, v = uv
        reaction = u * v * v
        change = np.stack([feed * (1 - u) - reaction, reaction - (feed + kill) * v])
        uv = fft.irfft2(implicit * fft.rfft2(uv + step * change), (n, n))
    result: Field = uv[1]
    return result


def _ranks(field: Field) -> NDArray[np.int64]:
    """Compute the rank of every value from 0; equal values rank in order of position."""
    ranks = np.empty(field.size, dtype=np.int64)
    # stable: the order of equal values must not depend on the processor
    ranks[np.argsort(field, axis=None, kind="stable")] = np.arange(field.size)
    return ranks.reshape(field.shape)


def _make_random_field(random: Random, power: Field) -> Field:
    """Draw a Gaussian random field with this power spectrum (on the half plane of rfft2) and zero mean."""
    n = len(power)
    modes = fft.rfft2(random.standard_normal((n, n))) * np.sqrt(power)
    modes[0, 0] = 0
    result: Field = fft.irfft2(modes, (n, n))
    return result


def _filter(field: Field, transfer: Field) -> Field:
    result: Field = fft.irfft2(fft.rfft2(field) * transfer, field.shape)
    return result


@lru_cache(maxsize=4)
def _wave_vector(n: int) -> tuple[Field, Field]:
    k = 2 * np.pi * np.fft.fftfreq(n).astype(np.float64)
    return k[:, None], 2 * np.pi * np.arange(n // 2 + 1)[None, :] / n


@lru_cache(maxsize=4)
def _wave_number(n: int) -> Any:
    kx, ky = _wave_vector(n)
    return np.hypot(kx, ky)
