"""`mlhpc export`: writes results and the events of runs in the forms that other tools read. Reads only what it exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from suite.cli.options import card_option, output_option
from suite.compliance.check import check
from suite.compliance.exchange.result_forms import RESULT_FORMS
from suite.exit_codes import ExitCode
from suite.files import print_line, write_whole
from suite.log.export.mlflow_store import write_mlflow
from suite.log.export.prometheus_text import render_prometheus
from suite.log.export.series import RunSeries, read_series
from suite.log.export.tensorboard_files import write_tensorboard

PROMETHEUS = "prometheus"
FOLDERS: dict[str, Callable[[RunSeries, Path], Path]] = {"mlflow": write_mlflow, "tensorboard": write_tensorboard}


@click.command()
@click.argument("form", type=click.Choice([*RESULT_FORMS, PROMETHEUS, *FOLDERS]))
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@card_option
@output_option("File to write; of mlflow and tensorboard the folder.", "standard output; mlruns or tensorboard")
def export(form: str, paths: tuple[Path, ...], output: Path | None) -> None:
    """Write results, or the events of runs, for other tools.

    \b
    Of results, with the checker's verdict on each:
      fom          a line for each figure of merit, for ReFrame, JUBE, Ramble
      jsonl        a JSON document for each result, with a schema
      bencher      Bencher Metric Format
      superbench   SuperBench's results.jsonl
    Of the events of each run:
      prometheus   last values, for the textfile collector of the node exporter
      mlflow       a file store of MLflow
      tensorboard  event files

    Exit code 0 if something was exported, compliant or not; 1 if there was nothing.

    \b
    Examples:
      mlhpc export fom runs/cosmoflow-mini-20260101T120000Z
      mlhpc export jsonl submissions/ACME -o results.jsonl
      mlhpc export tensorboard runs/* -o boards
    """
    if form in FOLDERS:
        folder = output or Path("mlruns" if form == "mlflow" else form)
        count = 0
        for run in read_series(paths):
            print_line(str(FOLDERS[form](run, folder)))
            count += 1
        print_line(f"{folder}: {count} runs for {form}")
        return
    scored = [] if form == PROMETHEUS else check(list(paths)).results
    text = render_prometheus(read_series(paths)) if form == PROMETHEUS else RESULT_FORMS[form](scored)
    if not text.strip("{}\n"):
        print_line(f"mlhpc: no result_*.txt under {', '.join(map(str, paths))}: nothing to export", error=True)
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if output is None:
        print_line(text, end="")
    else:
        write_whole(output, text)
