"""Trials under mpiexec: exit codes, signals, killed ranks, nothing left behind. Workers are a few lines of Python."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.launch import local, trials
from mlhpc.suite.machine.probes.allowance import count_memory_kills
from mlhpc.suite.stopping import REPEAT_WINDOW_S
from tests.fixtures.disk import fill

LONG_S = 100  # what takes a second, on a machine that is busy with other work

RANKS_OF_FOUR_LINES = """
import os, signal, sys, time
rank = int(os.environ.get("PMI_RANK", "0"))
"""


def worker(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(RANKS_OF_FOUR_LINES + textwrap.dedent(body))
    return [sys.executable, str(path)]


def run(
    tmp_path: Path, body: str, *, ranks: int = 2, grace_s: float = 5.0, told: Path | None = None
) -> tuple[int, list[str], list[str]]:
    said: list[str] = []
    echoed: list[str] = []
    code = local.run_local(
        worker(tmp_path, body), ranks=ranks, log=tmp_path / "output" / "trial_0.log", say=said.append,
        echo=echoed.append, grace_s=grace_s, read_told=lambda: local.read_exit_code(told),
    )  # fmt: skip
    return code, said, echoed


def living(tmp_path: Path) -> list[str]:
    """Command lines of living processes that run this test's worker."""
    script = str(tmp_path / "worker.py").encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if script in arguments:
            found.append(entry.name)
    return found


def test_worker_command_is_the_documented_one() -> None:
    make = partial(local.make_worker_command, "cosmoflow", config="mini", run=Path("r"), trial=3, python="py")
    command = make(mode="strong", seed=7, overrides=["max_epochs=2"], resume=True)
    assert " ".join(command) == (
        "py -P -m mlhpc run cosmoflow --config mini --output r --trial 3 --seed 7 --set max_epochs=2 --resume"
    )
    assert " ".join(make(mode="weak")) == "py -P -m mlhpc run cosmoflow --config mini --output r --trial 3 --mode weak"


def test_one_rank_needs_no_mpiexec(tmp_path: Path) -> None:
    assert local.make_mpiexec_command(1) == []
    assert run(tmp_path, "print('hello')", ranks=1) == (0, [], ["hello"])


def test_a_missing_mpiexec_is_answered_with_the_line_that_installs_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"needed for 2 ranks: .*python -m pip install mpich mpi4py"):
        local.make_mpiexec_command(2)


def test_ranks_share_the_cores_and_see_no_slurm_job() -> None:
    environment = local.make_trial_environment({"SLURM_JOB_ID": "1", "PMI_RANK": "0", "HOME": "/h"}, ranks=2)
    assert environment.keys() == {"HOME", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "UCX_NET_DEVICES"}
    assert local.make_trial_environment({"OMP_NUM_THREADS": "3"}, ranks=2)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("returncode", "ended_by", "code", "text"),
    [
        (0, None, 0, None),
        (3, None, 3, None),
        (9, 6, 1, "a rank was ended by signal 6 (SIGABRT); the other ranks were stopped"),
        (-6, None, 1, "a rank was ended by signal 6 (SIGABRT); the other ranks were stopped"),
        (255, None, 1, "the launcher ended with exit code 255"),
    ],
)
def test_an_exit_is_a_worker_code_or_is_explained(
    returncode: int, ended_by: int | None, code: int, text: str | None
) -> None:
    assert local.explain_end(returncode, ended_by) == (code, text)


@pytest.mark.parametrize("kills", [(None, None), (6, 6), (6, 7), (None, 7), (7, None), (0, 0)])
def test_signal_9_is_lack_of_memory_only_if_the_kernel_counted_one(kills: tuple[int | None, int | None]) -> None:
    for code, ended_by in ((9, 9), (-9, None)):
        _, text = local.explain_end(code, ended_by, memory_kills=kills)
        assert text is not None
        assert text.startswith("a rank was ended by signal 9 (SIGKILL): ")
        assert text.endswith("; the other ranks were stopped")
        assert ("because memory ran out" in text) == (kills == (6, 7))
        assert ("a person, a batch system or a limit" in text) == (kills != (6, 7))
        assert ("or the kernel, if memory ran out" in text) == (None in kills)


