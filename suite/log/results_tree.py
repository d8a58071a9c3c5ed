"""Finds packages, results and logs under a path. This is the only walker of a results tree; it reads no log.

Symbolic links are never followed: they are listed as `SkippedPath`, with the reason.

    <submitter>/systems/<system>.json
    <submitter>/results/<system>/[strong|weak/]<benchmark>/result_<i>.txt       and pruned_results/result_<i>.txt
    <submitter>/benchmarks/...                                                 code and its sample logs: never results
    <run folder>/run.json, result_<i>.txt, resumed_<i>_<k>.txt
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import ARCHIVE, COMPRESSED, DuplicateKeyError, print_line, read_json
from mlhpc.suite.log.reader import HEAD_BYTES, read_limits

MANIFEST = "manifest.sha256"
CRATE = "ro-crate-metadata.json"  # of a package, for other tools
PRUNED = "pruned_results"
POWER = "power"
SCENARIOS = ("strong", "weak")


@dataclass(frozen=True)
class SkippedPath:
    """A path that the walker did not follow, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Placement:
    """The meaning of the names of the folders above a log.

    ``scenario`` and ``benchmark`` are None if the layout has no such folder.
    """

    package: Path
    system: str
    scenario: str | None
    benchmark: str | None


@dataclass(frozen=True)
class Group:
    """One folder of logs: the runs of one benchmark. Fields that the folder names do not show are None."""

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
        """The submitter: the name of the package's folder."""
        return self.package.absolute().name if self.package else None

    @property
    def round_folder(self) -> Path | None:
        """The folder above the package, if it is named as that of a round. Logs outside a package have none."""
        place = _parse_placement(self.folder)
        package = self.package or (place.package if place and place.benchmark else None)
        folder = package.absolute().parent if package else None
        return folder if folder is not None and parse_round(folder) else None

    @property
    def round(self) -> str | None:
        """The round of that folder, as ``v3.0``."""
        return parse_round(self.round_folder) if self.round_folder else None

    @property
    def resumed(self) -> tuple[Path, ...]:
        """Logs of continued runs, which are never scored."""
        return tuple(path for path in self.others if re.fullmatch(RESUMED, path.name))


@dataclass(frozen=True)
class Tree:
    """The groups and packages under a path, what could not be read, and what was not followed.

    ``loadgen`` has the logs of LoadGen, if there are no others: it writes those of MLPerf Inference.
    """

    path: Path
    groups: tuple[Group, ...]
    packages: tuple[Path, ...]
    unread: tuple[OSError, ...] = ()
    skipped: tuple[SkippedPath, ...] = ()
    loadgen: tuple[Path, ...] = ()

    @property
    def no_rules(self) -> str | None:
        """Say that this suite judges nothing of what lies under the path. None if there may be something."""
        if not self.loadgen:
            return None
        if self.loadgen[0] == self.path:
            return "of MLPerf Inference (a log of LoadGen): this suite has no rules for it"
        first = self.loadgen[0].relative_to(self.path)
        return f"a round of MLPerf Inference (LoadGen logs: {first}): this suite has no rules for it"


