"""`mlhpc environment`: shows the environment of a package's runs, writes a lock of it, and makes it anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from suite.cli.group import Subcommands
from suite.cli.options import JSON, format_option, output_option
from suite.errors import InputError
from suite.exit_codes import ExitCode
from suite.files import print_line, print_progress, write_whole
from suite.log.origin.installed import Environment, normal, read_environment
from suite.package.environment import (
    SUITE,
    Wheel,
    compare_installed,
    compare_suite,
    find_environment,
    list_wheels,
    match_wheels,
    others,
    render_lock,
    same_version,
)

LOCK = "requirements.lock"

_source = click.argument("source", type=click.Path(exists=True, path_type=Path))
_wheels = click.option(
    "--find-links", "wheels", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="WHEELHOUSE",
    help="Folder of wheels; no index is asked.",
)  # fmt: skip


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc environment show submissions/ACME
  mlhpc environment lock submissions/ACME --find-links wheelhouse -o requirements.lock
  mlhpc environment create submissions/ACME --find-links wheelhouse -o venv    without a network
  mlhpc environment create submissions/ACME -o venv                           from pip's index
""",
)
def environment() -> None:
    """Show, lock and make anew the Python environment of a package's runs.

    SOURCE is a package, a run folder or an environment.json. Names and versions are the package's choice: read them before you
    install them. Wheels are installed and nothing is built, so no code of theirs runs while the environment is made.
    """


@environment.command()
@_source
@format_option()
def show(source: Path, style: str) -> None:
    """Print the distributions of an environment, and how those of this one differ."""
    found, path = find_environment(source)
    here = read_environment().by_name()
    if style == JSON:
        print_line(found.text().rstrip())
        return
    print_line(f"{path}: {found.python}, {found.machine}, {len(found.distributions)} distributions")
    for each in found.distributions:
        now = here.get(normal(each.name))
        same = now is not None and (now.version, now.record_sha256) == (each.version, each.record_sha256)
        beside = "" if same else f"  here: {now.version if now else 'none'}"
        if now is not None and now.version == each.version and not same:
            beside = "  here: other files"
        print_line(f"  {each.name} {each.version}{f' ({each.source})' if each.source != 'index' else ''}{beside}")


@environment.command()
@_source
@_wheels
@output_option("File of the lock.", LOCK)
def lock(source: Path, wheels: Path | None, output: Path | None) -> None:
    """Write a lock with hashes, for pip install --require-hashes and uv, of the wheels at hand.

    Exit code 1 if the hash of a distribution is not known: pip keeps none of what it installed from an index, so the wheels
    must be at hand (--find-links).
    """
    found, _ = find_environment(source)
    matched, missing = _match(found, wheels)
    known = {normal(each.name) for each in others(found) if each.wheel_sha256 is not None}
    missing = {name: why for name, why in missing.items() if name not in known}
    path = output or Path(LOCK)
    write_whole(path, render_lock(found, matched, missing))
    print_line(f"{path}: {len(others(found)) - len(missing)} of {len(others(found))} distributions with their hash")
    _tell_missing(missing)
    if missing:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


@environment.command()
@_source
@_wheels
@output_option("New folder of the virtual environment.", "venv")
@click.option(
    "--other-suite", is_flag=True, help="Take a wheel of mlhpc whose files are not those of the package's runs."
)
def create(source: Path, wheels: Path | None, output: Path | None, other_suite: bool) -> None:
    """Make the environment of a package's runs anew, and compare every distribution with it.

    With --find-links by the hashes of its wheels and without a network; else from pip's index, compared after. mlhpc itself is
    installed from its wheel in WHEELHOUSE, if that holds the files that the runs were made with. Exit code 1 if something
    differs.
    """
    found, path = find_environment(source)
    root = output or Path("venv")
    if root.exists():
        raise InputError(f"{root}: exists already; choose another -o")
    _check_python(found)
    words = ["install", "--disable-pip-version-check", "-q", "--no-compile", "--no-deps", "--only-binary", ":all:"]
    text = "".join(f"{normal(each.name)}=={each.version}\n" for each in others(found))
    suite: Wheel | None = None
    if wheels is not None:
        matched, missing = _match(found, wheels)
        if missing:
            _tell_missing(missing)
            raise InputError(
                f"{wheels}: {len(missing)} of {len(others(found))} distributions cannot be installed from it"
            )
        suite = _find_suite(found, path, wheels, other_suite)
        text = render_lock(found, matched, {})
        words += ["--no-index", "--find-links", str(wheels), "--require-hashes"]
    print_progress(f"{root}: making the environment")
    _call([sys.executable, "-I", "-m", "venv", str(root)])  # a venv.py of the working folder is not taken for it
    requirements = root / LOCK
    write_whole(requirements, text)
    pip = [str(root / "bin" / "python"), "-I", "-m", "pip"]
    _call([*pip, *words, "-r", str(requirements)])
    if suite is not None:
        _call([*pip, "install", "--disable-pip-version-check", "-q", "--no-deps", "--no-index", str(suite.path)])
    problems = compare_installed(found, next(root.glob("lib/python*/site-packages")))
    for problem in problems:
        print_line(f"{root}: {problem}", error=True)
    rest = "" if suite is not None else "; mlhpc itself is not: install it from its checkout or wheel"
    same = len(others(found)) - len(problems)
    print_line(f"{root}: {same} of {len(others(found))} distributions are those of the package{rest}")
    if problems:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _match(found: Environment, wheels: Path | None) -> tuple[dict[str, Wheel], dict[str, str]]:
    names = [each.name for each in found.distributions]
    return match_wheels(found, list_wheels(wheels, names) if wheels is not None else [])


def _tell_missing(missing: dict[str, str]) -> None:
    for name, why in missing.items():
        print_line(f"{name}: {why}", error=True)


def _check_python(found: Environment) -> None:
    """InputError if this Python is not of the version that the environment is of: its compiled wheels fit no other."""
    here = read_environment(()).python
    if found.python.rpartition(".")[0] != here.rpartition(".")[0]:
        raise InputError(f"the environment is of {found.python}, this is {here}; call mlhpc with that Python")


def _find_suite(found: Environment, path: Path, wheels: Path, other_suite: bool) -> Wheel | None:
    """The wheel of the suite itself, if it has the files of the runs. InputError if it has others; None if there is no wheel."""
    of_suite = found.by_name().get(SUITE)
    made = [
        wheel for wheel in list_wheels(wheels, [SUITE]) if of_suite and same_version(wheel.version, of_suite.version)
    ]
    if not made:
        return None
    try:
        sources = json.loads((path.parent / "sources.json").read_text("utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        sources = {}
    different = compare_suite(made[0], sources if isinstance(sources, dict) else {})
    if (different or not sources) and not other_suite:
        what = (
            f"{different[0]} and {len(different) - 1} more differ"
            if different
            else "the package does not tell its files"
        )
        raise InputError(f"{made[0].path}: not the suite of the runs: {what}; --other-suite takes it")
    return made[0]


def _call(command: Sequence[str]) -> None:
    """Run a program of this machine. InputError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise InputError(f"{Path(command[0]).name} {' '.join(command[1:4])}: {lines[-1] if lines else 'failed'}")
