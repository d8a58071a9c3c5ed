"""Linux keeps the signal that a process asks for, until it asks for none."""

from __future__ import annotations

import ast
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlhpc.suite import processes

ROOT = Path(__file__).resolve().parents[2]
ASKED = """
import ctypes
from mlhpc.suite.processes import load_parent_signal
ask, kept = load_parent_signal(), ctypes.c_int()
for number in (15, 0):
    ask(number)
    ctypes.CDLL(None).prctl(2, ctypes.byref(kept))  # PR_GET_PDEATHSIG
    print(kept.value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_signal_is_kept_until_none_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["15", "0"]


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert processes.load_parent_signal() is None


def _starts(folder: str) -> Iterator[tuple[str, set[str | None]]]:
    """Each place that starts a process, with the names of the options there."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("subprocess.run", "subprocess.Popen")):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", {word.arg for word in node.keywords}


def test_no_process_that_we_start_reads_what_is_typed_for_the_next_command() -> None:
    """The keyboard is the person's, and in a `while read host; do ssh host mlhpc …` the list of hosts."""
    found = [start for folder in ("suite", "workloads", "analysis", "plugins") for start in _starts(folder)]
    assert len(found) > 10
    assert [place for place, options in found if not options & {"stdin", "input"}] == []


def test_doctor_leaves_what_is_typed_meanwhile_to_the_shell() -> None:
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"next command\n")
    code = "from mlhpc.suite.commands.machine import doctor; print(doctor._run_command(['head', '-n', '1']))"
    done = subprocess.run([sys.executable, "-c", code], stdin=terminal, capture_output=True, text=True, timeout=300)
    assert done.stdout == "CommandResult(code=0, output='')\n"
    assert os.read(terminal, 100) == b"next command\n"
