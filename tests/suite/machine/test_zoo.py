"""Everything that reads the machine, on machines that are not here (tests/machines/): what is found is what their files say.

The keys of ``expected`` are checked here, but for ``doctor`` (tests/suite/commands/test_doctor.py).
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlhpc.suite.errors import InputError
from mlhpc.suite.launch.local import make_trial_environment
from mlhpc.suite.machine.facts import read_facts, write_facts
from mlhpc.suite.machine.probes import allowance
from mlhpc.suite.machine.probes.allowance import find_usable_resources, read_usable_resources
from mlhpc.suite.machine.probes.collect import collect_facts
from mlhpc.suite.machine.probes.processor import VARIABLE, find_machine_root, list_data_caches
from mlhpc.suite.machine.system import System, describe_system, describe_system_of, make_system_description
from mlhpc.suite.performance.ceilings.sizes import SweepPlan, plan_sweep
from mlhpc.suite.training.devices import compute_threads_per_rank
from tests.fixtures.zoo import GIB, Machine, every_machine, machine, machines

MIB = 1 << 20


def test_the_zoo_has_the_machines_that_broke_something() -> None:
    assert len(machines()) >= 15


@every_machine
def test_what_a_process_may_use(machine: Machine, zoo_root: Path) -> None:
    found, expected = read_usable_resources(zoo_root), machine.expected
    assert found.cores == expected["cores"]
    assert found.cpu_quota == expected.get("quota")
    assert found.memory_free == pytest.approx(expected["free_gib"] * GIB, rel=1e-6)
    assert found.memory_limit == (expected["limit_gib"] and expected["limit_gib"] * GIB)
    assert found.open_files == machine.description.get("open_files", [None])[0]


@every_machine
def test_facts_and_system_description(machine: Machine, zoo_root: Path, tmp_path: Path) -> None:
    found = collect_facts({}, root=zoo_root)
    assert found.problems == ()
    assert found.simulated
    assert found.node == machine.description["files"]["proc/sys/kernel/hostname"]
    for name, value in machine.expected["facts"].items():
        part: Any = found.software if name == "container" else found if name == "product" else found.cpu
        told = getattr(part, {"numa": "numa_nodes", "mhz": "max_frequency_mhz"}.get(name, name))
        assert (list(told) if isinstance(told, tuple) else told) == value, name
    system = describe_system_of(found)
    assert system.processor_caches == machine.expected["caches"]
    assert system.threads_per_node == machine.expected["facts"]["threads"]
    assert found.limits.memory_gib == machine.expected["limit_gib"]
    assert read_facts(write_facts(found, tmp_path)) == found


@every_machine
def test_the_plan_of_a_sweep(machine: Machine, zoo_root: Path) -> None:
    expected = machine.expected
    allowed = read_usable_resources(zoo_root)
    plan = plan_sweep(list_data_caches(zoo_root, allowed.cpus), allowed.cpus, allowed.cores, 1, allowed.memory_free, 3)
    assert isinstance(plan, SweepPlan), plan
    assert {cache.name: cache.share_bytes >> 10 for cache in plan.shares} == expected["shares_kib"]
    assert plan.sizes[-1] / MIB == pytest.approx(expected["largest_mib"], abs=0.02)
    assert plan.total_bytes <= allowed.memory_free / 4
    assert expected.get("cut", "") in plan.cut
    assert bool(plan.cut) == ("cut" in expected)


@every_machine
def test_default_threads_of_ranks(machine: Machine, zoo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "REAL_ROOT", zoo_root)  # the machine that works is this one too
    monkeypatch.setenv(VARIABLE, str(zoo_root))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for ranks, threads in machine.expected["threads"].items():
        environment = make_trial_environment({VARIABLE: str(zoo_root), "SLURM_JOB_ID": "1"}, ranks=ranks)
        assert environment["OMP_NUM_THREADS"] == str(threads)
        assert compute_threads_per_rank(SimpleNamespace(local_size=ranks)) == threads  # type: ignore[arg-type]


def test_a_simulated_machine_never_has_more_than_the_real_one(tmp_path: Path) -> None:
    """It is the real one that works: 1024 threads on two cores, or memory that is not there, would break it."""
    root = machine("xeon_8480_two_sockets").lay_out(tmp_path, each_cpu=False)
    (root / "proc/meminfo").write_text("MemTotal: 900000000000 kB\nMemAvailable: 900000000000 kB\n")
    real, found = read_usable_resources(Path("/")), find_usable_resources({VARIABLE: str(root)})
    assert (found.cores, found.memory_free) == (min(224, real.cores), pytest.approx(real.memory_free, rel=0.2))
    assert find_usable_resources({}).cpus == real.cpus


@pytest.mark.parametrize(
    "text", ["", "nonsense", "0-", "3-1", "-", "0-3:1/2", "\0", "0,,1", "1-2-3", "٣", "0-99999999999"]
)
def test_a_mask_that_is_none_leaves_the_cpus_that_are_online(text: str, tmp_path: Path) -> None:
    root = machine("offline_cpus").lay_out(tmp_path, each_cpu=False)
    (root / "proc/self/status").write_text(f"Cpus_allowed_list:\t{text}\n")
    assert read_usable_resources(root).cpus == {1, 4}


@pytest.mark.parametrize(
    "text", ["", "-1", "max", "max max", "x y", "0 0", "100000 0", "100000", "1 2 3", "9" * 30 + " x"]
)
def test_a_quota_that_is_none_is_no_quota(text: str, tmp_path: Path) -> None:
    root = machine("slurm_job_cgroup_v2").lay_out(tmp_path, each_cpu=False)
    (root / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/cpu.max").write_text(text)
    assert read_usable_resources(root).cpu_quota is None


@pytest.mark.parametrize(
    ("name", "text", "free_gib"),
    [
        ("memory.max", "max", 200),
        ("memory.max", "", 200),
        ("memory.max", str(1 << 62), 200),
        ("memory.max", "-5", 200),
        ("memory.current", "", 8),
        ("memory.current", str(9 << 30), 0),  # over its limit: nothing is free, and never less than nothing
        ("memory.stat", "inactive_file 536870912", 7.5),
        ("memory.stat", "inactive_file nonsense", 7),
        ("memory.high", str(4 << 30), 3),
        ("step_0/user/memory.max", str(2 << 30), 2),
    ],
)
def test_the_strictest_group_counts(name: str, text: str, free_gib: float, tmp_path: Path) -> None:
    root = machine("slurm_job_cgroup_v2").lay_out(tmp_path, each_cpu=False)
    path = root / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert read_usable_resources(root).memory_free == free_gib * GIB


def test_a_hybrid_tree_of_groups_is_read(tmp_path: Path) -> None:
    """systemd's: version 1 controllers, and version 2 beside them without any."""
    root = machine("container_cgroup_v1").lay_out(tmp_path, each_cpu=False)
    (root / "sys/fs/cgroup/unified").mkdir()
    text = (root / "proc/self/cgroup").read_text()
    (root / "proc/self/cgroup").write_text(f"{text}0::/docker/af31\n")
    assert read_usable_resources(root).memory_free == 3 * GIB


