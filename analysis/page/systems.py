"""Builds tables of systems, settings and logs, and of the fields in which results of one class differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlhpc.analysis.page.cells import HtmlTable, build_html_table, build_time_cells, drop_empty
from mlhpc.analysis.study import Study
from mlhpc.analysis.tables.ingest import parse_mapping

SYSTEM_FIELDS = (
    "system", "round", "submitter", "name", "nodes", "accelerators_per_node", "accelerator", "accelerator_memory",
    "processors_per_node", "processor", "memory", "storage", "network", "topology", "framework",
    "operating_system", "described_by", "problem",
)  # fmt: skip
SHOWN_DIGITS = 12  # of a checksum: a page of 3,000 logs would grow by 0.2 MB


def build_systems_table(study: Study) -> HtmlTable:
    """Build the table of every system, with the fields that any of them has."""
    table = study.tables.systems
    columns = {name.replace("_", " "): list(table[name]) for name in SYSTEM_FIELDS if table[name].notna().any()}
    return build_html_table(columns, "Systems as described by their packages, or as the run collected them")


def build_system_differences(study: Study) -> list[HtmlTable]:
    """Build for each class with several results a table of the description's fields that differ."""
    # Without names and sources, which always differ
    systems = study.tables.systems.set_index("system_key")[list(SYSTEM_FIELDS[4:-2])]
    systems.columns = systems.columns.str.replace("_", " ")
    described = {row["group"]: dict(systems.loc[row["system_key"]]) for _, row in study.distinct.iterrows()}
    return _build_differences(study, described, "descriptions that differ")


def _build_differences(study: Study, known: Mapping[str, Mapping[str, Any]], what: str) -> list[HtmlTable]:
    """Build for each class with several results a table of what differs of ``known``.

    It has the same names, with their values, for each group.
    """
    tables = []
    for title, rows in study.classes():
        of_results = [known[group] for group in rows["group"]]
        columns: dict[str, list[Any]] = {"system": list(rows["label"])}
        for name in of_results[0]:
            values = [of_result[name] for of_result in of_results]
            if len({str(value) for value in values}) > 1:
                columns[name] = values
        if len(columns) > 1:
            of = [(place,) for place in rows.index]
            tables.append(build_html_table(drop_empty(columns), f"{title}: {what}", of=of))
    return tables


def _settings(study: Study) -> dict[str, dict[str, Any]]:
    """Collect hyperparameters and run_config of each result (by group), flat.

    Settings that differ between runs say so.
    """
    by_group: dict[str, dict[str, Any]] = {}
    for group, runs in study.runs.groupby("group", sort=True):
        flat = [
            _flatten(parse_mapping(hyperparameters)) | _flatten(parse_mapping(config))
            for hyperparameters, config in zip(runs["hyperparameters"], runs["config"], strict=True)
        ]
        names = sorted({name for settings in flat for name in settings})
        by_group[str(group)] = {
            name: values.pop() if len(values) == 1 else "differs between runs"
            for name in names
            # As JSON, because lists and mappings cannot be members of a set
            if (values := {json.dumps(settings.get(name)) for settings in flat})
        }
    return by_group


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def build_setting_differences(study: Study) -> list[HtmlTable]:
    """Build for each class with several results a table of the settings in which they differ."""
    settings = _settings(study)
    names = sorted({name for of_result in settings.values() for name in of_result})
    known = {group: {name: of_result.get(name) for name in names} for group, of_result in settings.items()}
    return _build_differences(study, known, "settings that differ")


def build_settings_tables(study: Study) -> list[tuple[str, HtmlTable]]:
    """Build a table of the settings of every result that logs some, each with a heading."""
    labels = study.results.set_index("group")["label"]
    return [
        (
            f"{labels[group]} ({group})",
            build_html_table({"setting": list(s), "value": list(s.values())}, f"Settings of {labels[group]}"),
        )
        for group, s in _settings(study).items()
        if s
    ]


def build_logs_table(study: Study) -> HtmlTable:
    """Build the table of every log: outcome, part in the score, beginning of its checksum.

    tables/runs has all columns.
    """
    runs = study.runs
    columns = {
        "log": list(runs["run"]),
        "outcome": list(runs["outcome"]),
        "in the score": list(runs["fate"]),
        "run": build_time_cells(runs["run_s"]),
        "epochs to target": list(runs["epochs_to_target"]),
        "seed": list(runs["seed"]),
        "events": list(runs["event_count"]),
        "sha256": [str(digest)[:SHOWN_DIGITS] + "…" for digest in runs["sha256"]],
    }
    place = {group: place for place, group in study.results["group"].items()}
    return build_html_table(columns, "Every log that was read", of=[(place[group],) for group in runs["group"]])
