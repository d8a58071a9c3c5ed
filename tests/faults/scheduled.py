"""The campaign on a real Slurm of two nodes, or on a real Grid Engine: see `tests.faults.campaign`."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.campaign import SETTINGS, Chain, Keep, Kill, Outcome, commands, make_data, parent_of, plan, run_chains
from tests.grid_engine.conftest import SUBMIT, GridEngine, running_grid_engine
from tests.slurm.conftest import ROOT, Cluster, lives, running_cluster, slurm_path

SCRIPT = ROOT / "submissions" / "slurm" / "cosmoflow-mini.sbatch"
OF_SLURM = ("rank", "srun", "slurmstepd", "slurmd", "script")
OF_GRID_ENGINE = ("rank", "mpiexec", "proxy", "shepherd", "execd", "script")
DAEMONS = ("slurmd", "sge_execd")
LIMIT_S = 180.0  # a job that the scheduler itself does not end by then is cancelled, as its owner would
EMPTY_S = (
    25.0  # the same for a job that has had no rank for so long: Slurm waits for one that it lost with its slurmstepd
)


def wait_for_end(pid: int, limit_s: float = 20.0) -> None:
    """Wait a second, and until a daemon has ended: one that got SIGTERM may take seconds to shut down."""
    time.sleep(1.0)
    end = time.monotonic() + limit_s - 1.0
    while lives(pid) and Path(dict(commands()).get(pid, [""])[0]).name in DAEMONS and time.monotonic() < end:
        time.sleep(0.1)


class Job:
    """A job of a chain."""

    def __init__(
        self, cluster: Cluster | GridEngine, job: str, exit_file: Path, ranks: Callable[[], list[int]], patience: float
    ) -> None:
        self._cluster, self._job, self._exit, self._ranks = cluster, job, exit_file, ranks
        self._begin = self._worked = time.monotonic()
        self.cancelled, self._patience = False, patience

    def poll(self) -> int | None:
        """The job's exit code, 1 if its script left none; None while the scheduler has it. Cancels what has nothing left to do."""
        state, now = self._cluster.state(self._job), time.monotonic()
        if state != "RUNNING" or self._ranks():
            self._worked = now
        empty_s, limit_s = self._patience * EMPTY_S, self._patience * LIMIT_S
        if not self.cancelled and (now > self._worked + empty_s or now > self._begin + limit_s):
            self._cluster.cancel(self._job)
            self.cancelled = True
        if state in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"}:
            return None
        return int(self._exit.read_text()) if self._exit.exists() else 1

    def wait(self) -> int:
        """Wait for the end."""
        while (code := self.poll()) is None:
            time.sleep(0.2)
        return code


class ScheduledChain(Chain):
    """A trial of two ranks as a job. The same script continues the run folder."""

    end_s = 240.0  # a run goes on to its end where its scheduler loses a process that it does not need, as one of srun's two
    keeps: tuple[str, ...] = ()  # daemons, which live on

    def __init__(self, cluster: Any, root: Path, data: Path, seed: int, patience: float) -> None:
        super().__init__(root, data, seed, dict(cluster.environment))
        self.cluster, self.job, self.patience = cluster, "", patience
        self.end_s = patience * type(self).end_s  # longer than until a job is cancelled
        self.jobs: list[Job] = []

    def start(self) -> Job:
        """Submit the job; the same script continues the run folder."""
        exports = {
            "MLHPC_PYTHON": sys.executable,
            "MLHPC_SIZE": "smoke",
            "MLHPC_RUN": str(self.root),
            "MLHPC_RUNS": "1",
            "MLHPC_SEED": str(self.seed),
            "MLHPC_SET": " ".join((f"data={self.data}", *SETTINGS)),
            "MLHPC_REPLACE_FAILED": "1" if self.replace else "0",
        }
        self.replace = False
        self.root.parent.mkdir(exist_ok=True)
        self.job = self.submit(exports)
        self.jobs.append(Job(self.cluster, self.job, self.root / "exit" / self.job, self.ranks, self.patience))
        return self.jobs[-1]

    def submit(self, exports: dict[str, str]) -> str:
        """Submit the script with these variables; the job's id."""
        raise NotImplementedError

    def ranks(self) -> list[int]:
        """The living ranks."""
        return self.processes()["rank"]

    def alive(self) -> list[int]:
        """Every living process of the job: not the daemons."""
        return [pid for kind, pids in self.processes().items() for pid in pids if kind not in self.keeps]


