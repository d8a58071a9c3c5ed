"""`mlhpc check`: judges logs, results, packages and rounds. Exit code 1 for an error or an empty check."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from mlhpc.suite.cli.options import JSON, TEXT, card_option, format_option
from mlhpc.suite.compliance.check import Verdict
from mlhpc.suite.compliance.check import check as check_paths
from mlhpc.suite.compliance.exchange.review_files import add_waivers, read_reference_points, read_waivers
from mlhpc.suite.compliance.official import run_official, write_rules
from mlhpc.suite.compliance.output import (
    explain_rule,
    print_table,
    render_json,
    render_junit,
    render_rule_list,
    render_table,
)
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line

FORMATS: dict[str, Callable[[Verdict], str]] = {
    "text": render_table,
    "json": render_json,
    "junit": render_junit,
}


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@card_option
@click.option(
    "--ruleset",
    "ruleset_name",
    metavar="NAME",
    help=f"Judge by these rules: {', '.join(list_rulesets())}. [those of the log or its folder]",
)
@format_option(*(name for name in FORMATS if name not in (TEXT, JSON)), meaning="; junit prints XML for CI systems")
@click.option(
    "--official",
    is_flag=True,
    help="Also run MLCommons' checker (mlperf_logging 4.1.68) on a copy, and show its verdict.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning"]),
    default="error",
    show_default=True,
    help="Lowest severity that gives exit code 1.",
)
@click.option(
    "--waive",
    "waive_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=(
        "YAML file of findings that reviewers accept: a list `waivers` of rule, path, reason, who. "
        "They are listed, but do not count."
    ),
)
@click.option(
    "--rcp",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=(
        "Epochs that reference runs needed, for batch sizes that the rules lack: "
        "JSON file of `mlhpc workload rcp record` or of MLCommons' rcp_checker."
    ),
)
@click.option(
    "--explain",
    metavar="RULE",
    help=(
        "Print what a rule asks, why, its severity, and how to mend a finding, such as --explain last-eval; check"
        " nothing."
    ),
)
@click.option("--list-rules", is_flag=True, help="Print all rules, one on each line.")
@click.option(
    "--write-official-rules",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write rule files for MLCommons' checker (mlperf_logging), one for each workload and size.",
)
def check(
    paths: tuple[Path, ...],
    ruleset_name: str | None,
    style: str,
    official: bool,
    fail_on: str,
    waive_file: Path | None,
    rcp: Path | None,
    explain: str | None,
    list_rules: bool,
    write_official_rules: Path | None,
) -> None:
    """Check logs, packages or a whole round against the rules, and list what breaks them.

    PATHS are logs, run folders, results folders, packages or rounds.

    Exit code 0: compliant. Exit code 1: an error was found, or with --fail-on warning a warning. Exit code 2: usage, or
    nothing to check.

    \b
    Examples:
      mlhpc check runs/cosmoflow-mini-20260101T120000Z
      mlhpc check submissions/ACME --official
      mlhpc check hpc_results_v3.0 --format json
      mlhpc check submissions/ACME --fail-on warning --waive waivers.yaml
      mlhpc check --explain last-eval
    """
    if explain is not None:
        print_line(explain_rule(explain))
    elif list_rules:
        print_line(render_rule_list())
    elif write_official_rules is not None:
        print_line("\n".join(map(str, write_rules(write_official_rules))))
    elif not paths:
        raise click.UsageError("give PATHS to check, such as runs/mine; mlhpc help check says what they can be")
    else:
        verdict = _check_paths(paths, ruleset_name, waive_file, rcp)
        _print_verdict(verdict, style)
        good = verdict.compliant and not (fail_on == "warning" and verdict.count("warning"))
        if official:
            official_verdict = run_official(list(paths))
            # JSON and JUnit go to standard output alone: a program reads them.
            print_line(official_verdict.text(), error=style != TEXT)
            good = good and official_verdict.accepted
        # An empty check must not pass: a wrong path in a CI job would look like a compliant result.
        if not verdict.logs and not verdict.packages:
            raise click.exceptions.Exit(ExitCode.USAGE)
        if not good:
            raise click.exceptions.Exit(ExitCode.FINDINGS)


def _check_paths(
    paths: tuple[Path, ...], ruleset_name: str | None, waive_file: Path | None, rcp: Path | None
) -> Verdict:
    """Check the paths. Every other file is read first, so that a mistake in it ends the command at once."""
    if ruleset_name is not None:
        read_ruleset(ruleset_name)
    # Checking a round takes minutes, reading these files does not.
    given = read_reference_points(rcp) if rcp is not None else None
    waivers = read_waivers(waive_file, paths) if waive_file is not None else None
    verdict = check_paths(list(paths), ruleset_name, given)
    return verdict if waivers is None else add_waivers(verdict, waivers)


def _print_verdict(verdict: Verdict, style: str) -> None:
    if style == TEXT and sys.stdout.isatty():
        print_table(verdict)
    else:
        print_line(FORMATS[style](verdict))
