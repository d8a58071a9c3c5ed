"""The configuration in a results package, to enter it into a tournament. It is read as data: nothing in a package is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.tournament.folder import OF_THE_TOURNAMENT, Settings, check_config, digest, read_plain
from suite.config import RunConfig, load_config, resolve_config
from suite.descriptor import descriptor
from suite.documents import YamlSource, plain
from suite.errors import InputError
from suite.log.results_tree import list_files

MOST = 1000  # configurations that are looked at


def find_config(package: Path, settings: Settings, overrides: Sequence[str] = ()) -> RunConfig:
    """Find the configuration of the runs of a tournament's workload and size in a package.

    InputError if there is none, or if there are different ones.
    """
    known = descriptor(settings.workload)
    paths = [path for path in list_files(package) if path.name == "config.yaml" and "provenance" in path.parts]
    if len(paths) > MOST:
        raise InputError(f"{package}: {len(paths)} configurations; at most {MOST} are read")
    found: dict[str, tuple[Path, RunConfig]] = {}
    for path in paths:
        read_plain(path)
        source = YamlSource.read(path)
        if (source.data.get("workload"), source.data.get("size")) == (settings.workload, settings.size):
            shipped = plain(load_config(known, settings.size), without_none=True)
            own = {key: value for key, value in source.data.items() if key not in OF_THE_TOURNAMENT}
            stated = {key: shipped[key] for key in OF_THE_TOURNAMENT if key in shipped}
            config = resolve_config(known, YamlSource(path, own | stated, source.lines), overrides)
            found.setdefault(digest(config), (path, check_config(known, str(path), config, settings)))
    if not found:
        raise InputError(
            f"{package}: no configuration of {settings.workload} {settings.size} (provenance/*/config.yaml)"
        )
    if len(found) > 1:
        first, second = [path for path, _ in found.values()][:2]
        raise InputError(f"{package}: different configurations in {first} and {second}; enter one with --config FILE")
    return next(config for _, config in found.values())
