"""Measures `mlhpc preflight` on a real Slurm of two nodes: six ways in which one node is slow, and healthy repetitions.

    python -m tests.plugins.fleet.slow_nodes --looks 100 -o benchmarks/results/DATE-preflight.txt

Each node is a network namespace with a core of its own. As root, with Debian's slurm-wlm and iproute2, and cgroup v1. Nodes share
the machine's memory, caches and disk. All gates are those of a job script that `mlhpc submit --preflight` renders.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from scipy import stats

from mlhpc.plugins.fleet.samples import compute_node_value, group_by_metric, read_samples
from mlhpc.plugins.fleet.slow_nodes import FALSE_ALARM_RATE, judge, merge_verdicts
from mlhpc.suite.launch.job import Job, Resources, Site, SystemFile
from mlhpc.suite.launch.script import render_script
from mlhpc.suite.machine.probes.processor import read_cpu
from tests.slurm.conftest import Cluster, running_cluster, slurm_path

SLOW = "node2"
GATE_S = 48
HISTORY = 20  # earlier looks that a healthy look is judged beside
LOOKS_PROGRAM = """
import sys
from pathlib import Path
import torch
from mlhpc.plugins.fleet.benches import measure_node
from mlhpc.suite.launcher import Launch
from mlhpc.suite.world import World, find_node_name
torch.set_num_threads(1)
tell = lambda text: None
world = World.create(Launch("none", 0, 1))
for look in range(int(sys.argv[2])):
    measure_node(world, device=torch.device("cpu"), directory=Path(sys.argv[1]), workloads={"cosmoflow": Path(sys.argv[3])},
            seconds=float(sys.argv[4]), output=Path(sys.argv[1]) / f"{look:04d}-{find_node_name()}.jsonl", at=tell, say=tell)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--looks", type=int, default=100, help="healthy looks at both nodes")
    parser.add_argument("--look-s", type=float, default=2.5, help="seconds of one of them")
    parser.add_argument("--gates", type=int, default=6, help="healthy gates before those with a slow node; 0: no gates")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    os.environ["PATH"] = slurm_path()
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {read_cpu(Path('/')).model}, {os.cpu_count()} CPUs, Linux {platform.release()}; "
        "two slurmd, each in a network namespace on a core of its own; memory, caches and disk are shared"
    ]

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)
        options.output.write_text("\n".join(lines) + "\n")

    with tempfile.TemporaryDirectory(prefix="mlhpc-slow-", dir="/tmp") as folder, two_hosts() as hosts:
        root = Path(folder)
        data = make_data(root)
        with running_cluster(hosts) as cluster:
            for number, node in enumerate(("node1", "node2")):
                subprocess.run(["taskset", "-acp", str(number), pid_of(cluster, node)], check=True, capture_output=True)
            say_healthy(say, cluster, root, data, options.looks, options.look_s)
            if options.gates:
                say_gates(say, cluster, root, options.gates)
    return 0


def make_data(root: Path) -> Path:
    """The smoke data of CosmoFlow, whose step is measured, below a new working folder."""
    data = root / "data/cosmoflow-smoke"
    words = ["-P", "-m", "mlhpc", "data", "generate", "cosmoflow", "--size", "smoke", "-o", str(data)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=root)
    return data


