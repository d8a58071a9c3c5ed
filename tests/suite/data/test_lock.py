"""A lock has one owner; the lock of an owner that is gone is taken over, that of one that may live never."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from mlhpc.suite.data import lock
from mlhpc.suite.data.lock import (
    BREAKING_S,
    SILENT_S,
    Owner,
    create_lock,
    create_lock_for_all_ranks,
)
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import check_ownership, write_atomically, write_file_atomically
from mlhpc.suite.log.energy.power_log import READING
from mlhpc.suite.machine.power.counters import EnergyCounter, EnergyMeter
from mlhpc.suite.machine.power.sampler import Sampler, Scope, watch_owner
from tests.fixtures.warm import warm_python

HOLDER = """
import sys
from pathlib import Path
from mlhpc.suite.data.lock import create_lock
with create_lock(Path(sys.argv[1]), "trial 0"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that tries to hold the lock, until its input ends."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], text=True, **pipes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trial_0.lock"


@pytest.fixture
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = holder(path)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def take(path: Path) -> None:
    with create_lock(path, "trial 0"):
        assert path.exists()
    assert not list(path.parent.iterdir())


def test_a_lock_is_there_while_it_is_held_and_leaves_nothing(path: Path) -> None:
    take(path)
    with pytest.raises(KeyboardInterrupt), create_lock(path, "trial 0"):
        raise KeyboardInterrupt
    take(path)


def test_a_living_process_keeps_its_lock_and_is_named(path: Path, held: subprocess.Popen[str]) -> None:
    os.utime(path, (0, 0))  # on the same host its silence says nothing: it may be stopped
    with pytest.raises(
        InputError, match=rf"^{path}: trial 0 is in use by process {held.pid} on \S+ since 20\S+Z; wait"
    ):
        take(path)
    held.send_signal(signal.SIGSTOP)
    with pytest.raises(InputError, match="in use by process"):
        take(path)


def test_the_lock_of_a_killed_process_is_taken_over_at_once(path: Path, held: subprocess.Popen[str]) -> None:
    held.kill()
    held.wait()
    assert path.exists()
    take(path)


def write(path: Path, age_s: float = 0.0, **changes: object) -> Owner:
    owner = structs.replace(Owner.this_process({"SLURM_JOB_ID": "7"}), **changes)
    path.write_text(msgspec.json.encode(owner).decode())
    os.utime(path, (time.time() - age_s,) * 2)
    return owner


ELSEWHERE = {"boot": "another", "host": "node9", "pid": 1}


@pytest.mark.parametrize(
    ("age_s", "changes"),
    [
        (0.0, ELSEWHERE),
        (SILENT_S - 20, ELSEWHERE),
        (0.0, {"namespace": "a container's", "pid": 4194305}),
        (0.0, {"job": "7", "restart": 1, **ELSEWHERE}),  # this process is no restart of it
        (10 * SILENT_S, {}),  # this process
        (-3600.0, ELSEWHERE),  # from the future
    ],
)
def test_an_owner_that_may_live_keeps_its_lock(path: Path, age_s: float, changes: dict[str, object]) -> None:
    write(path, age_s, **changes)
    before = path.read_bytes()
    with pytest.raises(InputError, match="in use by process"):
        take(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("age_s", "changes"),
    [
        (SILENT_S + 20, ELSEWHERE),
        (0.0, {"pid": 4194305}),
        (0.0, {"started": 1}),  # another process had this number
        (SILENT_S + 20, {"namespace": "a container's"}),
        (SILENT_S + 20, {"boot": "before the reboot"}),
    ],
)
def test_the_lock_of_an_owner_that_is_gone_is_taken_over(path: Path, age_s: float, changes: dict[str, object]) -> None:
    write(path, age_s, **changes)
    take(path)


def test_a_requeued_job_takes_over_its_own_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, **ELSEWHERE)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    take(path)
    write(path, **ELSEWHERE | {"job": "8"})
    with pytest.raises(InputError, match="in use by process 1 of job 8 on node9"):
        take(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff\x00"])
def test_a_lock_that_names_no_owner_counts_while_it_is_new(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match="its lock is new and names no owner"):
        take(path)
    os.utime(path, (time.time() - SILENT_S - 20,) * 2)
    take(path)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda at: at.symlink_to("/dev/zero"), Path.mkdir, lambda at: at.symlink_to("gone")]
)
def test_what_lies_in_the_place_of_a_lock_and_is_no_file_is_named_and_not_read(
    path: Path, make: Callable[[Path], None]
) -> None:
    make(path)
    with pytest.raises((OSError, InputError), match="in its place: remove it"):
        take(path)
    assert lock.find_living_owner(path) is None


