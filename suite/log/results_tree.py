"""Finding results: which folders under a path hold logs, and what their place in the MLPerf HPC tree says of them.

Names of folders are data here, never paths to follow: symbolic links are reported and not entered.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.sha256"
PRUNED = "pruned_results"
SCENARIOS = ("strong", "weak")
_LARGEST_JSON = 4 * 2**20


@dataclass(frozen=True)
class Group:
    """One folder of logs: the runs of one benchmark. Fields that the place does not tell are None."""

    folder: Path
    logs: tuple[Path, ...]
    pruned: tuple[Path, ...] = ()
    others: tuple[Path, ...] = ()
    links: tuple[Path, ...] = ()
    package: Path | None = None
    system: str | None = None
    scenario: str | None = None
    benchmark: str | None = None
    old_layout: bool = False

    @property
    def submitter(self) -> str | None:
        """The submitter, which is the name of the package's folder."""
        return self.package.absolute().name if self.package else None

    @property
    def round(self) -> str | None:
        """The round as far as a folder's name says it: ``v3.0``."""
        for part in reversed(self.folder.absolute().parts):
            match = re.fullmatch(r"(?:.*results_)?v(\d+\.\d+)", part)
            if match:
                return f"v{match[1]}"
        return None


@dataclass(frozen=True)
class Tree:
    """Everything under a path that can be judged."""

    path: Path
    groups: tuple[Group, ...]
    packages: tuple[Path, ...]
    unread: tuple[OSError, ...] = ()


@dataclass(frozen=True)
class SystemFile:
    """A systems/<name>.json as read: its fields, or why there are none."""

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def number(self, name: str) -> int | None:
        """A field that holds a number, written as text as all published ones are."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*", str(self.fields.get(name, "")))
        return int(match[1]) if match else None

    @property
    def compute_units(self) -> int | None:
        """Accelerators of the system, or its processors' nodes if it has none."""
        nodes, accelerators = self.number("number_of_nodes"), self.number("accelerators_per_node")
        return nodes * max(accelerators or 0, 1) if nodes is not None else None


def find(path: Path, *, partly: bool = False) -> Tree:
    """Everything to judge under ``path``: a log, a folder of logs, a package, a round.

    A folder that cannot be read is an OSError, or with ``partly`` one of the tree's ``unread``. ValueError for a device.
    """
    if path.is_file():
        return Tree(path, (Group(path.parent, (path,)),), ())
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: neither a file nor a folder")
    groups: list[Group] = []
    packages: list[Path] = []
    unread: list[OSError] = []
    for name, folders, _ in os.walk(path, onerror=unread.append):
        folder = Path(name)
        folders.sort()
        try:
            if "results" in folders and (folder / "systems").is_dir() and not (folder / "results").is_symlink():
                packages.append(folder)
            folders[:] = [item for item in folders if item not in (PRUNED, "benchmarks", ".git")]
            group = _group(folder, path)
        except OSError as error:
            unread.append(error)
            continue
        if group is not None:
            groups.append(group)
    if unread and not partly:
        raise unread[0]
    return Tree(path, tuple(groups), tuple(packages), tuple(unread))


def read_system(path: Path) -> SystemFile:
    """Read a system description; what is wrong with it is its ``problem``."""
    try:
        if path.is_symlink() or not path.is_file():
            return SystemFile(path, problem="there is no such file")
        if path.stat().st_size > _LARGEST_JSON:
            return SystemFile(path, problem="larger than 4 MiB")
        data = json.loads(path.read_bytes())
    except OSError as error:
        return SystemFile(path, problem=f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        return SystemFile(path, problem=f"not JSON: {str(error)[:80]}")
    if not isinstance(data, dict):
        return SystemFile(path, problem=f"expected a JSON object, found {type(data).__name__}")
    return SystemFile(path, data)


def _group(folder: Path, root: Path) -> Group | None:
    """The group that a folder is, if it holds logs or stands where a result must be."""
    place = _place(folder)
    entries = sorted(folder.iterdir()) if _may_hold_logs(folder, place) else []
    logs = [item for item in entries if _is_log(item) and not item.is_symlink()]
    expected = place is not None and place[1] is not None and folder != root
    if not logs and not expected:
        return None
    pruned = folder / PRUNED
    shelved = sorted(pruned.iterdir()) if pruned.is_dir() and not pruned.is_symlink() else []
    package, scenario, system, benchmark, old = _named(folder, place)
    return Group(
        folder,
        tuple(sorted(logs, key=_natural)),
        pruned=tuple(sorted((item for item in shelved if _is_log(item) and not item.is_symlink()), key=_natural)),
        others=tuple(item for item in entries if item not in logs and item.name != PRUNED and not item.is_symlink()),
        links=tuple(item for item in (*entries, *shelved) if item.is_symlink()),
        package=package,
        system=system,
        scenario=scenario,
        benchmark=benchmark,
        old_layout=old,
    )


_Place = tuple[Path, str | None, str, str]


def _place(folder: Path) -> _Place | None:
    """(package, scenario, system, benchmark) if the folder stands under ``<package>/results/``."""
    parts = folder.absolute().parts
    if len(parts) > 4 and parts[-4] == "results" and (len(parts) < 6 or parts[-5] != "implementations"):
        return _above(folder, 4), parts[-2], parts[-3], parts[-1]
    if len(parts) > 3 and parts[-3] == "results" and parts[-1] not in SCENARIOS:
        return _above(folder, 3), None, parts[-2], parts[-1]
    return None


def _above(folder: Path, levels: int) -> Path:
    """The folder so many levels up, as the user's path writes it where that is possible."""
    return folder.parents[levels - 1] if len(folder.parents) >= levels else folder.absolute().parents[levels - 1]


def _named(folder: Path, place: _Place | None) -> tuple[Path | None, str | None, str | None, str | None, bool]:
    if place is None:
        return None, None, None, None, False
    package, scenario, system, benchmark = place
    if not (package / "systems").is_dir() and not (package / "benchmarks").is_dir():
        return None, None, None, None, False
    return package, scenario if scenario else "strong", system, benchmark, scenario is None


def _may_hold_logs(folder: Path, place: _Place | None) -> bool:
    return place is not None or any(True for _ in folder.glob("result_*"))


def _is_log(path: Path) -> bool:
    return path.name.startswith("result_") and path.suffix == ".txt" and (path.is_symlink() or path.is_file())


def _natural(path: Path) -> tuple[int, str]:
    digits = re.search(r"(\d{1,9})", path.name)
    return int(digits[1]) if digits else -1, path.name
