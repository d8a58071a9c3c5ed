"""The folder of a tournament: its settings, its entries and where everything lies. Everything in it is read as data only."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from msgspec import Meta, Struct

from analysis.tournament.race import Plan
from suite.card import Target
from suite.config import RunConfig, load_config
from suite.descriptor import Descriptor, descriptor
from suite.documents import YamlSource, plain
from suite.errors import InputError
from suite.files import one_line, read_bytes, write_whole
from suite.log.limits import limits
from suite.log.run_folder import RunFolder

VERSION: Final = 1
TIME: Final = "time_to_train"
CPU: Final = "cpu_seconds"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
NAME_TEXT = "1 to 40 letters, digits, - and _, the first a letter or a digit"
OF_THE_TOURNAMENT = (
    "data",
    "verify_data",
    "submission",
    "staging",
    "cache_drop_command",
    "instrumentation",
    "watchdog",
)
"""Settings that no entry may state: they are the same for all, and some of them name commands and folders."""
MOST_ENTRIES = 64

Model = TypeVar("Model", bound=Struct)


class _Frozen(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Settings(_Frozen, frozen=True, kw_only=True):
    """tournament.yaml: what is the same for all entries. ``tuning_runs``: runs that an entry may have used to be found."""

    version: Literal[1] = VERSION
    workload: str
    size: str
    system: Annotated[str, Meta(min_length=1, max_length=200, description="name of the machine; stated in every log")]
    ranks: Annotated[int, Meta(ge=1, le=65536)] = 1
    objective: Literal["time_to_train", "cpu_seconds"] = TIME
    error: Annotated[float, Meta(ge=0.001, le=0.5, description="chance of a wrong answer")] = 0.05
    blocks: Annotated[int, Meta(ge=1, le=1000, description="the most runs that each entry gets")] = 16
    run_limit_s: Annotated[float, Meta(gt=0.0, le=1e7, description="seconds from start to end of a run")] = 3600.0
    tuning_runs: Annotated[int, Meta(ge=0, le=100_000)] = 0
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    data: Annotated[str | None, Meta(description="data root; null: the default of the workload and size")] = None


class Tuning(_Frozen, frozen=True, kw_only=True):
    """A run that was used to find an entry, as the entrant states it: the name of its folder and the sha256 of its log."""

    run: Annotated[str, Meta(max_length=300)]
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class EntryFile(_Frozen, frozen=True, kw_only=True):
    """entry.yaml: where an entry comes from."""

    version: Literal[1] = VERSION
    name: str
    source: Annotated[str, Meta(max_length=2000)]
    config_sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    tuning: tuple[Tuning, ...] = ()


@dataclass(frozen=True)
class Entry:
    """An entry and its resolved configuration. ``path`` is the file of the configuration."""

    file: EntryFile
    path: Path
    config: RunConfig

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.file.name


@dataclass(frozen=True)
class Tournament:
    """A tournament folder, its settings and entries by name."""

    root: Path
    settings: Settings
    entries: tuple[Entry, ...]

    @cached_property
    def plan(self) -> Plan:
        """What decides the race. InputError with fewer than two entries."""
        if len(self.entries) < 2:
            raise InputError(f"{self.root}: a tournament needs two entries; there are {len(self.entries)}")
        names = tuple(entry.name for entry in self.entries)
        return Plan(names, self.settings.error, self.settings.blocks, self.settings.seed)

    @property
    def runs(self) -> Path:
        """The folder with a folder for each block."""
        return self.root / "runs"

    @property
    def journal(self) -> Path:
        """What was started and what ended, a file each."""
        return self.root / "journal"

    @property
    def lock(self) -> Path:
        """The lock of the process that runs the tournament."""
        return self.root / "tournament.lock"

    def run(self, block: int, entry: str) -> RunFolder:
        """The run folder of an entry in a block."""
        return RunFolder(self.runs / f"block_{block:03d}" / entry)

    @property
    def target(self) -> Target:
        """What a run must reach: the card's, whatever an entry says."""
        return descriptor(self.settings.workload).card().target(self.settings.size)

    def digests(self) -> dict[str, str]:
        """The sha256 of everything that must stay once a run was started, by name."""
        files = {"tournament.yaml": self.root / "tournament.yaml"}
        for entry in self.entries:
            files |= {
                f"entries/{entry.name}/{path.name}": path for path in (entry.path, entry.path.with_name("entry.yaml"))
            }
        return {name: hashlib.sha256(read_plain(path)).hexdigest() for name, path in files.items()}


def read_tournament(root: Path) -> Tournament:
    """Read a tournament. InputError for what is damaged: file, line, value and what was expected."""
    if not (root / "tournament.yaml").exists():
        raise InputError(
            f"{root}: no tournament here (no tournament.yaml); begin one with: mlhpc tournament new {root}"
        )
    settings = _read_yaml(root / "tournament.yaml", Settings)
    if not math.isfinite(settings.run_limit_s):
        raise InputError(f"{root / 'tournament.yaml'}: run_limit_s = {settings.run_limit_s}: expected seconds")
    known = descriptor(settings.workload)
    known.card().size(settings.size)
    shipped = load_config(known, settings.size)
    folder = root / "entries"
    _refuse_link(folder)
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    if len(paths) > MOST_ENTRIES:
        raise InputError(f"{folder}: {len(paths)} entries; at most {MOST_ENTRIES} are read")
    return Tournament(root, settings, tuple(_read_entry(path, settings, known, shipped) for path in paths))


