"""What several test folders share."""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.fixtures.hosts import connected_hosts
from tests.fixtures.once import made_once
from tests.fixtures.readme import GENERATE
from tests.fixtures.warm import warm_folder
from tests.fixtures.zoo import Machine

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FIRST = (  # files of more than ten seconds: begun last, one of them would keep one worker busy and the others idle
    "tests/slurm/",
    "tests/grid_engine/",
    "tests/test_readme.py",
    "tests/test_run.py",
    "tests/suite/training/test_watchdog.py",
    "tests/suite/training/test_harness.py",
    "tests/workloads/moe/",
    "tests/suite/data/test_staging.py",
    "tests/analysis/page/test_report.py",
    "tests/suite/cli/test_streams.py",
    "tests/suite/machine/test_precision.py",
    "tests/analysis/figures/test_boxes.py",
    "tests/workloads/deepcam/",
    "tests/workloads/open_catalyst/",
    "tests/suite/performance/test_profiling.py",
    "tests/plugins/axes/test_measured.py",
    "tests/plugins/fleet/",
    "tests/test_docs.py",
    "tests/test_own_loop.py",
    "tests/suite/commands/test_workload.py",
    "tests/suite/training/test_own_run.py",
    "tests/test_doc_examples.py",
)


# In a checkout these folders could be imported by their own names too: a second time, which no wheel can.
sys.modules.update(dict.fromkeys(("suite", "workloads", "analysis", "submissions", "plugins")))  # type: ignore[arg-type]


# No test may depend on how busy the machine is
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


def pytest_configure(config: pytest.Config) -> None:
    """Keep what tests measure of this machine beside them, not for the user's runs; workers of xdist share it."""
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as a shell's background has it: every process would inherit that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="mlhpc-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = folder.name
        # No submitter is known, whatever this person has stated for their own runs.
        os.environ["XDG_CONFIG_HOME"] = folder.name
        os.environ.pop("MLHPC_ORG", None)


def pytest_collection(session: pytest.Session) -> None:
    """Let Python's garbage collector leave ten thousand tests alone, which it would walk again and again."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what collection made: it stays until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, in this order. Of a test marked ``drawn(n)`` mark all but n cases ``long``."""
    cases = defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        if (mark := item.get_closest_marker("drawn")) and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, count), of_one_test in cases.items():
        # By a hash of their names: neighbours in a table are alike.
        for item in sorted(of_one_test, key=lambda item: zlib.crc32(item.nodeid.encode()))[count:]:
            item.add_marker(pytest.mark.long)

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(ROOT).as_posix()
        return next((n for n, start in enumerate(LONGEST_FIRST) if place.startswith(start)), len(LONGEST_FIRST))

    items.sort(key=rank)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of 256 KiB. Mounting one needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a small disk needs root to mount it: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="session")
def smoke_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder ($MLHPC_DATA) with the smoke size of CosmoFlow, generated once by the README's own command."""

    def generate(folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "MLHPC_DATA"}
        path = f"{warm_folder()}:{os.environ['PATH']}"
        done = subprocess.run(
            shlex.split(GENERATE),
            cwd=folder,
            env=environment | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return made_once(tmp_path_factory, "smoke", generate) / "data"


@pytest.fixture(scope="session")
def drawn_gallery(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The gallery's page and its pictures by name, drawn once."""
    from docs.pages import gallery

    def draw(folder: Path) -> None:
        example = gallery.example(folder)
        found = (gallery.page(example, {}), gallery.pictures(example))
        (folder / "gallery.json").write_text(json.dumps(found), encoding="utf-8")

    page, pictures = json.loads((made_once(tmp_path_factory, "gallery", draw) / "gallery.json").read_text("utf-8"))
    return page, pictures


@pytest.fixture
def zoo_root(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the test's machine, laid out once for all tests: read only."""
    return made_once(tmp_path_factory, f"zoo-{machine.name}", machine.lay_out)


@pytest.fixture
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """The commands that run something on one of two hosts (tests/fixtures/hosts.py)."""
    with connected_hosts() as commands:
        yield commands