def test_the_lock_of_a_time_to_come_says_so(path: Path) -> None:
    write(path, -3600.0, **ELSEWHERE)
    with pytest.raises(InputError, match="its time lies .* ahead; if that process has ended, remove this file"):
        take(path)


def test_a_process_killed_while_it_took_over_a_lock_blocks_nobody(path: Path) -> None:
    write(path, pid=4194305)
    breaker = path.with_name(f".{path.name}.break.part")
    write(breaker, BREAKING_S + 20, pid=4194305)
    take(path)


def test_a_lock_that_was_taken_over_is_not_removed_by_its_former_owner(path: Path) -> None:
    with create_lock(path, "trial 0"):
        other = write(path, **ELSEWHERE)
    assert msgspec.json.decode(path.read_text(), type=Owner) == other


WRITER = """
import os, signal, sys
from pathlib import Path
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.files import write_file_atomically
from mlhpc.suite.log.mllog import EventLog
from mlhpc.suite.training.checkpoint import Checkpoint
with create_lock(Path(sys.argv[1]), "trial 0", ends=True):
    log = EventLog(Path(sys.argv[1]).with_name("log"))
    log.event("before")
    os.kill(os.getpid(), signal.SIGSTOP)
    {}
    print("written")
"""


WRITES = (
    "log.event('after')",
    "write_file_atomically(Path(sys.argv[1]).with_name('other'), 'mine')",
    "Checkpoint(Path(sys.argv[1]).with_name('trial_0.pt'), {}).remove()",
    "Checkpoint(Path(sys.argv[1]).with_name('trial_0.pt'), {}).remove_others(None)",
    "from mlhpc.suite.data.staging import remove_abandoned; remove_abandoned(Path(sys.argv[1]).parent)",
    "from mlhpc.suite.data.build import _write_record; _write_record(Path(sys.argv[1]).with_name('other'), {})",
)


