"""Reads the operating system, container, Python environment and limits of this process."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from mlhpc.suite.machine.facts import UNKNOWN, Limits, Software
from mlhpc.suite.machine.probes.allowance import read_usable_resources
from mlhpc.suite.machine.probes.sysfs import convert_to_gib, read_text
from mlhpc.suite.plugins import read_name_and_version

# Container runtimes, each with the environment variable it sets ("" for none) and a file that exists only inside it
CONTAINERS: tuple[tuple[str, str, str], ...] = (
    ("apptainer", "APPTAINER_CONTAINER", ".singularity.d"),
    ("singularity", "SINGULARITY_CONTAINER", ".singularity.d"),
    ("podman", "", "run/.containerenv"),
    ("docker", "", ".dockerenv"),
    ("pyxis/enroot", "ENROOT_RUNTIME_PATH", "etc/enroot"),
    ("shifter", "SHIFTER_RUNTIME", "var/hostsfs"),
)


def read_software(root: Path, environ: Mapping[str, str]) -> Software:
    """Read names and versions of software, and the loaded environment modules."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', read_text(root / "etc/os-release"), re.M))
    installed = {name: version for name, version in map(read_name_and_version, distributions()) if name}
    return Software(
        operating_system=release.get("PRETTY_NAME") or UNKNOWN,
        kernel=read_text(root / "proc/sys/kernel/osrelease") or platform.release() or UNKNOWN,
        libc=" ".join(platform.libc_ver()).strip() or UNKNOWN,
        container=_find_container(root, environ),
        clock_source=read_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource") or UNKNOWN,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=dict(sorted(installed.items(), key=lambda item: item[0].lower())),
        mpi=_read_mpi(),
        loader=_find_loader(root),
        preloaded=" ".join(read_text(root / "etc/ld.so.preload").split()),
        time_zone=_read_time_zone(root, environ),
        locale=next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environ.get(name))), "C"),
        modules=tuple(name for name in environ.get("LOADEDMODULES", "").split(":") if name),
    )


def read_limits(root: Path) -> Limits:
    """Read the limits of the control groups and of this process."""
    allowance = read_usable_resources(root)
    return Limits(
        memory_gib=convert_to_gib(allowance.memory_limit, 1),
        cpu_quota=allowance.cpu_quota,
        cpus_allowed=len(allowance.cpus),
        open_files=allowance.open_files,
    )


def _find_loader(root: Path) -> str:
    """Return the file name of the dynamic loader: glibc's, or musl's, which names the architecture."""
    places = ("lib64/ld-linux*.so.*", "lib/ld-linux*.so.*", "lib/ld-musl-*.so.*")
    return next((path.name for place in places for path in sorted(root.glob(place))), UNKNOWN)


def _read_time_zone(root: Path, environ: Mapping[str, str]) -> str:
    """Return the time zone: TZ, else the target of /etc/localtime, else the name in /etc/timezone."""
    if zone := environ.get("TZ"):
        return zone
    link = root / "etc/localtime"
    if link.is_symlink():
        return str(link.readlink()).rpartition("zoneinfo/")[2]
    return read_text(root / "etc/timezone") or UNKNOWN


def _find_container(root: Path, environ: Mapping[str, str]) -> str:
    for name, variable, marker in CONTAINERS:
        if (variable and variable in environ) or (root / marker).exists():
            return name
    return "none found"


def _read_mpi() -> str:
    """Return the MPI library if this process has loaded one. To load it here could start MPI or fail."""
    module = sys.modules.get("mpi4py.MPI")
    return str(module.Get_library_version()).strip("\0 \n").splitlines()[0].strip() if module else UNKNOWN
