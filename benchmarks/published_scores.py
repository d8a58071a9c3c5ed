"""Recompute the shipped table of published scores from clones of the public rounds.

python benchmarks/published_scores.py hpc_results_v0.7 hpc_results_v1.0 hpc_results_v2.0 hpc_results_v3.0 -o published.json
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from mlhpc.analysis.published.scores import ROUNDS, SOURCE, VERSION, count_rounds
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.cli.options import output_option
from mlhpc.suite.files import print_line, write_file_atomically

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
    "precision": "precision",
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
    "first_epoch_extra_s": "first_epoch_extra_s.mean",
    "train_s": "train_s.mean",
    "eval_s": "eval_s.mean",
    "other_s": "other_s.mean",
    "train_rate": "train_rate.mean",
    "unit_hours": "unit_hours",
    "carried_over_from": "carried_over_from",
}


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@output_option("New JSON file.", "published.json")
@click.option("--force", is_flag=True, help="Replace an existing file.")
def main(folders: tuple[Path, ...], output: Path | None, force: bool) -> None:
    """Regenerate the table of published scores from clones of https://github.com/mlcommons/hpc_results_v*.

    FOLDERS are the clones. What they do not hold is missing from the table and named by it and by every report. The table that
    this installation ships is replaced only when it is named: -o analysis/published/scores.json --force.
    """
    path = output or Path("published.json")
    if path.exists() and not force:
        raise click.UsageError(f"{path} exists; --force replaces it")
    text = render(read_study(folders, {}))
    write_file_atomically(path, text)
    rows = json.loads(text)["rows"]
    print_line(f"{path}: {len(rows)} results")
    for round_, at_hand in count_rounds([row[1] for row in rows]).items():
        if at_hand < ROUNDS[round_]:
            print_line(f"  missing: {round_}, {ROUNDS[round_] - at_hand} of {ROUNDS[round_]} results")


def render(study: Study) -> str:
    """Render the table as JSON text: rounds with their source, then one list per result; floats with six digits."""
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


def _short(value: Any) -> Any:
    """Return a value for JSON: None for missing and non-finite ones, floats with six digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)) or value != value:
        return None
    if hasattr(value, "item"):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