@pytest.mark.parametrize(
    ("write_it", "change"), [*((each, "other") for each in WRITES), (WRITES[0], "gone"), (WRITES[0], "touched")]
)
def test_a_process_that_lost_its_lock_ends_before_its_next_write(path: Path, write_it: str, change: str) -> None:
    """A suspended process wakes up: its lock has another owner, or is gone with him. A mere touch is no loss."""
    program = [*warm_python(), "-c", WRITER.replace("{}", write_it), str(path)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    own = wait_until_stopped(path)
    path.with_name("trial_0.pt").write_text("of the new owner")
    path.with_name("shard.h5.part").write_text("of the new owner")
    if change == "gone":
        path.unlink()
    else:
        write(path, 600.0, **(ELSEWHERE if change == "other" else {})) if change == "other" else os.utime(path, (1, 1))
    os.kill(own, signal.SIGCONT)
    output, errors = process.communicate(timeout=300)
    if change == "touched":
        assert (process.returncode, output) == (0, "written\n"), errors
        return
    assert (process.returncode, output) == (6, "")
    fate = "was removed, or another process took it over and ended" if change == "gone" else "was taken over by another"
    assert errors.startswith(f"mlhpc: {path}: this lock {fate}")
    assert errors.endswith("; ended here, so that its files are not touched\n")
    assert path.with_name("log").read_text().count("\n") == 1
    assert not path.with_name("other").exists()
    assert path.with_name("trial_0.pt").read_text() == "of the new owner"
    assert path.with_name("shard.h5.part").exists()
    assert path.exists() == (change == "other")


def test_a_copied_lock_names_the_place_of_the_other_one(path: Path, tmp_path: Path) -> None:
    """A run folder that was copied while its run went on: to end that process would end a good run."""
    copied = tmp_path / "copy" / path.name
    copied.parent.mkdir()
    with create_lock(path, "trial 0"):
        copied.write_bytes(path.read_bytes())
        with pytest.raises(InputError, match=rf"made this lock as {path}; if {copied.parent} is a copy"):
            create_lock(copied, "trial 0").__enter__()


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        assert code == 6
        raise Ended

    monkeypatch.setattr(os, "_exit", end)


def test_each_rank_ends_before_it_writes_what_was_taken_over(
    path: Path, ends: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 may be on another host, and wake later. A lock that is gone was given back: rank 0 has ended its part."""
    owner = write(path, **ELSEWHERE)
    world = SimpleNamespace(is_first=False, check_together=lambda error: None, broadcast=lambda value, kind: owner)
    with create_lock_for_all_ranks(path, "trial 0", world):  # type: ignore[arg-type]
        check_ownership()
        path.unlink()
        write_file_atomically(path.with_name("mine"), "written")
        write(path, **ELSEWHERE | {"pid": 2})
        with pytest.raises(Ended):
            write_file_atomically(path.with_name("mine"), "lost")
    assert path.with_name("mine").read_text() == "written"
    check_ownership()  # it is no rank of the trial any more
    assert capfd.readouterr() == ("", "")  # rank 0 says it


def test_a_write_that_a_suspension_interrupts_is_not_finished(path: Path, ends: None) -> None:
    def write_slowly() -> None:
        with write_atomically(path.with_name("shard")) as part:
            part.write_text("mine")
            write(path, **ELSEWHERE)

    with create_lock(path, "trial 0", ends=True), pytest.raises(Ended):
        write_slowly()
    assert not path.with_name("shard").exists()


def test_a_power_sampler_ends_with_the_trial_and_writes_no_end(path: Path, ends: None) -> None:
    write(path, **ELSEWHERE)
    check, log = watch_owner(path), path.with_name("node_0.txt")
    scope = Scope("package", [EnergyCounter("rapl/package-0", time.monotonic)])
    scope.file = os.open(log, os.O_WRONLY | os.O_CREAT)

    def wait(seconds: float) -> bool:
        if log.read_text().count(READING):
            write(path, **ELSEWHERE | {"pid": 2})
        return True

    with pytest.raises(Ended):
        Sampler([scope], EnergyMeter(scope.counters), wait=wait, check=check).run({}, 0.01)
    assert "stop" not in log.read_text()
    assert log.read_text().count("\n") == 2


def wait_until_stopped(path: Path) -> int:
    """Wait until the process that holds a lock is stopped. Returns its id."""
    while True:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            own = msgspec.json.decode(path.read_text(), type=Owner).pid
            if Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return own
        time.sleep(0.01)


def test_of_many_that_find_a_dead_owners_lock_one_gets_it(path: Path) -> None:
    write(path, pid=4194305)
    processes = [holder(path) for _ in range(6)]
    said = [process.stdout.readline() for process in processes]  # the owner keeps it until all have answered
    answers = [process.communicate(timeout=300)[1] for process in processes]
    assert sorted(said) == [*[""] * 5, "held\n"], answers
    assert sum("in use by process" in errors for errors in answers) == 5


def test_without_hard_links_the_lock_is_one_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    take(path)
    with create_lock(path, "trial 0"), pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
        take(path)


def test_seconds_of_a_suspension_are_found_by_the_clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is late by seconds, a suspended one by what it slept."""
    monkeypatch.setattr(lock, "suspensions", [])
    clock = iter([0.0, 9.0, 34.0, 50.0, 351.0, 351.0])  # 16 s of the file server in between
    monkeypatch.setattr(lock, "_read_clock_s", lambda: next(clock))
    monkeypatch.setattr(lock, "_refresh", lambda *of: None)
    with create_lock(path, "trial 0") as lease:
        lease.look()
        assert lock.suspensions == []
        lease.look()
        lease.look()
    assert lock.suspensions == [24.0, 300.0]
