"""Benchmark suite for AI on supercomputers. This module is its Python API: the names in `__all__` are stable, all else may change.

Importing it loads nothing heavy; a name loads what it needs when it is first used. docs/api.md describes every name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from suite.training.own.run import Run as Run

_NAMES = {  # name: module that has it, and its name there
    "Run": ("suite.training.own.run", "Run"),
}
__all__ = ["Run"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'mlhpc' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _NAMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
