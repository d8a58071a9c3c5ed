"""A structure with its energy and forces, checks of its values, and the arrays of a shard of structures.

Synthetic trajectories: an adsorbate relaxes on a metal slab under ASE's effective medium theory. Writes nothing.

The potential is many-body, smooth and deterministic. Its parameters for H, C, N and O are not quantitative (Jacobsen,
Stoltze & Nørskov, doi:10.1016/0039-6028(96)00816-3). The data have the form of the task but no realistic chemistry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.workloads.open_catalyst.config import ELEMENTS
from mlhpc.workloads.open_catalyst.graph import Edges, find_neighbours
from mlhpc.workloads.open_catalyst.graph import list_triplets as triplets_of

Arrays = dict[str, NDArray[Any]]

TAGS = (0, 1, 2)  # below the surface, surface, adsorbate
PER_ATOM = {
    "position": (np.float32, (3,)),  # angstrom
    "force": (np.float32, (3,)),  # eV/angstrom
    "number": (np.uint8, ()),
    "tag": (np.uint8, ()),
    "fixed": (np.uint8, ()),
}


@dataclass(frozen=True)
class Structure:
    """Atoms in a cell that is periodic in three directions. Frames with the same ``trajectory`` belong together."""

    position: NDArray[np.float64]  # (A, 3) angstrom
    cell: NDArray[np.float64]  # (3, 3) angstrom, one vector a row
    number: NDArray[np.int64]  # (A,) atomic numbers
    tag: NDArray[np.int64]  # (A,)
    fixed: NDArray[np.bool_]  # (A,)
    force: NDArray[np.float64]  # (A, 3) eV/angstrom
    energy: float  # eV
    trajectory: int
    frame: int


@dataclass(frozen=True)
class Neighbourhood:
    """Which atoms are neighbours: within the cutoff, at most ``max_neighbours`` per atom."""

    cutoff_angstrom: float
    max_neighbours: int

    def edges(self, position: NDArray[np.float64], cell: NDArray[np.float64]) -> Edges:
        """Compute the edges. InputError if the cell is broken, atoms coincide or there is no edge."""
        edges = find_neighbours(position, cell, cutoff=self.cutoff_angstrom, most=self.max_neighbours)
        if not len(edges):
            raise InputError(f"no edge: no two of the {len(position)} atoms within {self.cutoff_angstrom:g} angstrom")
        return edges


def check(structure: Structure) -> None:
    """Check shapes, ranges and finiteness. InputError if the structure cannot be trained on."""
    atoms = len(structure.number)
    shapes = {"position": (atoms, 3), "force": (atoms, 3), "cell": (3, 3), "tag": (atoms,), "fixed": (atoms,)}
    for name, shape in shapes.items():
        actual = np.shape(getattr(structure, name))
        if actual != shape:
            raise InputError(f"{name} has the shape {actual}, expected {shape}")
    if not atoms:
        raise InputError("no atoms")
    for name in ("position", "force", "cell", "energy"):
        values = np.asarray(getattr(structure, name))
        if not np.isfinite(values).all():
            where = np.argwhere(~np.isfinite(np.atleast_1d(values)))[0]
            raise InputError(f"{name} has {np.atleast_1d(values)[tuple(where)]} at {where.tolist()}")
    for name, low, high in (("number", 1, ELEMENTS - 1), ("tag", TAGS[0], TAGS[-1])):
        values = np.asarray(getattr(structure, name))
        if values.min() < low or values.max() > high:
            raise InputError(f"{name} has values from {values.min()} to {values.max()}, expected {low} to {high}")
    if bool(structure.fixed.all()):
        raise InputError("all atoms are fixed: there is no force to learn")


def build_shard_arrays(structures: Sequence[Structure], neighbourhood: Neighbourhood, origins: Sequence[str]) -> Arrays:
    """Build the arrays of a shard. ``origins`` names each structure in error messages."""
    edges, triplets = [], []
    for structure, origin in zip(structures, origins, strict=True):
        try:
            check(structure)
            # rounded as the loader will read them: the counts of edges and triplets must be those of training
            stored = structure.position.astype(np.float32).astype(np.float64)
            graph = neighbourhood.edges(stored, structure.cell.astype(np.float32).astype(np.float64))
        except ValueError as error:
            raise InputError(f"{origin}: {error}") from None
        edges.append(len(graph))
        triplets.append(len(triplets_of(graph, len(structure.number))[0]))
    lengths = [len(structure.number) for structure in structures]
    arrays: Arrays = {"atom.offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}
    for name, (dtype, _) in PER_ATOM.items():
        arrays[f"atom.{name}"] = np.concatenate([getattr(each, name) for each in structures]).astype(dtype)
    return arrays | {
        "cell": np.stack([each.cell for each in structures]).astype(np.float32),
        "energy": np.array([each.energy for each in structures], dtype=np.float64),
        "trajectory": np.array([each.trajectory for each in structures], dtype=np.int64),
        "frame": np.array([each.frame for each in structures], dtype=np.int32),
        "edges": np.array(edges, dtype=np.int32),
        "triplets": np.array(triplets, dtype=np.int64),
    }


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
