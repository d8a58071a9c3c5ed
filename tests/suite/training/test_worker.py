"""What a worker does before its trial."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from mlhpc.suite import LAUNCH
from mlhpc.suite.training.worker import set_max_open_files


@pytest.mark.parametrize("soft", [256, 1024])
def test_a_worker_may_open_as_many_files_as_the_hard_limit_allows(soft: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        set_max_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


ORPHAN = """
import subprocess, sys, time
child = '''
import sys, time
from mlhpc.suite.training.devices import end_with_launcher
with end_with_launcher():
    print("starting", flush=True)
    time.sleep(float(sys.argv[1]))
print("connected", flush=True)
time.sleep(2)
print("alive", flush=True)
'''
subprocess.Popen([sys.executable, "-c", child, sys.argv[1]])
time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace needs root")
def test_a_launcher_that_is_the_first_process_of_a_container_has_not_ended() -> None:
    """`docker run IMAGE mlhpc run …`: the rank's parent has the number of init."""
    program = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    child = "from mlhpc.suite.training.devices import end_with_launcher\nwith end_with_launcher(): print('alive')"
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program, child, "mlhpc"]
    done = subprocess.run(words, env=os.environ | {LAUNCH: "token"}, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("environ", "starting_s", "until", "expected"),
    [
        (
            {LAUNCH: "token"},
            100,
            "starting",
            "starting\n",
        ),  # what started the rank is killed during its start: the rank ends
        ({LAUNCH: "token"}, 0, "connected", "starting\nconnected\nalive\n"),  # afterwards it goes on
        ({}, 1, "starting", "starting\nconnected\nalive\n"),  # nor is anybody else's process ended
    ],
)
def test_a_rank_ends_with_what_started_it_until_it_is_connected(
    environ: dict[str, str], starting_s: float, until: str, expected: str
) -> None:
    own = {name: value for name, value in os.environ.items() if name != LAUNCH} | environ
    command = [sys.executable, "-c", ORPHAN, str(starting_s)]
    with subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline()]
        while lines[-1].strip() != until:
            lines.append(parent.stdout.readline())
        parent.kill()
        assert "".join(lines) + parent.stdout.read() == expected  # the pipe is closed when the child has ended too
