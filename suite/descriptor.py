"""Describes workloads: name, card, hyperparameters and place of the code. Torch-free; finds installed workloads.

A workload is a folder whose ``__init__`` holds a `Descriptor` and imports no torch. Entry points name the installed
ones. A card-only benchmark is a card without code. It is a YAML file that the user names (MLHPC_CARDS), or a descriptor
without implementation.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlhpc.suite.card import Card, read_card
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.plugins import CARDS, FAILURES, WORKLOADS, explain_unusable, find_plugins, print_skipped

CARD_NAME = "card.yaml"  # in a workload's folder


@dataclass(frozen=True)
class Descriptor:
    """A workload without its code. ``implementation`` and ``generator`` are import paths, ``module[:name]``.

    Without these it is a card-only benchmark, for a person's own loop (`mlhpc.Run`). ``hyperparameters`` is a class
    derived from `mlhpc.suite.config.Hyperparameters`, or its name as ``module:name``. A name is not imported to read
    the card. ``folder`` holds the card, named ``card_name``, and the folders ``rcp/`` and ``config/``. ``no_stages``:
    why a pipeline cannot divide the model into stages; empty if it can.
    """

    name: str
    folder: Path
    hyperparameters: type[Struct] | str | None = None
    implementation: str | None = None
    generator: str | None = None
    card_name: str = CARD_NAME
    no_stages: str = "its forward pass does not begin with what another stage returns"

    @property
    def card_path(self) -> Path:
        """The file of the card."""
        return self.folder / self.card_name

    def card(self) -> Card:
        """Read the workload's card, once for each state of its file."""
        return _read_once(self.card_path, _read_mtime_ns(self.card_path))

    def load_hyperparameters(self) -> Any:
        """Return the class of the hyperparameters, imported if only its name is given.

        Without one: a dict with any keys.
        """
        if self.hyperparameters is None:
            return dict[str, Any]
        return load_object(self.hyperparameters) if isinstance(self.hyperparameters, str) else self.hyperparameters

    def code(self) -> str:
        """The import path of the implementation. If there is none, InputError says how such a benchmark is run."""
        if self.implementation is None:
            raise InputError(
                f"{self.name}: {self.card_path} is a card without code: "
                "a loop of your own runs it, with mlhpc.Run (docs/own_loop.md)"
            )
        return self.implementation

    def load_generator(self) -> Any:
        """Import the module with ``generate``, ``convert`` and ``fetch`` (docs/data.md), or raise InputError."""
        if self.generator is None:
            raise InputError(
                f"{self.name}: {self.card_path} is a card without code, so mlhpc makes no data for it; "
                "use the data of your own loop (docs/own_loop.md)"
            )
        return load_object(self.generator)


@lru_cache(maxsize=64)
def _read_once(path: Path, stamp: int) -> Card:
    return read_card(path)


