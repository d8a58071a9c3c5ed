"""The configuration in a results package, to enter it into a tournament. It is read as data: nothing in a package is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.tournament.folder import Settings, digest, read_config, read_plain
from suite.config import RunConfig
from suite.descriptor import descriptor
from suite.errors import InputError
from suite.files import YamlSource
from suite.log.results_tree import list_files

MOST = 1000  # configurations that are looked at
OF_THE_PLACE = ("data", "verify_data", "submission", "staging", "cache_drop_command", "instrumentation", "watchdog")
"""What a configuration says of where it ran: the tournament states it, so it is left out."""


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
        data = YamlSource.read(path).data
        if (data.get("workload"), data.get("size")) == (settings.workload, settings.size):
            own = [f"{key}={_shipped(settings, key)}" for key in OF_THE_PLACE if key in data]
            config = read_config(known, str(path), [*own, *overrides], settings)
            found.setdefault(digest(config), (path, config))
    if not found:
        raise InputError(f"{package}: no configuration of {settings.workload} {settings.size} (provenance/*/config.yaml)")
    if len(found) > 1:
        first, second = [path for path, _ in found.values()][:2]
        raise InputError(f"{package}: different configurations in {first} and {second}; enter one with --config FILE")
    return next(config for _, config in found.values())
