"""`mlhpc package`: builds a results package from run folders, or verifies that packages are unchanged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args, get_type_hints

import click

from mlhpc.suite.cli.options import FiniteRange, card_option, output_option
from mlhpc.suite.compliance.package_files import check_manifest
from mlhpc.suite.config import Submission
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, quote_path
from mlhpc.suite.launch.job import read_system
from mlhpc.suite.log.results_tree import MANIFEST
from mlhpc.suite.machine.system import read_description
from mlhpc.suite.package.build import Package, build_package
from mlhpc.suite.package.redaction import KINDS
from mlhpc.suite.plugins import EXCHANGE, load_export, mark_missing_wing

_SYSTEMS = Path("submissions") / "systems"  # as in the repository; another place is a path to --system


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@card_option
@click.option(
    "--submitter",
    metavar="ORG",
    help="Your organisation. If the logs name none, the package says that it was stated late. "
    "[submission_org of the logs]",
)
@click.option(
    "--system",
    help="System the runs were made on: a name, or a .yaml file that describes it. "
    "A name finds submissions/systems/<name>.yaml, if it exists. Required without --verify.",
)
@output_option("Folder of the package, named like the submitter; an existing package is extended.", "submissions/ORG")
@click.option(
    "--division",
    type=click.Choice(["closed", "open"]),
    help="Division of the rules: closed fixes the model and most settings, open does not. [as in the logs]",
)
@click.option(
    "--status",
    type=click.Choice(get_args(get_type_hints(Submission)["status"])),
    help="Availability of the system, such as cloud or onprem. [submission_status of the logs]",
)
@click.option(
    "--count-failed", is_flag=True, help="Count a log without run_stop as a failed run; one run of a result may fail."
)
@click.option(
    "--redact",
    default="",
    metavar="KINDS",
    help="Replace names of hosts, paths or the Slurm account in the package's files, such as --redact hosts,paths. "
    "Passwords and tokens are always removed. [none]",
)
@click.option(
    "--power",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="CSV",
    help=mark_missing_wing(
        EXCHANGE, "CSV file with the readings of an external power meter, for an energy score (docs/energy.md)."
    ),
)
@click.option(
    "--power-columns",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="YAML",
    help="YAML file that names the columns of --power, their unit and what the meter measures (docs/energy.md). "
    "[known from the head of a table of nvidia-smi, amd-smi, rocm-smi, jpwr or sacct]",
)
@click.option(
    "--network-power",
    "network_w",
    type=FiniteRange(0, 1e9, min_open=True),
    metavar="WATTS",
    help="Estimated power of the network, added to the energy: its maximum rated power times the share that the runs "
    "used, such as 1200.",
)
@click.option(
    "--verify", is_flag=True, help="Only check that packages are unchanged since they were built; RUNS are packages."
)
def package(
    runs: tuple[Path, ...],
    submitter: str | None,
    system: str | None,
    output: Path | None,
    division: str | None,
    status: str | None,
    count_failed: bool,
    redact: str,
    power: Path | None,
    power_columns: Path | None,
    network_w: float | None,
    verify: bool,
) -> None:
    """Build a submitter's results package from run folders.

    Logs are copied byte for byte, and no file is overwritten. Runs of another size or number of nodes get a system
    folder of their own.

    \b
    Examples:
      mlhpc package runs/cosmoflow-mini-20260101T120000Z --system mycluster --submitter ACME -o submissions/ACME
      mlhpc package runs/A runs/B --system submissions/systems/mycluster.yaml --submitter ACME
      mlhpc package runs/A --system mycluster --power pdu.csv --power-columns pdu.yaml
      mlhpc package --verify submissions/ACME
    """
    if verify:
        _verify_packages(runs)
        return
    if system is None:
        raise click.UsageError("--system is missing: name the system the runs were made on, such as --system mycluster")
    if power is None and power_columns is not None:
        raise click.UsageError("--power-columns says what the columns of --power mean: give both")

    name, stated, system_submitter = system, None, None
    file = _find_system_file(system)
    if file is not None:
        system_submitter = read_system(file).submitter
        # A path stands for the system's name too: the package's folders have it.
        name, stated = Path(system).stem, read_description(file)
    meter = None
    if power is not None:
        meter = load_export("power-meter", "--power")(power, power_columns)
    built = build_package(
        runs,
        system=name,
        out=output,
        submitter=submitter,
        division=division,
        status=status,
        stated=stated,
        count_failed=count_failed,
        redact=_parse_redactions(redact),
        meter=meter,
        network_w=network_w,
        system_submitter=system_submitter,
    )
    _print_package(built)


def _print_package(built: Package) -> None:
    for result in built.results:
        pruned = f", {len(result.pruned)} pruned" if result.pruned else ""
        print_line(f"{built.folder / result.folder}: {len(result.scored)} run{'s' * (len(result.scored) != 1)}{pruned}")
    for note in built.notes:
        print_line(f"note: {note}")
    for text in built.personal:
        print_line(text)
    for warning in built.warnings:
        print_line(f"warning: {warning}")
    for text in built.incomplete:
        print_line(f"incomplete: {text}")
    state = "incomplete: see above" if built.incomplete else "complete"
    print_line(f"{built.folder}: package {state}; next: mlhpc check {quote_path(built.folder)}")


def _parse_redactions(text: str) -> list[str]:
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise click.UsageError(f"--redact {unknown[0]!r}: expected some of {', '.join(KINDS)}, separated by commas")
    return kinds


def _find_system_file(system: str) -> Path | None:
    """Find the system file of --system, a path or a name in submissions/systems. None if there is none."""
    path = Path(system)
    if path.suffix in (".yaml", ".yml"):
        return path
    shipped = _SYSTEMS / f"{system}.yaml"
    return shipped if shipped.is_file() else None


def _verify_packages(packages: tuple[Path, ...]) -> None:
    """Print how each package differs from its manifest. Exit code 1 if one does. InputError if a path is no package."""
    for folder in packages:
        # A path that is no package ends the command before anything is printed of the others.
        if not any(os.path.lexists(folder / name) for name in (MANIFEST, "results", "systems")):
            raise InputError(f"{folder}: not a package (no {MANIFEST} and no results/); mlhpc package RUNS builds one")
    count = 0
    for folder in packages:
        changes = [f"{path}: {message}" for _, path, message in check_manifest(folder)]
        print_line("\n".join(changes) if changes else f"{folder}: unchanged")
        count += len(changes)
    if count:
        if any((folder / MANIFEST).exists() for folder in packages):
            print_line(
                "what changed is not what was packaged: copy the package again, or build it again: mlhpc package RUNS",
                error=True,
            )
        raise click.exceptions.Exit(ExitCode.FINDINGS)
