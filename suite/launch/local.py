"""Runs one trial under mpiexec on this machine: starts and stops it, shows and logs its output.

No process is left behind.

`make_worker_command` and `make_mpiexec_command` build the command line, `explain_end` interprets the exit code. Only
`run_local` touches processes.

Records the last attempt at a trial: a heartbeat while its local launcher lives, then the exit code.

Tests MPI: loads the library, starts two ranks. Says what to do if launcher and library are of different MPIs.

Package lists prove nothing. mpi4py takes the first MPI library that it finds: the site's or the ``mpich`` wheel's. A
launcher of another MPI starts ranks that do not see each other.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from mlhpc.suite import LAUNCH
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.errors import InputError, explain_limit
from mlhpc.suite.exit_codes import WORKER_CODES, ExitCode
from mlhpc.suite.files import make_folder, print_line, read_bytes, read_json, render_duration
from mlhpc.suite.launcher import drop_launcher_variables, explain_machine, explain_network, explain_steering
from mlhpc.suite.log.reader import EXIT_CODE_BYTES, read_limits
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.machine.probes.allowance import count_memory_kills, find_usable_resources
from mlhpc.suite.processes import (
    find_by_token,
    has_children,
    kill_by_token,
    make_parent_death_hook,
    make_python_command,
    read_start_time,
    signal_by_token,
)
from mlhpc.suite.stopping import REPEAT_WINDOW_S, end_by_signal
from mlhpc.suite.world import find_node_name

DEAD_AFTER_S = 60.0  # of no heartbeat, where the process cannot be looked at


@dataclass(frozen=True)
class AttemptState:
    """The state of the last attempt at a trial: exit code if it ended, else whether its launcher lives.

    Both are None if there was no local launcher, or it left nothing.
    """

    code: int | None = None
    alive: bool | None = None


@contextmanager
def keep_heartbeat(path: Path, what: str) -> Iterator[Callable[[], bool]]:
    """Keep a file, which is a lock, while the body runs. LockedError if another living launcher has it.

    If the disk cannot hold the file, the body runs without it. Yields what says whether another one took it over.
    """
    lease = None
    with ExitStack() as stack:
        # Only the disk's errors: a LockedError of another launcher still ends this one.
        with suppress(OSError):
            make_folder(path.parent)
            lease = stack.enter_context(create_lock(path, what))

        def is_lost() -> bool:
            if lease is not None:
                lease.check()
            return lease is not None and lease.lost

        yield is_lost


def read_attempt_state(folder: RunFolder, trial: int, *, now_s: float | None = None) -> AttemptState:
    """Read what the last attempt at a trial left. A damaged file counts as none."""
    path = folder.running(trial)
    try:
        data = read_json(path, read_limits().json)
        touched_s = path.stat().st_mtime
        host, pid, started = str(data["host"]), int(data["pid"]), data["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return AttemptState(code=read_exit_code(folder.exit_code(trial), range(256)))
    # On this host the process itself can be looked at; from elsewhere only the age of its file.
    if host in (socket.gethostname(), find_node_name()):
        # The kernel reuses process numbers; the start time tells the launcher from a later process.
        return AttemptState(alive=started is not None and read_start_time(pid) == started)
    return AttemptState(alive=(time.time() if now_s is None else now_s) - touched_s < DEAD_AFTER_S)


def read_exit_code(path: Path | None, known: Container[int] = WORKER_CODES) -> int | None:
    """Read an exit code from a file, a worker's if not said otherwise. None if there is none, or something else."""
    try:
        text = "" if path is None else read_bytes(path, EXIT_CODE_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() and int(text) in known else None


START_S = 3.0  # so long mpiexec may take to start its proxy
IDLE_S = 10.0  # an mpiexec without proxy and ranks ends by itself in less, or never
NO_RANKS = "mpiexec started no rank, and waited"
TAIL_LINES = 100  # of the ranks' output that are looked at for why they ended
LAST_LINES_S = 5.0  # for what ranks printed before they ended
POLL_S = 1.0  # between two looks at what runs, while nothing is printed
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def make_suite_command(*words: str, python: str = sys.executable) -> list[str]:
    """Return the command line of ``mlhpc WORDS`` as a process of its own."""
    return make_python_command("-m", "mlhpc", *words, python=python)


def make_worker_command(
    workload: str,
    *,
    config: str,
    run: Path,
    trial: int,
    mode: str,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    replace_failed: bool = False,
    python: str = sys.executable,
) -> list[str]:
    """Return the command line of one rank (docs/architecture.md, "The worker").

    ``seed`` is the base: trial i gets seed + i.
    """
    command = make_suite_command("run", workload, python=python)
    command += ["--config", config, "--output", str(run), "--trial", str(trial)]
    command += ["--mode", mode] if mode != "strong" else []
    command += ["--seed", str(seed)] if seed is not None else []
    for override in overrides:
        command += ["--set", override]
    return command + (["--resume"] if resume else []) + (["--replace-failed"] if replace_failed else [])


def make_mpiexec_command(ranks: int) -> list[str]:
    """Return the words before the worker's command: this Python's mpiexec or the one on PATH. None for one rank.

    InputError, with the command that installs one, if there is none.
    """
    if ranks < 1:
        raise InputError(f"--ranks {ranks}: expected at least 1")
    if ranks == 1:
        return []
    # The mpiexec of the mpich wheel fits this Python's mpi4py; the one on PATH may be of another MPI.
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise InputError(
            f"no mpiexec beside {sys.executable} or on PATH, needed for {ranks} ranks: "
            f"{sys.executable} -m pip install mpich mpi4py"
        )
    return [program, "-n", str(ranks)]


def make_trial_environment(environ: Mapping[str, str], *, ranks: int) -> dict[str, str]:
    """Return the environment of the ranks: an even share of this process's cores, and no launcher's variables."""
    environment = drop_launcher_variables(environ)
    # Without it the OpenMP threads of every rank take all cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, find_usable_resources(environ).cores // ranks)))
    # A killed rank loses the lines that are still in its buffer.
    environment.setdefault("UCX_NET_DEVICES", "lo")  # of MPICH, which listens on the outer interface else
    return environment | {"PYTHONUNBUFFERED": "1"}


# Lines of Hydra, MPICH's mpiexec. The line of `_CONNECTION_TIMEOUT` is the first that faulthandler prints.
_EXIT_STRING = re.compile(r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")
_CONNECTION_TIMEOUT = re.compile(r"Timeout \(\d+:\d\d:\d\d(\.\d+)?\)!")
_BANNER = re.compile(
    r"={20,}$|=   |\[(mpiexec|proxy)[:@]|YOUR APPLICATION TERMINATED|This typically refers to a problem"
    r"|Please see the FAQ|Abort\(\d+\) on node"
)


def is_banner(line: str) -> bool:
    """Return True for lines of mpiexec's own message about a rank that ended. They go only to the log."""
    return bool(_BANNER.match(line))


def parse_rank_signal(line: str) -> int | None:
    """Parse the signal that ended a rank from a line of mpiexec's output. None if the line names none."""
    match = _EXIT_STRING.match(line)
    return int(match.group(1)) if match else None


def is_connection_timeout(line: str) -> bool:
    """Return True for the line before the stack of a rank that could not connect (mlhpc.suite.training.devices)."""
    return bool(_CONNECTION_TIMEOUT.fullmatch(line))


def explain_end(
    returncode: int,
    ended_by: int | None,
    *,
    late: bool = False,
    cpu_time_s: int | None = None,
    memory_kills: tuple[int | None, int | None] = (None, None),
) -> tuple[int, str | None]:
    """Return the trial's exit code, and a message if the worker could not print one.

    ``ended_by`` is the signal from `parse_rank_signal`. A negative ``returncode`` means that a signal ended the process
    we started. ``late``: the output had a line for which `is_connection_timeout` holds. ``cpu_time_s``: the CPU time
    that one process may take here. ``memory_kills``: `count_memory_kills` before and after.
    """
    if late:
        return 1, "the ranks were not connected with each other within watchdog.silence_s; their Python stacks"
    if ended_by is None and returncode < 0:
        ended_by = -returncode
    if ended_by is not None:
        # The kernel sends the first at the soft limit, the second at the hard one
        limited = cpu_time_s is not None and ended_by in (signal.SIGXCPU, signal.SIGKILL)
        why = f": its CPU time may have reached this shell's limit (ulimit -t: {cpu_time_s} s)" if limited else ""
        if ended_by == signal.SIGKILL and not limited:
            why = f": {_explain_kill(*memory_kills)}"
        name = _describe_signal(ended_by)
        return 1, f"a rank was ended by signal {ended_by} ({name}){why}; the other ranks were stopped"
    if returncode in WORKER_CODES:
        return returncode, None
    if returncode == ExitCode.TAKEN_OVER:  # the rank said why
        return 1, None
    return 1, f"the launcher ended with exit code {returncode}"


def _explain_kill(before: int | None, after: int | None) -> str:
    """Return who may have sent signal 9, which no process can answer: only the kernel's count tells memory apart."""
    if before is not None and after is not None and after > before:
        return f"{MEMORY_RAN_OUT} (oom_kill in /proc/vmstat rose from {before} to {after})"
    count = "the kernel counted no end for want of memory, so " if before is not None and before == after else ""
    return f"{count}a person, a batch system or a limit may have sent it" + (
        "" if count else ", or the kernel, if memory ran out"
    )


MEMORY_RAN_OUT = "the kernel, because memory ran out"


def run_local(
    command: Sequence[str],
    *,
    ranks: int,
    log: Path,
    say: Callable[[str], None],
    echo: Callable[[str], None] | None = None,
    grace_s: float = 30.0,
    environ: Mapping[str, str] = os.environ,
    read_told: Callable[[], int | None] = lambda: None,
    on_stop: Callable[[int], object] = lambda number: None,
) -> int:
    """Run the ranks of a trial until they end and return its exit code (docs/architecture.md): 0, 1, 2 or 3.

    Everything the ranks print is appended to ``log`` and passed to ``echo`` line by line. ``say`` gets at most one
    message, about an abnormal end.

    The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this process becomes SIGTERM to the ranks. A second signal, or
    ``grace_s`` seconds, becomes SIGKILL. The ranks also get SIGTERM and ``grace_s`` to save if this process is killed.
    ``on_stop`` gets the number of the first signal, which ranks that had finished do not notice.

    ``read_told`` reads the exit code that rank 0 left. It counts if mpiexec itself failed.
    """
    token, kills = uuid.uuid4().hex, count_memory_kills()
    # mpiexec starts ranks in sessions of their own, so they are found by this token (mlhpc.suite.processes).
    environment = make_trial_environment(environ, ranks=ranks) | {LAUNCH: token}
    make_folder(log.parent)
    log.touch()
    ended_by, late, tail = None, False, deque[str](maxlen=TAIL_LINES)
    stop = _RankStopper(token, grace_s, on_stop)
    with _forward_signals(stop), _OutputRelay(log, token, grace_s) as output, _kill_at_end(stop):
        process = subprocess.Popen(
            [*make_mpiexec_command(ranks), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output.take_writer(),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=make_parent_death_hook(os.getpid()),
        )
        stop.attend(process)
        output.begin()
        monitor = _LauncherMonitor(process, token, ranks, stop, grace_s)
        for line in output.lines(monitor.check):
            ended_by, late = ended_by or parse_rank_signal(line), late or is_connection_timeout(line)
            tail.append(line)
            if echo is not None and not is_banner(line) and line.strip():
                echo(line)
        returncode = process.wait()
    late, limit_s = late and returncode != 0, find_usable_resources(environ).cpu_time_s
    code, message = explain_end(
        returncode, ended_by, late=late, cpu_time_s=limit_s, memory_kills=(kills, count_memory_kills())
    )
    if monitor.stuck:
        code, message = 1, NO_RANKS
        # What it did not say: another program was to start its proxy, or none could be started
        tail.append("mpiexec@" if explain_steering(environ) else "unable to fork")
    if stop.number is not None and (ended_by is not None or returncode < 0):
        message = None  # it was asked for, and whoever got the signal says so
    if stop.forced:
        slow = f"the ranks did not stop within {render_duration(grace_s)} of the signal and"
        code, message = (
            1,
            f"{'a second signal came before the ranks had stopped: they' if stop.again else slow} were killed",
        )
    # mpiexec can fail after all ranks have come to their end.
    elif message and (kept := read_told()) is not None:
        code, message = kept, f"{message}, but all ranks had come to the end: exit code {kept} counts"
    elif message and (cause := explain_limit("\n".join(tail)) or explain_network("\n".join(tail), environ)):
        message = f"{message}; {cause}"
    if message:
        say(f"{message}: see {log}")
    return code


def run_attached(command: Sequence[str], *, ranks: int, environ: Mapping[str, str] = os.environ) -> int:
    """Run ranks that print for this process, and return their exit code.

    Their errors go where this process's go. Their output passes through it, because mpiexec would end them at a full
    disk. They have nothing to save: the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 to this process kills them. Then it
    raises KeyboardInterrupt here.
    """
    token = uuid.uuid4().hex
    # Lines of this process come before those of the ranks.
    sys.stdout.flush()
    stop = _RankStopper(token, grace_s=0.0)
    with _forward_signals(stop), _kill_at_end(stop):
        process = subprocess.Popen(
            [*make_mpiexec_command(ranks), *command],
            env=make_trial_environment(environ, ranks=ranks) | {LAUNCH: token},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=make_parent_death_hook(os.getpid()),
        )
        # A daemon: a stray process that holds the pipe open must not keep this one alive.
        printer = threading.Thread(target=_print_all, args=(process.stdout,), daemon=True)
        printer.start()
        stop.attend(process)
        code = process.wait()
    printer.join(LAST_LINES_S)
    if stop.number is not None:
        end_by_signal(stop.number)
    return code


def _print_all(lines: IO[bytes] | None) -> None:
    assert lines is not None
    for line in lines:
        print_line(line.decode(errors="replace"), end="")


class _OutputRelay:
    """The relay between the ranks and this process (mlhpc.suite.launch.relay). It outlives this process."""

    def __init__(self, log: Path, token: str, grace_s: float) -> None:
        self._arguments = (str(log), token, str(grace_s))
        self._reader, self._writer = os.pipe()

    def __enter__(self) -> _OutputRelay:
        self._relay = subprocess.Popen(
            make_python_command("-m", "mlhpc.suite.launch.relay", *self._arguments),
            stdin=self._reader,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        # With a reading end open here, ranks would not notice that the relay has ended.
        os.close(self._reader)
        return self

    def __exit__(self, *_: object) -> None:
        self.begin()
        assert self._relay.stdout is not None
        self._relay.stdout.close()
        self._relay.wait()

    def take_writer(self) -> int:
        """Return the descriptor that the ranks write to."""
        return self._writer

    def begin(self) -> None:
        """Close the writing end here, so that the output ends when the ranks have ended."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def lines(self, running: Callable[[], bool]) -> Iterator[str]:
        """Yield the lines of the ranks until they end and ``running`` returns False. Asks it about once a second."""
        assert self._relay.stdout is not None
        source, rest, ended = self._relay.stdout.fileno(), b"", False
        while True:
            if ended or not select.select([source], [], [], POLL_S)[0]:
                if not running() and ended:
                    break
                # At the end of the output select returns at once.
                time.sleep(POLL_S if ended else 0)
                continue
            data = os.read(source, 65536)
            ended = not data
            # A read may end in the middle of a line.
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        if rest:
            yield rest.decode(errors="replace")


class _LauncherMonitor:
    """Watches mpiexec and its proxy, and takes over if either ends before the ranks.

    Nobody else would end the other ranks when one dies.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], token: str, ranks: int, stop: _RankStopper, grace_s: float
    ) -> None:
        self._process, self._token, self._ranks, self._stop, self._grace_s = process, token, ranks, stop, grace_s
        self._started = time.monotonic()
        self._missing_since: float | None = None
        self._idle_since: float | None = None
        self.stuck = False  # mpiexec had neither proxy nor ranks, and would have waited for ever

    def check(self) -> bool:
        """Return True while the trial runs. Kills unattended ranks once one has been missing for the grace period."""
        if self._process.poll() is None:
            # An mpiexec without a child has lost its proxy, and nobody would end the other ranks when one dies.
            starting = time.monotonic() - self._started < START_S
            if self._ranks == 1 or starting or has_children(self._process.pid):
                return True
        self._stop.launcher_has_gone()
        ranks = len(find_by_token(self._token, ranks_only=True))
        if 0 < ranks < self._ranks:
            self._missing_since = self._missing_since or time.monotonic()
            if time.monotonic() - self._missing_since > self._grace_s:
                kill_by_token(self._token)
        if ranks == 0 and self._process.poll() is None:
            self._idle_since = self._idle_since or time.monotonic()
            if time.monotonic() - self._idle_since > IDLE_S:  # at the end it lives a moment longer than its ranks
                self.stuck = True
                self._process.kill()
        return ranks > 0


class _RankStopper:
    """Stops the ranks: SIGTERM at the first call, SIGKILL at the second or after the grace period.

    It exists before the processes do. A signal that comes earlier takes effect when they have started.
    """

    def __init__(self, token: str, grace_s: float, on_stop: Callable[[int], object] = lambda number: None) -> None:
        self.number: int | None = None  # of the first signal
        self.forced = self.again = False  # again: by a second signal
        self._asked_s = 0.0
        self._on_stop = on_stop
        self._process: subprocess.Popen[bytes] | None = None
        self._token = token
        self._grace_s = grace_s
        self._timer = threading.Timer(grace_s, self._force)
        # It must not keep this process alive after the ranks have ended.
        self._timer.daemon = True
        self._passed_on = self._ranks_told = False

    def attend(self, process: subprocess.Popen[bytes]) -> None:
        """Remember the process that the signals are for."""
        self._process = process
        if self.number is not None:
            self._end()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.number is not None:
            # timeout(1) sends a signal to the process and to its group: two that follow at once are one request.
            if time.monotonic() - self._asked_s > REPEAT_WINDOW_S:
                self.again = True
                self._force()
            return
        self.number, self._asked_s = signum, time.monotonic()
        self._on_stop(signum)
        self._end()

    def finish(self) -> None:
        """Kill whatever is left of the ranks, however they ended."""
        self._timer.cancel()
        kill_by_token(self._token)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def launcher_has_gone(self) -> None:
        """Signal the ranks themselves, once: an mpiexec that gets the signal while it starts ends without them."""
        if self.number is not None and not self._ranks_told:
            self._ranks_told = True
            signal_by_token(self._token, signal.SIGTERM)

    def _end(self) -> None:
        if self._process is None or self._passed_on:
            return
        self._passed_on = True
        # Ranks of `run_attached` have nothing to save.
        if not self._grace_s:
            self._force()
            return
        self._timer.start()
        if self._process.poll() is None:
            # mpiexec passes it on to its ranks.
            self._process.send_signal(signal.SIGTERM)
        else:
            self.launcher_has_gone()

    def _force(self) -> None:
        self.forced = True
        kill_by_token(self._token)


@contextmanager
def _kill_at_end(stop: _RankStopper) -> Iterator[None]:
    try:
        yield
    finally:
        stop.finish()


@contextmanager
def _forward_signals(handler: _RankStopper) -> Iterator[None]:
    """Send signals of this process to the handler. Does nothing outside the main thread, where Python forbids it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in FORWARDED_SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _describe_signal(number: int) -> str:
    return next((item.name for item in signal.Signals if item == number), "unknown")


Family = Literal["mpich", "openmpi"]
LOAD_PROGRAM = """
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    paths = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
print("LOADS", " ".join(MPI.Get_library_version().splitlines()[0].split()), "FROM", *paths[:1], flush=True)
"""
# Run by two processes: one line from one world of two, or two lines from two worlds of one
WORLD_PROGRAM = """
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() == 0:
    print("RANKS", MPI.COMM_WORLD.Get_size(), " ".join(MPI.Get_library_version().splitlines()[0].split()), flush=True)
"""
# What a library or launcher calls itself. The members of a family share one binary interface
FAMILIES: tuple[tuple[Family, str], ...] = (
    ("openmpi", r"open\s?mpi|openrte|prterun|prrte"),
    ("mpich", r"mpich|hydra|mvapich|intel\(r\) mpi|cray"),
)
# The plug-ins of srun that speak the process interface of each family, the best first.
PLUGINS: Mapping[Family, tuple[str, ...]] = {"mpich": ("pmi2", "cray_shasta", "pmix"), "openmpi": ("pmix",)}


@dataclass(frozen=True)
class SiteMpi:
    """The MPI of a cluster. ``mpicc`` is its compiler wrapper, ``loaded`` its loaded MPI modules.

    ``modules`` is True if it has environment modules at all.
    """

    mpicc: str | None
    loaded: tuple[str, ...]
    modules: bool


def find_site(environ: Mapping[str, str]) -> SiteMpi:
    """Look for the site's MPI: mpicc on PATH but not in this Python's own folder, and environment modules."""
    # The wheel's mpicc in this Python's folder is not the site's.
    own = str(Path(sys.executable).parent)
    path = ":".join(folder for folder in environ.get("PATH", "").split(":") if folder and folder != own)
    names = [name for name in environ.get("LOADEDMODULES", "").split(":") if re.search(r"mpi|mpt", name, re.I)]
    return SiteMpi(shutil.which("mpicc", path=path), tuple(names), bool(environ.get("MODULEPATH")))


def parse_family(text: str) -> Family | None:
    """Return the family of an MPI from its version text. None if it is unknown."""
    return next((name for name, pattern in FAMILIES if re.search(pattern, text, re.I)), None)


def parse_loaded_library(output: str) -> tuple[str, str] | None:
    """Parse version and path of the library that `LOAD_PROGRAM` loaded. None if it did not."""
    match = re.search(r"^LOADS (.*?) FROM ?(.*)$", output, re.M)
    return (match.group(1), match.group(2)) if match else None


def parse_worlds(output: str) -> list[tuple[int, str]]:
    """Parse size and library of each world that `WORLD_PROGRAM` printed. Two processes may print into one line."""
    return [(int(ranks), text) for ranks, text in re.findall(r"RANKS (\d+) ([^\n]+?)\s*(?=RANKS|\n|$)", output)]


def explain_fix(
    site: SiteMpi, python: str = sys.executable, output: str = "", environ: Mapping[str, str] = os.environ
) -> str:
    """Return what to do if no MPI loads, or if launcher and library are of different MPIs.

    ``output``: what they printed. Variables that steer MPI come first: they may cause any failure. Then
    comes the machine, if the output blames it.
    """
    if known := explain_steering(environ) or explain_machine(output) or explain_network(output, environ):
        return known
    if site.mpicc:
        build = f"MPICC={site.mpicc} {python} -m pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
        return f"{python} -m pip uninstall -y mpich; {build}"
    if site.modules and not site.loaded:
        return "load the site's MPI (module avail mpi; module load NAME), then run mlhpc doctor again"
    if site.loaded:
        return f"module {site.loaded[0]} has no mpicc on PATH: load its development module, or ask the site's support"
    return f"{python} -m pip install --force-reinstall mpich mpi4py"


def list_srun_plugins(library: str, types: Sequence[str]) -> list[str]:
    """List the plug-ins of ``srun --mpi`` that connect ranks of this library, best first."""
    known = parse_family(library)
    if known is None:
        return [name for name in types if name.startswith(("pmi", "cray"))]
    return [name for name in PLUGINS[known] if any(each == name or each.startswith(f"{name}_v") for each in types)]
