"""A real Grid Engine of one node on this machine for the session: own ports, cell and folder; stopped by its pid files.

Debian's packages; /etc/hosts stays as it is, because `host_aliases` says that this host and localhost are one.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mlhpc.suite.launch.schedulers.grid_engine import fetch_states
from tests.slurm.conftest import ROOT, free_ports, stop

PROGRAMS = ("sge_qmaster", "sge_execd", "qsub", "qstat", "qconf")
INSTALL = "MLHPC_INSTALL_SLURM=1 make slurm"
SYSTEM = ROOT / "submissions/systems/grid-engine.yaml"
SUBMIT = ("submit", "cosmoflow", "--system", str(SYSTEM), "--size", "smoke", "--nodes", "1")
SHARE, TOOLS = Path("/usr/share/gridengine"), Path("/usr/lib/gridengine")
LIMITS = "\n".join(
    f"{kind}_{what} INFINITY"
    for what in ["rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem"]
    for kind in "sh"
)
GROUP = "group_name @allhosts\nhostlist {host}\n"
PARALLEL_ENVIRONMENT = """\
pe_name mlhpc
slots 8
user_lists NONE
xuser_lists NONE
start_proc_args /bin/true
stop_proc_args /bin/true
allocation_rule $pe_slots
control_slaves TRUE
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""
QUEUE = f"""\
qname all.q
hostlist @allhosts
seq_no 0
load_thresholds NONE
suspend_thresholds NONE
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:00:01
processors UNDEFINED
qtype BATCH INTERACTIVE
ckpt_list NONE
pe_list mlhpc
rerun FALSE
slots 8
tmpdir /tmp
shell /bin/bash
prolog NONE
epilog NONE
shell_start_mode unix_behavior
starter_method NONE
suspend_method NONE
resume_method NONE
terminate_method NONE
notify 00:00:60
owner_list NONE
user_lists NONE
xuser_lists NONE
subordinate_list NONE
complex_values NONE
projects NONE
xprojects NONE
calendar NONE
initial_state default
{LIMITS}
"""


