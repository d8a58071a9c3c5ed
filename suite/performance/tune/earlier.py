"""Reads what earlier searches and runs used, for `mlhpc tune --from`: their settings are measured first.

The machine may be another one. So only the settings are taken, and each is measured anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.performance.tune.result import RESULT, TuneResult
from mlhpc.suite.performance.tune.space import Point, Space, find_default, key_of_point

FASTEST = 3  # points that a search gives to the next one


def read_earlier_points(paths: Sequence[Path], descriptor: Descriptor, space: Space, cores: int) -> list[Point]:
    """List the points of searches (tune.json, or its folder), of run folders, and of packages; each point once.

    A value that the space does not have, such as more ranks than this machine has cores, stays: such a point is in no
    pool. InputError for a path with neither, or of another workload.
    """
    found: dict[str, Point] = {}
    for path in paths:
        points = list(_read_points(path, descriptor, space, cores))
        if not points:
            raise InputError(
                f"{path}: holds no search or run of {descriptor.name}; expected {RESULT}, a run folder or a package"
            )
        found.update({key_of_point(point): point for point in points})
    return list(found.values())


def read_result(path: Path) -> TuneResult:
    """Read the document of a search, from its file or folder. InputError names what is wrong with it."""
    file = path / RESULT if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{path}: has no {RESULT}; expected the folder of a search by mlhpc tune")
    return read_json_document(file, TuneResult, "result of mlhpc tune", 1)


def _read_points(path: Path, descriptor: Descriptor, space: Space, cores: int) -> Iterator[Point]:
    if path.is_file() or (path / RESULT).is_file():
        result = read_result(path)
        if result.workload == descriptor.name:
            yield from (space.restrict(point) for point in result.list_fastest(FASTEST))
        return
    for file in sorted(path.rglob("run.json")):
        run = RunFolder(file.parent)
        info = run.read_info()
        if info.workload == descriptor.name:
            ranks = info.ranks or 1
            config = load_config(descriptor, str(run.config_path))
            yield find_default(space, config, ranks, max(1, cores // ranks))
