"""`mlhpc package`: builds a results package from run folders, or proves one unchanged."""

from __future__ import annotations

from pathlib import Path

import click

from suite.compliance.group_rules import changed_files
from suite.package import build_package
from suite.system import read_description

_SYSTEMS = Path("submissions") / "systems"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--org", "--submitter", "org", help="Submitter; default: submission_org of the logs.")
@click.option("--system", help="Name of the system; a file submissions/systems/<name>.yaml or a path may describe it.")
@click.option(
    "-o", "--output", default="submissions", show_default=True, type=click.Path(file_okay=False, path_type=Path)
)
@click.option("--division", type=click.Choice(["closed", "open"]), help="Default: that of the logs.")
@click.option("--status", help="Availability of the system; default: submission_status of the logs.")
@click.option("--verify", is_flag=True, help="RUNS are packages: prove them unchanged since they were built.")
def package(
    runs: tuple[Path, ...],
    org: str | None,
    system: str | None,
    output: Path,
    division: str | None,
    status: str | None,
    verify: bool,
) -> None:
    """Build <output>/<org>/{systems,benchmarks,results} from run folders.

    Logs are copied byte for byte; nothing is overwritten. Results of another size or shape get their own system folder.

    \b
    Examples:
      mlhpc package runs/cosmoflow-mini-20260101T120000Z --org ACME --system mycluster
      mlhpc package runs/A runs/B --org ACME --system submissions/systems/mycluster.yaml -o submissions
      mlhpc package --verify submissions/ACME
    """
    if verify:
        _verify(runs)
        return
    if system is None:
        raise click.UsageError("Missing option '--system'")
    file = _system_file(system)
    built = build_package(
        runs,
        system=Path(system).stem if file is not None else system,
        out=output,
        org=org,
        division=division,
        status=status,
        stated=read_description(file) if file is not None else None,
    )
    for result in built.results:
        click.echo(f"{built.folder / result.place}: {len(result.scored)} runs")
    for note in built.notes:
        click.echo(f"note: {note}")
    click.echo(f"{built.folder}: package complete; next: mlhpc check {built.folder}")


def _system_file(system: str) -> Path | None:
    path = Path(system)
    if path.suffix in (".yaml", ".yml"):
        return path
    shipped = _SYSTEMS / f"{system}.yaml"
    return shipped if shipped.is_file() else None


def _verify(packages: tuple[Path, ...]) -> None:
    bad = 0
    for folder in packages:
        changes = [f"{path}: {message}" for _, path, message in changed_files(folder)]
        click.echo("\n".join(changes) if changes else f"{folder}: unchanged")
        bad += len(changes)
    if bad:
        raise click.exceptions.Exit(1)
