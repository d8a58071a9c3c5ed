"""`Study`: all that figures and the report are made from, namely the tables of logs, every run decomposed, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from analysis.network.fit import Fit
from analysis.results.decompose import choose, per_run, results
from analysis.results.names import CLASS, describe_systems, find_pairs, heading, name_results, tasks
from analysis.results.prices import Prices
from analysis.results.selection import Selection
from analysis.roofline.inputs import Inputs
from analysis.tables.ingest import Tables, ingest
from suite.card import Card
from suite.errors import InputError


class NotAnswerableError(InputError):
    """A figure lacks data; the message names what is missing."""


@dataclass(frozen=True)
class Study:
    """``runs`` is `decompose.per_run` of every log, ``results`` has one row per group of runs; both have a ``label``.

    ``inputs`` are the ceilings and counters files of the command line, ``networks`` the fitted all-to-all sweeps, and
    ``between`` the pairs of results (groups of one class, from and to) that the user named. With ``prices`` of devices the
    results have a ``cost``.
    """

    tables: Tables
    runs: pd.DataFrame
    results: pd.DataFrame
    selections: Mapping[str, Selection]
    inputs: Inputs = field(default_factory=Inputs)
    networks: tuple[Fit, ...] = ()
    between: tuple[tuple[str, str], ...] = ()
    prices: Prices | None = None

    def classes(self) -> list[tuple[str, pd.DataFrame]]:
        """Results by benchmark, size and mode, each with a heading. Only results of one class may share a panel."""
        return [(heading(*key), group) for key, group in self.results.groupby(CLASS, sort=True)]

    def tasks(self) -> list[tuple[str, pd.DataFrame]]:
        """Results that may be ranked against each other, each group with a heading."""
        return tasks(self.results)

    @property
    def cost(self) -> tuple[str, str]:
        """The column of results to compare costs by, and what it counts: what the user's prices are in, else unit hours."""
        return ("cost", self.prices.unit) if self.prices else ("unit_hours", "unit hours")

    def fitted_networks(self) -> tuple[Fit, ...]:
        """``networks``; NotAnswerableError without one."""
        if not self.networks:
            raise NotAnswerableError("an all-to-all sweep (mlhpc moe --sweep-network -o FILE) among the report's paths")
        return self.networks

    def runs_of(self, group: str) -> pd.DataFrame:
        """The runs of one result."""
        return self.runs[self.runs["group"] == group]


def study(
    paths: Sequence[Path],
    cards: Mapping[str, Card],
    inputs: Inputs | None = None,
    networks: Sequence[Fit] = (),
    between: Sequence[tuple[str, str]] = (),
    prices: Prices | None = None,
) -> Study:
    """Read and decompose all logs below the paths.

    Raises InputError as `ingest` does, and for names in ``between`` that fit no result or several of one class.
    """
    tables = ingest(paths, cards)
    runs = per_run(tables.runs)
    selections = choose(tables)
    runs["fate"] = [selections[group].fate[run] for group, run in zip(runs["group"], runs["run"], strict=True)]
    rows = results(runs, selections)
    rows["device"], rows["machine"] = describe_systems(rows, tables.systems)
    rows["name"], rows["label"] = name_results(rows)
    rows["cost"] = prices.cost(rows) if prices else None
    runs["label"] = runs["group"].map(rows.set_index("group")["label"])
    pairs = tuple(pair for names in between for pair in find_pairs(rows, *names))
    return Study(tables, runs, rows, selections, inputs or Inputs(), tuple(networks), pairs, prices)
