"""Finds a count for the size of machines that differs between the results to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

COUNTS = ("units", "nodes", "cores", "ranks")
PLURAL = {
    name: f"{name}s" for name in ("accelerator", "node", "core", "rank")
} | {"processor": "processors", "unit": "compute units"}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """Holds the size of each result's machine, and the name of what is counted.

    It is accelerator, processor, unit, node, core or rank.
    """

    sizes: pd.Series
    one: str

    @property
    def count(self) -> str:
        """Return what the sizes count, as the name of an axis."""
        return PLURAL[self.one]


def find_training_units(rows: pd.DataFrame) -> pd.Series:
    """Find the compute units of each result that train: evaluations that overlap may have their own.

    Such a log has fewer ranks than accelerators (OC20 on Eos: 512 of 640). Or a batch has fewer samples than there are
    accelerators. Then each sample is trained by equally many, and the rest evaluate (OpenFold on Eos: batch 256, 2,048
    of 2,080).
    """
    units, ranks, batch = (pd.to_numeric(rows[name]) for name in ("units", "ranks", "global_batch_size"))
    apart = rows["async_eval"].astype(bool) & (rows["unit"] == "accelerator")
    training = units.mask(apart & (ranks < units), ranks)
    return training.mask(apart & (batch < training), training - training % batch)


def choose_extent(rows: pd.DataFrame, *, training: bool = False) -> Extent:
    """Return the size of each machine in the first count that all results have and that varies.

    The order is compute units, nodes, cores (ranks x threads), ranks. Cores decide on one processor, where units and
    nodes are 1. Ranks count only where cores are not known: more ranks on the same cores are no larger machine. If no
    count varies, or a machine has accelerators, it is compute units. These are called accelerators or processors
    (column ``unit``) if all results have the same kind. ``training`` counts those alone which train.
    """
    kinds = rows["unit"].dropna().unique()
    unit = str(kinds[0]) if len(kinds) == 1 and rows["unit"].notna().all() else "unit"
    units = find_training_units(rows) if training else pd.to_numeric(rows["units"])
    if "accelerator" in kinds and units.notna().all():
        return Extent(units, unit)  # as many accelerators on half the nodes are no smaller machine
    for column in COUNTS:
        values = pd.to_numeric(rows[column])
        if values.notna().all() and values.nunique() > 1:
            return Extent(values, unit if column == "units" else column.removesuffix("s"))
        # Cores are known and do not vary: more ranks on them are no larger machine
        if column == "cores" and values.notna().all():
            break
    return Extent(units, unit)


def add_extent(rows: pd.DataFrame, by: Sequence[str], *, training: bool = False) -> pd.DataFrame:
    """Return the rows with the columns ``extent``, ``one`` and ``hours``; rows of unknown extent are left out.

    Machines with the same values of ``by`` are counted in the same unit (`choose_extent`), and ``one`` names it.
    ``hours`` is the extent times the mean time of a run, in hours. ``training`` counts those alone which train.
    """
    parts = []
    for _, part in rows.groupby(list(by), sort=True):
        found = choose_extent(part, training=training)
        hours = found.sizes * pd.to_numeric(part["run_s.mean"]) / 3600
        parts.append(part.assign(extent=found.sizes.astype(float), one=found.one, hours=hours))
    # groupby sorts by key; the caller's order of rows is restored
    whole = pd.concat(parts).loc[rows.index] if parts else rows.assign(extent=None, one="unit", hours=None)
    return whole[whole["extent"] > 0]


def find_system_units(rows: pd.DataFrame) -> pd.Series:
    """Find the compute units of each result's machine; in throughput mode, those of the whole system."""
    # In throughput mode `units` are those of one instance, and the machine runs many
    return rows["units"].mask((rows["mode"] == "weak") & rows["units_described"].notna(), rows["units_described"])


def render_system_units(row: Mapping[Any, Any] | pd.Series) -> str | None:
    """Render the compute units of a result's machine; in throughput mode as "1,888 of 2,048", if some trained no model.

    None: not known.
    """
    size = find_system_units(pd.DataFrame([row])).iloc[0]
    if pd.isna(size):
        return None
    some = row["mode"] == "weak" and row["units_busy"] < size
    return f"{row['units_busy']:,.0f} of {size:,.0f}" if some else f"{size:,.0f}"


def find_unit_names(rows: pd.DataFrame, systems: pd.DataFrame) -> pd.Series:
    """Return what a compute unit of each result is: "accelerator", or "processor" on a system without.

    None: not known.
    """
    known = systems.set_index("system_key")
    names = pd.Series(None, index=known.index, dtype=object)
    names[known["processors_per_node"] > 0] = "processor"
    # Last, because a system with accelerators has processors too
    names[known["accelerators_per_node"] > 0] = "accelerator"
    return rows["system_key"].map(names)
