"""Reads the shipped table of scores of the public MLPerf HPC rounds. `benchmarks/published_scores.py` makes it.

All numbers are recomputed from the public logs. Results whose logs were not at hand are missing:
`describe_missing_results` names them. `read_stated_minutes` holds the minutes that submitters or papers printed, which
sometimes differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mlhpc.suite.documents import parse_yaml
from mlhpc.suite.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1
FOLDER = files("mlhpc.analysis.published")
TABLE = "scores.json"
SOURCE = "https://github.com/mlcommons/hpc_results_"
# Counted in the public repositories; the shipped table may have fewer
ROUNDS: Mapping[str, int] = {
    "v0.7": 15,
    "v1.0": 31,
    "v2.0": 22,
    "v3.0": 22,
}  # number of results published in each round


@cache
def _read_table() -> dict[str, Any]:
    """Return the shipped table as it is written: its columns and rows."""
    document: dict[str, Any] = json.loads((FOLDER / TABLE).read_text("utf-8"))
    if document["version"] != VERSION:
        raise InputError(
            f"{TABLE}: version {document['version']}, this suite reads {VERSION}; run benchmarks/published_scores.py"
        )
    return document


@cache
def read_scores() -> pd.DataFrame:
    """Return the shipped table, one row per result, with its own names of columns."""
    import pandas as pd

    document = _read_table()
    return pd.DataFrame(document["rows"], columns=document["columns"])


def find_score(
    round_: str | None, submitter: str | None, system: str | None, scenario: str, benchmark: str | None
) -> dict[str, Any] | None:
    """Find the official score of a published result: ``score_s`` or ``models_per_min``, and the source.

    None if it is not known.
    """
    document = _read_table()
    names = document["columns"]
    wanted = {"round": round_, "submitter": submitter, "system": system, "mode": scenario, "benchmark": benchmark}
    for row in document["rows"]:
        found = dict(zip(names, row, strict=True))
        if all(found[name] == value for name, value in wanted.items()):
            source = f"{SOURCE}{round_}"
            return {"score_s": found["score_s"], "models_per_min": found["models_per_min"], "source": source}
    return None


def describe_missing_results(held: Iterable[str] = ()) -> str:
    """Return the end of a sentence that names the missing results of the public rounds; empty if none is missing.

    A result is missing if neither the table nor ``held`` (groups) has it.
    """
    groups = {*read_scores()["group"], *held}
    counts = count_rounds([group.partition("/")[0] for group in groups])
    gaps = [f"{r} ({ROUNDS[r] - n} of {ROUNDS[r]} results)" for r, n in counts.items() if n < ROUNDS[r]]
    return f". Not at hand when the table was made: {', '.join(gaps)}." if gaps else ""


@cache
def read_stated_minutes() -> Mapping[str, tuple[float, str]]:
    """Return by group of a published result the minutes that a submitter or a paper printed, and the source."""
    entries = parse_yaml((FOLDER / "stated.yaml").read_text("utf-8"))
    return {entry["group"]: (float(entry["minutes"]), str(entry["source"])) for entry in entries}


def count_rounds(rounds: Sequence[str]) -> dict[str, int]:
    """Count the results at hand of each public round."""
    return {round_: rounds.count(round_) for round_ in ROUNDS}