@dataclass(frozen=True)
class SystemFile:
    """The fields of a systems/<name>.json, or the ``problem`` why there are none."""

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def number(self, name: str) -> int | None:
        """Return the integer in a field, None if there is none. Published files write numbers as text."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*", str(self.fields.get(name, "")))
        return int(match[1]) if match else None

    @property
    def compute_units(self) -> int | None:
        """Accelerators of the system, or its nodes if it has none."""
        nodes, accelerators = self.number("number_of_nodes"), self.number("accelerators_per_node")
        return nodes * max(accelerators or 0, 1) if nodes is not None else None


@dataclass(frozen=True)
class LogFile:
    """One log and the meaning of the folders above it. ``label`` is a short path, the same wherever the tree lies.

    ``kind``: run is a folder with run.json, package an MLPerf tree, loose anything else. ``mode`` is None outside
    packages, ``round`` unless a folder above is named after one.
    """

    path: Path
    label: str
    kind: Literal["run", "package", "loose"]
    round: str | None
    submitter: str | None
    system: str
    mode: Literal["strong", "weak"] | None
    benchmark: str | None
    pruned: bool
    resumed: bool
    trial: int | None
    package: Path
    description: Path | None = None


RESULT = r"result_.*\.txt"
RESULT_OF_RUN = r"result_\d+\.txt"  # in a run folder, whose trials have numbers: another name is of a copy
NO_LOGS = {
    ".json",
    ".jsonl",
    ".yaml",
    ".yml",
    ".html",
    ".csv",
    ".py",
    ".zip",
    ".gz",
    ".tgz",
    ".bz2",
    ".xz",
    ".tar",
}  # suffixes of files that hold none
RESUMED = r"resumed_.*\.txt"
_LOADGEN = r"mlperf_log_(?:detail|summary)\.txt"
_TRIAL = r"(?:result|resumed)_(\d+)"
_ROUND = r"(?:.*results[_\-])?v(\d+\.\d+)"


def find_results(path: Path, *, partly: bool = False) -> Tree:
    """Find logs, folders of logs, packages and rounds under ``path``.

    OSError for a folder that cannot be read; with ``partly`` it is listed in ``unread`` instead. InputError for a
    device.
    """
    if path.is_file():
        if path.suffix in NO_LOGS:
            raise InputError(
                f"{path}: not a log (result_*.txt); expected logs, run folders, results folders or packages"
            )
        if _is_of_loadgen(path):
            return Tree(path, (), (), loadgen=(path,))
        return Tree(path, (Group(path.parent, (path,)),), ())
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: neither a file nor a folder")
    groups: list[Group] = []
    packages: list[Path] = []
    unread: list[OSError] = []
    skipped: list[SkippedPath] = []
    loadgen: list[Path] = []
    for folder, folders, files in list_tree(path, unread.append):
        loadgen += [folder / name for name in files if re.fullmatch(_LOADGEN, name)]
        try:
            if "results" in folders and (folder / "systems").is_dir() and not (folder / "results").is_symlink():
                packages.append(folder)
            left_out = dict(_list_skipped_folders(folder, folders))
            folders[:] = [item for item in folders if item not in left_out]
            group = _make_group(folder, path)
        except OSError as error:
            unread.append(error)
            continue
        skipped += [SkippedPath(folder / item, reason) for item, reason in left_out.items() if reason]
        if group is not None:
            groups.append(group)
            skipped += [SkippedPath(link, LINK) for link in group.links]
            copies = [path for path in group.others if re.fullmatch(RESULT, path.name) and path.is_file()]
            skipped += [SkippedPath(path, COPY) for path in copies]
            for copy in copies:
                _warn_once(f"mlhpc: warning: {copy}: {COPY}")
    if unread and not partly:
        raise unread[0]
    if loadgen and not any((*group.logs, *group.pruned, *group.resumed) for group in groups):
        return Tree(path, (), tuple(packages), tuple(unread), tuple(skipped), tuple(loadgen))
    return Tree(path, tuple(groups), tuple(packages), tuple(unread), tuple(skipped))


@cache
def _warn_once(text: str) -> None:
    """Print a warning, once however often a command walks the tree."""
    print_line(text, error=True)


def _is_of_loadgen(path: Path) -> bool:
    """Return True for a log of LoadGen, whatever it is called."""
    with suppress(OSError), path.open("rb") as stream:
        return b'"key": "loadgen_version"' in stream.read(HEAD_BYTES) or re.fullmatch(_LOADGEN, path.name) is not None
    return False


def _list_logs_below(folder: Path) -> Iterator[Path]:
    """Yield the logs of the results of a system: those below its folders of scenarios or benchmarks."""
    for here, _, names in list_tree(folder, lambda _: None):
        yield from (here / name for name in names if here != folder and re.fullmatch(RESULT, name))


UNREAD = "cannot be read"
LINK = "a symbolic link: not followed"
COPY = "not named as the log of a trial (result_<number>.txt): a copy? It is left out"
CODE = "code of a package: its logs are no results"


def _list_skipped_folders(folder: Path, folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the folders not to walk into, each with the reason. The reason is empty if the user need not know."""
    for name in folders:
        # Pruned results and power readings belong to the group above them. A system may have such a name too.
        aside = name in (PRUNED, ".git") or (name == POWER and "results" in folder.parts)
        if aside and (folder.name != "results" or not any(_list_logs_below(folder / name))):
            yield name, ""
        elif name == "benchmarks" and ("results" in folders or "systems" in folders):
            yield name, CODE
        elif (folder / name).is_symlink():
            yield name, LINK