def test_the_kernels_count_of_ends_for_memory_is_read(tmp_path: Path) -> None:
    assert count_memory_kills(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("pgfault 7\noom_kill 12\nnr_free 1\n")
    assert count_memory_kills(tmp_path) == 12


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGXCPU, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_that_the_kernel_ended_is_told_with_its_cpu_time(number: signal.Signals) -> None:
    limited = number in (signal.SIGKILL, signal.SIGXCPU)
    for code, ended_by in ((-number, None), (9, number)):
        _, text = local.explain_end(code, ended_by, cpu_time_s=9)
        assert ("may have reached this shell's limit (ulimit -t: 9 s)" in (text or "")) == limited
        assert "may have reached this" not in (local.explain_end(code, ended_by)[1] or "")


def test_the_limit_of_cpu_time_is_found_where_ranks_run(tmp_path: Path) -> None:
    program = """if True:
    import resource, sys
    from pathlib import Path
    from mlhpc.suite.launch.local import run_local
    resource.setrlimit(resource.RLIMIT_CPU, (7200, 7200))
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    run_local([sys.executable, "-c", kill], ranks=1, log=Path("log"), say=print)"""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "(ulimit -t: 7200 s)" in done.stdout, done.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_the_workers_exit_code_is_the_trials(tmp_path: Path, code: int) -> None:
    assert run(tmp_path, f"sys.exit({code})")[:2] == (code, [])


def test_output_of_every_rank_goes_to_the_log(tmp_path: Path) -> None:
    run(tmp_path, "os.write(1, f'from {rank}\\n'.encode())")
    assert sorted((tmp_path / "output" / "trial_0.log").read_text().splitlines()) == ["from 0", "from 1"]


def test_a_killed_rank_ends_the_trial_in_seconds_with_one_line(tmp_path: Path) -> None:
    code, said, echoed = run(
        tmp_path,
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
        """,
    )
    assert code == 1
    log = tmp_path / "output" / "trial_0.log"
    (text,) = said
    assert text.startswith("a rank was ended by signal 9 (SIGKILL): ")
    assert text.endswith(f"; the other ranks were stopped: see {log}")
    assert echoed == []  # mpiexec's banner is in the log only
    assert living(tmp_path) == []


def test_ranks_that_were_not_connected_are_explained_in_one_line(tmp_path: Path) -> None:
    body = """
        import faulthandler
        faulthandler.dump_traceback_later(0.5, exit=True)
        time.sleep(60)
        """
    code, said, _ = run(tmp_path, body)
    assert code == 1
    log = tmp_path / "output" / "trial_0.log"
    text = "the ranks were not connected with each other within watchdog.silence_s; their Python stacks"
    assert said == [f"{text}: see {log}"]
    assert "Timeout (0:00:00.500000)!" in log.read_text().splitlines()


LAUNCHER = """
import sys
from pathlib import Path
from mlhpc.suite.launch.local import run_local
folder = Path(sys.argv[1])
sys.exit(run_local([sys.executable, str(folder / "worker.py")], ranks=2, log=folder / "trial_0.log",
                   say=print, echo=lambda line: print(line, flush=True), grace_s=float(sys.argv[2])))
"""

STOPS_POLITELY = """
def stop(number, frame):
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
os.write(1, b"ready\\n")  # one write: lines of two ranks do not mix
while True:
    time.sleep(0.1)
"""

IGNORES_SIGNALS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"ready\\n")  # one write: lines of two ranks do not mix
while True:
    time.sleep(0.1)
"""


def launch(tmp_path: Path, body: str, grace_s: float) -> subprocess.Popen[str]:
    worker(tmp_path, body)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), str(grace_s)], stdout=subprocess.PIPE, text=True
    )
    for _ in range(2):
        assert process.stdout.readline().strip() == "ready"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_ranks_and_they_may_save(tmp_path: Path, number: int) -> None:
    process = launch(tmp_path, STOPS_POLITELY, 20)
    process.send_signal(number)
    output = process.communicate(timeout=LONG_S)[0]
    assert output.count("saved") == 2
    assert process.returncode == ExitCode.STOPPED
    assert living(tmp_path) == []


def test_an_interrupt_typed_twice_is_one_and_the_ranks_save(tmp_path: Path) -> None:
    process = launch(tmp_path, STOPS_POLITELY, 20)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=LONG_S)[0].count("saved") == 2
    assert process.returncode == ExitCode.STOPPED


def test_ranks_that_ignore_the_signal_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    process = launch(tmp_path, IGNORES_SIGNALS, 0.5)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=LONG_S)[0]
    assert output.startswith("the ranks did not stop within 0.5 s of the signal and were killed: see ")
    assert process.returncode == 1
    assert living(tmp_path) == []


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    """The second comes when the first has reached the ranks: before, the system may make one signal of the two."""
    tells = IGNORES_SIGNALS.replace("signal.SIG_IGN", "lambda *_: os.write(1, b'ignored\\n')")
    process = launch(tmp_path, tells, 600)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().strip() == "ignored"
    time.sleep(2 * REPEAT_WINDOW_S)  # sooner it would be the same request
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=LONG_S)[0]
    assert "a second signal came before the ranks had stopped: they were killed: see " in said
    assert process.returncode == 1
    assert living(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_of_a_killed_launcher_save_and_then_none_is_left(tmp_path: Path) -> None:
    """They print while they save: without the relay they would end of a broken pipe before it."""
    process = launch(tmp_path, STOPS_POLITELY.replace("time.sleep(0.3)", "print('saving', flush=True)"), 60)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LONG_S)
    wait_until(lambda: living(tmp_path) == [])
    wait_until(lambda: (tmp_path / "trial_0.log").read_text().count("saved") == 2)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_of_a_killed_launcher_that_ignore_signals_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    process = launch(tmp_path, IGNORES_SIGNALS, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LONG_S)
    wait_until(lambda: living(tmp_path) == [])