def test_a_path_that_leads_out_of_the_tree_stays_in_it(tmp_path: Path) -> None:
    root = machine("container_cgroup_v1").lay_out(tmp_path, each_cpu=False)
    (root / "proc/self/cgroup").write_text("4:memory:/../../../../etc\n")
    assert read_usable_resources(root).memory_free == 3 * GIB


def test_a_machine_that_says_nothing_has_one_core_and_unknown_memory(tmp_path: Path) -> None:
    found = read_usable_resources(tmp_path)
    assert (found.cores, found.memory_free, found.memory_total, found.open_files) == (1, None, None, None)


def test_a_root_that_is_no_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{VARIABLE}={tmp_path / 'none'}: expected the folder"):
        find_machine_root({VARIABLE: str(tmp_path / "none")})


def test_results_of_a_simulated_machine_say_so_whatever_the_system_file_says(tmp_path: Path) -> None:
    facts = collect_facts({VARIABLE: str(machine("grace").lay_out(tmp_path))})
    system = describe_system([facts], System(system_name="Alps", hardware_notes="none", processor_model="NVIDIA Grace"))
    text = json.dumps(make_system_description(system, submitter="A", division="closed", status="onprem", nodes=1))
    assert json.loads(text)["system_name"] == "simulated machine: Alps"
    assert facts.software.packages, "the software is real"
    real = collect_facts({}, root=Path("/"), run=lambda command: "")
    assert not real.simulated
    assert "simulated" not in (describe_system_of(real).system_name or "")
