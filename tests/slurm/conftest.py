"""A real Slurm of two nodes on this machine for the session: own ports, munge and folder; stopped by its pid files.

The nodes share this machine's cores: they prove placement, limits and failure handling, never timing.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "squeue")
INSTALL = "apt-get install -y slurm-wlm munge"

SLURM_CONF = """\
ClusterName=mlhpc
FirstJobId={first_job}
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=5
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=batch Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES PriorityTier=1
PartitionName=urgent Nodes=node[1-2] MaxTime=INFINITE State=UP OverSubscribe=YES PriorityTier=2
"""


@dataclass(frozen=True)
class Cluster:
    """A running Slurm. Commands run with its configuration and without any other Slurm's variables."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        foreign = ("SLURM_", "SBATCH_", "PMI_", "MLHPC_", "OMP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, cwd: Path = ROOT, **variables: str) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            command, cwd=cwd, env=self.environment | variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, script: Path, *options: str, exports: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
        """Submit a script and return the job id. ``exports`` go through the environment, as sbatch passes it on."""
        return self.call("sbatch", "--parsable", *options, str(script), cwd=cwd, **(exports or {})).strip()

    def state(self, job: str) -> str:
        """The job's state as squeue or scontrol says, for example RUNNING."""
        text = self.call("scontrol", "show", "job", job)
        return text.partition("JobState=")[2].split()[0]

    def cancel(self, job: str) -> None:
        self.call("scancel", job)

    def wait(self, job: str, *, timeout_s: float = 300) -> str:
        """Wait until the job has ended and its script is gone; its last state."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self.state(job)
            if state not in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"}:
                return state
            time.sleep(0.3)
        self.cancel(job)
        raise AssertionError(f"job {job} still {state} after {timeout_s} s")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, node1 and node2, idle."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=slurm_path()) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this machine; as root: {INSTALL}")
    os.environ["PATH"] = slurm_path()
    with running_cluster() as started:
        yield started


@contextmanager
def running_cluster(hosts: Mapping[str, Sequence[str]] | None = None) -> Iterator[Cluster]:
    """Start a cluster in a new folder under /tmp (unix socket names are short), stop it and remove the folder.

    ``hosts``: the commands that run something on the hosts node1 and node2 with the addresses 10.78.0.1 and .2, where this one
    is 10.78.0.254.
    """
    folder = Path(tempfile.mkdtemp(prefix="mlhpc-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname().partition(".")[0]
        ports = free_ports()
        nodes = f"NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2 State=UNKNOWN"
        if hosts is not None:
            nodes = (
                f"NodeName=node[1-2] NodeHostname={host} NodeAddr=10.78.0.[1-2] Port={ports[1]} CPUs=1 State=UNKNOWN"
            )
        address = "127.0.0.1" if hosts is None else "10.78.0.254"
        # MPICH names its shared memory by job and step, and what a killed step leaves in /dev/shm stops the next one of that name
        first_job = 1 + int.from_bytes(os.urandom(3)) * 3
        text = SLURM_CONF.format(
            root=folder, user=user, host=host, address=address, ports=ports, nodes=nodes, first_job=first_job
        )
        (folder / "slurm.conf").write_text(text)
        for name in ("state", "spool/node1", "spool/node2"):
            (folder / name).mkdir(parents=True)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        for pid_file in ("munged.pid", "slurmctld.pid", "node1.pid", "node2.pid"):  # stopped in the reverse order
            cleanup.callback(stop, folder / pid_file)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={folder / file}" for name, file in files.items()]
        cluster.call("munged", "--force", *options, f"--seed-file={folder / 'munged.seed'}")
        cluster.call("slurmctld", "-i")
        for node in ("node1", "node2"):
            cluster.call(*(hosts or {}).get(node, ()), "slurmd", "-N", node)
        _wait_until_idle(cluster)
        yield cluster
        subprocess.run(["scancel", "--user", user], env=cluster.environment, timeout=300)


def slurm_path() -> str:
    """PATH with this Python's folder and the folders of Slurm's daemons."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


def free_ports() -> list[int]:
    """One port for slurmctld and two consecutive ones for the nodes."""
    for base in range(17800 + os.getpid() % 1000, 30000, 7):
        probes = [socket.socket() for _ in range(3)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", base + offset))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
        return [base, base + 1, base + 2]
    raise AssertionError("no three free ports in a row")


def _wait_until_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "--noheader", "-o", "%T %D"], env=cluster.environment, capture_output=True, text=True, timeout=300
        )
        if done.stdout.split() == ["idle", "2"]:
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(cluster.folder.glob("*.log")))
    raise AssertionError(f"the two nodes are not idle after 300 s: {done.stdout}{done.stderr}\n{logs}")


def stop(pid_file: Path) -> None:
    """SIGTERM to the process of a pid file, then SIGKILL after 10 s. A daemon that never started has no file."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return
    deadline = time.monotonic() + 10
    while lives(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """False for a zombie too: in a container the first process may never ask for a daemon's end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
