"""Our code beside the public reference codes. They are not installed: a person brings clones of them.

``MLHPC_REFERENCES`` is a folder of clones, each named ``owner+name`` or ``name``. What a test needs and does not find makes it a
skip of one line. Codes whose packages cannot live in our environment run in others: ``MLHPC_REFERENCE_PYTHONS`` lists their
interpreters, separated as in PATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.references import REFERENCES, find_clone

PYTHONS = "MLHPC_REFERENCE_PYTHONS"
PACKAGES = ("torch", "numpy")


class Row(NamedTuple):
    """One comparison: ``value`` is how far our result is from the reference's, ``bound`` how far it may be."""

    workload: str
    what: str
    value: float
    bound: float


ROWS = pytest.StashKey[list[Row]]()
USED = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reference-table", type=Path, metavar="FILE", help="write the table of comparisons to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    config.stash[USED] = {}


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The function that finds the clone of ``owner/name``, or skips the test."""

    def find(repository: str) -> Path:
        if REFERENCES not in os.environ:
            pytest.skip(f"{REFERENCES} is not set: it names a folder of clones of the reference codes")
        path = find_clone(repository)
        if path is not None:
            request.config.stash[USED][repository] = _commit(path)
            return path
        pytest.skip(f"no clone of github.com/{repository} in {REFERENCES}")

    return find


@pytest.fixture
def python_with(request: pytest.FixtureRequest) -> Callable[..., str]:
    """The function that finds a Python with all packages, ours or one of ``MLHPC_REFERENCE_PYTHONS``, or skips the test."""

    def find(*packages: str) -> str:
        for python in (sys.executable, *filter(None, os.environ.get(PYTHONS, "").split(os.pathsep))):
            found = _versions(python, packages)
            if found is not None:
                request.config.stash[USED].update({name: found[name] for name in packages if name not in PACKAGES})
                return python
        pytest.skip(f"no Python in {PYTHONS} has {', '.join(packages)}")

    return find


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, str, float, float], None]:
    """The function that adds a row to the table and fails the test if the value lies above the bound, or is no number."""

    def add(workload: str, what: str, value: float, bound: float) -> None:
        request.config.stash[ROWS].append(Row(workload, what, float(value), float(bound)))
        assert float(value) <= bound, f"{workload}: {what}: {value} is above {bound}"

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    text = render(rows, config.stash[USED])
    terminalreporter.section("our code beside the reference codes")
    terminalreporter.write_line(text)
    path = config.getoption("reference_table", default=None)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")


def render(rows: list[Row], used: dict[str, str]) -> str:
    """The table: a line per comparison, ``NOT`` before those above their bound; then what was compared with what."""
    width = max(len(row.what) for row in rows)
    lines = [f"{'workload':<14}  {'what':<{width}}  {'difference':>10}  {'allowed':>8}"]
    for row in sorted(rows, key=lambda row: row.workload):
        mark = "" if row.value <= row.bound else "  NOT within"
        lines.append(f"{row.workload:<14}  {row.what:<{width}}  {row.value:>10.2g}  {row.bound:>8.2g}{mark}")
    ours = {package: version(package) for package in PACKAGES}
    lines += ["", *(f"{name} {found}" for name, found in sorted((ours | used).items()))]
    return "\n".join(lines)


def _commit(path: Path) -> str:
    done = subprocess.run(["git", "-C", str(path), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "of an unknown commit"


@cache
def _versions(python: str, packages: tuple[str, ...]) -> dict[str, str] | None:
    """The versions of packages, by the names under which they are imported. None if one is missing."""
    command = (
        "import sys; from importlib.metadata import packages_distributions, version; "
        "found = packages_distributions(); print(*(version(found[name][0]) for name in sys.argv[1:]), sep='\\n')"
    )
    done = subprocess.run([python, "-c", command, *packages], capture_output=True, text=True)
    return dict(zip(packages, done.stdout.split(), strict=True)) if done.returncode == 0 else None
