"""The power of CosmoFlow's counts over linear theory, by redshift, at all sizes: a particle counted once, and as eight points.

    python benchmarks/voxel_power.py

P(k): counts over their mean - 1, divided by the voxel's window, no shot noise subtracted, shells of |k| rounded to multiples of
2 pi / box. Linear theory: the modes that the universe began with, times the growth, so few universes suffice. Right is about 1 at
the largest scales. `full` has 512^3 particles; here its voxels of 1 Mpc/h fill a smaller box.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import fft

from mlhpc.workloads.cosmoflow import cosmology
from mlhpc.workloads.cosmoflow.config import REDSHIFTS
from mlhpc.workloads.cosmoflow.generate import SIZES

FIDUCIAL = cosmology.Cosmology(*cosmology.FIDUCIAL.tolist())
BINS = 5
SIMULATIONS = {name: SIZES[name].simulation for name in ("smoke", "mini", "small")}
SIMULATIONS["full"] = replace(SIZES["full"].simulation, particles=64, mesh=64, box_mpc_h=64.0)
Floats = Any


def make_counts(simulation: cosmology.Simulation, number: int) -> tuple[Floats, Floats]:
    """The counts of a fiducial universe, and the linear modes of today's contrast that it began with."""
    random, n = np.random.default_rng([72, number]), simulation.particles
    noise = random.standard_normal((n,) * 3).astype(simulation.precision)
    modes = cosmology.compute_linear_modes(noise, FIDUCIAL, simulation.box_mpc_h)
    first, second = cosmology.compute_displacements(modes.copy())
    return cosmology._evolve_cola(first, second, FIDUCIAL, simulation), modes


def compute_ratios(counts: Floats, modes: Floats) -> Floats:
    """P(k) over linear theory: (redshifts, bins)."""
    n = len(counts)
    k, half = fft.fftfreq(n) * n, fft.rfftfreq(n) * n
    shell = np.rint(np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + half**2)).astype(int)
    shown = np.where((half == 0) | (half == n // 2), 1, 2)  # a mode with half > 0 stands for two
    window = np.sinc(k / n)[:, None, None] * np.sinc(k / n)[:, None] * np.sinc(half / n)

    def sum_shells(power: Floats) -> Floats:
        return np.bincount(shell.ravel(), (power * shown).ravel())[1 : BINS + 1]

    contrast = counts / counts.mean(axis=(0, 1, 2)) - 1
    linear = sum_shells(np.abs(modes) ** 2)
    growth = [cosmology.compute_growth(1 / (1 + z), FIDUCIAL.omega_m) ** 2 for z in REDSHIFTS]
    measured = [sum_shells(np.abs(fft.rfftn(contrast[..., each]) / window) ** 2) for each in range(len(REDSHIFTS))]
    return np.array([power / (d2 * linear) for power, d2 in zip(measured, growth, strict=True)])


def main() -> None:
    print("| size | points of a particle | redshift | P(k) / linear, first five bins | voxels with the mean | CPU-ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size, shipped in SIMULATIONS.items():
        universes = {16: 60, 32: 16}.get(shipped.particles, 4)
        for points in (1, 8) if shipped.precision == "float64" else (1,):
            simulation = replace(shipped, points=points)
            make_counts(simulation, 0)
            begin = time.process_time()
            made = [make_counts(simulation, number) for number in range(universes)]
            spent = 1e3 * (time.process_time() - begin) / universes
            ratios = np.mean([compute_ratios(*each) for each in made], axis=0)
            for channel, z in enumerate(REDSHIFTS):
                alike = np.mean([(each[..., channel] == each[..., channel].mean()).mean() for each, _ in made])
                text = " ".join(f"{value:.2f}" for value in ratios[channel])
                print(f"| {size} | {points} | {z:g} | {text} | {100 * alike:.1f} % | {spent:.1f} |", flush=True)


if __name__ == "__main__":
    main()
