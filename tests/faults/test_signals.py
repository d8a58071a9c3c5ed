"""Ctrl-C and SIGTERM at random moments of commands: one line, exit code 130 or 143, no process left."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mlhpc.suite.plugins import list_missing_wings
from tests.fixtures.cli import handles_signals
from tests.fixtures.wings import MISSING_COMMANDS

MARK = "MLHPC_TEST_SIGNALS"  # in the environment of every process of a command
END_S = 60.0  # of a command on a busy machine
LONGER_S = {"run": 30.0, "ab": 600.0}  # a rank that saves has 30 s; a contest ends its present run first
MOMENTS_S = 5.0
FINE = {0, 1, 2, 3, 4}  # the command was done, or a trial left a checkpoint


@dataclass(frozen=True)
class Signal:
    """One signal to one command, some seconds after it could first answer.

    It goes to the command's group, as a terminal sends it, or to the command alone.
    """

    words: tuple[str, ...]
    number: int
    at_s: float
    group: bool


def commands(root: Path, out: Path) -> list[tuple[str, ...]]:
    """The commands of the campaign. ``root`` has data and a finished run; ``out`` is new."""
    run = f"{root}/run"
    found: list[tuple[str, ...]] = [
        ("data", "generate", "deepcam", "--size", "smoke", "--ranks", "2", "-o", f"{out}/data"),
        ("data", "generate", "cosmoflow", "--size", "smoke", "-o", f"{out}/data"),
        ("run", "cosmoflow", "--size", "smoke", "--ranks", "2", "-o", f"{out}/run"),
        ("run", "cosmoflow", "--size", "smoke", "--runs", "2", "-o", f"{out}/run"),
        ("ceilings", "--quick", "--ranks", "2", "-o", f"{out}/c.json"),
        ("package", run, "--system", "this-machine", "--submitter", "ACME", "-o", f"{out}/package"),
        ("report", run, "-o", f"{out}/report"),
        ("preflight", "node", "--ranks", "2", "--budget", "30", "-o", f"{out}/preflight"),
        ("reproduce", run, "--level", "0"),
        (
            *("ab", "steps", "cosmoflow", "--size", "smoke", "--ranks", "2"),
            *("--set-b", "hyperparameters.dropout=0.1", "-o", f"{out}/ab"),
        ),
        ("ab", "runs", "run", f"{out}/contest"),
        ("demo", "cosmoflow", "--size", "smoke", "--runs", "1", "-o", f"{out}/demo"),
    ]
    return [words for words in found if words[0] != "ab" or "tune" not in list_missing_wings()]


def prepare(root: Path) -> dict[str, str]:
    """Make data, a run and a contest; return the environment of the commands."""
    environ = {**os.environ, "MLHPC_DATA": str(root / "data"), "OMP_NUM_THREADS": "1"}
    sized = ("cosmoflow", "--size", "smoke")
    contest = f"{root}/contest"
    for words in (
        ("data", "generate", *sized),
        ("run", *sized, "--set", "max_epochs=1", "-o", f"{root}/run"),
        ("ab", "runs", "new", contest, *sized, "--system", "this-machine", "--ranks", "2"),
        ("ab", "runs", "enter", contest, "one", "--set", "max_epochs=1"),
        ("ab", "runs", "enter", contest, "two", "--set", "max_epochs=1", "--set", "hyperparameters.dropout=0.1"),
    ):
        subprocess.run(suite(words), env=environ, cwd=root, capture_output=True)
    assert (root / "run" / "result_0.txt").exists()
    assert (root / "contest").is_dir() or "tune" in list_missing_wings()
    return environ


def suite(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "mlhpc", *words]


def living(token: str) -> list[str]:
    found = []
    for process in psutil.process_iter(["environ", "cmdline", "status"]):
        if (process.info["environ"] or {}).get(MARK) == token and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(process.info["cmdline"] or [])[-120:])
    return found


def send(sent: Signal, environ: dict[str, str], cwd: Path) -> list[str]:
    """Send one signal; return what is wrong with the end of the command."""
    token = f"{time.monotonic()}"
    process = subprocess.Popen(
        suite(sent.words), env=environ | {MARK: token}, cwd=cwd, text=True, errors="replace",
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and not handles_signals(process.pid):  # Python itself starts: nobody could answer
        time.sleep(0.001)
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() - begin < sent.at_s:
        time.sleep(0.01)
    if process.poll() is None:
        (os.killpg if sent.group else os.kill)(process.pid, sent.number)
    try:
        errors = process.communicate(timeout=END_S + LONGER_S.get(sent.words[0], 0.0))[1]
    except subprocess.TimeoutExpired:
        stuck = living(token)
        for each in psutil.process_iter(["environ"]):
            if (each.info["environ"] or {}).get(MARK) == token:
                each.kill()
        return [f"hangs: {stuck}"]
    problems = []
    code = process.returncode
    if "Traceback" in errors or "Error" in errors or "defect" in errors:
        problems.append(f"says {errors[-1500:]!r}")
    lines = [line for line in errors.splitlines() if "stopped" in line]
    if code == 128 + sent.number:
        if len(lines) != 1:
            problems.append(f"{len(lines)} lines: {errors[-300:]!r}")
    elif code not in FINE:
        problems.append(f"exit code {code}: {errors[-300:]!r}")
    deadline = time.monotonic() + 3
    while (left := living(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return problems + ([f"left: {left}"] if left else [])


def campaign(root: Path, count: int, seed: int) -> list[tuple[Signal, list[str]]]:
    """Send so many signals; return those with a problem."""
    # A process that a shell started with `&` ignores SIGINT, and so would the commands
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environ, chance = prepare(root), random.Random(seed)
    found = []
    for number in range(count):
        out = root / f"out{number}"
        out.mkdir()
        if (root / "contest").is_dir():
            shutil.copytree(root / "contest", out / "contest")
        words = [each for each in commands(root, out) if each[0] not in MISSING_COMMANDS]
        sent = Signal(
            words[number % len(words)], chance.choice((signal.SIGINT, signal.SIGTERM)),
            chance.random() * MOMENTS_S, chance.random() < 0.5,
        )  # fmt: skip
        if problems := send(sent, environ, out):
            found.append((sent, problems))
            sys.stderr.write(f"{number}: {sent}: {problems}\n")
    return found


@pytest.mark.long
def test_three_hundred_signals_leave_one_line_and_no_process(tmp_path: Path) -> None:
    assert campaign(tmp_path, 300, seed=44) == []


if __name__ == "__main__":
    print(campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
