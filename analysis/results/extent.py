"""In what the size of a machine is counted where results of several sizes are compared: the first count that varies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

COUNTS = ("units", "nodes", "cores", "ranks")
PLURAL = {
    name: f"{name}s" for name in ("accelerator", "node", "core", "rank")
} | {"processor": "processors", "unit": "compute units"}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """The size of each result's machine and what one of it is called: accelerator, processor, unit, node, core or rank."""

    sizes: pd.Series
    one: str

    @property
    def count(self) -> str:
        """What the sizes count, as the name of an axis."""
        return PLURAL[self.one]


def extent(rows: pd.DataFrame) -> Extent:
    """The size of each result's machine in the first count that is known of all and varies: compute units, nodes,
    cores, ranks.

    On one processor, where units and nodes are 1, it counts cores (ranks x threads). Ranks only where cores are not
    known: more ranks on the same cores are no larger machine. Nothing varies: compute units. These are called
    accelerators or processors (column ``unit``) where all results have the same.
    """
    kinds = rows["unit"].dropna().unique()
    unit = str(kinds[0]) if len(kinds) == 1 and rows["unit"].notna().all() else "unit"
    for column in COUNTS:
        values = pd.to_numeric(rows[column])
        if values.notna().all() and values.nunique() > 1:
            return Extent(values, unit if column == "units" else column.removesuffix("s"))
        if column == "cores" and values.notna().all():
            break
    return Extent(pd.to_numeric(rows["units"]), unit)


def with_extent(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The rows with the size of each machine counted alike within ``by``: ``extent``, ``one`` of what it counts, and
    ``hours``.

    ``hours`` is the size times the mean time of a run, in hours. Rows of unknown size are left out.
    """
    parts = []
    for _, part in rows.groupby(list(by), sort=True):
        found = extent(part)
        hours = found.sizes * pd.to_numeric(part["run_s.mean"]) / 3600
        parts.append(part.assign(extent=found.sizes.astype(float), one=found.one, hours=hours))
    whole = pd.concat(parts).loc[rows.index] if parts else rows.assign(extent=None, one="unit", hours=None)
    return whole[whole["extent"] > 0]


def unit_names(rows: pd.DataFrame, systems: pd.DataFrame) -> pd.Series:
    """What a compute unit of each result is: an accelerator, or a processor on a system without; None if neither is
    known.
    """
    known = systems.set_index("system_key")
    names = pd.Series(None, index=known.index, dtype=object)
    names[known["processors_per_node"] > 0] = "processor"
    names[known["accelerators_per_node"] > 0] = "accelerator"
    return rows["system_key"].map(names)
