"""Facts: what the node says is read right, what it does not say is unknown, and nothing secret is written."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.facts import UNKNOWN, read_facts, write_facts
from mlhpc.suite.machine.probes import collect
from mlhpc.suite.machine.probes.collect import collect_facts, list_file_systems
from mlhpc.suite.machine.probes.processor import CpuCache, list_data_caches

TWO_SOCKETS = {
    "proc/cpuinfo": "\n\n".join(
        f"processor\t: {i}\nmodel name\t: AMD EPYC 7742\ncpu MHz\t\t: 1500.5\nflags\t\t: sse4_2 avx2 fma"
        for i in range(8)
    ),
    "proc/meminfo": "MemTotal:       526385152 kB\nSwapTotal:             0 kB\n",
    "proc/self/mountinfo": "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 21 0:40 / /a\\040b rw - lustre mds@tcp:/fs rw\n",
    "etc/os-release": 'NAME="SLES"\nPRETTY_NAME="SUSE Linux Enterprise Server 15 SP4"\n',
    "sys/devices/system/node/node0/x": "",
    "sys/devices/system/node/node1/x": "",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3400000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/block/nvme0n1/size": str(1920 * 10**9 // 512),
    "sys/block/nvme0n1/queue/rotational": "0",
    "sys/block/nvme0n1/device/model": "MZ7LH1T9",
    "sys/block/loop0/size": "100",
    "sys/class/net/eth0/device/vendor": "0x15b3",
    "sys/class/net/eth0/speed": "200000",
    "sys/class/net/eth0/type": "1",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/lo/speed": "-1",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
    "sys/class/infiniband/mlx5_0/hca_type": "MT4123",
    "sys/devices/system/edac/mc/mc0/dimm0/size": "32768",
    "sys/devices/system/edac/mc/mc0/dimm0/dimm_mem_type": "Registered-DDR4",
    "sys/devices/system/edac/mc/mc0/dimm1/size": "32768",
    "sys/devices/system/edac/mc/mc0/dimm1/dimm_mem_type": "Registered-DDR4",
    "sys/fs/cgroup/cpu.max": "max 100000",
    "sys/fs/cgroup/memory.max": str(64 * 2**30),
} | {
    f"sys/devices/system/cpu/cpu{i}/{name}": value
    for i in range(8)
    for name, value in {
        "topology/physical_package_id": str(i % 2),
        "topology/core_id": str(i // 2 % 2),
        "cache/index3/level": "3",
        "cache/index3/type": "Unified",
        "cache/index3/size": "16384K",
        "cache/index3/shared_cpu_list": f"socket{i % 2}",
    }.items()
}

SMI = (
    "NVIDIA A100-SXM4-80GB, 81920, 470.57.02, 1410, 400.00, 4, 16, Disabled\n"
    "NVIDIA A100-SXM4-80GB, 81920, 470.57.02, 1410, [N/A], 4, 16, [N/A]\n"
)
TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n\nLegend:\n  NV#  = bonded NVLinks\n"


def tree(folder: Path, files: Mapping[str, str] = TWO_SOCKETS) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def nvidia(command: Sequence[str]) -> str:
    return SMI if "--query-gpu" in command[1] else TOPOLOGY if command[1] == "topo" else ""


def silent(command: Sequence[str]) -> str:
    return ""


def test_a_two_socket_node_with_two_gpus_is_read_right(tmp_path: Path) -> None:
    found = collect_facts({"SLURMD_NODENAME": "nid1"}, root=tree(tmp_path), run=nvidia)
    assert found.problems == ()
    assert found.node == "nid1"
    cpu = found.cpu
    assert (cpu.model, cpu.sockets, cpu.cores, cpu.threads, cpu.numa_nodes) == ("AMD EPYC 7742", 2, 4, 8, 2)
    assert (cpu.max_frequency_mhz, cpu.governor, cpu.simd, cpu.virtualised) == (
        3400.0,
        "performance",
        ("sse4_2", "avx2", "fma"),
        False,
    )
    assert [(c.level, c.size_kib, c.instances) for c in cpu.caches] == [(3, 16384, 2)]
    assert found.memory.total_gib == pytest.approx(502.0, abs=0.1)
    assert found.memory.modules == {"32 GiB Registered-DDR4": 2}
    assert found.memory.transparent_hugepages == "madvise"
    assert [(d.name, d.rotational, d.size_gib) for d in found.storage] == [
        ("nvme0n1", False, pytest.approx(1788.1, abs=1))
    ]
    assert [(n.name, n.link, n.speed_gbit_s, n.state) for n in found.network] == [
        ("eth0", "ethernet", 200.0, "up"),
        ("mlx5_0/1", "rdma over infiniband", 200.0, "active"),
    ]
    first, second = found.accelerators
    assert (first.model, first.memory_gib, first.max_clock_mhz, first.power_limit_w) == (
        "NVIDIA A100-SXM4-80GB",
        80.0,
        1410.0,
        400.0,
    )
    assert (second.power_limit_w, second.mig) == (None, UNKNOWN)
    assert found.accelerator_links == "NVLink (NV12 in nvidia-smi topo)"
    assert (found.limits.memory_gib, found.limits.cpu_quota) == (64.0, None)
    assert found.software.operating_system == "SUSE Linux Enterprise Server 15 SP4"


def test_data_caches_are_read_as_linux_lists_them(tmp_path: Path) -> None:
    caches = [("Data", "1", "48K", "0,64"), ("Instruction", "1", "32K", "0,64")]
    caches += [("Unified", "2", "1024K", "0,64"), ("Unified", "3", "32768K", "0-7")]
    names = ("type", "level", "size", "shared_cpu_list")
    files = {
        f"sys/devices/system/cpu/cpu0/cache/index{index}/{name}": f"{text}\n"
        for index, texts in enumerate(caches)
        for name, text in zip(names, texts, strict=True)
    }
    found = list_data_caches(tree(tmp_path, files), [0])
    assert found[0] == CpuCache(level=1, kind="data", size_kib=48, shared_cpu_list="0,64")
    assert [(cache.level, cache.size_bytes >> 10, len(cache.sharers)) for cache in found] == [
        (1, 48, 2),
        (2, 1024, 2),
        (3, 32768, 8),
    ]
    assert list_data_caches(tmp_path / "none", [0]) == []


def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    places = {"data": tmp_path}
    mounts = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:40 / {tmp_path.parent} rw shared:1 - lustre mds:/fs rw\n"
    (found,) = list_file_systems(tree(tmp_path, {"proc/self/mountinfo": mounts}), places)
    assert (found.type, found.device, found.mount) == ("lustre", "mds:/fs", str(tmp_path.parent))


def test_a_node_that_says_nothing_is_unknown_and_not_an_error(tmp_path: Path) -> None:
    found = collect_facts({}, root=tmp_path, run=silent)
    assert found.problems == ()
    assert (found.cpu.model, found.cpu.sockets, found.memory.total_gib, found.accelerators) == (UNKNOWN, None, None, ())
    assert found.software.operating_system == UNKNOWN


def test_files_full_of_nonsense_do_not_end_a_run(tmp_path: Path) -> None:
    nonsense = dict.fromkeys(TWO_SOCKETS, "\0\xff: ::\n\n - -max [] 7x\n")
    found = collect_facts({}, root=tree(tmp_path, nonsense), run=lambda command: "a,b\n\0,,,,,,,\n")
    assert found.node
    assert all(":" in problem for problem in found.problems)


def test_a_probe_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "list_block_devices", lambda root: 1 // 0)
    found = collect_facts({}, root=tmp_path, run=silent)
    assert found.problems == ("storage: ZeroDivisionError: integer division or modulo by zero",)
    assert found.storage == ()


def test_only_listed_variables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        "SLURM_JWT": "s3cr3t",
        "SLURM_JOB_USER": "s3cr3t",
        "WANDB_API_KEY": "s3cr3t",
    }
    for name, value in (secrets | {"SLURM_JOB_ID": "17", "OMP_NUM_THREADS": "3"}).items():
        monkeypatch.setenv(name, value)
    text = write_facts(collect_facts(os.environ), tmp_path).read_text()
    assert "s3cr3t" not in text
    assert json.loads(text)["slurm"] == {"SLURM_JOB_ID": "17"}
    assert json.loads(text)["tuning"]["OMP_NUM_THREADS"] == "3"


def test_facts_are_written_once_per_node_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("n1", "n2", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        path = write_facts(collect_facts(os.environ, run_folder=tmp_path), tmp_path / "run")
        assert read_facts(path).node == node
    assert sorted(p.name for p in (tmp_path / "run/facts").iterdir()) == ["n1.json", "n2.json"]
    assert any(place.purpose == "run folder" for place in read_facts(path).file_systems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ('{"version": 0}', "expected facts of version 1, found 0"),
        ('{"version": 1}', "missing keys 'collected', 'node', 'hostname'"),
    ],
)
def test_facts_that_are_none_say_what_was_wanted(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "n.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"^{path}: {message}"):
        read_facts(path)
