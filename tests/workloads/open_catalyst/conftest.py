"""Structures to build graphs from."""

import numpy as np

from mlhpc.workloads.open_catalyst.structures import Structure


def random_structure(seed: int, atoms: int = 7, side: float = 5.0) -> Structure:
    """Atoms at least 1 angstrom apart (images included) in a skewed cell, with forces that mean nothing."""
    rng = np.random.default_rng(seed)
    cell = side * (np.eye(3) + 0.25 * rng.uniform(-1, 1, (3, 3)))
    position: list[np.ndarray] = []
    while len(position) < atoms:
        candidate = rng.random(3)
        apart = [candidate - other for other in position]
        if all(np.linalg.norm((each - np.rint(each)) @ cell) > 1.0 for each in apart):
            position.append(candidate)
    return Structure(
        position=np.array(position) @ cell, cell=cell, number=rng.choice([1, 6, 8, 29, 78], atoms),
        tag=rng.integers(0, 3, atoms), fixed=np.arange(atoms) < 2, force=rng.normal(size=(atoms, 3)),
        energy=float(rng.normal()), trajectory=seed, frame=0,
    )  # fmt: skip