def _read_mtime_ns(path: Path) -> int:
    """Return when a file was last changed; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def load_descriptors() -> dict[str, Descriptor]:
    """Load the descriptors of all installed workloads, by name. If a card cannot be read, one line is printed instead.

    Of two workloads with one MLPerf name the first is taken. So no package changes the rules for another's results.
    """
    found: dict[str, Descriptor] = {}
    names: dict[str, str] = {}
    for name, plugin in find_plugins(WORKLOADS).items():
        try:
            loaded = _load_entry_point(plugin.point)
            # Plug-ins come sorted with ours first, so ours keep their names.
            first = names.setdefault(loaded.card().mlperf_name, name)
            if first != name:
                raise InputError(
                    f"its benchmark name (mlperf_name) {loaded.card().mlperf_name!r} is that of workload {first!r}; "
                    "its card must state another"
                )
        except FAILURES as error:  # it affects no other workload
            print_skipped("workload", name, plugin.package, explain_unusable(error))
        else:
            found[name] = loaded
    for path, _ in list_card_files():
        _add_card(found, path)
    return dict(sorted(found.items()))


def describe_card(path: Path) -> Descriptor:
    """Return the card-only benchmark of a card file. InputError if the file is no card."""
    # The working directory may change before the card is read again.
    path = path.absolute()
    card = _read_once(path, _read_mtime_ns(path))
    return Descriptor(card.workload, path.parent, card_name=path.name)


def list_card_files() -> tuple[tuple[Path, int], ...]:
    """Return the card files in MLHPC_CARDS, in order, each once, with the time of its last change."""
    names = filter(None, os.environ.get(CARDS, "").split(os.pathsep))
    return tuple((path, _read_mtime_ns(path)) for path in dict.fromkeys(Path(name).absolute() for name in names))


@contextmanager
def use_cards(paths: Iterable[str | Path]) -> Iterator[None]:
    """Add the benchmarks of the card files in the body, also for processes that it starts.

    InputError for a file that is no card.
    """
    before = os.environ.get(CARDS)
    names = [*filter(None, [before]), *(str(describe_card(Path(path)).card_path) for path in paths)]
    if names:
        os.environ[CARDS] = os.pathsep.join(names)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(CARDS, None)
        else:
            os.environ[CARDS] = before


def _add_card(found: dict[str, Descriptor], path: Path) -> None:
    """Add the benchmark of a card file. InputError if a name is taken: nobody changes another benchmark's rules."""
    added = describe_card(path)
    card = added.card()
    for other in found.values():
        known = other.card()
        # One card given twice, by --card and by the variable, is no conflict.
        if known == card:
            return
        for what, ours, theirs in (
            ("workload", card.workload, known.workload),
            ("mlperf_name", card.mlperf_name, known.mlperf_name),
        ):
            if ours == theirs:
                raise InputError(
                    f"{path}: {what} {ours!r} is that of another card, {other.card_path}; change it, or leave one of"
                    " the cards out"
                )
    found[added.name] = added


def load_descriptor(name: str) -> Descriptor:
    """Load the descriptor of one workload. InputError names the installed ones, or says why this one is unusable."""
    plugins = find_plugins(WORKLOADS)
    if name not in plugins:
        # Reading all cards is slow, and without card files no other name exists.
        known = load_descriptors() if list_card_files() else {}
        if name in known:
            return known[name]
        raise InputError(_explain_unknown_workload(name, sorted({*plugins, *known})))
    try:
        loaded = _load_entry_point(plugins[name].point)
        # A damaged card is reported here, not in the middle of a run.
        loaded.card()
    except FAILURES as error:
        package = plugins[name].package
        raise InputError(f"workload {name!r} of package {package} cannot be used: {explain_unusable(error)}") from error
    return loaded


def _explain_unknown_workload(name: str, known: list[str]) -> str:
    """Return the message about an unknown workload. What stands there may be a file, a run folder or a size too."""
    path = Path(name)
    if path.suffix == ".py":
        return f"{name} is a program, not a workload: python {name} with `import mlhpc` in it (docs/own_loop.md)"
    if path.suffix in {".yaml", ".yml"}:
        return f"{name} is a file, not a workload: settings are --config {name}, a card is --card {name}"
    if path.is_dir():
        return f"{name} is a folder, not a workload; a run folder goes on with: mlhpc run WORKLOAD -o {name} --resume"
    first, *rest = re.split(r"[/:@,-]", name)
    if first in known and rest[-1]:
        return f"unknown workload {name!r}; did you mean {first} --size {rest[-1]}? workloads: {', '.join(known)}"
    return explain_unknown_name("workload", name, known)


def list_installed_cards() -> dict[str, Card]:
    """Return the cards of the installed workloads by MLPerf name."""
    cards = (each.card() for each in load_descriptors().values())
    return {card.mlperf_name: card for card in cards}


def _load_entry_point(point: EntryPoint) -> Descriptor:
    loaded = point.load()
    if not isinstance(loaded, Descriptor):
        raise InputError(
            f"entry point {point.value} names an object of type {type(loaded).__name__}; expected a mlhpc.Descriptor"
        )
    if loaded.name != point.name:
        raise InputError(
            f"the workload {point.value} calls itself {loaded.name!r}, but its entry point is {point.name!r}: "
            "expected one name (in its DESCRIPTOR and in pyproject.toml)"
        )
    return loaded


def load_object(target: str) -> Any:
    """Import what ``module:name`` or ``module`` names."""
    module, separator, name = target.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if separator else loaded