class SlurmChain(ScheduledChain):
    """A trial on two nodes, one rank each."""

    victims, keeps = OF_SLURM, ("slurmd",)
    options: tuple[str, ...] = ()

    def submit(self, exports: dict[str, str]) -> str:
        return self.cluster.sbatch(SCRIPT, *self.options, exports=exports, cwd=self.root.parent)

    def processes(self) -> dict[str, list[int]]:
        """The living processes of the job by kind; the daemons of the nodes too."""
        found: dict[str, list[int]] = {name: [] for name in OF_SLURM}
        for pid, words in commands():
            program, line = Path(words[0]).name, " ".join(words)
            if line.startswith(f"slurmstepd: [{self.job}."):
                found["slurmstepd"].append(pid)
            elif f"job{int(self.job or 0):05d}/slurm_script" in line:
                found["script"].append(pid)
            elif str(self.root) in words:
                found["srun" if program == "srun" else "rank"].append(pid)
        for node in ("node1", "node2"):
            if pid := self._daemon(node):
                found["slurmd"].append(pid)
        return found

    def repair(self) -> None:
        """Start a killed slurmd again after a while."""
        wait_for_end(self.struck)
        for node in ("node1", "node2"):
            if self._daemon(node) is None:
                self.cluster.call("slurmd", "-N", node)

    def _daemon(self, node: str) -> int | None:
        """The living slurmd of a node. One that was ended by SIGTERM has removed its pid file."""
        try:
            pid = int((self.cluster.folder / f"{node}.pid").read_text() or 0)
        except FileNotFoundError:
            return None
        return pid if pid and lives(pid) else None


class PreemptedChain(SlurmChain):
    """The same, whose nodes an urgent job takes away. Slurm queues the job again by itself."""

    victims, options = ("preemption",), ("--requeue",)

    def processes(self) -> dict[str, list[int]]:
        """Also the ranks, as what a preemption takes away."""
        found = super().processes()
        return found | {"preemption": found["rank"]}

    def strike(self, victim: int, number: int) -> None:
        """Submit an urgent job for all nodes."""
        words = ("-p", "urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
        self.cluster.call("sbatch", *words, cwd=self.root.parent)


class GridEngineChain(ScheduledChain):
    """A trial on one node, two ranks under mpiexec."""

    victims, keeps = OF_GRID_ENGINE, ("execd",)

    def submit(self, exports: dict[str, str]) -> str:
        script = self.root.parent / "job.sh"
        if not script.exists():
            words = [*SUBMIT, "--dry-run", "-q"]
            script.write_text(self.cluster.call(sys.executable, "-P", "-m", "mlhpc", *words))
        # Not started again by itself: the campaign does so
        words = ["-terse", "-r", "n", "-o", "/dev/null", str(script)]
        return str(self.cluster.call("qsub", *words, cwd=self.root.parent, **exports)).strip()

    def processes(self) -> dict[str, list[int]]:
        """The living processes of the job by kind; the daemon of the node too."""
        found = {name: pids for name, pids in super().processes().items() if name in OF_GRID_ENGINE}
        found |= {name: [] for name in OF_GRID_ENGINE if name not in found}
        running = dict(commands())
        for pid, words in running.items():
            if f"/job_scripts/{self.job} " in f"{' '.join(words)} ":
                found["script"].append(pid)
                if "sge_shepherd" in running.get(shepherd := parent_of(pid), [""])[0]:
                    found["shepherd"].append(shepherd)
        found["execd"] = [pid for pid in self.cluster.daemons() if lives(pid)]
        return found

    def repair(self) -> None:
        """Start a killed execd again after a while."""
        wait_for_end(self.struck)
        if not any(map(lives, self.cluster.daemons())):
            self.cluster.call("sge_execd")


def campaign(
    root: Path,
    kills: int,
    seed: int,
    keep: Keep | None = None,
    *,
    grid_engine: bool = False,
    preempted: bool = False,
    patience: float = 1.0,
) -> list[Outcome]:
    """Run chains under a scheduler until as many kills as asked for have hit a living process.

    ``patience`` multiplies the times after which a job is cancelled, for a busy machine.
    """
    os.environ["PATH"] = slurm_path()
    chance = random.Random(seed)
    data = make_data(root)
    with running_grid_engine() if grid_engine else running_cluster() as cluster:
        chains: list[ScheduledChain] = []

        def chain(number: int, batch: Sequence[Kill]) -> Chain:
            kind = GridEngineChain if grid_engine else PreemptedChain if preempted else SlurmChain
            chains.append(kind(cluster, root / f"chain{number}", data, seed, patience))
            return chains[-1]

        victims = OF_GRID_ENGINE if grid_engine else PreemptedChain.victims if preempted else OF_SLURM
        outcomes = run_chains(chain, plan(kills, 0, chance, victims), chance, keep=keep)
    cancelled = sum(job.cancelled for each in chains for job in each.jobs)
    print(f"{cancelled} jobs without a rank for {EMPTY_S:g} s were cancelled, as their owner would", flush=True)
    return outcomes
