"""Builds the section of the procurement index: one number for each system, what is missing, and its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from mlhpc.analysis.drawing.digits import render_interval, render_number
from mlhpc.analysis.page.cells import HtmlTable, build_html_table
from mlhpc.analysis.results.index import ANY_TIER, Index, build_index_tables

MOST_NAMED = 5  # of results without a tier
CAPTIONS = {
    "index": "Index of each system",
    "index_without_one": "The index with one workload left out",
    "index_ratios": "The ratios behind the index",
}


@dataclass(frozen=True)
class ProcurementSection:
    """Holds the index as the template takes it: an answer, remarks, and its tables."""

    answer: str
    remarks: tuple[str, ...]
    tables: tuple[HtmlTable, ...]


def build_procurement_section(index: Index | None) -> ProcurementSection | None:
    """Build the section of an index; None without one."""
    if index is None:
        return None
    tables = [_build_table(table, CAPTIONS[name]) for name, table in build_index_tables(index).items() if len(table)]
    return ProcurementSection(_answer(index), tuple(_remarks(index)), tuple(tables))


def _build_table(table: pd.DataFrame, caption: str) -> HtmlTable:
    """Build a table of the page. The system heads each row; the tier is left out if no result has one."""
    names = [name for name in table if name != "system" and not (name == "tier" and set(table["tier"]) == {ANY_TIER})]
    return build_html_table(table[["system", *names]].to_dict("list"), caption, strong={"index"})


def _answer(index: Index) -> str:
    others = [each for each in index.systems if each.system != index.reference and each.value is not None]
    if not others:
        return f"No other system than {index.reference} has a result of every workload, so there is no index."
    parts = []
    for tier in dict.fromkeys(each.tier for each in others):
        # Systems are sorted, the best first in each tier
        best = next(each for each in others if each.tier == tier)
        if best.low is None or best.high is None:
            many = render_number(best.value)
        else:
            many = render_interval(best.value or math.nan, best.low, best.high)
        name = "" if tier == ANY_TIER else f"{tier}: "
        parts.append(f"{name}{best.system} is {many} times as fast as {index.reference}")
    return "; ".join(parts) + "."


def _remarks(index: Index) -> list[str]:
    workloads = index.weights.workloads
    weights = ", ".join(f"{each.title} {each.weight:g}" for each in workloads)
    remarks = [
        f"Weighted geometric mean of ratios of speed to {index.reference}, of whole results of any size of machine "
        f"unless the file of weights states units. Weights: {weights}. Intervals: 95 %, over the runs."
    ]
    if any(each.mode == "weak" for each in workloads):
        remarks.append("A throughput is one measurement, so the intervals leave out how much it would vary.")
    if index.without_tier:
        more = f" and {len(index.without_tier) - MOST_NAMED} more" if len(index.without_tier) > MOST_NAMED else ""
        which = ", ".join(index.without_tier[:MOST_NAMED]) + more
        stated = {each.tier for each in index.systems} != {ANY_TIER}
        remarks += [f"Not in any tier, so left out: {which}."] if stated else []
    return remarks
