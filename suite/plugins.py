"""What installed packages add to the suite: commands, workloads and figures, found by entry point.

One broken package must not break everything else: it is left out with one line, and is an error only when it is asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from suite.files import one_line, print_line

COMMANDS = "mlhpc.commands"
WORKLOADS = "mlhpc.workloads"
FIGURES = "mlhpc.figures"
SCORES = "mlhpc.scores"  # functions that find the official score of a published result
CARDS = "MLHPC_CARDS"  # environment variable: card files of card-only benchmarks, separated as in PATH
OURS = "mlhpc"  # the package whose entries win over others of the same name


@dataclass(frozen=True)
class Plugin:
    """An entry point ``name = module:attr``, and the installed package that it is of.

    importlib.metadata knows the same, but to import it and to parse a package's name by it takes as long as a small command.
    """

    name: str
    value: str
    package: str

    @property
    def module(self) -> str:
        """The name of the module."""
        return self.value.partition(":")[0].strip()

    @property
    def attr(self) -> str:
        """The name in the module; empty if the module itself is meant."""
        return self.value.partition(":")[2].partition("[")[0].strip()

    def load(self) -> Any:
        """Import the module and get what the entry point names. Whatever a stranger's module raises is raised."""
        loaded: Any = import_module(self.module)
        for name in filter(None, self.attr.split(".")):
            loaded = getattr(loaded, name)
        return loaded


@cache
def find_plugins(group: str) -> dict[str, Plugin]:
    """Find the entry points of a group by name, ours first, then by name. Of two with one name the first is taken."""
    points: dict[str, Plugin] = {}
    found = [point for of, point in _installed() if of == group]
    for point in sorted(found, key=lambda point: (package_of(point) != OURS, point.name)):
        first = points.setdefault(point.name, point)
        if first.value != point.value:
            kind = group.removeprefix("mlhpc.").removesuffix("s")
            leave_out(kind, point.name, package_of(point), f"its name is taken by {first.value} of {package_of(first)}")
    return points


@cache
def _installed() -> tuple[tuple[str, Plugin], ...]:
    """The group and the entry point of all that installed packages add, as pip installs them: folders on the import path.

    Of a package that is there twice the first counts.
    """
    packages: dict[str, list[tuple[str, Plugin]]] = {}
    for folder in dict.fromkeys(path or "." for path in sys.path):
        for info in _infos(folder):
            text = _read(f"{info}/entry_points.txt")
            if "mlhpc." in text:
                package = _name(info)
                points = [(of, Plugin(name, value, package)) for of, name, value in _entries(text)]
                packages.setdefault(package.lower().replace("_", "-"), points)
    return tuple(point for points in packages.values() for point in points)


def _infos(folder: str) -> list[str]:
    """The folders in which pip, or a build, keeps what is known of a package."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info")))
    except OSError:  # no such folder, or an archive
        return []


def _name(info: str) -> str:
    """The name of the package, as its metadata have it."""
    for line in (_read(f"{info}/METADATA") or _read(f"{info}/PKG-INFO")).splitlines():
        if line.startswith("Name:"):
            return line.removeprefix("Name:").strip()
    return Path(info).stem.partition("-")[0]


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  every command opens a hundred of them
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Group, name and value of each line of an entry_points.txt."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield group, name.strip(), value.strip()


def package_of(point: Plugin) -> str:
    """The name of the installed package that an entry point comes from."""
    return point.package


def reason(error: BaseException) -> str:
    """Why a plug-in cannot be used, as one line with the kind of error where its text alone says too little."""
    text = one_line(error)
    return text if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {text}"


@cache
def leave_out(kind: str, name: str, package: str, why: str) -> None:
    """Say once per process, on stderr, that a plug-in is left out."""
    print_line(f"mlhpc: {kind} {name!r} of package {package} is left out: {why}", error=True)