@dataclass(frozen=True)
class GridEngine:
    """A running Grid Engine."""

    root: Path
    ports: tuple[int, int]
    first: tuple[str, ...] = ()  # the command that runs something on the first host

    @property
    def environment(self) -> dict[str, str]:
        foreign = ("SGE_", "PMI_", "MLHPC_", "OMP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        ports = {"SGE_QMASTER_PORT": str(self.ports[0]), "SGE_EXECD_PORT": str(self.ports[1])}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        return kept | ports | {"SGE_ROOT": str(self.root), "SGE_CELL": "default", "PATH": path}

    def call(self, *command: str, cwd: Path = ROOT, **variables: str) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            (*self.first, *command),
            cwd=cwd,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """The job's state in the words of `mlhpc status`. "GONE" after its end."""
        found = fetch_states([job], lambda *words: self.call(*words))
        return next((state for name, _, state in found if name == job), "GONE")

    def cancel(self, job: str) -> None:
        """Cancel a job. One that has ended meanwhile is no error."""
        try:
            self.call("qdel", job)
        except AssertionError:
            assert self.state(job) == "GONE"

    def daemons(self) -> list[int]:
        """The process ids that sge_execd noted."""
        return [int(path.read_text()) for path in self.root.glob("spool/execd/*/execd.pid")]

    def wait_until_gone(self, job: str) -> None:
        """Wait until the queue has no more of a job."""
        deadline = time.monotonic() + 300
        while any(line.split()[:1] == [job] for line in self.call("qstat", "-u", "*").splitlines()):
            assert time.monotonic() < deadline, self.call("qstat", "-j", job)
            time.sleep(0.3)


@pytest.fixture(scope="session")
def grid_engine() -> Iterator[GridEngine]:
    """One node with eight slots."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing or os.getuid():
        pytest.skip(f"no {', '.join(missing) or 'root'} on this machine; as root: {INSTALL}")
    with running_grid_engine() as started:
        yield started


@contextmanager
def running_grid_engine(hosts: Mapping[str, Sequence[str]] | None = None) -> Iterator[GridEngine]:
    """Start a Grid Engine in a new folder under /tmp, stop it and remove the folder.

    ``hosts``: the commands that run something on hosts of these names, the first with all but the other's execd. Each takes one
    rank of a job.
    """
    root = Path(tempfile.mkdtemp(prefix="mlhpc-sge-", dir="/tmp"))
    root.chmod(0o755)
    commands = {name: tuple(command) for name, command in (hosts or {socket.gethostname(): ()}).items()}
    host = next(iter(commands))
    ports = free_ports()
    engine = GridEngine(root, (ports[0], ports[1]), commands[host])
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, root, ignore_errors=True)
        common, spool = root / "default/common", root / "spool"
        for folder in (common, spool / "qmaster/job_scripts", spool / "execd"):
            folder.mkdir(parents=True)
        for name in ("bin", "lib", "util", "utilbin"):
            (root / name).symlink_to(Path("/var/lib/gridengine") / name)
        where = f"{common};{spool}/qmaster"
        own = {"admin_user": "root", "ignore_fqdn": "true", "spooling_method": "classic", "spooling_lib": "libspoolc"}
        own |= {"spooling_params": where, "qmaster_spool_dir": f"{spool}/qmaster"}
        _write_settings(SHARE / "default-bootstrap", common / "bootstrap", own)
        own = {"execd_spool_dir": f"{spool}/execd", "min_uid": "0", "min_gid": "0", "load_report_time": "00:00:01"}
        _write_settings(SHARE / "default-configuration", root / "configuration", own)
        if hosts is None:
            (common / "host_aliases").write_text(f"{host} localhost {socket.getfqdn()}\n")
        (common / "act_qmaster").write_text(f"{host}\n")
        engine.call(str(TOOLS / "spoolinit"), "classic", "libspoolc", where, "init")
        resources = SHARE / "util/resources"
        for what, value in (
            ("configuration", root / "configuration"),
            ("complexes", resources / "centry"),
            ("usersets", resources / "usersets"),
            ("managers", "root"),
        ):
            engine.call(str(TOOLS / "spooldefaults"), what, str(value))
        cleanup.callback(stop, spool / "qmaster/qmaster.pid")
        engine.call("sge_qmaster")
        for name in commands:
            _wait_for(engine, "qconf", "-as", name)
            engine.call("qconf", "-ah", name)
        rule = PARALLEL_ENVIRONMENT.replace("$pe_slots", "1") if hosts else PARALLEL_ENVIRONMENT
        for option, text in (("-Ahgrp", GROUP.format(host=" ".join(commands))), ("-Ap", rule), ("-Aq", QUEUE)):
            (root / "file").write_text(text)
            engine.call("qconf", option, str(root / "file"))
        fast = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
        (root / "scheduler").write_text(engine.call("qconf", "-ssconf"))
        _write_settings(root / "scheduler", root / "file", fast)
        engine.call("qconf", "-Msconf", str(root / "file"))
        cleanup.callback(lambda: [stop(path) for path in spool.glob("execd/*/execd.pid")])
        for command in commands.values():
            replace(engine, first=command).call("sge_execd")
        yield engine
        subprocess.run(
            [*engine.first, "qdel", "-f", "-u", "*"], env=engine.environment, capture_output=True, timeout=300
        )


def _write_settings(source: Path, target: Path, own: dict[str, str]) -> None:
    """Copy a file of names and values, with other values for some."""
    lines = [line.split(None, 1) for line in source.read_text().splitlines() if line.strip() and line[0] != "#"]
    target.write_text("".join(f"{name} {own.get(name, value)}\n" for name, value in lines))


def _wait_for(engine: GridEngine, *command: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            [*engine.first, *command], env=engine.environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline, done.stdout + done.stderr
        time.sleep(0.2)
