"""The command `mlhpc report`: read and check logs, then write a page, a JSON document and tables into one folder."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from suite.cli.options import card_option
from suite.errors import DEFECT
from suite.files import print_line, write_whole

if TYPE_CHECKING:
    from analysis.page.report import Report

PARTS = ("report.html", "report.json", "tables")


HELP_GROUP = "Compare"
HELP_ORDER = 2


@click.command(
    epilog="""\b
Examples:
  mlhpc report runs/first -o report
  mlhpc report packages/ACME published/hpc_results_v3.0 -o comparison
  mlhpc report runs/first ceilings.json --what-if other-machine.json
  mlhpc report hpc_results_v1.0 --between "Fugaku 512" "Selene 1024"
  mlhpc report hpc_results_v3.0 --price "H100=2.50 USD/h" --price "A100=1.20 USD/h"
"""
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@card_option
@click.option("-o", "--output", default="report", show_default=True, type=click.Path(path_type=Path), help="Folder.")
@click.option(
    "--tables",
    "form",
    default="csv",
    show_default=True,
    type=click.Choice(["csv", "parquet"]),
    help="Form of the tables.",
)
@click.option(
    "--what-if",
    "what_if",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Ceilings of a machine to predict the runs' time for; may be repeated.",
)
@click.option(
    "--between",
    multiple=True,
    nargs=2,
    metavar="FROM TO",
    help="Two results, by their label or a part of it, whose speed-up is split into its factors; may be repeated.",
)
@click.option(
    "--price",
    "price",
    multiple=True,
    metavar="DEVICE=NUMBER UNIT/h",
    help="What an hour of one compute unit costs, e.g. 'H100=2.50 USD/h' or '... kWh/h'; or a YAML file. May be repeated.",
)
@click.option("--force", is_flag=True, help="Replace an existing report.")
def report(
    paths: tuple[Path, ...],
    output: Path,
    form: str,
    what_if: tuple[Path, ...],
    between: tuple[tuple[str, str], ...],
    price: tuple[str, ...],
    force: bool,
) -> None:
    """Compare results: one self-contained HTML page from run folders and results packages.

    PATHS are run folders, packages (<submitter>/results/...) or whole rounds, and files about their systems: ceilings
    (`mlhpc ceilings`), all-to-all sweeps (`mlhpc moe --sweep-network`), steps of `mlhpc demo`. OUTPUT gets
    report.html, report.json and tables/ with the same numbers; docs/tables.md says what the columns mean.
    """
    _refuse(output, form, force)
    from analysis.figures import is_ours
    from analysis.page.checked import check_paths
    from analysis.page.report import render_report
    from analysis.results.prices import read_prices
    from analysis.sources import read_sources
    from analysis.study import study
    from analysis.tables.workers import started
    from suite.descriptor import installed_cards

    prices = read_prices(price)
    sources = read_sources(paths, what_if)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns at length if the home folder cannot be written
    checked = started(check_paths, sources.logs)  # in a second process: the check reads the same logs by its own rules
    loaded = study(sources.logs, installed_cards(), sources.inputs, sources.networks, between, prices)
    rendered = render_report(loaded, checked(), sources.failures)
    _write(rendered, output, form)
    size = (output / "report.html").stat().st_size / 1e6
    print_line(
        f"{output / 'report.html'}  {size:.2f} MB; numbers: {output / 'report.json'}, {output / 'tables'}/*.{form}"
    )
    for _, text in rendered.defects:
        print_line(f"mlhpc: {text}", error=True)
    if any(is_ours(figure) for figure, _ in rendered.defects):
        sys.exit(DEFECT)


def _refuse(output: Path, form: str, force: bool) -> None:
    """Raise UsageError, before anything is read, if the report could not be written."""
    existing = [path for name in PARTS if (path := output / name).exists()]
    if existing and not force:
        raise click.UsageError(f"{existing[0]} exists; --force replaces it")
    if output.is_file():
        raise click.UsageError(f"-o {output}: is a file; the report is a folder")
    if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise click.UsageError("--tables parquet needs pyarrow: pip install 'mlhpc[parquet]'")


def _write(rendered: Report, output: Path, form: str) -> None:
    """Write every part under a temporary name and rename it; the page is last, so that its numbers always exist."""
    output.mkdir(parents=True, exist_ok=True)
    part, tables = output / "tables.part", output / "tables"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for name, frame in rendered.frames.items():
        if form == "parquet":
            frame.to_parquet(part / f"{name}.parquet", index=False)
        else:
            (part / f"{name}.csv").write_text(rendered.csv[name], encoding="utf-8", errors="replace")
    shutil.rmtree(tables, ignore_errors=True)
    part.rename(tables)
    for name, text in (("report.json", rendered.json), ("report.html", rendered.html)):
        write_whole(output / name, text)
