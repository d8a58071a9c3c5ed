"""The shipped table of scores of the public MLPerf HPC rounds: reading it and rendering it anew.

All numbers are recomputed from the public logs. Results whose logs were not at hand are missing, and `missing` names them.
`stated_minutes` holds the minutes that submitters or papers printed, which sometimes differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from suite.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from analysis.study import Study

VERSION = 1
FOLDER = files("analysis.published")
TABLE = "scores.json"
SHIPPED = Path(str(FOLDER)) / TABLE
SOURCE = "https://github.com/mlcommons/hpc_results_"
ROUNDS: Mapping[str, int] = {
    "v0.7": 15,
    "v1.0": 31,
    "v2.0": 22,
    "v3.0": 22,
}  # number of results published in each round
COLUMNS = {  # column of the table: column of Study.results
    "group": "group",
    "round": "round",
    "submitter": "submitter",
    "system": "system",
    "machine": "machine",
    "benchmark": "benchmark",
    "size": "size",
    "mode": "mode",
    "division": "division",
    "device": "device",
    "nodes": "nodes",
    "units": "units",
    "units_described": "units_described",
    "global_batch_size": "global_batch_size",
    "train_samples": "train_samples",
    "n_averaged": "n_averaged",
    "score_s": "score_s",
    "score_tool_s": "score_tool_s",
    "score_with_staging_s": "score_with_staging_s",
    "models": "models",
    "models_per_min": "models_per_min",
    "run_s": "run_s.mean",
    "epochs": "epochs_to_target.mean",
    "epochs_std": "epochs_to_target.std",
    "tau_s": "tau_s.mean",
    "staging_s": "staging_exposed_s.mean",
    "staging_before_run_s": "staging_before_run_s.mean",
    "train_s": "train_s.mean",
    "eval_s": "eval_s.mean",
    "other_s": "other_s.mean",
    "train_rate": "train_rate.mean",
    "unit_hours": "unit_hours",
    "carried_over_from": "carried_over_from",
}


def render(study: Study) -> str:
    """The table as JSON text: rounds with their source, then one list per result; floats with six digits."""
    rows = study.results[study.results["round"].isin(ROUNDS) & (study.results["size"] == "full")]
    lines = [[_short(row[name]) for name in COLUMNS.values()] for row in rows.to_dict("records")]
    head = {
        "version": VERSION,
        "what": "MLPerf HPC results recomputed from the public logs; times in seconds",
        "rounds": {
            round_: {"source": f"{SOURCE}{round_}", "results": count, "published": ROUNDS[round_]}
            for round_, count in count_rounds([line[1] for line in lines]).items()
        },
        "columns": list(COLUMNS),
    }
    body = ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{body}\n]\n}}\n'


@cache
def _read_table() -> dict[str, Any]:
    """The shipped table as it is written: its columns and rows."""
    document: dict[str, Any] = json.loads((FOLDER / TABLE).read_text("utf-8"))
    if document["version"] != VERSION:
        raise InputError(f"{TABLE}: version {document['version']}, this suite reads {VERSION}; run benchmarks/published_scores.py")
    return document


@cache
def published() -> pd.DataFrame:
    """The shipped table, one row per result, with the columns of COLUMNS."""
    import pandas as pd

    document = _read_table()
    return pd.DataFrame(document["rows"], columns=document["columns"])


def find_score(
    round_: str | None, submitter: str | None, system: str | None, scenario: str, benchmark: str | None
) -> dict[str, Any] | None:
    """Find the official score of a published result: ``score_s`` or ``models_per_min``, and the source. None if it is not known."""
    document = _read_table()
    names = document["columns"]
    wanted = {"round": round_, "submitter": submitter, "system": system, "mode": scenario, "benchmark": benchmark}
    for row in document["rows"]:
        found = dict(zip(names, row, strict=True))
        if all(found[name] == value for name, value in wanted.items()):
            source = f"{SOURCE}{round_}"
            return {"score_s": found["score_s"], "models_per_min": found["models_per_min"], "source": source}
    return None


def missing(held: Iterable[str] = ()) -> str:
    """The end of a sentence that names the results of the public rounds which neither the table nor ``held`` (groups) has.

    Empty if none is missing.
    """
    groups = {*published()["group"], *held}
    counts = count_rounds([group.partition("/")[0] for group in groups])
    gaps = [f"{r} ({ROUNDS[r] - n} of {ROUNDS[r]} results)" for r, n in counts.items() if n < ROUNDS[r]]
    return f". Not at hand when the table was made: {', '.join(gaps)}." if gaps else ""


@cache
def stated_minutes() -> Mapping[str, tuple[float, str]]:
    """By group of a published result: the minutes that a submitter or a paper printed, and the source."""
    entries = yaml.safe_load((FOLDER / "stated.yaml").read_text("utf-8"))
    return {entry["group"]: (float(entry["minutes"]), str(entry["source"])) for entry in entries}


def count_rounds(rounds: Sequence[str]) -> dict[str, int]:
    """The number of results at hand of each public round, from the rounds of those results."""
    return {round_: rounds.count(round_) for round_ in ROUNDS}


def _short(value: Any) -> Any:
    """A value as JSON: None for missing and non-finite ones, floats with six digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)) or value != value:
        return None
    if hasattr(value, "item"):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value
