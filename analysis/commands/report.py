"""The command `mlhpc report`: read and check logs, then write a page, a JSON document and tables into one folder."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlhpc.suite.cli.options import busy_option, card_option, output_option
from mlhpc.suite.cli.progress import make_plain_progress
from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import (
    add_path_to_errors,
    make_folder,
    make_scratch_folder,
    print_line,
    print_progress,
    refuse_link,
    write_file_of_folder,
)
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.plugins import EXCHANGE, explain_missing_wing, list_missing_wings, load_export, mark_missing_wing

if TYPE_CHECKING:
    from mlhpc.analysis.page.issues import CheckedPath
    from mlhpc.analysis.page.report import Report
    from mlhpc.analysis.sources.readers import Sources
    from mlhpc.analysis.study import Study

OUTPUT_NAMES = ("report.html", "report.json", "tables")
LOOK_EVERY_S = 5.0  # between two looks of --watch at the files
LEAST_PAUSE_S, PAUSE_SHARE = 15.0, 20.0  # between two reports of --watch: seconds, and times what the last one took
LAST_BYTES = 100_000  # of a log, where its run_stop is
BRIEF = "brief.html"
SILENT_S = 600.0  # --watch ends after so long without a change
LEAST_REPORT_BYTES = 2**20  # what a report takes at least on the disk, with its tables
FIGURE_FORMATS = ("svg", "png", "pdf")  # of files with figures
THEMES = ("page", "slides")  # of these files
ADDS_TO_REPORTS = ("network", "tune")  # wings with figures, or with files for them


@click.command(
    epilog="""\b
