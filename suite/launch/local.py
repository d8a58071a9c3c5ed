"""Runs one trial under mpiexec on this machine: starts it, shows and logs its output, stops it, leaves no process behind.

`worker_command` and `mpiexec_command` build the command line and `explain_end` interprets the exit code; only `run_local`
touches processes. mpiexec starts every rank in a session of its own, out of reach of signals to our process group, so
ranks are found by a token in their environment.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from suite.errors import InputError
from suite.machine.probes.allowance import usable

WORKER_CODES = (0, 1, 2, 3)
STOPPED = 3  # ended by a signal, with a checkpoint left
TOKEN_NAME = "MLHPC_LAUNCH"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def suite_command(*words: str, python: str = sys.executable) -> list[str]:
    """The command line of ``mlhpc WORDS`` as a process of its own.

    With -P the working directory is not on the import path: a user's folder ``workloads/`` there is not taken for ours.
    """
    return [python, "-P", "-m", "suite", *words]


def worker_command(
    workload: str,
    *,
    config: str,
    run: Path,
    trial: int,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    mode: str = "strong",
    resume: bool = False,
    replace_failed: bool = False,
    python: str = sys.executable,
) -> list[str]:
    """The command line of one rank (docs/architecture.md, "The worker"). ``seed`` is the base: trial i gets seed + i."""
    command = suite_command("run", workload, python=python)
    command += ["--config", config, "--output", str(run), "--trial", str(trial)]
    command += ["--mode", mode] if mode != "strong" else []
    command += ["--seed", str(seed)] if seed is not None else []
    for override in overrides:
        command += ["--set", override]
    return command + (["--resume"] if resume else []) + (["--replace-failed"] if replace_failed else [])


def mpiexec_command(ranks: int) -> list[str]:
    """The words before the worker's command: none for one rank, else the mpiexec beside this Python or on PATH.

    ValueError, with the command that installs one, if there is none.
    """
    if ranks < 1:
        raise InputError(f"--ranks {ranks}: expected at least 1")
    if ranks == 1:
        return []
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise InputError(
            f"no mpiexec beside {sys.executable} or on PATH, needed for {ranks} ranks: "
            f"{sys.executable} -m pip install mpich mpi4py"
        )
    return [program, "-n", str(ranks)]


def trial_environment(environ: Mapping[str, str], *, ranks: int) -> dict[str, str]:
    """The environment of the ranks: the cores that this process may use shared evenly, and no variables of a Slurm job.

    With those variables mpiexec would start the ranks with srun.
    """
    environment = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "PMI_", "PMIX_"))}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable(environ).cores // ranks)))
    return environment | {"PYTHONUNBUFFERED": "1"}


_EXIT_STRING = re.compile(r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")
_BANNER = re.compile(
    r"={20,}$|=   |YOUR APPLICATION TERMINATED|This typically refers to a problem|Please see the FAQ|Abort\(\d+\) on node"
)


def is_banner(line: str) -> bool:
    """True for lines of mpiexec's own message about a rank that ended. They go to the log but not to the terminal."""
    return bool(_BANNER.match(line))


def rank_signal(line: str) -> int | None:
    """Parse the signal that ended a rank from a line of mpiexec's output. None if the line names none."""
    match = _EXIT_STRING.match(line)
    return int(match.group(1)) if match else None


def explain_end(returncode: int, ended_by: int | None) -> tuple[int, str | None]:
    """The trial's exit code, and a message if the worker could not print one itself.

    ``ended_by`` is the signal from `rank_signal`; a negative ``returncode`` means that a signal ended the process we started.
    """
    if ended_by is None and returncode < 0:
        ended_by = -returncode
    if ended_by is not None:
        return 1, f"a rank was ended by signal {ended_by} ({_signal_name(ended_by)}); the other ranks were stopped"
    if returncode in WORKER_CODES:
        return returncode, None
    return 1, f"the launcher ended with exit code {returncode}"


def run_local(
    command: Sequence[str],
    *,
    ranks: int,
    log: Path,
    say: Callable[[str], None],
    echo: Callable[[str], None] | None = None,
    grace_s: float = 30.0,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Run the ranks of a trial until they end and return its exit code (docs/architecture.md): 0, 1, 2 or 3.

    Everything the ranks print is appended to ``log`` and passed to ``echo`` line by line; ``say`` gets at most one
    message, about an abnormal end. The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this process becomes SIGTERM to the
    ranks; a second signal, or ``grace_s`` seconds later, SIGKILL. The ranks also get SIGTERM if this process is killed.
    """
    token = uuid.uuid4().hex
    environment = trial_environment(environ, ranks=ranks) | {TOKEN_NAME: token}
    log.parent.mkdir(parents=True, exist_ok=True)
    ended_by = None
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*mpiexec_command(ranks), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent(os.getpid()),
        )
        stop = _Stop(process, token, grace_s)
        try:
            with _forwarded(stop):
                for line in process.stdout or ():
                    file.write(line)
                    file.flush()
                    ended_by = ended_by or rank_signal(line)
                    if echo is not None and not is_banner(line) and line.strip():
                        echo(line.rstrip("\n"))
                returncode = process.wait()
        finally:
            stop.finish()
    code, message = explain_end(returncode, ended_by)
    if stop.forced:
        code, message = 1, f"the ranks did not stop within {grace_s:g} s of the signal and were killed"
    if message:
        say(f"{message}: see {log}")
    return code


class _Stop:
    """Stops a trial: SIGTERM at the first call, SIGKILL at the second or when the grace period is over."""

    def __init__(self, process: subprocess.Popen[str], token: str, grace_s: float) -> None:
        self.forced = False
        self._process = process
        self._token = token
        self._timer = threading.Timer(grace_s, self._force)
        self._timer.daemon = True
        self._asked = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._asked:
            self._force()
        else:
            self._asked = True
            self._process.send_signal(signal.SIGTERM)
            self._timer.start()

    def finish(self) -> None:
        """Kill whatever is left of the trial, whether it ended by itself, by a signal or by an error here."""
        self._timer.cancel()
        kill_marked(self._token)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _force(self) -> None:
        self.forced = True
        kill_marked(self._token)


def kill_marked(token: str, *, tries: int = 20) -> None:
    """Send SIGKILL to every process that has this launch's token, until none is left."""
    for _ in range(tries):
        pids = list(_marked(token))
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not pids:
            return
        time.sleep(0.05)


def _marked(token: str) -> Iterator[int]:
    """The processes whose environment has the token. A zombie's environment is empty, so zombies are not listed."""
    needle = f"{TOKEN_NAME}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = needle in (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        if marked:
            yield int(entry.name)


@contextmanager
def _forwarded(handler: _Stop) -> Iterator[None]:
    """Send signals of this process to the handler. Python allows that in the main thread only; elsewhere nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in FORWARDED}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    """A function that the child calls to get SIGTERM from Linux when its parent dies. None on other systems."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec the child must not load anything

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return ask


def _signal_name(number: int) -> str:
    return next((item.name for item in signal.Signals if item == number), "unknown")
