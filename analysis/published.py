"""Scores of the public MLPerf HPC rounds: the compact table that ships, how it is regenerated, what was stated elsewhere.

Numbers are recomputed from the public logs, facts with round and source; a round or result that was not at hand is
missing and named. `stated_minutes` holds what submitters printed, which is not always the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from suite.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

    from analysis.study import Study

VERSION = 1
TABLE = "published.json"
SOURCE = "https://github.com/mlcommons/hpc_results_"
ROUNDS: Mapping[str, int] = {"v0.7": 15, "v1.0": 31, "v2.0": 22, "v3.0": 22}  # results published in each
COLUMNS = {  # name in the table: name in the results of a study
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


HELP_GROUP = "Compare"
HELP_ORDER = 3


@click.command(
    epilog="""\b
Example:
  mlhpc published hpc_results_v0.7 hpc_results_v1.0 hpc_results_v3.0 -o published.json
"""
)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file. [the table this installation ships]")
def command(folders: tuple[Path, ...], output: Path | None) -> None:
    """Regenerate the table of published scores from clones of https://github.com/mlcommons/hpc_results_v*.

    FOLDERS are the clones. What they do not hold is missing from the table and named by it and by every report.
    """
    from analysis.study import study

    target = output or Path(str(files("analysis") / TABLE))
    text = written(study(folders, {}))
    write_whole(target, text)
    rows = json.loads(text)["rows"]
    click.echo(f"{target}: {len(rows)} results")
    for round_, at_hand in _at_hand([row[1] for row in rows]).items():
        if at_hand < ROUNDS[round_]:
            click.echo(f"  missing: {round_}, {ROUNDS[round_] - at_hand} of {ROUNDS[round_]} results")


def written(made: Study) -> str:
    """The table as JSON text: rounds with their source, then a list per result; floats with six digits."""
    rows = made.results[made.results["round"].isin(ROUNDS) & (made.results["size"] == "full")]
    lines = [[_short(row[name]) for name in COLUMNS.values()] for row in rows.to_dict("records")]
    head = {
        "version": VERSION,
        "what": "MLPerf HPC results recomputed from the public logs; times in seconds",
        "rounds": {
            round_: {"source": f"{SOURCE}{round_}", "results": count, "published": ROUNDS[round_]}
            for round_, count in _at_hand([line[1] for line in lines]).items()
        },
        "columns": list(COLUMNS),
    }
    body = ",\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{body}\n]\n}}\n'


@cache
def published() -> pd.DataFrame:
    """The table that ships, one row per result; columns of COLUMNS."""
    import pandas as pd

    document = json.loads((files("analysis") / TABLE).read_text("utf-8"))
    if document["version"] != VERSION:
        raise ValueError(f"{TABLE}: version {document['version']}, this suite reads {VERSION}; run `mlhpc published`")
    return pd.DataFrame(document["rows"], columns=document["columns"])


def missing() -> str:
    """What of the public rounds the table lacks, as a sentence; empty if nothing."""
    counts = _at_hand(published()["round"].to_list())
    gaps = [f"{r} ({ROUNDS[r] - n} of {ROUNDS[r]} results)" for r, n in counts.items() if n < ROUNDS[r]]
    return f"Not at hand when the table was made: {', '.join(gaps)}." if gaps else ""


@cache
def stated_minutes() -> Mapping[str, tuple[float, str]]:
    """Minutes that a submitter or a paper printed for a published result, with the source, by group."""
    entries = yaml.safe_load((files("analysis") / "stated.yaml").read_text("utf-8"))
    return {entry["group"]: (float(entry["minutes"]), str(entry["source"])) for entry in entries}


def _at_hand(rounds: Sequence[str]) -> dict[str, int]:
    return {round_: rounds.count(round_) for round_ in ROUNDS}


def _short(value: Any) -> Any:
    if value is None or (isinstance(value, float) and not math.isfinite(value)) or value != value:
        return None
    if hasattr(value, "item"):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value
