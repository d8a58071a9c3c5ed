"""Tests MPI: loads the library, starts two ranks. Says what to do if launcher and library are of different MPIs.

Package lists prove nothing. mpi4py takes the first MPI library that it finds: the site's or the ``mpich`` wheel's. A
launcher of another MPI starts ranks that do not see each other.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Family = Literal["mpich", "openmpi"]
LOAD_PROGRAM = """
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    paths = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
print("LOADS", " ".join(MPI.Get_library_version().splitlines()[0].split()), "FROM", *paths[:1], flush=True)
"""
# Run by two processes: one line from one world of two, or two lines from two worlds of one
WORLD_PROGRAM = """
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() == 0:
    print("RANKS", MPI.COMM_WORLD.Get_size(), " ".join(MPI.Get_library_version().splitlines()[0].split()), flush=True)
"""
# What a library or launcher calls itself. The members of a family share one binary interface
FAMILIES: tuple[tuple[Family, str], ...] = (
    ("openmpi", r"open\s?mpi|openrte|prterun|prrte"),
    ("mpich", r"mpich|hydra|mvapich|intel\(r\) mpi|cray"),
)
# The plug-ins of srun that speak the process interface of each family, the best first.
PLUGINS: Mapping[Family, tuple[str, ...]] = {"mpich": ("pmi2", "cray_shasta", "pmix"), "openmpi": ("pmix",)}


@dataclass(frozen=True)
class SiteMpi:
    """The MPI of a cluster. ``mpicc`` is its compiler wrapper, ``loaded`` its loaded MPI modules.

    ``modules`` is True if it has environment modules at all.
    """

    mpicc: str | None
    loaded: tuple[str, ...]
    modules: bool


def find_site(environ: Mapping[str, str]) -> SiteMpi:
    """Look for the site's MPI: mpicc on PATH but not in this Python's own folder, and environment modules."""
    # The wheel's mpicc in this Python's folder is not the site's.
    own = str(Path(sys.executable).parent)
    path = ":".join(folder for folder in environ.get("PATH", "").split(":") if folder and folder != own)
    names = [name for name in environ.get("LOADEDMODULES", "").split(":") if re.search(r"mpi|mpt", name, re.I)]
    return SiteMpi(shutil.which("mpicc", path=path), tuple(names), bool(environ.get("MODULEPATH")))


def parse_family(text: str) -> Family | None:
    """Return the family of an MPI from its version text. None if it is unknown."""
    return next((name for name, pattern in FAMILIES if re.search(pattern, text, re.I)), None)


def parse_loaded_library(output: str) -> tuple[str, str] | None:
    """Parse version and path of the library that `LOAD_PROGRAM` loaded. None if it did not."""
    match = re.search(r"^LOADS (.*?) FROM ?(.*)$", output, re.M)
    return (match.group(1), match.group(2)) if match else None


def parse_worlds(output: str) -> list[tuple[int, str]]:
    """Parse size and library of each world that `WORLD_PROGRAM` printed. Two processes may print into one line."""
    return [(int(ranks), text) for ranks, text in re.findall(r"RANKS (\d+) ([^\n]+?)\s*(?=RANKS|\n|$)", output)]


def explain_fix(site: SiteMpi, python: str = sys.executable) -> str:
    """Return what to do if no MPI loads, or if launcher and library are of different MPIs."""
    if site.mpicc:
        build = f"MPICC={site.mpicc} {python} -m pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        return f"{python} -m pip uninstall -y mpich; {build}"
    if site.modules and not site.loaded:
        return "load the site's MPI (module avail mpi; module load NAME), then run mlhpc doctor again"
    if site.loaded:
        return f"module {site.loaded[0]} has no mpicc on PATH: load its development module, or ask the site's support"
    return f"{python} -m pip install --force-reinstall mpich mpi4py"


def list_srun_plugins(library: str, types: Sequence[str]) -> list[str]:
    """List the plug-ins of ``srun --mpi`` that connect ranks of this library, best first."""
    known = parse_family(library)
    if known is None:
        return [name for name in types if name.startswith(("pmi", "cray"))]
    return [name for name in PLUGINS[known] if any(each == name or each.startswith(f"{name}_v") for each in types)]
