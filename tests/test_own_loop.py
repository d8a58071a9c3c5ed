"""The example of a person's own loop: run on one rank and, by torchrun, on two; checked, scored, packaged and reported."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlhpc.suite.log.reader import read_events
from tests.fixtures.cli import mlhpc
from tests.fixtures.once import made_once
from tests.fixtures.warm import warm_python

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_loop"
CARD = ("--card", EXAMPLE / "card.yaml")
ENV = os.environ | {"OMP_NUM_THREADS": "1"}
# As often as asked, in one process that imports torch once; a process group that outlives the run makes it fail at its end,
# and so do threads of a group of ours (the loop's own group has two): they could abort the interpreter while it ends
AGAIN = """
import atexit, glob, os, runpy, sys, time
import torch.distributed as dist
def count():
    names = [open(name).read() for name in glob.glob("/proc/self/task/*/comm")]
    return len([name for name in names if "gloo_runloop" in name])
def leave():
    until = time.monotonic() + 100
    while count() > 2 and time.monotonic() < until:
        time.sleep(0.01)
    if dist.is_initialized() or count() > 2:
        os._exit(9)
atexit.register(leave)
sys.argv = {words!r}
for _ in range({count}):
    runpy.run_path(sys.argv[0], run_name="__main__")
    dist.init_process_group = lambda *_, **__: None  # it is there
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python")


def python(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    start = [sys.executable] if words[0] == "-m" else warm_python()  # torchrun is started as a person does
    done = subprocess.run(
        [*start, *map(str, words)],
        cwd=folder,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def times(count: int, *words: str | Path) -> list[str]:
    """The words of a Python that runs a program so many times."""
    return ["-c", AGAIN.format(words=[str(word) for word in words], count=count)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``one/`` and ``two/``: three runs of the example on so many ranks."""

    def make(folder: Path) -> None:
        python(folder, EXAMPLE / "make_data.py", "data")
        for name, before in (("one", ()), ("two", (*TORCHRUN, sys.executable))):
            (folder / name).mkdir()
            python(folder / name, *before, *times(3, EXAMPLE / "train.py", "--data-path", "../data"))

    return made_once(tmp_path_factory, "own_loop", make)


def test_the_loop_became_a_benchmark_with_at_most_fifteen_added_lines() -> None:
    before, after = ((EXAMPLE / name).read_text().splitlines() for name in ("plain.py", "train.py"))
    added = [
        line[1:] for line in difflib.unified_diff(before, after, n=0) if line.startswith("+") and line[1:4] != "++ "
    ]
    assert 5 < len([line for line in added if line.strip()]) <= 15, added


def test_the_loop_as_it_was_runs_too(tmp_path: Path) -> None:
    python(tmp_path, EXAMPLE / "make_data.py", "data")
    done = python(tmp_path, EXAMPLE / "plain.py", "--data-path", "data", "--epochs", "1")
    assert done.stdout.startswith("epoch 0: accuracy ")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ranks", ["one", "two"])
def test_the_runs_are_compliant_scored_and_shown(ran: Path, ranks: str) -> None:
    runs = ran / ranks / "runs" / "shapes"
    checked = mlhpc("check", runs, *CARD, "--format", "json")
    assert checked.returncode == 0, checked.stdout
    rules = {finding["rule"] for finding in json.loads(checked.stdout)["findings"]}
    assert rules - {"other-work"} == {"rcp-missing"}, "who else works on this machine is not the loop's"
    scored = mlhpc("score", runs, *CARD)
    assert scored.returncode == 0, scored.stdout
    assert "mean of 1 of 3 runs" in scored.stdout
    log = read_events(runs / "result_2.txt")
    (phases,) = [event.value for event in log.events if event.key == "rank_phases"][:1]
    assert phases["forward_backward"] > 0
    assert phases["optimizer"] > 0
    assert (phases["exposed_communication"] > 0) == (ranks == "two"), "the gradients of two ranks are exchanged"
    assert [event.value for event in log.events if event.key == "number_of_ranks"] == [1 if ranks == "one" else 2]
    assert (runs / "code" / "train.py").read_text() == (EXAMPLE / "train.py").read_text()


def test_the_runs_are_packaged_with_card_and_program_and_reported(ran: Path, tmp_path: Path) -> None:
    runs, package = ran / "two" / "runs" / "shapes", tmp_path / "ACME"
    built = mlhpc("package", runs, "--system", "laptop", "--submitter", "ACME", "-o", package, *CARD)
    assert built.returncode == 0, built.stdout + built.stderr
    checked = mlhpc("check", package, *CARD)
    assert checked.returncode == 0, checked.stdout
    (code,) = package.glob("benchmarks/shapes/implementations/*/*/strong")
    kept = code / "provenance" / "run_0"
    assert (kept / "card.yaml").read_bytes() == (EXAMPLE / "card.yaml").read_bytes()
    assert (kept / "code" / "train.py").read_bytes() == (EXAMPLE / "train.py").read_bytes()
    assert "train.py, a loop of the submitter's own logged by mlhpc" in (code / "README.md").read_text()
    assert "train.py" in (code / "run_and_time.sh").read_text()
    environment = ENV | {"DATA": str(ran / "data"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = ["bash", str(code / "init_datasets.sh")]
    assert subprocess.run(script, env=environment, timeout=300).returncode == 0
    assert subprocess.run(script, env=environment | {"DATA": str(EXAMPLE)}, timeout=300).returncode == 1
    reported = mlhpc("report", package, "-o", tmp_path / "report", *CARD)
    assert reported.returncode == 0, reported.stderr
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [result["benchmark"] for result in numbers["results"]] == ["shapes"]
    answered = {figure["name"] for figure in numbers["figures"] if figure["answer"]}
    assert {"convergence", "time_split", "phases"} <= answered
