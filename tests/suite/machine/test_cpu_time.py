"""Who used the CPUs of a node: on the machines of the zoo from files, and here beside a real neighbour."""

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from mlhpc.suite.machine.probes.allowance import read_usable_resources
from mlhpc.suite.machine.probes.cpu_time import (
    CONTROL_GROUP,
    PROC_STAT,
    TICKS,
    NodeUse,
    compute_use,
    read_node_times,
    read_own_s,
)
from tests.fixtures.zoo import Machine, every_machine, machine

HOST = 5000  # seconds that each CPU was busy before the run


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def lay_times(root: Path, cpus: Collection[int], busy: dict[int, float], *, stolen: float = 0.0) -> None:
    """A /proc/stat of these CPUs: ``busy`` seconds since the run began, a third of each kind; interrupts do not count."""
    rows = []
    for cpu in cpus:
        third = (HOST + busy.get(cpu, 0.0)) * TICKS / 3
        kinds = [third, third, third, 9e6, 7e3, 7777 * len(rows), 3e3, stolen * TICKS, third, 0]
        rows.append(f"cpu{cpu} {' '.join(str(round(kind)) for kind in kinds)}")
    write(root, "proc/stat", "\n".join(["cpu  1 2 3 4 5 6 7 8 9 0", *rows, f"intr {'5 ' * 2000}", "ctxt 17"]))


def lay_process(root: Path, pid: str, seconds: float, *, parent: str = "1", children: str | None = None) -> None:
    """A process that used so many seconds, half of it in children that have ended; its name has a space and a bracket."""
    quarter = round(seconds * TICKS / 4)
    fields = ["S", parent, *["0"] * 9, *[str(quarter)] * 4, "20", "0"]
    number = "42" if pid == "self" else pid
    write(root, f"proc/{pid}/stat", f"{number} (a ) name) {' '.join(fields)}\n")
    if children is not None:
        write(root, f"proc/{pid}/task/{number}/children", children)


def used(root: Path, own_s: float, busy: dict[int, float], stolen: float = 0.0) -> NodeUse:
    allowed = read_usable_resources(root)
    cpus = range(max(256, *allowed.cpus) + 1)
    lay_times(root, cpus, {})
    begin = read_node_times(root)
    lay_times(root, cpus, busy, stolen=stolen)
    return compute_use(begin, read_node_times(root), allowed.cpus, own_s, allowed.cores)


@every_machine
def test_only_the_cpus_that_the_job_may_use_count(machine: Machine, zoo_root: Path) -> None:
    cpus = read_usable_resources(zoo_root).cpus
    busy = {cpu: 10.0 if cpu in cpus else 999.0 for cpu in range(300)}
    found = used(zoo_root, 4.0 * len(cpus), busy, stolen=0.5)
    assert (found.cpus, found.source, found.absent) == (len(cpus), PROC_STAT, None)
    assert found.other_s == pytest.approx(6.0 * len(cpus), abs=0.03 * len(cpus))
    assert found.stolen_s == pytest.approx(0.5 * len(cpus))
    assert found.pressure_s is None, "no machine of the zoo has /proc/pressure"


@every_machine
def test_a_machine_that_counts_nothing_says_so(machine: Machine, zoo_root: Path) -> None:
    begin = read_node_times(zoo_root)
    allowed = read_usable_resources(zoo_root)
    found = compute_use(begin, read_node_times(zoo_root), allowed.cpus, 30.0, allowed.cores)
    assert (found.other_s, found.source) == (0.0, None)
    assert found.absent is not None


def test_in_a_container_whose_proc_stat_is_empty_its_group_counts(tmp_path: Path) -> None:
    """Version 1, and the path of the group is the host's: the mount is the container's own."""
    root = machine("container_cgroup_v1").lay_out(tmp_path, each_cpu=False)
    usage = "sys/fs/cgroup/cpu,cpuacct/cpuacct.usage"
    lay_times(root, range(64), {})
    write(root, usage, "5000000000000\n")
    begin = read_node_times(root)
    write(root, usage, "5020000000000\n")
    found = compute_use(begin, read_node_times(root), frozenset(range(64)), 12.0, 6)
    assert (found.source, found.cpus, found.own_s, found.other_s) == (CONTROL_GROUP, 6, 12.0, pytest.approx(8.0))


