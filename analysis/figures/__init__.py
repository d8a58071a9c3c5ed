"""The figures of the report: each module of this package is one figure, and ``questions.yaml`` has the question it answers.

A module has TITLE, CAPTION, ORDER (where on the page), ``table(study)``, the numbers behind the figure with units in the
column names, ``answer(study)``, one line, and ``draw(study)``. All raise NotAnswerableError where the data are missing.

Other installed packages add figures the same way: an entry point of the group ``mlhpc.figures`` names a package of such modules
with its ``questions.yaml``. A module that cannot be imported is left out with one line.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

import pandas as pd

from analysis.study import Study
from suite.errors import InputError
from suite.plugins import FIGURES, OURS, Plugin, find_plugins, leave_out, reason

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FigureModule(Protocol):
    """What a module of this package offers."""

    __name__: str
    TITLE: str
    CAPTION: str
    ORDER: int

    def table(self, study: Study) -> pd.DataFrame:
        """The numbers behind the figure."""
        ...

    def answer(self, study: Study) -> str:
        """The answer to the figure's question in one line."""
        ...

    def draw(self, study: Study) -> Figure:
        """The figure."""
        ...


PARTS = ("TITLE", "CAPTION", "ORDER", "table", "answer", "draw")


@cache
def packages() -> dict[str, ModuleType]:
    """Import the packages of figures, ours first, by the name of their entry point; a broken one is left out with one line."""
    loaded: dict[str, ModuleType] = {}
    for name, plugin in find_plugins(FIGURES).items():
        try:
            package = importlib.import_module(plugin.point.value)
            if not hasattr(package, "__path__"):
                raise InputError(f"{plugin.point.value} is a module; expected a package of figures")
            loaded[name] = package
        except Exception as error:
            _leave_out(plugin, name, error)
    return loaded


@cache
def figures() -> dict[str, FigureModule]:
    """Every figure by name, in the order of the page."""
    modules: dict[str, FigureModule] = {}
    for name, package in packages().items():
        for module, figure in _modules(find_plugins(FIGURES)[name], package):
            modules.setdefault(module, figure)
    return dict(sorted(modules.items(), key=lambda item: (item[1].ORDER, item[0])))


def is_ours(figure: str) -> bool:
    """True if the figure belongs to this package, not to another installed one."""
    return figures()[figure].__name__.startswith(f"{__name__}.")


def _modules(plugin: Plugin, package: ModuleType) -> Iterator[tuple[str, FigureModule]]:
    for info in pkgutil.iter_modules(package.__path__):
        try:
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            missing = [part for part in PARTS if not hasattr(module, part)]
            if missing:
                raise InputError(f"{module.__name__} lacks {', '.join(missing)}")
        except Exception as error:
            _leave_out(plugin, info.name, error)
        else:
            yield info.name, cast(FigureModule, module)


def _leave_out(plugin: Plugin, name: str, error: Exception) -> None:
    if plugin.package == OURS:
        raise error
    leave_out("figure", name, plugin.package, reason(error))
