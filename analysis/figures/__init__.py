"""The figures of the report. Each module here is one figure and is found by being here.

A module has TITLE, CAPTION, ORDER (where on the page), ``table(study)``, the numbers behind the figure with units in the
column names, ``answer(study)``, one line, and ``draw(study)``. All raise NotAnswerableError where the data are missing. The
question it answers is in questions.yaml.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

import pandas as pd
from matplotlib.figure import Figure

from analysis.study import Study


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


def figures() -> dict[str, FigureModule]:
    """Every figure by name, in the order of the page."""
    modules = {
        info.name: cast(FigureModule, importlib.import_module(f"{__name__}.{info.name}"))
        for info in pkgutil.iter_modules(__path__)
    }
    return dict(sorted(modules.items(), key=lambda item: (item[1].ORDER, item[0])))