def test_the_widest_group_of_version_2_counts(tmp_path: Path) -> None:
    root = machine("slurm_job_cgroup_v2").lay_out(tmp_path, each_cpu=False)
    job = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
    begin = None
    for usage in (100_000_000, 140_000_000):
        write(root, f"{job}/cpu.stat", f"usage_usec {usage}\nuser_usec 1\n")
        write(root, f"{job}/step_0/cpu.stat", f"usage_usec {usage // 2}\n")
        begin = begin or read_node_times(root)
    found = compute_use(begin, read_node_times(root), frozenset({16, 17, 18, 19}), 30.0, 4)  # type: ignore[arg-type]
    assert (found.source, found.other_s) == (CONTROL_GROUP, pytest.approx(10.0))


def test_times_of_other_cpus_than_the_kernel_lists_are_not_taken(tmp_path: Path) -> None:
    """A container may list CPUs 0 to 3 in /proc/stat while its mask has the host's numbers."""
    lay_times(tmp_path, range(4), {})
    begin = read_node_times(tmp_path)
    lay_times(tmp_path, range(4), dict.fromkeys(range(4), 10.0))
    assert compute_use(begin, read_node_times(tmp_path), frozenset({16, 17}), 1.0, 2).absent


def test_counts_that_went_back_are_no_negative_time(tmp_path: Path) -> None:
    lay_times(tmp_path, [0], {0: 9.0}, stolen=3.0)
    begin = read_node_times(tmp_path)
    lay_times(tmp_path, [0], {}, stolen=1.0)
    found = compute_use(begin, read_node_times(tmp_path), frozenset({0}), 0.5, 1)
    assert (found.other_s, found.stolen_s) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["", "cpu0", "cpu0 1 2", "cpu0 a b c d", "cpu0 1 2 3 -4", "\0"])
def test_a_stat_that_is_none_counts_nothing(text: str, tmp_path: Path) -> None:
    write(tmp_path, "proc/stat", text)
    assert read_node_times(tmp_path).by_cpu == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("some avg10=1.53 avg60=0.82 avg300=0.94 total=46071654\nfull avg10=0.00 total=0", 46.071654),
        ("some avg10=0.00", None),
        ("", None),
    ],
)
def test_pressure(text: str, seconds: float | None, tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/cpu", text)
    assert read_node_times(tmp_path).pressure_s == seconds


@pytest.mark.parametrize("listed", [True, False], ids=["children listed", "children searched"])
def test_workers_of_a_rank_are_its_own_and_no_others(listed: bool, tmp_path: Path) -> None:
    """A living child, and a grandchild of it that another thread started; not a stranger."""
    if listed:
        write(tmp_path, "proc/thread-self/children", "")
    lay_process(tmp_path, "self", 8.0, children="50 ")
    lay_process(tmp_path, "42", 8.0)
    lay_process(tmp_path, "50", 2.0, parent="42", children="")
    write(tmp_path, "proc/50/task/51/children", "60 61")  # 61 has ended meanwhile
    lay_process(tmp_path, "60", 1.0, parent="50")
    lay_process(tmp_path, "70", 400.0)
    assert read_own_s(tmp_path) == pytest.approx(11.0)


def test_a_process_that_the_kernel_tells_nothing_of_used_nothing(tmp_path: Path) -> None:
    assert read_own_s(tmp_path) == 0.0


MEASURED = """
import sys, time
from pathlib import Path
from mlhpc.suite.machine.probes.cpu_time import read_node_times, read_own_s, compute_use
root, cpu = Path("/"), int(sys.argv[1])
begin, own = read_node_times(root), read_own_s(root)
sys.stdout.write("begun\\n"); sys.stdout.flush()
spent = time.process_time() + 0.4
while time.process_time() < spent: pass
use = compute_use(begin, read_node_times(root), {cpu}, read_own_s(root) - own, 1)
print(use.own_s, use.other_s, use.source)
"""


def test_a_busy_neighbour_on_the_same_cpu_is_told() -> None:
    """Both are pinned to one CPU and fight for it, so the neighbour gets about as much as is measured to be one's own."""
    cpu = min(os.sched_getaffinity(0))

    def pin() -> None:
        os.sched_setaffinity(0, {cpu})

    with subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=pin) as neighbour:
        try:
            measured = [sys.executable, "-c", MEASURED, str(cpu)]
            done = subprocess.run(measured, preexec_fn=pin, capture_output=True, text=True, timeout=300, check=True)
        finally:
            neighbour.kill()
    own_s, other_s, source = done.stdout.split()[1:]
    assert source == PROC_STAT
    assert float(own_s) == pytest.approx(0.4, abs=0.1)
    assert float(other_s) > 0.1  # other people's processes can only add to it
