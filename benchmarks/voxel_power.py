"""The power of CosmoFlow's counts over linear theory, by redshift: as shipped, and with eight particles in a voxel.

    python benchmarks/voxel_power.py

"interpolated": the simulation is the shipped one; before particles are counted its displacements are interpolated (by Fourier
modes) to a lattice of twice as many particles along each axis. P(k): counts over their mean - 1, divided by the voxel's window, no
shot noise subtracted, shells of |k| rounded to multiples of 2 pi / box. Right is about 1 at the largest scales.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
from scipy import fft

from mlhpc.workloads.cosmoflow import cosmology
from mlhpc.workloads.cosmoflow.config import REDSHIFTS
from mlhpc.workloads.cosmoflow.generate import SIZES

FIDUCIAL = cosmology.Cosmology(*cosmology.FIDUCIAL.tolist())
BINS = 5
Floats = Any


def interpolate(field: Floats, fine: int) -> Floats:
    """A field (3, n, n, n) on cell centres, on the centres of ``fine``^3 cells."""
    n = field.shape[1]
    modes, big = fft.rfftn(field, axes=(1, 2, 3)), np.zeros((3, fine, fine, fine // 2 + 1), complex)
    low = (slice(0, n // 2), slice(-n // 2 + 1, None))
    for rows in low:
        for columns in low:
            big[:, rows, columns, : n // 2] = modes[:, rows, columns, : n // 2]
    shift = 0.5 * n / fine - 0.5  # of the first centre, in coarse cells
    turn = np.exp(2j * np.pi * fft.fftfreq(fine) * fine * shift / n)
    half = np.exp(2j * np.pi * fft.rfftfreq(fine) * fine * shift / n)
    big *= turn[:, None, None] * turn[:, None] * half
    found: Floats = fft.irfftn(big, s=(fine,) * 3, axes=(1, 2, 3)) * (fine / n) ** 3
    return found


def make_counts(simulation: cosmology.Simulation, number: int, times: int) -> Floats:
    """Counts of a universe with ``times``^3 particles in a voxel."""
    random, n = np.random.default_rng([72, number]), simulation.particles
    modes = cosmology.compute_linear_modes(random.standard_normal((n,) * 3), FIDUCIAL, simulation.box_mpc_h)
    first, second = cosmology.compute_displacements(modes)
    plain, fine = cosmology.count, times * n

    def count(positions: Sequence[Floats], particles: int, mesh: int) -> Floats:
        moved = [interpolate(each - cosmology._grid(n).positions, fine) * times for each in positions]
        return plain([cosmology._grid(fine).positions + each for each in moved], fine, mesh)

    with mock.patch.object(cosmology, "count", count if times > 1 else plain):
        return cosmology._evolve_cola(first, second, FIDUCIAL, simulation)


def list_shells(n: int) -> tuple[Floats, Floats, Floats]:
    """Wave numbers in units of 2 pi / box, the number of modes that each stands for, and the voxel's window."""
    k, half = fft.fftfreq(n) * n, fft.rfftfreq(n) * n
    size = np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + half**2)
    weight = np.where((half == 0) | (half == n // 2), 1, 2) * np.ones_like(size)
    return size, weight, np.sinc(k / n)[:, None, None] * np.sinc(k / n)[:, None] * np.sinc(half / n)


def compute_ratios(counts: Floats, box: float) -> Floats:
    """P(k) over linear theory: (redshifts, bins)."""
    n = len(counts)
    size, weight, window = list_shells(n)
    shells = [np.rint(size) == number for number in range(1, BINS + 1)]
    rows = []
    for channel, z in enumerate(REDSHIFTS):
        contrast = counts[..., channel] / counts[..., channel].mean() - 1
        power = np.abs(fft.rfftn(contrast) / n**3 / window) ** 2 * box**3
        growth = cosmology.compute_growth(1 / (1 + z), FIDUCIAL.omega_m) ** 2
        theory = [growth * cosmology.compute_power(2 * np.pi * size[shell] / box, FIDUCIAL) for shell in shells]
        pairs = zip(shells, theory, strict=True)
        rows.append([np.sum(power[shell] * weight[shell]) / np.sum(due * weight[shell]) for shell, due in pairs])
    return np.array(rows)


def main() -> None:
    print("| size | particles in a voxel | redshift | P(k) / linear, first five bins | voxels with the mean | CPU-ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size, universes in (("smoke", 60), ("mini", 16)):
        simulation = SIZES[size].simulation
        for times, name in ((1, "1, shipped"), (2, "8, interpolated")):
            make_counts(simulation, 0, times)
            begin = time.process_time()
            made = [make_counts(simulation, number, times) for number in range(universes)]
            spent = 1e3 * (time.process_time() - begin) / universes
            ratios = np.mean([compute_ratios(each, simulation.box_mpc_h) for each in made], axis=0)
            for channel, z in enumerate(REDSHIFTS):
                alike = np.mean([(each[..., channel] == each[..., channel].mean()).mean() for each in made])
                text = " ".join(f"{value:.2f}" for value in ratios[channel])
                print(f"| {size} | {name} | {z:g} | {text} | {100 * alike:.1f} % | {spent:.1f} |", flush=True)


if __name__ == "__main__":
    main()
