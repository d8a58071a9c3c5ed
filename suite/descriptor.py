"""Descriptors of workloads: name, card, hyperparameters and where the code is. Torch-free; finds installed workloads.

A workload is a folder whose ``__init__`` holds a `Descriptor` and imports no torch. Entry points name the installed ones.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from suite.card import Card, read_card
from suite.errors import InputError, unknown
from suite.plugins import WORKLOADS, find_plugins, leave_out, package_of, reason


class Hyperparameters(BaseModel):
    """The base class of each workload's hyperparameters: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Descriptor:
    """A workload without its code. ``implementation`` and ``generator`` name what to import, as ``module:name`` or ``module``."""

    name: str
    folder: Path
    hyperparameters: type[Hyperparameters]
    implementation: str
    generator: str

    @cache  # noqa: B019  descriptors are module constants
    def card(self) -> Card:
        """Read the workload's card, once per process."""
        return read_card(self.folder)

    def load_generator(self) -> Any:
        """Import the module with ``generate``, ``convert`` and ``fetch`` (their arguments: docs/data.md)."""
        return resolve(self.generator)


def descriptors() -> dict[str, Descriptor]:
    """Load the descriptors of all installed workloads whose card can be read, by name; others are left out with one line.

    Of two workloads with one MLPerf name the first is taken: no package can change the rules for another one's results.
    """
    found: dict[str, Descriptor] = {}
    names: dict[str, str] = {}
    for point in find_plugins(WORKLOADS).values():
        try:
            loaded = _load(point)
            first = names.setdefault(loaded.card().mlperf_name, point.name)
            if first != point.name:
                raise InputError(f"its benchmark name {loaded.card().mlperf_name!r} is that of workload {first!r}")
        except Exception as error:  # a stranger's code: whatever it raises, the other workloads are not affected
            leave_out("workload", point.name, package_of(point), reason(error))
        else:
            found[point.name] = loaded
    return dict(sorted(found.items()))


def descriptor(name: str) -> Descriptor:
    """Load the descriptor of one workload. InputError names the installed ones, or says why this one cannot be used."""
    points = find_plugins(WORKLOADS)
    if name not in points:
        raise InputError(unknown("workload", name, sorted(points)))
    try:
        loaded = _load(points[name])
        loaded.card()
    except Exception as error:
        package = package_of(points[name])
        raise InputError(f"workload {name!r} of package {package} cannot be used: {reason(error)}") from error
    return loaded


def installed_cards() -> dict[str, Card]:
    """The cards of the installed workloads by MLPerf name."""
    cards = (each.card() for each in descriptors().values())
    return {card.mlperf_name: card for card in cards}


def _load(point: EntryPoint) -> Descriptor:
    loaded = point.load()
    if not isinstance(loaded, Descriptor):
        raise InputError(f"{point.value} is no suite.descriptor.Descriptor but {type(loaded).__name__}")
    if loaded.name != point.name:
        raise InputError(f"{point.value} has the name {loaded.name!r}, its entry point {point.name!r}")
    return loaded


def resolve(target: str) -> Any:
    """Import what ``module:name`` or ``module`` names."""
    module, separator, name = target.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if separator else loaded
