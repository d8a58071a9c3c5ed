"""Synthetic trajectories: an adsorbate relaxes on a metal slab under ASE's effective medium theory. Writes nothing.

The potential is many-body, smooth and deterministic. Its parameters for H, C, N and O are not quantitative (Jacobsen,
Stoltze & Nørskov, doi:10.1016/0039-6028(96)00816-3). The data have the form of the task but no realistic chemistry.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.random import Generator, Philox

from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.workloads.open_catalyst.structures import Structure

ALL_METALS = ("Al", "Cu", "Ag", "Au", "Ni", "Pd", "Pt")
ALL_ADSORBATES = ("H", "C", "N", "O", "CO", "OH", "NO", "H2O")
VACUUM_ANGSTROM = 8.0
HEIGHT_ANGSTROM = (1.3, 2.2)  # of the lowest atom of the adsorbate above the highest of the slab
RATTLE_ANGSTROM = 0.06
LARGEST_FORCE = 6.0  # eV/angstrom: larger forces mean overlapping atoms; the frame is rejected
MAX_ATTEMPTS = 200


@dataclass(frozen=True)
class Surfaces:
    """The distribution of trajectories: slabs of (x, y, layers) atoms, half of them alloys of two metals."""

    metals: tuple[str, ...]
    adsorbates: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]
    fixed_layers: int
    steps: int = 12
    frames: int = 4


def make_trajectory(surfaces: Surfaces, seed: int, number: int) -> list[Structure]:
    """Generate ``frames`` frames of one relaxation, a function of (seed, number)."""
    # counter-based: the numbers depend on seed and number alone, not on what was drawn before
    random = Generator(Philox(key=[seed, number]))
    for _ in range(MAX_ATTEMPTS):
        relaxed = _relax(_make_system(surfaces, random), surfaces, number)
        if relaxed is not None:
            return relaxed
    raise AssertionError(f"seed {seed}, trajectory {number}: no acceptable slab in {MAX_ATTEMPTS} attempts")


def verify_ase() -> None:
    """Check that ASE is installed. InputError says how to install it."""
    try:
        import ase  # noqa: F401
    except ImportError:
        raise InputError(f"open_catalyst: data cannot be generated: {explain_not_installed('ase')}") from None


def _ase(name: str) -> Any:
    """Import a module of ASE on demand: the package is optional and untyped."""
    return import_module(f"ase.{name}")


def _make_system(surfaces: Surfaces, random: Generator) -> Any:
    build, constraints, data = (_ase(name) for name in ("build", "constraints", "data"))
    face = (build.fcc111, build.fcc100)[random.integers(2)]
    host, guest = (str(metal) for metal in random.choice(surfaces.metals, 2, replace=False))
    shape = surfaces.shapes[random.integers(len(surfaces.shapes))]
    slab = face(host, size=shape, vacuum=0.0, periodic=True)
    layer = slab.get_tags().copy()  # 1 is the top
    if random.random() < 0.5:
        slab.numbers[random.random(len(slab)) < random.uniform(0.1, 0.5)] = data.chemical_symbols.index(guest)
    adsorbate = build.molecule(str(random.choice(surfaces.adsorbates)))
    # Q of a Gaussian matrix is a random orientation
    vectors = np.linalg.qr(random.normal(size=(3, 3)))[0]
    turned = (adsorbate.positions - adsorbate.positions[0]) @ vectors
    site = random.random(2) @ slab.cell[:2, :2]
    # the lowest atom of the adsorbate gets the drawn height above the slab
    turned += [*site, slab.positions[:, 2].max() + random.uniform(*HEIGHT_ANGSTROM) - turned[:, 2].min()]
    adsorbate.positions = turned
    lowest = layer > shape[2] - surfaces.fixed_layers
    slab.positions[~lowest] += random.normal(scale=RATTLE_ANGSTROM, size=((~lowest).sum(), 3))
    tags = np.where(layer == 1, 1, 0)
    system = slab + adsorbate
    system.set_tags(np.concatenate([tags, np.full(len(adsorbate), 2)]))
    build.add_vacuum(system, 2 * VACUUM_ANGSTROM)
    system.pbc = True
    system.set_constraint(constraints.FixAtoms(mask=np.concatenate([lowest, np.zeros(len(adsorbate), dtype=bool)])))
    return system


def _relax(system: Any, surfaces: Surfaces, number: int) -> list[Structure] | None:
    """Relax with BFGS and pick frames spread over it. None if it ends too early or forces are too large."""
    system.calc = _ase("calculators.emt").EMT()
    fixed = np.zeros(len(system), dtype=bool)
    fixed[system.constraints[0].index] = True
    states = []
    for _ in _ase("optimize").BFGS(system, logfile=None).irun(fmax=0.01, steps=surfaces.steps):
        force = system.get_forces(apply_constraint=False)
        if np.abs(force).max() > LARGEST_FORCE:
            return None
        states.append((system.positions.copy(), force, float(system.get_potential_energy())))
    if len(states) < surfaces.frames:
        return None
    return [
        Structure(
            position=states[step][0],
            cell=np.asarray(system.cell),
            number=system.numbers.astype(np.int64),
            tag=system.get_tags().astype(np.int64),
            fixed=fixed,
            force=states[step][1],
            energy=states[step][2],
            trajectory=number,
            frame=int(step),
        )
        for step in np.linspace(0, len(states) - 1, surfaces.frames).round().astype(int)
    ]
