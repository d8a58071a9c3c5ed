"""Reads the public simulations: one HDF5 file per universe with ``full`` counts (n, n, n, 4) and targets ``unitPar``.

The files also contain namePar, physPar and redshifts: the same information in physical units. Source:
https://portal.nersc.gov/project/m3363/ (cosmoUniverse_2019_05_4parE, 512^3 voxels of 1 Mpc/h).
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from suite.errors import InputError
from workloads.cosmoflow.config import REDSHIFTS, TARGETS


def read_universe(path: Path) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    """Read counts (n, n, n, 4) int16 and targets (4,) float32. InputError names file, dataset and what was expected."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            missing = [name for name in ("full", "unitPar") if name not in file]
            if missing:
                raise InputError(f"{path}: no dataset {missing[0]!r}; datasets: {', '.join(sorted(file)) or 'none'}")
            full, targets = file["full"], np.asarray(file["unitPar"][()], dtype=np.float32)
            side = full.shape[0] if full.shape else 0
            if full.shape != (side, side, side, len(REDSHIFTS)) or full.dtype.kind not in "iu":
                raise InputError(f"{path}: dataset 'full' is {full.shape} {full.dtype}, expected (n, n, n, 4) integers")
            counts = full[...]
    except OSError as error:
        raise InputError(f"{path}: not a readable HDF5 file: {error}") from None
    if targets.shape != (len(TARGETS),) or not np.isfinite(targets).all():
        raise InputError(f"{path}: dataset 'unitPar' is {targets.tolist()}, expected {len(TARGETS)} finite numbers")
    if counts.min() < 0 or counts.max() > np.iinfo(np.int16).max:
        raise InputError(
            f"{path}: dataset 'full' has counts from {counts.min()} to {counts.max()}, expected int16 from 0"
        )
    return counts.astype(np.int16, copy=False), targets
