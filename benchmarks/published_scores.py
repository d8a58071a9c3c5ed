"""Recompute the shipped table of published scores from clones of the public rounds.

    python benchmarks/published_scores.py hpc_results_v0.7 hpc_results_v1.0 hpc_results_v2.0 hpc_results_v3.0 -o published.json
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from analysis.published.scores import ROUNDS, count_rounds, render
from analysis.study import study
from suite.cli.options import output_option
from suite.files import print_line, write_whole


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
    text = render(study(folders, {}))
    write_whole(path, text)
    rows = json.loads(text)["rows"]
    print_line(f"{path}: {len(rows)} results")
    for round_, at_hand in count_rounds([row[1] for row in rows]).items():
        if at_hand < ROUNDS[round_]:
            print_line(f"  missing: {round_}, {ROUNDS[round_] - at_hand} of {ROUNDS[round_]} results")


if __name__ == "__main__":
    main()
