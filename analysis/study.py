"""Everything a figure or the report may look at: the tables, each run decomposed, one row per result. No drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.decompose import choose, per_run, results
from analysis.ingest import Tables, ingest
from analysis.selection import Selection
from suite.card import Card

CLASS = ["benchmark", "size", "mode"]


class NotAnswerableError(ValueError):
    """The data for a figure are not there; the message says what is missing."""


@dataclass(frozen=True)
class Study:
    """``runs`` is `decompose.per_run` of every log, ``results`` one row per group, both with a ``label`` to show."""

    tables: Tables
    runs: pd.DataFrame
    results: pd.DataFrame
    selections: Mapping[str, Selection]

    def classes(self) -> list[tuple[str, pd.DataFrame]]:
        """Results by benchmark, size and mode, each with a heading: what may stand beside each other in a figure."""
        return [(heading(*key), group) for key, group in self.results.groupby(CLASS, sort=True)]

    def runs_of(self, group: str) -> pd.DataFrame:
        """The runs of one result."""
        return self.runs[self.runs["group"] == group]


def study(paths: Sequence[Path], cards: Mapping[str, Card]) -> Study:
    """Read paths and decompose. ValueError as of `ingest`."""
    tables = ingest(paths, cards)
    runs = per_run(tables.runs)
    selections = choose(tables)
    runs["fate"] = [selections[group].fate[run] for group, run in zip(runs["group"], runs["run"], strict=True)]
    rows = results(runs, selections)
    rows["name"], rows["label"] = _names(rows)
    runs["label"] = runs["group"].map(rows.set_index("group")["label"])
    return Study(tables, runs, rows, selections)


def heading(benchmark: str, size: str, mode: str) -> str:
    """How a class of results is called."""
    return f"{benchmark} · size {size} · {'throughput' if mode == 'weak' else 'time to train'}"


def _names(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The system with its submitter where two share a name; and that with the round where rounds are mixed."""
    system = rows["system"].astype(str)
    clash = system.groupby([rows[key] for key in (*CLASS, "round")] + [system]).transform("size") > 1
    name = system.where(~clash, system + " · " + rows["submitter"].astype(str))
    mixed = rows["round"].nunique() > 1
    return name, name + " · " + rows["round"].astype(str) if mixed else name