def _read_entry(folder: Path, settings: Settings, known: Descriptor, shipped: RunConfig) -> Entry:
    _refuse_link(folder)
    if not NAME.fullmatch(folder.name) or not folder.is_dir():
        raise InputError(f"{folder}: expected the folder of an entry, named with {NAME_TEXT}")
    file = _read_yaml(folder / "entry.yaml", EntryFile)
    if file.name != folder.name:
        raise InputError(
            f"{folder / 'entry.yaml'}: name = {file.name!r}: expected {folder.name!r}, the name of its folder"
        )
    if len(file.tuning) > settings.tuning_runs:
        raise InputError(
            f"{folder / 'entry.yaml'}: {len(file.tuning)} tuning runs; every entry of this tournament has {settings.tuning_runs}"
        )
    path = folder / "config.yaml"
    read_plain(path)
    config = read_config(known, str(path), (), settings, shipped)
    if digest(config) != file.config_sha256:
        raise InputError(
            f"{path}: config_sha256 in entry.yaml does not fit: the configuration was changed after it was entered"
        )
    return Entry(file, path, config)


def read_config(
    known: Descriptor, name: str, overrides: Sequence[str], settings: Settings, shipped: RunConfig | None = None
) -> RunConfig:
    """Load the configuration of an entry. InputError if it is of another size, or states what the tournament states."""
    return check_config(known, name, load_config(known, name, overrides), settings, shipped)


def check_config(
    known: Descriptor, name: str, config: RunConfig, settings: Settings, shipped: RunConfig | None = None
) -> RunConfig:
    """The configuration itself. InputError, which begins with ``name``, as `read_config`. ``shipped``: that of the size."""
    shipped = shipped or load_config(known, settings.size)
    if config.size != settings.size:
        raise InputError(f"{name}: size is {config.size!r}; this tournament is of {settings.workload} {settings.size}")
    for key in OF_THE_TOURNAMENT:
        if getattr(config, key) != getattr(shipped, key):
            raise InputError(f"{name}: {key} is the same for all entries: leave it out")
    return config


def write_settings(root: Path, settings: Settings) -> None:
    """Make the folder of a new tournament. InputError if there is something at its path."""
    if root.exists() or root.is_symlink():
        raise InputError(f"{root}: exists already; a tournament never writes into an earlier folder")
    write_whole(root / "tournament.yaml", yaml.safe_dump(plain(settings), sort_keys=False), overwrite=False)


def write_entry(tournament: Tournament, name: str, config: RunConfig, source: str, tuning: Sequence[Tuning]) -> Path:
    """Add an entry and return its folder. InputError if the name or the configuration is taken, or the tuning above the budget."""
    if not NAME.fullmatch(name):
        raise InputError(f"entry {name!r}: expected {NAME_TEXT}")
    if any(tournament.journal.glob("*.json")):
        raise InputError(f"{tournament.root}: runs were started: nobody can enter any more")
    if len(tuning) > tournament.settings.tuning_runs:
        raise InputError(
            f"entry {name!r}: {len(tuning)} tuning runs; every entry of this tournament has {tournament.settings.tuning_runs}"
        )
    for other in tournament.entries:
        if other.name.lower() == name.lower():
            raise InputError(f"entry {name!r}: there is an entry {other.name!r} already")
        if digest(other.config) == digest(config):
            raise InputError(f"entry {name!r}: has the same configuration as {other.name!r}: one is enough")
    if len(tournament.entries) >= MOST_ENTRIES:
        raise InputError(f"{tournament.root}: has {MOST_ENTRIES} entries; no more are read")
    folder = tournament.root / "entries" / name
    file = EntryFile(name=name, source=source, config_sha256=digest(config), tuning=tuple(tuning))
    text = yaml.safe_dump(plain(config, without_none=True), sort_keys=False)
    write_whole(folder / "config.yaml", text, overwrite=False)
    write_whole(folder / "entry.yaml", yaml.safe_dump(plain(file), sort_keys=False), overwrite=False)
    return folder


def digest(config: RunConfig) -> str:
    """The sha256 of a resolved configuration: what two entries may not have in common."""
    return hashlib.sha256(json.dumps(logged(config), sort_keys=True).encode()).hexdigest()


def logged(config: RunConfig) -> dict[str, Any]:
    """A configuration as its log has it, without what the tournament states."""
    text: dict[str, Any] = json.loads(json.dumps(config.logged(), default=str))
    return {key: value for key, value in text.items() if key not in OF_THE_TOURNAMENT}


def read_plain(path: Path) -> bytes:
    """Read a small regular file. InputError for a link, and for what is larger or no file."""
    _refuse_link(path)
    try:
        return read_bytes(path, limits().json)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from None


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise InputError(f"{path}: is a symbolic link, which is not followed")


def _read_yaml(path: Path, model: type[Model]) -> Model:
    read_plain(path)
    source = YamlSource.read(path)
    if source.data.get("version") != VERSION:
        raise InputError(
            f"{source.where('version')}: version {source.data.get('version')!r}; this suite reads {VERSION}"
        )
    return source.convert(model)