def find_logs(paths: Sequence[Path]) -> tuple[list[LogFile], list[SkippedPath]]:
    """Find every log under the paths, once each, in a stable order, and what was not followed.

    InputError names a path that does not exist or that holds no log.
    """
    found: dict[Path, LogFile] = {}
    skipped: dict[Path, SkippedPath] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
        tree = find_results(path.resolve(), partly=True)
        logs = [log for group in tree.groups for log in _list_log_files(group)]
        skipped |= {item.path: item for item in tree.skipped}
        skipped |= {
            Path(e.filename): SkippedPath(Path(e.filename), f"cannot be read: {e.strerror}") for e in tree.unread
        }
        if tree.no_rules:
            raise InputError(f"{path}: {tree.no_rules}")
        if not logs:
            raise InputError(
                f"{path}: no result_*.txt below it{describe_near_logs([path])}; expected run folders, or an MLPerf HPC "
                "tree <submitter>/results/<system>/[strong|weak/]<benchmark>/result_*.txt"
            )
        found |= {log.path: log for log in logs}
    ordered = sorted(found.values(), key=lambda log: (log.label, str(log.path)))
    closed = [log.path for log in ordered if not os.access(log.path, os.R_OK)]
    ordered = [log for log in ordered if log.path not in closed] or ordered
    for path in [*(item.path for item in skipped.values() if item.reason.startswith(UNREAD)), *closed]:
        print_line(f"mlhpc: warning: {path}: may not be read and is left out; ask for read permission", error=True)
    return _make_labels_distinct(ordered), [skipped[path] for path in sorted(skipped)]


def describe_near_logs(paths: Sequence[Path]) -> str:
    """Return what one of the first 100 entries has of a log, if it is none: its name or its content."""
    trees = (tree for path in paths for tree in list_tree(path, lambda _: None))
    for entry in islice((here / name for here, folders, files in trees for name in sorted((*folders, *files))), 100):
        with suppress(OSError):
            named = re.fullmatch(RESULT, entry.name) is not None
            if entry.is_symlink():
                if named:
                    return f"; {entry} is {LINK}"
                continue  # what it leads to is not looked into
            if named and not entry.is_file():
                return f"; {entry} is no file"
            if not named and entry.is_file():
                with entry.open("rb") as stream:
                    head = stream.read(HEAD_BYTES)
                if entry.name.startswith("result_") and head.startswith((*COMPRESSED, ARCHIVE)):
                    return f"; {entry} is compressed: unpack it"
                if b":::MLLOG" in head and not _is_of_loadgen(entry):
                    return f"; {entry} holds MLLOG events but is not named result_<n>.txt"
    return ""


def list_files(folder: Path) -> list[Path]:
    """List every file and every symbolic link below a folder, sorted. Links are listed and never followed."""
    entries = []
    for here, folders, files in list_tree(folder, lambda _: None):
        entries += [here / item for item in files]
        entries += [here / item for item in folders if (here / item).is_symlink()]
    return sorted(entries)


