"""Machines that nobody here has: the topology that util-linux keeps of them (tests/expected/lscpu), and what its lscpu counts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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
