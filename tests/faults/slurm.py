"""The campaign on a real Slurm of two nodes: see `tests.faults.campaign`."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.campaign import SETTINGS, Chain, Keep, Kill, Outcome, commands, make_data, plan, run_chains
from tests.slurm.conftest import ROOT, Cluster, lives, running_cluster, slurm_path

SCRIPT = ROOT / "submissions" / "slurm" / "cosmoflow-mini.sbatch"
VICTIMS = ("rank", "srun", "slurmstepd", "slurmd", "script")
LIMIT_S = 180.0  # a job that Slurm itself does not end by then is cancelled, as its owner would
EMPTY_S = (
    25.0  # the same for a job that has had no rank for so long: Slurm waits for one that it lost with its slurmstepd
)


class Job:
    """A job of a chain."""

    def __init__(self, cluster: Cluster, job: str, exit_file: Path, ranks: Callable[[], list[int]]) -> None:
        self._cluster, self._job, self._exit, self._ranks = cluster, job, exit_file, ranks
        self._begin = self._worked = time.monotonic()
        self.cancelled = False

    def poll(self) -> int | None:
        """The job's exit code, 1 if its script left none; None while Slurm has it. Cancels what has nothing left to do."""
        state, now = self._cluster.state(self._job), time.monotonic()
        if state != "RUNNING" or self._ranks():
            self._worked = now
        if not self.cancelled and (now > self._worked + EMPTY_S or now > self._begin + LIMIT_S):
            self._cluster.call("scancel", self._job)
            self.cancelled = True
        if state in {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"}:
            return None
        return int(self._exit.read_text()) if self._exit.exists() else 1

    def wait(self) -> int:
        """Wait for the end."""
        while (code := self.poll()) is None:
            time.sleep(0.2)
        return code


class SlurmChain(Chain):
    """A trial on two nodes, one rank each."""

    victims = VICTIMS
    end_s = 240.0  # a run goes on to its end where Slurm loses a process that it does not need, as one of srun's two

    def __init__(self, cluster: Cluster, root: Path, data: Path, seed: int) -> None:
        super().__init__(root, data, seed, dict(cluster.environment))
        self.cluster, self.job = cluster, ""
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
        self.job = self.cluster.sbatch(SCRIPT, exports=exports, cwd=self.root.parent)
        self.jobs.append(Job(self.cluster, self.job, self.root / "exit" / self.job, self.ranks))
        return self.jobs[-1]

    def processes(self) -> dict[str, list[int]]:
        """The living processes of the job by kind; the daemons of the nodes too."""
        found: dict[str, list[int]] = {name: [] for name in VICTIMS}
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

    def ranks(self) -> list[int]:
        """The living ranks."""
        return self.processes()["rank"]

    def alive(self) -> list[int]:
        """Every living process of the job: not the daemons."""
        return [pid for kind, pids in self.processes().items() for pid in pids if kind != "slurmd"]

    def repair(self) -> None:
        """Start a killed slurmd again after a while."""
        time.sleep(1.0)
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


def campaign(root: Path, kills: int, seed: int, keep: Keep | None = None) -> list[Outcome]:
    """Run chains under Slurm until as many kills as asked for have hit a living process."""
    os.environ["PATH"] = slurm_path()
    chance = random.Random(seed)
    data = make_data(root)
    with running_cluster() as cluster:
        chains = []

        def chain(number: int, batch: Sequence[Kill]) -> Chain:
            chains.append(SlurmChain(cluster, root / f"chain{number}", data, seed))
            return chains[-1]

        outcomes = run_chains(chain, plan(kills, 0, chance, VICTIMS), chance, keep=keep)
    cancelled = sum(job.cancelled for each in chains for job in each.jobs)
    print(f"{cancelled} jobs without a rank for {EMPTY_S:g} s were cancelled, as their owner would", flush=True)
    return outcomes