def list_tree(top: Path, unread: Callable[[OSError], object]) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder below ``top`` with its folders and its other entries, sorted. A caller may remove folders.

    Links are not followed. ``unread`` is called for a folder that cannot be read.
    """
    # A stack and no recursion: os.walk of Python 3.11 calls itself, which fails at a thousand nested folders.
    waiting = [top]
    while waiting:
        here = waiting.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            unread(error)
            continue
        folders = [entry.name for entry in entries if _is_folder(entry)]
        # An entry knows its kind; a path beyond the system's longest cannot be asked.
        links = {entry.name for entry in entries if entry.is_symlink()}
        known = set(folders)
        yield here, folders, [entry.name for entry in entries if entry.name not in known]
        waiting += [here / name for name in reversed(folders) if name not in links]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def list_system_files(package: Path) -> list[Path]:
    """List the system descriptions of a package, sorted."""
    return sorted((package / "systems").glob("*.json"))


def read_system(path: Path) -> SystemFile:
    """Read a system description. If it cannot be read, ``problem`` says why."""
    try:
        if path.is_symlink() or not path.exists():
            return SystemFile(path, problem="there is no such file")
        data = read_json(path, read_limits().json)
    except OSError as error:
        return SystemFile(path, problem=f"cannot be read: {error.strerror}")
    except DuplicateKeyError as error:
        return SystemFile(path, problem=f"the name {str(error)[:80]!r} is given twice")
    except ValueError as error:
        return SystemFile(path, problem=f"not JSON: {str(error)[:80]}")
    if not isinstance(data, dict):
        return SystemFile(path, problem=f"expected a JSON object, found {type(data).__name__}")
    return SystemFile(path, data)


def parse_round(folder: Path) -> str | None:
    """Return the round, as ``v3.0``, of a folder named like ``hpc_results_v3.0`` or ``v3.0``. None for other names."""
    match = re.fullmatch(_ROUND, folder.name)
    return f"v{match[1]}" if match else None


def parse_suite(folder: Path) -> str | None:
    """Return the suite in a round's folder name: ``training`` of ``training_results_v4.0``. None for ``v4.0``."""
    match = re.fullmatch(r"(?:mlperf[_\-])?(\w+?)[_\-]results[_\-]v[0-9.]+", folder.name)
    return match[1] if match else None


def _make_group(folder: Path, root: Path) -> Group | None:
    """Return the group of a folder that holds logs or is where a result must be; None for other folders."""
    place = _parse_placement(folder)
    named = place if place is not None and place.benchmark is not None else None
    listed = _list_entries(folder)
    entries = listed if named is not None or any(name.startswith(("result_", "resumed_")) for name in listed) else {}
    form = RESULT_OF_RUN if "run.json" in entries else RESULT
    logs = [folder / name for name, entry in entries.items() if _is_log(entry) and re.fullmatch(form, name)]
    resumed = any(re.fullmatch(RESUMED, name) for name in entries)
    expected = named is not None and named.scenario is not None and folder != root
    if not logs and not resumed and not expected:
        return None
    pruned, known = folder / PRUNED, {path.name for path in logs}
    shelved = _list_entries(pruned) if pruned.is_dir() and not pruned.is_symlink() else {}
    others = (
        name for name, entry in entries.items() if name not in known and name != PRUNED and not entry.is_symlink()
    )
    group = Group(
        folder,
        tuple(sorted(logs, key=_make_sort_key)),
        pruned=tuple(sorted((pruned / name for name, entry in shelved.items() if _is_log(entry)), key=_make_sort_key)),
        others=tuple(folder / name for name in others),
        links=tuple(
            here / name
            for here, each in ((folder, entries), (pruned, shelved))
            for name, entry in each.items()
            if entry.is_symlink()
        ),
    )
    if named is None or not ((named.package / "systems").is_dir() or (named.package / "benchmarks").is_dir()):
        return group
    return replace(
        group,
        package=named.package,
        system=named.system,
        scenario=named.scenario or "strong",
        benchmark=named.benchmark,
        old_layout=named.scenario is None,
    )