def say_healthy(
    say: Callable[[str], None], cluster: Cluster, root: Path, data: Path, looks: int, seconds: float
) -> None:
    """Repeat the measuring of two healthy nodes in one step, and judge every look beside those before it."""
    folder, program = root / "looks", root / "looks.py"
    folder.mkdir()
    program.write_text(LOOKS_PROGRAM)
    words = ["srun", "-N2", "-n2", "--ntasks-per-node=1", "--mpi=none", sys.executable, "-P", str(program)]
    words += [str(folder), str(looks), str(data), str(seconds)]
    subprocess.run(words, check=True, env=cluster.environment | {"OMP_NUM_THREADS": "1"}, cwd=root)
    metrics = [
        group_by_metric(s for path in sorted(folder.glob(f"{n:04d}-*")) for s in read_samples(path))
        for n in range(looks)
    ]
    once = gate = count = 0
    past: list[dict[tuple[str, str], list[float]]] = []  # of each look
    for number in range(looks - 1):
        history = {key: [of[key] for of in past[-HISTORY:]] for key in (past[0] if past else {})}
        if number >= HISTORY:
            first, second = (judge(metrics[n], history=history) for n in (number, number + 1))
            once += sum(word == "bad" for word in first.words.values())
            gate += sum(word == "bad" for word in merge_verdicts(first, second).words.values())
            count += len(first.words)
        past.append(
            {(m.hardware, m.name): [values_of(v, m.better) for v in m.samples.values()] for m in metrics[number]}
        )
    low, high = stats.binom.interval(0.95, count, FALSE_ALARM_RATE)
    say(
        f"healthy: {looks} looks of {seconds:g} s at two nodes, {len(metrics[0])} metrics, beside the {HISTORY} looks before: "
        f"{count} repetitions of a node; named by one look {once}, by the gate's two looks {gate}; promised {FALSE_ALARM_RATE:g}: "
        f"{FALSE_ALARM_RATE * count:.2g} expected, 95 % within {low:.0f} to {high:.0f}"
    )


def values_of(values: tuple[float, ...], better: str) -> float:
    """A node's value of a metric, as history has it."""
    return math.exp(compute_node_value(values, "less"))


def say_gates(say: Callable[[str], None], cluster: Cluster, root: Path, healthy: int) -> None:
    """Gates of a job script: healthy ones that fill the history, then one for each way to be slow."""
    took, alarms = [], 0
    for number in range(healthy):
        verdict, seconds, _ = gate_of(cluster, root, f"healthy-{number}")
        took.append(seconds)
        alarms += sum(node["word"] == "bad" for node in verdict["nodes"].values())
    say(
        f"gates of {GATE_S} s while both nodes are healthy: {healthy}, nodes called bad: {alarms} of {2 * healthy}; "
        f"took {min(took)} to {max(took)} s: {max(took) / 36:.0f} % of an hour's job"
    )
    for name, slow in WAYS.items():
        with slow(cluster):
            verdict, seconds, _ = gate_of(cluster, root, name.split(":")[0].replace(" ", "-"))
        words = {node: about["word"] for node, about in sorted(verdict["nodes"].items())}
        named = "named" if words[SLOW] == "bad" else "NOT named"
        say(f"{name}: {named}; {words}; {seconds} s")
        for reason in verdict["nodes"][SLOW]["reasons"][:6]:
            say(f"    {reason}")


def gate_of(cluster: Cluster, root: Path, name: str) -> tuple[dict, int, str]:  # type: ignore[type-arg]
    """Run the gate of a job script without trials: its verdict, the seconds it took, and what it printed."""
    site = Site(preflight_history=str(root / "history"))
    system = SystemFile(name="two", site=site, resources=Resources(exclusive=False))
    job = Job(
        "cosmoflow", "smoke", "smoke", system, nodes=1, ranks_per_node=1, run=str(root / name),
        python=sys.executable, preflight=GATE_S, spares=1, time_limit="10",
    )  # fmt: skip
    script = root / f"{name}.sbatch"
    script.write_text(render_script(job))
    number = cluster.sbatch(script, exports={"MLHPC_RUNS": "0", "TMPDIR": str(root)}, cwd=root)
    cluster.wait(number, timeout_s=180)
    text = (root / f"cosmoflow-smoke-{number}.out").read_text()
    (verdict,) = (root / name).glob("preflight/*/verdict.json")
    seconds = int(text.rpartition("preflight: took ")[2].split()[0])
    return json.loads(verdict.read_text()), seconds, text