def wait_until(true: Callable[[], bool], timeout_s: float = LONG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


OUTLIVES_ITS_PARENT = """
from pathlib import Path
Path(__file__).with_name(f"started_{{rank}}").touch()
while not Path(__file__).with_name("started_1").exists():  # a rank that has not started never would
    time.sleep(0.01)
helper = os.getppid()
if {mpiexec}:  # the proxy's parent
    helper = int(open(f"/proc/{{helper}}/stat").read().rpartition(")")[2].split()[1])
if rank == 0:
    time.sleep(0.5)
    os.kill(helper, signal.SIGKILL)
time.sleep(1.5)
{end}
"""
TELLS = "if rank == 0: open({told!r}, 'w').write('0')"


def test_a_killed_mpiexec_ends_its_ranks_at_once(tmp_path: Path) -> None:
    """Its proxies do that. What a checkpoint of before has not saved is lost."""
    body = OUTLIVES_ITS_PARENT.format(mpiexec=True, end="time.sleep(3600)")
    code, said, _ = run(tmp_path, body, told=tmp_path / "told")
    assert (code, len(said)) == (1, 1)
    assert living(tmp_path) == []


def test_the_exit_code_of_whoever_took_a_trial_over_is_not_read(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.write_text("0\n")
    assert [trials._read_told(told, lambda lost=lost: lost) for lost in (False, True)] == [0, None]


def test_a_good_run_whose_proxy_fails_is_a_good_run(tmp_path: Path) -> None:
    told = tmp_path / "told"
    body = OUTLIVES_ITS_PARENT.format(mpiexec=False, end=TELLS.format(told=str(told)))
    code, said, echoed = run(tmp_path, body, told=told)
    assert code == 0, (said, (tmp_path / "output" / "trial_0.log").read_text())
    assert len(said) == 1
    assert "but all ranks had come to the end: exit code 0 counts" in said[0]
    assert echoed == []
    assert living(tmp_path) == []


def test_a_run_that_fails_after_its_proxy_is_not_waited_for_longer_than_the_grace_period(tmp_path: Path) -> None:
    body = OUTLIVES_ITS_PARENT.format(mpiexec=False, end="if rank == 0: time.sleep(3600)")
    code, said, _ = run(tmp_path, body, told=tmp_path / "told", grace_s=1)
    assert code == 1
    assert "the launcher ended with exit code" in said[0] or "ended by signal" in said[0]
    assert living(tmp_path) == []


@pytest.mark.parametrize("text", ["", "x", "-1", "70", "0 0", "\u0663", "\udcff"])
def test_a_file_that_is_no_exit_code_of_a_worker_does_not_count(tmp_path: Path, text: str) -> None:
    (tmp_path / "told").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert local.read_exit_code(tmp_path / "told") is None
    assert local.read_exit_code(tmp_path / "absent") is None


def test_a_full_disk_costs_the_log_of_the_output_and_nothing_else(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk)
    echoed: list[str] = []
    log = small_disk / "trial_0.log"
    code = local.run_local(
        worker(tmp_path, "print('a' * 50, end='', flush=True); time.sleep(0.3); print('a' * 50); print('b')"),
        ranks=1,
        log=log,
        say=print,
        echo=echoed.append,
    )
    assert code == 0
    told = f"mlhpc: {log}: disk full; output is shown and not kept"
    assert echoed.count(told) == 1
    assert echoed[0] == "a" * 100  # never told within a line
    assert [line for line in echoed if line != told] == ["a" * 100, "b"]


@pytest.mark.parametrize("said", ["RuntimeError: can't start new thread", "pthread_create() failed", "unable to fork"])
def test_a_limit_of_processes_is_named_however_a_rank_ends(said: str, tmp_path: Path) -> None:
    """The number is that of the shell; without a limit the control group may have one."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    log, told = tmp_path / "log", list[str]()
    program = f"import os; print({said!r}, flush=True); os.abort()"
    assert local.run_local([sys.executable, "-c", program], ranks=1, log=log, say=told.append) == 1
    (text,) = told
    assert "ended by signal 6 (SIGABRT)" in text
    assert "(ulimit -u" in text
    assert f"at most {most:,} " in text or most == resource.RLIM_INFINITY
    assert local.run_local([sys.executable, "-c", "import os; os.abort()"], ranks=1, log=log, say=told.append) == 1
    assert "ulimit" not in told[1]


def test_an_mpiexec_that_another_launcher_was_to_start_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "IDLE_S", 0.5)
    (srun := tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)
    environ = os.environ | {"HYDRA_LAUNCHER": "slurm", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told: list[str] = []
    command = worker(tmp_path, "pass")
    assert local.run_local(command, ranks=2, log=tmp_path / "log", say=told.append, environ=environ) == 1
    assert "HYDRA_LAUNCHER=slurm chooses" in told[0]
    assert "ulimit" not in told[0]
