"""Reads the configuration of a package's run as data, without settings that act on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mlhpc.suite.config import RunConfig, resolve_config
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import YamlSource, convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_bytes
from mlhpc.suite.package.reproduction.causes import OPERATIONAL

MAX_BYTES = 2**18  # bytes of a config.yaml; those of the shipped workloads have 2,000
MAX_DEPTH = 12  # mappings and lists inside each other
MOST_THREADS = 64
SUBMISSION = "submission"  # the submitter and the division: names only, which act on nothing
_REFUSED_SETTINGS = {
    "cache_drop_command": "a command of a package is never run",
    "data": "the data are those of this machine",
    "staging": "a package does not say where this machine writes",
}


def read_package_config(descriptor: Descriptor, path: Path) -> tuple[RunConfig, tuple[str, ...]]:
    """Read a package's config.yaml for the installed workload. Also returns why some settings are not followed.

    InputError if the file has anchors, or is larger or deeper than a run writes it. InputError also if the installed
    suite refuses a value.
    """
    source = read_plain_yaml(path)
    left_out = []
    # Places, commands and supervision of the package's machine must not act on this one.
    for key in sorted((OPERATIONAL - {SUBMISSION}) & source.data.keys()):
        value = source.data.pop(key)
        if key in _REFUSED_SETTINGS and value not in (None, {}, {"overlap": False}):
            left_out.append(f"{key}: {_REFUSED_SETTINGS[key]}")
    threads = source.data.get("loader_threads")
    if isinstance(threads, int) and threads > MOST_THREADS:
        source.data["loader_threads"] = MOST_THREADS
        left_out.append(f"loader_threads: at most {MOST_THREADS}")
    return resolve_config(descriptor, source), tuple(left_out)


def read_plain_yaml(path: Path) -> YamlSource:
    """Read a small YAML mapping without anchors: nested anchors can expand a small file beyond all memory."""
    if path.is_symlink():
        raise InputError(f"{path}: is a symbolic link, which is not followed; expected a file of the package")
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: cannot be read: not UTF-8 text") from None
    depth = 0
    try:
        # Events expand no alias, so a small file stays small.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise InputError(f"{path}{_find_line(event)}: an anchor or alias; a run's config.yaml has none")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise InputError(f"{path}{_find_line(event)}: nested more than {MAX_DEPTH} deep")
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    return YamlSource.read(path)


def _find_line(event: yaml.Event) -> str:
    return f":{event.start_mark.line + 1}" if event.start_mark is not None else ""


def make_changed_config(descriptor: Descriptor, original: RunConfig, overrides: tuple[str, ...]) -> RunConfig:
    """Return the original with ``overrides``. Without overrides, return the installed suite's own of the size."""
    if not overrides:
        return resolve_config(descriptor, YamlSource.read(descriptor.folder / "config" / f"{original.size}.yaml"))
    data: dict[str, Any] = convert_to_plain_data(original, without_none=True)
    return resolve_config(descriptor, YamlSource(Path("the configuration of the package"), data, {}), overrides)


def render_config(config: RunConfig) -> str:
    """Render the configuration as a YAML file that `mlhpc run --config` reads."""
    return yaml.safe_dump(convert_to_plain_data(config, without_none=True), sort_keys=False)
