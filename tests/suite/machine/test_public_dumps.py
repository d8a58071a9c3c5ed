"""Machines that nobody here has: the topology that util-linux keeps of them (tests/expected/lscpu), and what its lscpu counts;
matrices of `nvidia-smi topo -m` in public issues.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlhpc.suite.machine.facts import UNKNOWN, Accelerator
from mlhpc.suite.machine.probes.collect import read_accelerator_links
from mlhpc.suite.machine.probes.processor import read_cpu

# CPU: core_id, package, core_cpus_list. The numbers of cores begin anew in every cluster, or there are several packages.
SG2042 = {cpu: ((1, 0, 2, 3)[cpu] if cpu < 4 else cpu % 4, 0, str(cpu)) for cpu in range(64)}  # Milk-V Pioneer
PHONE = dict(enumerate([(0, 0, "0"), (1, 0, "1"), (2, 0, "2"), *((i, 1, str(3 + i)) for i in range(4)), (0, 2, "7")]))
EPYC_7451 = {
    cpu: (cpu % 48 // 2, cpu % 48 // 24, f"{cpu % 48},{cpu % 48 + 48}") for cpu in range(96)
}  # core_id repeats
XEON_HT = {cpu: (cpu % 8, 0, f"{cpu % 8},{cpu % 8 + 8}") for cpu in range(16)}


def lay_out(root: Path, cpus: dict[int, tuple[int, int, str]], name: str) -> Iterator[Path]:
    for cpu, (core, package, shared) in cpus.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        for file, text in (("core_id", core), ("physical_package_id", package), (name, shared)):
            (folder / file).write_text(f"{text}\n")
        yield folder


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(("cpus", "cores"), [(SG2042, 64), (PHONE, 8), (EPYC_7451, 48), (XEON_HT, 8)])
def test_cores_are_what_lscpu_counts(
    tmp_path: Path, cpus: dict[int, tuple[int, int, str]], cores: int, name: str
) -> None:
    folders = list(lay_out(tmp_path, cpus, name))
    assert read_cpu(tmp_path).cores == cores
    (folders[-1] / name).unlink()  # a CPU that does not say it: the numbers are what is left
    assert read_cpu(tmp_path).cores == len({(package, core) for core, package, _ in cpus.values()})


@pytest.mark.parametrize("name", ["package_cpus_list", "core_siblings_list"])
def test_clusters_with_package_numbers_are_one_socket(tmp_path: Path, name: str) -> None:
    """As of a phone's chip; lscpu counts one socket."""
    folders = list(lay_out(tmp_path, PHONE, "core_cpus_list"))
    assert read_cpu(tmp_path).sockets == 3
    for folder in folders:
        (folder / name).write_text("0-7\n")
    assert read_cpu(tmp_path).sockets == 1


LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(cells: list[list[str]], head: str, rest: str, blank: str = "\t", start: str = "GPU") -> str:
    names = [f"{start}{i}" for i in range(len(cells))]
    rows = [blank.join([name, *row, rest]) for name, row in zip(names, cells, strict=True)]
    return (
        "\n".join([blank.join(["", *names, head]), *rows, f"NIC0{blank}" + blank.join(["SYS"] * len(cells))])
        + "\n"
        + LEGEND
    )


def alike(count: int, link: str) -> list[list[str]]:
    return [[" X " if i == j else link for j in range(count)] for i in range(count)]


NEW = "NIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
PAIRS = [
    ["X", "NV4", "NODE", "NODE"],
    ["NV4", "X", "PHB", "NODE"],
    ["NODE", "PHB", "X", "NV4"],
    ["NODE", "NODE", "NV4", "X"],
]
DGX_1 = [
    ["X", "NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS"], ["NV1", "X", "NV2", "NV1", "SYS", "NV2", "SYS", "SYS"],
    ["NV1", "NV2", "X", "NV2", "SYS", "SYS", "NV1", "SYS"], ["NV2", "NV1", "NV2", "X", "SYS", "SYS", "SYS", "NV1"],
    ["NV2", "SYS", "SYS", "SYS", "X", "NV1", "NV1", "NV2"], ["SYS", "NV2", "SYS", "SYS", "NV1", "X", "NV2", "NV1"],
    ["SYS", "SYS", "NV1", "SYS", "NV1", "NV2", "X", "NV2"], ["SYS", "SYS", "SYS", "NV1", "NV2", "NV1", "NV2", "X"],
]  # fmt: skip
NVLINK = "NVLink ({} in nvidia-smi topo)"
MATRICES = {
    "HGX H100, sglang #13973": (matrix(alike(8, "NV18"), NEW, "PIX\t0-23,96-119\t0\t\tN/A"), NVLINK.format("NV18")),
    "A800, nccl #933": (matrix(alike(8, "NV8"), "NIC0    CPU Affinity", "NODE    0-47", "     "), NVLINK.format("NV8")),
    "DGX-2, nccl-tests #78": (matrix(alike(16, "NV6"), "mlx5_0\tCPU Affinity", "PIX\t0-23,48-71"), NVLINK.format("NV6")),
    "2 x 5090, club-3090 #1229": (matrix(alike(2, "PHB"), NEW, "SYS\t0-63\t0\t\tN/A"), "PCIe"),
    "8 x 4090, go-gpuallocator #17": (matrix(alike(8, "SYS"), NEW, "PHB\t0-55,112-167\t0\t\tN/A"), "PCIe"),
    "bridges between pairs": (matrix(PAIRS, "", ""), NVLINK.format("NV4") + ", PCIe between others"),
    "DGX-1": (matrix(DGX_1, "mlx5_0", "PIX"), NVLINK.format("NV1, NV2") + ", PCIe between others"),
    "head underlined, H20": (
        matrix(alike(8, "NV18"), NEW, "PXB\t0-55\t0").replace("\tGPU0", "\t\x1b[4mGPU0", 1).replace("NUMA ID", "NUMA ID\x1b[0m"),
        NVLINK.format("NV18"),
    ),
    "ten lanes are more than nine": (matrix([["X", "NV12", "NV4"], ["NV12", "X", "NV4"], ["NV4", "NV4", "X"]], "", ""),
                                     NVLINK.format("NV4, NV12")),
    "one GPU beside an NV-like card": (matrix(alike(1, ""), "NV1", "NV1"), UNKNOWN),
    "a driver that fails": ("Failed to initialize NVML: Driver/library version mismatch\n" + LEGEND, UNKNOWN),
    "nothing": ("", UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", MATRICES)
def test_links_are_those_between_gpus(name: str) -> None:
    text, links = MATRICES[name]
    found = read_accelerator_links([Accelerator(vendor="NVIDIA", model="x")] * 2, lambda command: text)
    assert found == links
