"""Builds the result tables of the page, one section per benchmark, size, mode and division."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from mlhpc.analysis.drawing.digits import render_number
from mlhpc.analysis.page.cells import (
    HtmlTable,
    build_html_table,
    build_time_cells,
    build_time_range_cells,
    drop_empty,
    render_ranges,
    render_spreads,
)
from mlhpc.analysis.published.scores import read_stated_minutes
from mlhpc.analysis.results.extent import choose_extent
from mlhpc.analysis.results.names import CLASS_COLUMNS, render_heading
from mlhpc.analysis.study import Study
from mlhpc.analysis.tables.ingest import parse_mapping
from mlhpc.suite.log.comparable import GROUP_MEANINGS, find_round_group


@dataclass(frozen=True)
class ScoreSection:
    """Holds the results of one class and division: heading, main table, further columns and remarks."""

    title: str
    table: HtmlTable
    details: HtmlTable
    remarks: tuple[str, ...] = field(default=())


def build_score_sections(study: Study) -> list[ScoreSection]:
    """Build one section per benchmark, size, mode and division.

    Rounds whose times mean different things are kept apart.
    """
    sections = []
    for key, rows in study.distinct.groupby([*CLASS_COLUMNS, "division"], sort=True):
        ordered = _sort_rows(rows)
        title = f"{render_heading(*key[:3])} · {key[3]} division"
        sections.append(
            ScoreSection(
                title, _headline_table(ordered, title), _details_table(ordered, title), tuple(_remarks(ordered))
            )
        )
    return sections


def _sort_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Sort by rounds whose times mean the same, then by the bold column: most models/min or shortest score first."""
    rank = -rows["models_per_min"] if rows["mode"].iloc[0] == "weak" else rows["score_s"]
    keyed = rows.assign(era=rows["round"].map(find_round_group), rank=rank)
    return keyed.sort_values(["era", "rank", "label"], na_position="last").drop(columns=["era", "rank"])


def _remarks(rows: pd.DataFrame) -> Iterable[str]:
    first = rows.iloc[0]
    if pd.notna(first["target"]):
        sign = "≤" if first["target_direction"] == "min" else "≥"
        yield f"Target: {first['metric_name']} {sign} {first['target']:g}."
    if rows["round"].nunique() > 1:
        yield "Rounds differ in rules and data; rows are ordered within rounds whose times mean the same."
        for name in sorted(set(rows["round"].map(find_round_group)) & set(GROUP_MEANINGS)):
            yield f"{name}: {GROUP_MEANINGS[name]}."
    if first["size"] != "full":
        yield f"Size {first['size']} is not the MLPerf problem; it compares with nothing but itself."


def _headline_table(rows: pd.DataFrame, caption: str) -> HtmlTable:
    """Build the columns that fit a screen: every score with its definition, scale, convergence and cost."""
    weak = rows["mode"].iloc[0] == "weak"
    columns: dict[str, list[Any]] = {"system": list(rows["name"])}
    if rows["rounds"].nunique() > 1:
        columns["round"] = list(rows["rounds"])
    if weak:
        columns["models/min"] = list(rows["models_per_min"])
    columns["time to train all" if weak else "score by the rules"] = [
        time or f"no score: {note}"
        for time, note in zip(build_time_cells(rows["score_s"]), rows["score_note"], strict=True)
    ]
    if rows["published"].any():
        columns["official tool prints"] = build_time_cells(
            rows["score_tool_s"].where(rows["published"] & (rows["round"] != "v0.7"))  # no tool for that round
        )
        stated = read_stated_minutes()
        columns["submitter stated"] = build_time_cells(
            60.0 * stated[group][0] if group in stated else None for group in rows["group"]
        )
    if (rows["staging_before_run_s.mean"] > 0).any():
        columns["with staging"] = build_time_cells(rows["score_with_staging_s"])
    if not weak:
        columns["95 % interval"] = build_time_range_cells(rows["score_low_s"], rows["score_high_s"])
    # A score is a mean already, so this column is only for results without one, and for instances
    columns["mean run"] = build_time_cells(rows["run_s.mean"].where(rows["score_s"].isna() | weak))
    columns["runs: averaged / reached / started"] = [
        f"{row.n_averaged} / {row.n_reached} / {row.n_started}" for row in rows.itertuples()
    ]
    columns |= _build_machine_columns(rows, weak=weak)
    columns["global batch"] = list(rows["global_batch_size"])
    columns["epochs to target"] = render_spreads(rows["epochs_to_target.mean"], rows["epochs_to_target.std"])
    columns["training [samples/s]"] = list(rows["train_rate.mean"])
    columns["unit hours"] = list(rows["unit_hours"])
    if "energy_j" in rows:
        columns["energy [MJ]"] = list(rows["energy_j"] / 1e6)
        columns["energy: 95 % interval [MJ]"] = render_ranges(rows["energy_low_j"] / 1e6, rows["energy_high_j"] / 1e6)
        columns["energy of"] = list(rows["energy_kind"])
        columns["no score of energy"] = list(rows["energy_note"])
    of = [(place,) for place in rows.index]
    return build_html_table(drop_empty(columns), caption, strong={"score by the rules", "models/min"}, of=of)


def _build_machine_columns(rows: pd.DataFrame, *, weak: bool) -> dict[str, list[Any]]:
    """Build the columns of the machine's size: compute units, and what varies.

    In throughput mode they are the units of the whole system and of one instance.
    """
    if weak:
        return {"units of the system": list(rows["units_described"]), "units of an instance": list(rows["units"])}
    found = choose_extent(rows)
    varies = {found.count: list(found.sizes)} if found.one in ("node", "core", "rank") else {}
    return {"compute units": list(rows["units"])} | varies


def _details_table(rows: pd.DataFrame, caption: str) -> HtmlTable:
    """Build the columns that do not fit into the main table."""
    columns: dict[str, list[Any]] = {
        "system": list(rows["name"]),
        "round": list(rows["rounds"]),
        "submitter": list(rows["submitter"]),
        "folder": list(rows["system"]),
        "device": list(rows["device"]),
        "nodes": list(rows["nodes"]),
        "ranks": list(rows["ranks"]),
        "precision": list(rows["precision"]),
        "fastest – slowest": build_time_range_cells(rows["fastest_s"], rows["slowest_s"]),
        "models trained": list(rows["models"]),
        "metric reached": list(rows["reached_value.mean"]),
        "target": list(rows["target"]),
        "trivial baselines": [_baselines(text) for text in rows["baselines"]],
        "best possible (knows how the data were made)": [_baselines(text) for text in rows["attainable"]],
        "scaling factor shipped": list(rows["scaling_factor"]),
        "the stated score's source": [read_stated_minutes().get(group, (0.0, ""))[1] for group in rows["group"]],
    }
    return build_html_table(drop_empty(columns), f"{caption}: more", of=[(place,) for place in rows.index])


def _baselines(text: object) -> str | None:
    return "; ".join(f"{name} {render_number(value)}" for name, value in parse_mapping(text).items()) or None
