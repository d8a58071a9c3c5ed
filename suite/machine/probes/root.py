"""Finds the root of the file system that the probes read: ``/``, or the folder of a simulated machine.

`VARIABLE` is an aid for tests: commands can meet a machine that is not there. Facts, ceilings and system descriptions
made with it say that the machine is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mlhpc.suite.errors import InputError

VARIABLE: Final = "MLHPC_MACHINE_ROOT"
REAL_ROOT: Final = Path("/")


def find_machine_root(environ: Mapping[str, str]) -> Path:
    """Return the root of the machine to read. InputError if the variable names no folder."""
    root = Path(environ.get(VARIABLE) or REAL_ROOT)
    if not root.is_dir():
        raise InputError(f"{VARIABLE}={root}: expected the folder of a simulated machine's /proc and /sys")
    return root


def is_simulated(root: Path) -> bool:
    """Return True if the probes read another root than the machine's own."""
    return root.resolve() != REAL_ROOT
