"""`mlhpc check`: judges logs, results, packages and rounds. Reads only; exit code 1 for an error or if nothing was checked."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from suite.compliance.check import check as check_paths
from suite.compliance.group_rules import GROUP_RULES
from suite.compliance.output import FORMATS, print_table
from suite.compliance.rules import EXPLANATIONS, LOG_RULES
from suite.compliance.ruleset import ruleset, ruleset_names
from suite.errors import InputError
from suite.files import print_line

HELP_GROUP = "Package and check"
HELP_ORDER = 2


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--ruleset", "ruleset_name", help="0.7.0, 1.0.0, 2.0.0, 3.0.0 or mlhpc-1.0. [found from the content, and printed]"
)
@click.option("--format", "style", type=click.Choice(list(FORMATS)), default="table", show_default=True)
@click.option("--official", is_flag=True, help="Also run mlperf_logging 4.1.68 on a copy and show its verdict.")
@click.option("--explain", metavar="RULE", help="Print what a rule asks, why, and how each ruleset weighs it.")
@click.option(
    "--write-official-rules",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write rule files of every workload and size for mlperf_logging's own engine.",
)
def check(
    paths: tuple[Path, ...],
    ruleset_name: str | None,
    style: str,
    official: bool,
    explain: str | None,
    write_official_rules: Path | None,
) -> None:
    """Check logs, results folders, packages or a whole round.

    Exit code 0: compliant; 1: an error was found, or there was nothing to check; 2: usage.

    \b
    Examples:
      mlhpc check runs/cosmoflow-mini-20260101T120000Z
      mlhpc check submissions/ACME --official
      mlhpc check hpc_results_v3.0 --format json
      mlhpc check --explain last-eval
    """
    if explain is not None:
        print_line(explanation(explain))
        return
    if write_official_rules is not None:
        from suite.compliance.official_rules import write_rules

        print_line("\n".join(map(str, write_rules(write_official_rules))))
        return
    if not paths:
        raise click.UsageError("Missing argument 'PATH...'")
    if ruleset_name is not None:
        ruleset(ruleset_name)
    verdict = check_paths(list(paths), ruleset_name)
    if style == "table" and sys.stdout.isatty():
        print_table(verdict)
    else:
        print_line(FORMATS[style](verdict))
    accepted = True
    if official:
        from suite.compliance.official import run_official

        official_verdict = run_official(list(paths))
        print_line(official_verdict.text(), error=style != "table")
        accepted = official_verdict.accepted
    if not verdict.compliant or not accepted:
        raise click.exceptions.Exit(1)


def explanation(rule: str) -> str:
    """The text that `--explain` prints. InputError, with the list of rules, for an unknown rule."""
    if rule not in EXPLANATIONS:
        raise InputError(f"unknown rule {rule!r}; rules: {', '.join(EXPLANATIONS)}")
    info = EXPLANATIONS[rule]
    scope = "one log" if rule in LOG_RULES else "the runs of a result" if rule in GROUP_RULES else "a package"
    weights = ", ".join(f"{name}: {ruleset(name).severity(rule) or 'not looked for'}" for name in ruleset_names())
    return f"{rule} ({scope})\n  {info.explanation}\n  reference: {info.reference}\n  severity: {weights}"
