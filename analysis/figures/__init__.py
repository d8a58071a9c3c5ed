"""The figures of the report: `FIGURES` names one module each.

A module has TITLE and VIEWS: each `View` is one question with its table, its answer in words and its chart. Other
installed packages add figures by an entry point of the group ``mlhpc.figures``. It names a package with its own
FIGURES. A module that cannot be imported is left out with one line.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Protocol, cast

from mlhpc.analysis.drawing.view import GOALS, Goal, View
from mlhpc.suite.errors import InputError
from mlhpc.suite.plugins import FAILURES, OURS, Plugin, explain_unusable, find_plugins, print_skipped
from mlhpc.suite.plugins import FIGURES as GROUP


class FigureModule(Protocol):
    """Describes what a module of this package offers."""

    __name__: str
    TITLE: str
    VIEWS: tuple[View, ...]


# In the order of the page. Names, because importing the modules loads altair, which is optional.
FIGURES = (
    "standing",
    "time_split",
    "run_timeline",
    "time_and_cost",
    "comparison",
    "waterfall",
    "beside_published",
    "progress",
    # learning and scaling
    "convergence",
    "course",
    "run_to_run",
    "scaling",
    "throughput",
    # inside a step
    "roofline",
    "bounds",
    "stragglers",
    "expert_load",
)
REQUIRED_ATTRIBUTES = ("TITLE", "VIEWS")  # of a module


@cache
def load_figure_modules() -> dict[str, FigureModule]:
    """Import every figure, in the order of the page: ours, then those of other packages.

    A broken package or module is left out with one line.
    """
    found: dict[str, FigureModule] = {}
    for name, plugin in find_plugins(GROUP).items():
        try:
            package = importlib.import_module(plugin.point.value)
            if not isinstance(getattr(package, "FIGURES", None), tuple):
                raise InputError(
                    f"package {plugin.point.value} has no FIGURES; expected a tuple of the names of its figure modules"
                )
        except FAILURES as error:
            _print_omission(plugin, name, error)
            continue
        for module, figure in _modules(plugin, package):
            found.setdefault(module, figure)
    return found


@cache
def list_views() -> dict[str, View]:
    """List the views of all figures by name, in the order of the page. The first of two with one name counts."""
    found: dict[str, View] = {}
    for module in load_figure_modules().values():
        for view in module.VIEWS:
            found.setdefault(view.name, view)
    return found


def group_views_by_goal() -> dict[Goal, list[View]]:
    """Group the views by the goal of their question: our goals, then those of other packages."""
    groups: dict[Goal, list[View]] = {goal: [] for goal in GOALS}
    for view in list_views().values():
        groups.setdefault(view.question.goal, []).append(view)
    return groups


def is_ours(view: str) -> bool:
    """Return True if the view belongs to this package, not to another installed one."""
    return list_views()[view].table.__module__.startswith(f"{OURS}.")


def _modules(plugin: Plugin, package: ModuleType) -> Iterator[tuple[str, FigureModule]]:
    for name in package.FIGURES:
        try:
            module = importlib.import_module(f"{package.__name__}.{name}")
            missing = [part for part in REQUIRED_ATTRIBUTES if not hasattr(module, part)]
            if missing:
                raise InputError(
                    f"figure module {module.__name__} has no {' and no '.join(missing)}; expected TITLE and a tuple"
                    " VIEWS"
                )
        except FAILURES as error:
            _print_omission(plugin, name, error)
        else:
            yield name, cast(FigureModule, module)


def _print_omission(plugin: Plugin, name: str, error: BaseException) -> None:
    # A figure of ours that fails is a defect and must be seen
    if plugin.package == OURS:
        raise error
    print_skipped("figure", name, plugin.package, explain_unusable(error))