Examples:
  mlhpc report runs/first -o report
  mlhpc report packages/ACME published/hpc_results_v3.0 -o comparison
  mlhpc report runs/first ceilings.json --what-if other-machine.json
  mlhpc report hpc_results_v1.0 --between "Fugaku 512" "Selene 1024"
  mlhpc report hpc_results_v3.0 --price "H100=2.50 USD/h" --price "A100=1.20 USD/h"
  mlhpc report hpc_results_v1.0 --index weights.yaml --reference Perlmutter
  mlhpc report packages/ACME --figures png,pdf
  mlhpc report packages/ACME --brief
  mlhpc report runs/first --watch             the page grows while runs last
  mlhpc report runs/* --form tensorboard -o boards
"""
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@card_option
@output_option("Folder of the report. With --form the folder or file to write.", "report")
@click.option(
    "--form",
    "tool",
    type=click.Choice(["mlflow", "tensorboard", "prometheus"]),
    help=mark_missing_wing(
        EXCHANGE, "Instead of a report, write metric and loss of each run for this tool (docs/exchange.md)."
    ),
)
@click.option(
    "--tables",
    "form",
    default="csv",
    show_default=True,
    type=click.Choice(["csv", "parquet"]),
    help="File format of the tables.",
)
@click.option(
    "--what-if",
    "what_if",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Predict the runs' time on another machine, from its `mlhpc ceilings` file; repeatable.",
)
@click.option(
    "--between",
    multiple=True,
    nargs=2,
    metavar="FROM TO",
    help=(
        "Split the speed-up between two results into its factors; repeatable. "
        "A part of a label names a result, such as Fugaku 512."
    ),
)
@click.option(
    "--price",
    "price",
    multiple=True,
    metavar="DEVICE=NUMBER UNIT/h",
    help="Cost of one device for an hour, such as 'H100=2.50 USD/h', or a YAML file of such lines; repeatable.",
)
@click.option(
    "--index",
    "weights",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=(
        "One number for each system: the geometric mean of its speeds against --reference, with the weights of this "
        "YAML file (docs/report.md)."
    ),
)
@click.option("--reference", metavar="SYSTEM", help="With --index: the system that counts as 1.")
@click.option(
    "--figures",
    "forms",
    metavar="FORM,...",
    default="",
    help=f"Also write every figure as a file into figures/: {', '.join(FIGURE_FORMATS)}, or several, such as png,pdf.",
)
@click.option(
    "--theme",
    type=click.Choice(THEMES),
    default=THEMES[0],
    show_default=True,
    help="Of the files with figures: slides have larger texts and wider charts.",
)
@click.option("--brief", is_flag=True, help="Also write brief.html: two A4 pages with five sentences and two figures.")
@click.option(
    "--watch",
    is_flag=True,
    help="Write the report again whenever logs change, until all runs ended. It reloads itself.",
)
@busy_option()
@click.option("--force", is_flag=True, help="Replace the report in OUTPUT.")
def report(
    paths: tuple[Path, ...],
    output: Path | None,
    tool: str | None,
    form: str,
    what_if: tuple[Path, ...],
    between: tuple[tuple[str, str], ...],
    price: tuple[str, ...],
    weights: Path | None,
    reference: str | None,
    forms: str,
    theme: str,
    brief: bool,
    watch: bool,
    busy: bool,
    force: bool,
) -> None:
    """Write one HTML page that compares run folders, packages and published rounds.

    PATHS are run folders, packages (<submitter>/results/...) or whole rounds. Some commands write files that add to the
    page: `mlhpc ceilings`, `mlhpc moe --sweep-network`, `mlhpc demo` (steps.json), `mlhpc ab runs show -o`.

    OUTPUT gets report.html, and the same numbers as report.json and tables/; docs/tables.md explains the columns.
    """
    if tool is not None:
        for text in load_export(tool, f"--form {tool}")(paths, output):
            print_line(text)
        return
    if (weights is None) != (reference is None):
        missing = "--reference SYSTEM" if reference is None else "--index WEIGHTS"
        raise click.UsageError(f"--index and --reference need each other: state {missing} as well")
    output = output or Path("report")
    wanted = _parse_formats(forms)
    _refuse(output, form, wanted, force)

    def make(reload_s: int = 0) -> Report:
        """Write the report; a page with ``reload_s`` reloads itself."""
        from mlhpc.analysis.page.pictures import ChartFiles
        from mlhpc.analysis.page.report import render_report
        from mlhpc.analysis.sources.readers import read_sources

        found = read_sources(paths, what_if)
        index = (weights, reference) if weights and reference else None
        read, checked = _read_study(found, between, price, index, busy=busy)
        tell = make_plain_progress("drawing figures", time.monotonic)
        files = ChartFiles(wanted, theme)
        rendered = render_report(read, checked, found.steps, form, files, tell, brief=brief, reload_s=reload_s)
        _write(rendered, output, form)
        return rendered

    # Imports stand inside of functions, so that `mlhpc report --help` needs no pandas
    with _make_output_folder(output):
        for wing in list_missing_wings():
            if wing in ADDS_TO_REPORTS:
                print_line(f"mlhpc: warning: {explain_missing_wing(wing)}; the report is without it", error=True)
        rendered = _write_until_ended(paths, output, make) if watch else make()
    size = (output / "report.html").stat().st_size / 1e6
    drawn = f", {output / 'figures'}/*" if wanted else ""
    print_line(
        f"{output / 'report.html'}  {size:.2f} MB; numbers: {output / 'report.json'}, "
        f"{output / 'tables'}/*.{form}{drawn}{f', {output / BRIEF}' if brief else ''}"
    )
    for _, text in rendered.defects:
        print_line(f"mlhpc: {text}", error=True)
    from mlhpc.analysis.figures import is_ours

    # A figure of another package that fails is no defect of ours
    if any(is_ours(figure) for figure, _ in rendered.defects):
        sys.exit(ExitCode.DEFECT)


def _write_until_ended(paths: tuple[Path, ...], output: Path, make: Callable[[int], Report]) -> Report:
    """Write the report after each change of the logs, until every run ended or nothing changed for `SILENT_S`.

    Runs that have no log yet are waited for. The last page does not reload itself.
    """
    before, last_change = None, time.monotonic()
    while (left := _count_runs_left(paths)) and time.monotonic() - last_change < SILENT_S:
        state = _list_log_states(paths)
        if state and state != before:
            before, last_change = state, time.monotonic()
            make(round(LEAST_PAUSE_S))
            took_s = time.monotonic() - last_change
            print_progress(f"{output / 'report.html'}: {left} to go", error=True)
            # Drawing takes the CPUs of the runs, so it must be rare
            time.sleep(max(LEAST_PAUSE_S, PAUSE_SHARE * took_s))
        time.sleep(LOOK_EVERY_S)
    return make(0)


def _list_log_states(paths: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    """List the logs with their sizes and times."""
    logs = sorted(log for path in paths for log in ([path] if path.is_file() else path.rglob("result_*.txt")))
    return [(str(log), state.st_size, state.st_mtime_ns) for log in logs for state in [log.stat()]]


def _count_runs_left(paths: tuple[Path, ...]) -> str:
    """Say how many runs of the run folders have not ended; empty if all have."""
    left = 0
    for folder in (RunFolder(info.parent) for path in paths for info in path.rglob("run.json")):
        logs = list(folder.root.glob("result_*.txt"))
        ended = sum(b'"run_stop"' in log.read_bytes()[-LAST_BYTES:] for log in logs)
        left += max(0, folder.read_info().runs - ended)
    return f"{left} run{'' if left == 1 else 's'}" if left else ""


def _read_study(
    found: Sources,
    between: tuple[tuple[str, str], ...],
    price: tuple[str, ...],
    index: tuple[Path, str] | None,
    *,
    busy: bool,
) -> tuple[Study, list[CheckedPath]]:
    """Read and judge the logs, with a line of progress every few seconds. What the user states is tried before that."""
    from mlhpc.analysis.page.issues import check_paths
    from mlhpc.analysis.results.index import compute_index, find_system, read_prices, read_weights
    from mlhpc.analysis.study import mark_not_ranked, read_study
    from mlhpc.suite.descriptor import list_installed_cards

    # Before the logs, which take minutes: a typing error is reported at once
    prices = read_prices(price)
    cards = list_installed_cards()
    weights = read_weights(index[0], [card.mlperf_name for card in cards.values()]) if index else None
    # Lines and no progress bar: a bar runs in a thread, and a process with threads must not be forked
    reading = make_plain_progress("reading logs", time.monotonic)
    read = read_study(found.logs, cards, found.inputs, found.documents, between, prices, reading, judging=True)
    # What the user names must be there, before minutes of checking and drawing
    if prices is not None and (unknown := prices.without_result(read.results["device"].dropna().unique())):
        raise InputError("; ".join(unknown))
    if index:
        find_system(read.results[read.results["score_s"].notna()], index[1])
    checked = check_paths(found.logs, read.tables.judged)
    read = mark_not_ranked(read, (item.verdict for item in checked), busy=busy)
    if index and weights:
        read = replace(read, index=compute_index(read.ranked, read.runs, weights, index[1]))
    return read, checked


def _parse_formats(given: str) -> tuple[str, ...]:
    """Parse the forms of figures that a user names, each once."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in given.split(",") if name.strip()))
    unknown = [name for name in names if name not in FIGURE_FORMATS]
    if unknown:
        raise click.UsageError(
            f"--figures {given}: no format is called {unknown[0]!r}; expected one or several of"
            f" {', '.join(FIGURE_FORMATS)}"
        )
    return names


@contextmanager
def _make_output_folder(output: Path) -> Iterator[None]:
    """Make the folder and prove that it can be written, before minutes of work. Remove it if nothing was written."""
    # The deepest first, so that each is empty when its parent is removed
    new = [folder for folder in (output, *output.parents) if not folder.exists()]
    make_folder(output)
    try:
        with add_path_to_errors(output, output / ".writable"):
            # As many bytes as a report: a full disk or quota shows now
            write_file_of_folder(output / ".writable", bytes(LEAST_REPORT_BYTES))
        (output / ".writable").unlink()
        yield
    finally:
        for folder in new:
            with suppress(OSError):
                folder.rmdir()  # only an empty folder can be removed so


def _refuse(output: Path, form: str, forms: tuple[str, ...], force: bool) -> None:
    """Raise UsageError, before anything is read, if the report could not be written."""
    parts = (*OUTPUT_NAMES, "figures") if forms else OUTPUT_NAMES
    for name in (*parts, BRIEF, ".writable"):
        refuse_link(output / name)
    existing = [path for name in parts if (path := output / name).exists()]
    if existing and not force:
        raise click.UsageError(f"{existing[0]} exists already; --force replaces it")
    if output.exists() and not output.is_dir():
        raise click.UsageError(f"-o {output} is a file; expected a folder for the report")
    if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise click.UsageError(f"--tables parquet: {explain_not_installed('pyarrow')}")
    if forms and importlib.util.find_spec("vl_convert") is None:
        raise click.UsageError(f"--figures: {explain_not_installed('vl_convert')}")


def _write(rendered: Report, output: Path, form: str) -> None:
    """Write every part under a temporary name and rename it; the page is last, so that its numbers always exist."""
    with _replace_folder(output / "tables") as part:
        for name, frame in rendered.frames.items():
            if form == "parquet":
                frame.to_parquet(part / f"{name}.parquet", index=False)
            else:
                # errors="replace": a name in a log may have a lone surrogate
                (part / f"{name}.csv").write_text(rendered.csv[name], encoding="utf-8", errors="replace")
    if rendered.figures:
        with _replace_folder(output / "figures") as part:
            for name, content in rendered.figures.items():
                (part / name).write_bytes(content)
    written = {"report.json": rendered.json, **({BRIEF: rendered.brief} if rendered.brief else {})}
    for name, text in (written | {"report.html": rendered.html}).items():
        write_file_of_folder(output / name, text)


@contextmanager
def _replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to the one named; it takes the name when it is filled."""
    with make_scratch_folder(folder.parent, f".{folder.name}.") as scratch:
        part = scratch / folder.name
        with add_path_to_errors(folder, part):
            make_folder(part)
            yield part
            refuse_link(folder)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
