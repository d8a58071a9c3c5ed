"""The figures of the report: `FIGURES` names one module each, and ``questions.yaml`` has the question that it answers.

A module has TITLE, CAPTION, ``table(study)``, the numbers behind the figure with units in the column names,
``answer(study)``, one line, and ``draw(study)``. All raise NotAnswerableError where the data are missing.

Other installed packages add figures the same way: an entry point of the group ``mlhpc.figures`` names a package with
its own FIGURES and ``questions.yaml``. A module that cannot be imported is left out with one line.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

import pandas as pd

from analysis.study import Study
from suite.errors import InputError
from suite.plugins import FIGURES as GROUP
from suite.plugins import OURS, Plugin, find_plugins, leave_out, reason

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FigureModule(Protocol):
    """What a module of this package offers."""

    __name__: str
    TITLE: str
    CAPTION: str

    def table(self, study: Study) -> pd.DataFrame:
        """The numbers behind the figure."""
        ...

    def answer(self, study: Study) -> str:
        """The answer to the figure's question in one line."""
        ...

    def draw(self, study: Study) -> Figure:
        """The figure."""
        ...


# In the order of the page. Names, because importing the modules loads matplotlib, which is optional.
FIGURES = (
    "time_split",
    "staging_cost",
    "time_and_units",
    "pareto",
    "energy_front",
    "beside_published",
    # learning
    "convergence",
    "epochs_and_batch",
    "run_to_run",
    "spread_ellipse",
    # speed and scaling
    "throughput",
    "waterfall",
    "scaling",
    "two_by_two",
    "throughput_mode",
    # inside a step
    "phases",
    "extended_roofline",
    "roofline",
    "time_roofline",
    "what_if",
    "stragglers",
    "hierarchical_roofline",
    "expert_load",
    # beside training, and between results
    "startup",
    "goodput",
    "comparison",
    "progress",
    # all-to-all of mixture-of-experts layers
    "moe_network_fit",
    "moe_layer_time",
    "moe_choice",
    "moe_crossover",
)
PARTS = ("TITLE", "CAPTION", "table", "answer", "draw")  # of a module


@cache
def packages() -> dict[str, ModuleType]:
    """Import the packages of figures, ours first, by the name of their entry point; a broken one is left out with one
    line.
    """
    loaded: dict[str, ModuleType] = {}
    for name, plugin in find_plugins(GROUP).items():
        try:
            package = importlib.import_module(plugin.point.value)
            if not isinstance(getattr(package, "FIGURES", None), tuple):
                raise InputError(f"{plugin.point.value} lacks FIGURES, a tuple of the names of its modules")
            loaded[name] = package
        except Exception as error:
            _leave_out(plugin, name, error)
    return loaded


@cache
def figures() -> dict[str, FigureModule]:
    """Import every figure, in the order of the page: ours, then those of other packages."""
    plugins, modules = find_plugins(GROUP), dict[str, FigureModule]()
    for name, package in packages().items():
        for module, figure in _modules(plugins[name], package):
            modules.setdefault(module, figure)
    return modules


def is_ours(figure: str) -> bool:
    """True if the figure belongs to this package, not to another installed one."""
    return figures()[figure].__name__.startswith(f"{__name__}.")


def _modules(plugin: Plugin, package: ModuleType) -> Iterator[tuple[str, FigureModule]]:
    for name in package.FIGURES:
        try:
            module = importlib.import_module(f"{package.__name__}.{name}")
            missing = [part for part in PARTS if not hasattr(module, part)]
            if missing:
                raise InputError(f"{module.__name__} lacks {', '.join(missing)}")
        except Exception as error:
            _leave_out(plugin, name, error)
        else:
            yield name, cast(FigureModule, module)


def _leave_out(plugin: Plugin, name: str, error: Exception) -> None:
    if plugin.package == OURS:
        raise error
    leave_out("figure", name, plugin.package, reason(error))
