"""Descriptors of workloads: name, card, hyperparameters and where the code is. Torch-free; finds installed workloads.

A workload is a folder whose ``__init__`` holds a `Descriptor` and imports no torch. Entry points name the installed ones.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from suite.card import Card, read_card
from suite.errors import InputError


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

    def load(self) -> Any:
        """Import the implementation, a `suite.workload.Workload` class; it imports torch."""
        return _resolve(self.implementation)

    def load_generator(self) -> Any:
        """Import the module with ``generate``, ``convert`` and ``fetch`` (see docs/architecture.md)."""
        return _resolve(self.generator)


def descriptors() -> dict[str, Descriptor]:
    """Load the descriptors of all installed workloads, by name (entry-point group ``mlhpc.workloads``)."""
    return {point.name: point.load() for point in sorted(entry_points(group="mlhpc.workloads"), key=lambda p: p.name)}


def descriptor(name: str) -> Descriptor:
    """Load the descriptor of one workload. ValueError names the installed ones."""
    points = {point.name: point for point in entry_points(group="mlhpc.workloads")}
    if name not in points:
        raise InputError(f"unknown workload {name!r}; workloads: {', '.join(sorted(points))}")
    return points[name].load()  # type: ignore[no-any-return]


def installed_cards() -> dict[str, Card]:
    """The cards of the installed workloads by MLPerf name."""
    cards = (each.card() for each in descriptors().values())
    return {card.mlperf_name: card for card in cards}


def _resolve(target: str) -> Any:
    module, separator, name = target.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if separator else loaded