def _parse_placement(folder: Path) -> Placement | None:
    """Parse the folder names below ``<package>/results/``; None for a folder elsewhere."""
    parts = folder.absolute().parts
    for depth in (2, 3, 4):  # of "results" from the end: results/<system>, .../<benchmark>, .../<scenario>/<benchmark>
        if len(parts) > depth and parts[-depth] == "results" and "implementations" not in parts[-depth - 1 : -depth]:
            system, *below = parts[1 - depth :]
            scenario = below[0] if len(below) == 2 else None
            benchmark = below[-1] if below and (scenario or below[-1] not in SCENARIOS) else None
            return Placement(_find_parent(folder, depth), system, scenario, benchmark)
    return None


def _find_parent(folder: Path, levels: int) -> Path:
    """Return the n-th parent folder, in the user's own spelling if possible, else absolute."""
    return folder.parents[levels - 1] if len(folder.parents) >= levels else folder.absolute().parents[levels - 1]


def _list_entries(folder: Path) -> dict[str, os.DirEntry[str]]:
    """Return the entries of a folder by name, sorted.

    Unlike a path, an entry knows its kind without another system call.
    """
    with os.scandir(folder) as entries:
        return {entry.name: entry for entry in sorted(entries, key=attrgetter("name"))}


def _is_log(entry: os.DirEntry[str]) -> bool:
    return bool(re.fullmatch(RESULT, entry.name)) and entry.is_file(follow_symlinks=False)


def _make_sort_key(path: Path) -> tuple[int, str]:
    digits = re.search(r"(\d{1,9})", path.name)
    return int(digits[1]) if digits else -1, path.name


def _list_log_files(group: Group) -> Iterator[LogFile]:
    """Yield the logs of a group with the meaning of the folders above them."""
    place, run = _parse_placement(group.folder), (group.folder / "run.json").is_file()
    first = LogFile(
        path=group.folder,
        label=f"{group.folder.name}/",
        kind="run" if run else "loose",
        round=None,
        submitter=None,
        system=group.folder.name,
        mode=None,
        benchmark=None,
        pruned=False,
        resumed=False,
        trial=None,
        package=group.folder,
    )
    if place is not None and not run:
        first = _describe_package_folder(first, place)
    for paths, above in (
        ((*group.logs, *group.resumed), ""),
        (group.pruned, f"{PRUNED}/" if first.kind == "package" else ""),
    ):
        for path in paths:
            match = re.match(_TRIAL, path.name)
            yield replace(
                first,
                path=path,
                label=f"{first.label}{above}{path.name}",
                pruned=paths is group.pruned,
                resumed=re.fullmatch(RESUMED, path.name) is not None,
                trial=int(match.group(1)) if match else None,
            )


def _describe_package_folder(folder: LogFile, place: Placement) -> LogFile:
    """Describe a folder of logs in a package's results."""
    round_ = parse_round(place.package.absolute().parent)
    below = folder.path.relative_to(place.package / "results").parts
    described = place.package / "systems" / f"{place.system}.json"
    return replace(
        folder,
        label="/".join([*([round_] if round_ else []), place.package.name, *below, ""]),
        kind="package",
        round=round_,
        submitter=place.package.name,
        system=place.system,
        mode="weak" if place.scenario == "weak" else "strong",
        benchmark=place.benchmark,
        package=place.package,
        description=described if described.is_file() else None,
    )


def _make_labels_distinct(logs: list[LogFile]) -> list[LogFile]:
    """Number the systems and labels of two trees with the same names, so that they differ."""
    trees: dict[tuple[str | None, str | None, str], list[Path]] = {}
    labels: dict[str, int] = {}
    distinct = []
    for log in logs:
        known = trees.setdefault((log.round, log.submitter, log.system), [])
        if log.package not in known:
            known.append(log.package)
        number = known.index(log.package) + 1
        count = labels[log.label] = labels.get(log.label, 0) + 1
        if number > 1 or count > 1:
            system = log.system if number == 1 else f"{log.system} ({number})"
            log = replace(log, system=system, label=log.label if count == 1 else f"{log.label} ({count})")
        distinct.append(log)
    return distinct
