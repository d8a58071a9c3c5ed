"""The command `mlhpc published`: recompute the shipped table of published scores from clones of the public rounds."""

from __future__ import annotations

import json
from pathlib import Path

import click

from analysis.published.scores import ROUNDS, SHIPPED, count_rounds, render
from suite.files import print_line, write_whole

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
def published(folders: tuple[Path, ...], output: Path | None) -> None:
    """Regenerate the table of published scores from clones of https://github.com/mlcommons/hpc_results_v*.

    FOLDERS are the clones. What they do not hold is missing from the table and named by it and by every report.
    """
    from analysis.study import study

    path = output or SHIPPED
    text = render(study(folders, {}))
    write_whole(path, text)
    rows = json.loads(text)["rows"]
    print_line(f"{path}: {len(rows)} results")
    for round_, at_hand in count_rounds([row[1] for row in rows]).items():
        if at_hand < ROUNDS[round_]:
            print_line(f"  missing: {round_}, {ROUNDS[round_] - at_hand} of {ROUNDS[round_]} results")