@contextmanager
def two_hosts() -> Iterator[dict[str, list[str]]]:
    """Two network namespaces and this host on one bridge: the commands that run something on node1 and node2."""
    ip, pid = shutil.which("ip") or "/usr/sbin/ip", os.getpid()
    names = {node: f"slow{pid}{node[-1]}" for node in ("node1", "node2")}

    def run(*words: str) -> None:
        subprocess.run([ip, *words], check=True, capture_output=True)

    with ExitStack() as stack:
        run("link", "add", "mlhpcbr", "type", "bridge")
        stack.callback(subprocess.run, [ip, "link", "del", "mlhpcbr"], capture_output=True)
        run("addr", "add", "10.78.0.254/24", "dev", "mlhpcbr")
        run("link", "set", "mlhpcbr", "up")
        for number, (node, name) in enumerate(names.items(), 1):
            run("netns", "add", name)
            stack.callback(subprocess.run, [ip, "netns", "del", name], capture_output=True)
            run("link", "add", f"{node}out", "type", "veth", "peer", "name", f"{node}in")
            run("link", "set", f"{node}out", "master", "mlhpcbr")
            run("link", "set", f"{node}in", "netns", name)
            run("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", f"{node}in")
            for words in (("link", "set", f"{node}out", "up"), ("-n", name, "link", "set", f"{node}in", "up")):
                run(*words)
            run("-n", name, "link", "set", "lo", "up")
        names_file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlhpc-hosts-", dir="/tmp"))) / "hosts"
        names_file.write_text("127.0.0.1 localhost\n10.78.0.1 node1\n10.78.0.2 node2\n")
        bind = f'mount --bind {names_file} /etc/hosts && exec nsenter --net=/run/netns/$0 "$@"'  # with /sys as it is
        yield {node: ["unshare", "--mount", "sh", "-c", bind, name] for node, name in names.items()}


def pid_of(cluster: Cluster, node: str) -> str:
    return (cluster.folder / f"{node}.pid").read_text().strip()


@contextmanager
def in_cgroup(cluster: Cluster, kind: str, *settings: tuple[str, str]) -> Iterator[Path]:
    """Put the slow node's daemon, and what it starts, into a control group with these settings."""
    group = Path(f"/sys/fs/cgroup/{kind}/mlhpc-slow-{os.getpid()}")
    group.mkdir()
    try:
        for file, value in settings:
            (group / file).write_text(value)
        (group / "cgroup.procs").write_text(pid_of(cluster, SLOW))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        time.sleep(0.2)
        group.rmdir()


@contextmanager
def busy(*words: str, group: Path | None = None) -> Iterator[None]:
    """A process beside, on the slow node's core."""
    process = subprocess.Popen(["taskset", "-c", "1", *words])
    try:
        if group is not None:
            (group / "cgroup.procs").write_text(str(process.pid))
        time.sleep(2)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def quota(cluster: Cluster) -> Iterator[None]:
    with in_cgroup(cluster, "cpu", ("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "50000")):
        yield


@contextmanager
def governor(cluster: Cluster) -> Iterator[None]:
    with in_cgroup(cluster, "cpu", ("cpu.cfs_period_us", "4000"), ("cpu.cfs_quota_us", "2400")):
        yield


@contextmanager
def hog(cluster: Cluster) -> Iterator[None]:
    program = "b = bytearray(3 << 30)\nwhile True:\n for i in range(0, len(b), 4096): b[i] = 1"
    with (
        in_cgroup(cluster, "memory", ("memory.limit_in_bytes", str(3800 << 20))) as group,
        busy(sys.executable, "-c", program, group=group),
    ):
        yield


@contextmanager
def throttled_link(cluster: Cluster) -> Iterator[None]:
    tbf = ["root", "tbf", "rate", "200mbit", "burst", "64k", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", f"{SLOW}out", *tbf], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", f"{SLOW}out", "root"], check=True)


@contextmanager
def slow_disk(cluster: Cluster) -> Iterator[None]:
    device = Path("/tmp").stat().st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {20 << 20}"
    with in_cgroup(
        cluster, "blkio", ("blkio.throttle.write_bps_device", limit), ("blkio.throttle.read_bps_device", limit)
    ):
        yield


WAYS: dict[str, Callable[[Cluster], AbstractContextManager[None]]] = {
    "CPU quota: half a core, by cgroup": quota,
    "memory hog: 3 GiB of the node's 3.7, by cgroup": hog,
    "link: 200 Mbit/s, by tc tbf": throttled_link,
    "disk: 20 MiB/s, by cgroup blkio": slow_disk,
    "stolen core: a busy process on the node's core": lambda cluster: busy(sys.executable, "-c", "while True: pass"),
    "governor: 60 % of the clock, simulated by a quota of 2.4 in every 4 ms": governor,
}


if __name__ == "__main__":
    sys.exit(main())
