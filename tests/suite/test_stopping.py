"""A signal ends a command with one line and 128 + its number (tests/faults/test_signals.py sends three hundred)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlhpc.suite.processes import has_children
from tests.fixtures.cli import handles_signals

PROGRAM = """
import sys, weakref
sys.argv = ["mlhpc", "wait"]
from mlhpc.suite import stopping
stopping.register_handlers()
import click
from mlhpc.suite.cli.main import group, main
{body}
group.commands["wait"] = click.Command("wait", callback=wait)
group.get_command = lambda context, name: group.commands[name]
print("ready", flush=True)
main()
"""
WAITS = "import time\ndef wait():\n    print('in', flush=True)\n    time.sleep(60)\n"
CLEANS = """
import time
def wait():
    try:
        print('in', flush=True)
        time.sleep(60)
    finally:
        time.sleep(0.3)
        print('cleaned', flush=True)
"""
CONVERTS = """
import time
def wait():
    try:
        print('in', flush=True)
        time.sleep(60)
    except BaseException as error:
        raise RecursionError('x') from error
"""
IN_A_CALLBACK = """
import time
class Thing: pass
def late(reference):
    print('in', flush=True)
    time.sleep(60)
def wait():
    thing = Thing()
    reference = weakref.ref(thing, late)
    del thing
    time.sleep(60)
"""
IN_A_STRING = "def wait():\n    exec('import time; print(\"in\", flush=True); time.sleep(60)')\n"


@pytest.mark.drawn(4)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("body", [WAITS, CLEANS, CONVERTS, IN_A_CALLBACK, IN_A_STRING])
def test_a_signal_ends_a_command_with_one_line(body: str, number: int) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM.format(body=body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "in\n"]
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert errors == f"mlhpc: stopped by {signal.Signals(number).name}\n"
    assert ("cleaned" in output) == (body == CLEANS)


def test_a_signal_that_the_caller_ignored_stays_ignored() -> None:
    body = "import time\ndef wait():\n    print('in', flush=True)\n    time.sleep(0.5)\n"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM.format(body=body)], stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "in\n"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 0


def test_ranks_that_are_started_end_with_their_command(tmp_path: Path) -> None:
    words = ["data", "generate", "deepcam", "--size", "smoke", "--ranks", "2", "-o", str(tmp_path / "d")]
    for moment in (handles_signals, has_children):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlhpc", *words], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        while process.poll() is None and not moment(process.pid):
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=300)[1]
        assert (process.returncode, errors) == (130, "mlhpc: stopped by SIGINT\n")


def test_an_interrupt_before_anything_is_imported_leaves_no_traceback(tmp_path: Path) -> None:
    """The first import of ours takes long here, as on a busy machine."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('mlhpc.suite.shadowed', 'mlhpc.suite.stopping'):\n"
        "            print('in', flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "mlhpc", "workload", "list"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[1] == ""
    assert process.returncode == -signal.SIGINT
