"""Reads the processors of the node and their caches from /proc/cpuinfo and /sys/devices/system/cpu."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite.machine.facts import UNKNOWN, Cache, Cpu
from mlhpc.suite.machine.probes.sysfs import parse_cpu_list, parse_number, read_text

SIMD_FLAGS = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx_vnni", "amx_bf16", "asimd", "sve", "sve2")
CPUS = "sys/devices/system/cpu"  # below the file-system root
# (implementer, part) of /proc/cpuinfo, as lscpu of util-linux names them
ARM_MODELS = {
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0x43", "0x0af"): "Marvell ThunderX2",
    ("0x46", "0x001"): "Fujitsu A64FX",
    ("0x48", "0xd01"): "HiSilicon TaiShan v110",
}
KIB_PER_UNIT = {"K": 1, "M": 1024, "G": 1024**2}


@dataclass(frozen=True)
class CpuCache:
    """One cache that a CPU (a hardware thread) uses. ``kind`` is data, instruction, unified or unknown.

    ``shared_cpu_list`` names the CPUs that use the same cache, as Linux writes lists (``0-3,8``). It is "" if Linux
    does not say.
    """

    level: int
    kind: str
    size_kib: int
    shared_cpu_list: str

    @property
    def size_bytes(self) -> int:
        """The size of the cache in bytes."""
        return self.size_kib << 10

    @property
    def sharers(self) -> frozenset[int]:
        """The CPUs that share the cache."""
        return parse_cpu_list(self.shared_cpu_list)


def read_cpu(root: Path) -> Cpu:
    """Describe all processors of the node."""
    entries = read_cpuinfo(root)
    first = entries[0] if entries else {}
    cpus = _list_cpus(root)
    topology = _read_topology(cpus)
    flags = _list_flags(first)
    return Cpu(
        model=_find_model(root, first),
        architecture=read_text(root / "proc/sys/kernel/arch") or platform.machine() or UNKNOWN,
        sockets=len({package for package, _ in topology}) or None,
        cores=len(set(topology)) or None,
        threads=len(entries) or None,
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        max_frequency_mhz=_read_max_frequency_mhz(cpus, entries),
        governor=_read_governor(cpus),
        boost=_read_boost(root),
        smt=read_text(root / CPUS / "smt/control") or UNKNOWN,
        simd=tuple(flag for flag in SIMD_FLAGS if flag in flags),
        virtualised="hypervisor" in flags if flags else None,
        caches=_count_caches(cpus),
    )


def _list_flags(entry: Mapping[str, str]) -> set[str]:
    """Return the features of a processor: x86 calls them flags, Arm features."""
    return set((entry.get("flags") or entry.get("Features") or "").split())


def _read_governor(cpus: Sequence[Path]) -> str:
    """Return the frequency governor of the first CPU that states one. Virtual machines have none."""
    for cpu in cpus:
        if text := read_text(cpu / "cpufreq/scaling_governor"):
            return text
    return UNKNOWN


def _read_boost(root: Path) -> str:
    """Return whether the processor may exceed its nominal clock: ``on`` or ``off``, from one of two drivers."""
    for name, on in (("cpufreq/boost", "1"), ("intel_pstate/no_turbo", "0")):
        if text := read_text(root / CPUS / name):
            return "on" if text == on else "off"
    return UNKNOWN


def _find_model(root: Path, entry: Mapping[str, str]) -> str:
    """Return the processor's name. Arm's have numbers instead; the device tree names the board, not the processor."""
    numbers = (entry.get("CPU implementer", ""), entry.get("CPU part", ""))
    board = read_text(root / "sys/firmware/devicetree/base/model").strip("\0")
    return entry.get("model name") or ARM_MODELS.get(numbers) or board or UNKNOWN


def read_cpuinfo(root: Path) -> list[dict[str, str]]:
    """Read /proc/cpuinfo: the fields of each hardware thread. Empty if it cannot be read."""
    entries = []
    for block in read_text(root / "proc/cpuinfo").split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        entry = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in entry:
            entries.append(entry)
    return entries


def list_data_caches(root: Path, cpus: Iterable[int]) -> list[CpuCache]:
    """List the data and unified caches, by level, of the first CPU that has any.

    Empty if Linux does not describe them (containers, some Arm machines). Other CPUs may have other caches: the
    efficiency cores of a hybrid processor have smaller ones.
    """
    for cpu in sorted(cpus):
        caches = _list_caches(root / CPUS / f"cpu{cpu}")
        # Instruction caches hold no data; without sharers a thread's part cannot be told.
        described = [cache for cache in caches if cache.kind in {"data", "unified"} and cache.sharers]
        if described:
            return sorted(described, key=lambda cache: cache.level)
    return []


def _list_cpus(root: Path) -> list[Path]:
    return sorted((root / CPUS).glob("cpu[0-9]*"), key=lambda path: int(path.name[3:]))


def _read_topology(cpus: Sequence[Path]) -> list[tuple[str, str]]:
    """Return (package, core) of each CPU that has both. Core numbers begin anew in every package."""
    ids = [(read_text(cpu / "topology/physical_package_id"), read_text(cpu / "topology/core_id")) for cpu in cpus]
    return [(package, core) for package, core in ids if package.isdecimal() and core.isdecimal()]  # "-1": not known


def _read_max_frequency_mhz(cpus: Sequence[Path], entries: Sequence[Mapping[str, str]]) -> float | None:
    """Return the highest frequency that the driver allows any CPU; without a driver the highest present one in
    /proc/cpuinfo.
    """
    allowed = [parse_number(read_text(cpu / "cpufreq/cpuinfo_max_freq")) for cpu in cpus]
    # The driver states the boost clock; cpuinfo only what a core runs at now.
    if any(allowed):
        return max(khz for khz in allowed if khz) / 1000
    momentary = [parse_number(entry.get("cpu MHz", "")) for entry in entries]
    return max((mhz for mhz in momentary if mhz), default=None)


def _list_caches(cpu: Path) -> list[CpuCache]:
    """List all caches of one CPU with a known level and size."""
    caches = []
    for index in sorted(cpu.glob("cache/index[0-9]*")):
        level, size_kib = parse_number(read_text(index / "level")), _parse_size_kib(read_text(index / "size"))
        if level and size_kib:
            kind = read_text(index / "type").lower() or UNKNOWN
            caches.append(CpuCache(int(level), kind, size_kib, read_text(index / "shared_cpu_list")))
    return caches


def _count_caches(cpus: Sequence[Path]) -> tuple[Cache, ...]:
    """Count the caches of the node. CPUs that share a cache state the same list; no list means a private cache."""
    sharers: dict[tuple[int, str, int], set[str]] = {}
    for cpu in cpus:
        for cache in _list_caches(cpu):
            sharers.setdefault((cache.level, cache.kind, cache.size_kib), set()).add(cache.shared_cpu_list or cpu.name)
    return tuple(
        Cache(level=level, kind=kind, size_kib=size, instances=len(lists))
        for (level, kind, size), lists in sorted(sharers.items())
    )


def _parse_size_kib(text: str) -> int | None:
    match = re.fullmatch(r"(\d+)([KMG])", text)
    return int(match.group(1)) * KIB_PER_UNIT[match.group(2)] if match else None
