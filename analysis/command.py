"""The command `mlhpc report`: reads logs, asks the checker, writes page, JSON and CSV beside each other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from analysis.report import Report, Verdict


@click.command(
    epilog="""\b
Examples:
  mlhpc report runs/first -o report.html
  mlhpc report packages/ACME published/hpc_results_v3.0 -o comparison.html
"""
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", default="report.html", show_default=True, type=click.Path(path_type=Path), help="The page."
)
@click.option("--force", is_flag=True, help="Replace an existing report.")
def report(paths: tuple[Path, ...], output: Path, force: bool) -> None:
    """Compare results: one self-contained HTML page from run folders and results packages.

    PATHS are run folders, packages (<submitter>/results/...) or whole rounds. Beside OUTPUT come <stem>.json and
    <stem>_tables/*.csv with the same numbers; docs/tables.md says what the columns mean.
    """
    if output.suffix != ".html":
        raise click.UsageError(f"-o {output}: the page is HTML; give a name that ends in .html")
    document, tables = output.with_suffix(".json"), output.with_name(f"{output.stem}_tables")
    existing = [path for path in (output, document, tables) if path.exists()]
    if existing and not force:
        raise click.UsageError(f"{existing[0]} exists; --force replaces it")
    if not output.parent.is_dir():
        raise click.UsageError(f"{output.parent}: no such folder")

    from analysis.report import build
    from analysis.study import study
    from analysis.targets import installed_cards

    made = build(study(paths, installed_cards()), [verdict(path) for path in paths])
    _write(made, output, document, tables)
    click.echo(f"{output}  {output.stat().st_size / 1e6:.2f} MB; numbers: {document}, {tables}/")


def verdict(path: Path) -> Verdict:
    """What the compliance check says of a path; files are named from the path's last part on."""
    from analysis.report import Finding, Verdict
    from suite.compliance.check import check

    said = check([path])
    place = str(path.resolve().parent) + "/"
    findings = tuple(Finding(f.rule, f.severity, _below(f.file, path, place), f.line, f.message) for f in said.findings)
    return Verdict(path.resolve().name, said.rulesets, said.logs, said.compliant, findings)


def _below(file: str, path: Path, place: str) -> str:
    return str(Path(file).resolve()).removeprefix(place) if Path(file).is_absolute() or Path(file).exists() else file


def _write(made: Report, output: Path, document: Path, tables: Path) -> None:
    """Everything beside first, then renamed; the page last, so that a page is never without its numbers."""
    part = tables.with_name(f"{tables.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for name, text in made.csv.items():
        (part / f"{name}.csv").write_text(text, encoding="utf-8", errors="replace")
    if tables.exists():
        shutil.rmtree(tables)
    part.rename(tables)
    for path, text in ((document, made.json), (output, made.html)):
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(path)
