"""Reads the processors of the node and their caches from /proc/cpuinfo and /sys/devices/system/cpu.

Reads the node's main memory: sizes from /proc/meminfo, DIMMs from the EDAC driver or else from dmidecode.

Reads short texts of the kernel and of vendors' tools, and numbers in them. No function here raises.

Finds the root of the file system that the probes read: ``/``, or the folder of a simulated machine.

`VARIABLE` is an aid for tests: commands can meet a machine that is not there. Facts, ceilings and system descriptions
made with it say that the machine is simulated.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.facts import UNKNOWN, Cache, Cpu, Memory

COMMAND_TIMEOUT_S = 20

Run = Callable[[Sequence[str]], str]  # runs a command and returns what it prints, "" if it fails


def run_command(command: Sequence[str]) -> str:
    """Return what a command prints; "" if it is not installed, fails or takes longer than `COMMAND_TIMEOUT_S`."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_text(path: Path) -> str:
    """Return the content of a file without surrounding white space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def parse_number(text: str) -> float | None:
    """Parse the number at the beginning of a text ("200 Gb/sec" gives 200.0). None without a number."""
    match = re.match(r"-?\d+(\.\d+)?", text.strip())
    return float(match.group()) if match else None


def parse_integer(text: str) -> int | None:
    """Parse a text of digits as an integer; None for any other text."""
    return int(text) if text.isdecimal() else None


def convert_to_gib(amount: str | float | None, unit_bytes: int) -> float | None:
    """Convert units of ``unit_bytes`` bytes to GiB, to three digits. None if it is no number ("max", "[N/A]")."""
    value = parse_number(amount) if isinstance(amount, str) else amount
    return round(value * unit_bytes / 2**30, 3) if value is not None else None


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a list of CPUs as Linux writes it: ``0-2,8`` is CPUs 0, 1, 2 and 8. Empty for any other text."""
    if not re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*", text.strip()):
        return frozenset()
    ranges = (part.partition("-") for part in text.strip().split(","))
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


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
        sockets=_count_sets(cpus, "package_cpus_list", "core_siblings_list")
        or len({package for package, _ in topology})
        or None,
        cores=_count_sets(cpus, "core_cpus_list", "thread_siblings_list") or len(set(topology)) or None,
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


def _count_sets(cpus: Sequence[Path], name: str, name_before_5_3: str) -> int:
    """Count the cores, or sockets, by the CPUs that share each, as lscpu does. Nobody promises that numbers are unique.

    Core numbers repeat in every cluster, and clusters of one package have package numbers. 0 where a CPU does not say it.
    """
    shared = [
        read_text(cpu / "topology" / name) or read_text(cpu / "topology" / name_before_5_3)
        for cpu in cpus
        if (cpu / "topology").is_dir()  # a CPU that is off has none
    ]
    return len(set(shared)) if all(shared) else 0


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


def read_memory(root: Path, run: Run) -> Memory:
    """Read sizes, DIMMs and huge pages. What the node does not show keeps its default."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", read_text(root / "proc/meminfo"), re.M))
    hugepages = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return Memory(
        total_gib=convert_to_gib(info.get("MemTotal"), 1024),
        swap_gib=convert_to_gib(info.get("SwapTotal"), 1024),
        modules=_count_dimms_edac(root) or _count_dimms_dmi(run(["dmidecode", "-t", "memory"])),
        transparent_hugepages=hugepages.group(1) if hugepages else UNKNOWN,
    )


def _count_dimms_edac(root: Path) -> dict[str, int]:
    """Count DIMMs by description. The driver states sizes in MiB."""
    dimms: Counter[str] = Counter()
    for dimm in (root / "sys/devices/system/edac/mc").glob("mc*/dimm*"):
        size = parse_number(read_text(dimm / "size"))
        if size:
            dimms[f"{size / 1024:g} GiB {read_text(dimm / 'dimm_mem_type')}".strip()] += 1
    return dict(dimms)


def _count_dimms_dmi(text: str) -> dict[str, int]:
    """Count DIMMs by description in the output of dmidecode. Often none: dmidecode needs root."""
    dimms: Counter[str] = Counter()
    for block in text.split("Memory Device\n")[1:]:
        fields = dict(re.findall(r"^\s+(Size|Type|Configured Memory Speed): (.+)$", block.split("\n\n")[0], re.M))
        if re.match(r"\d", fields.get("Size", "")):
            parts = (fields.get(key, "") for key in ("Size", "Type", "Configured Memory Speed"))
            dimms[" ".join(part for part in parts if part and part != "Unknown")] += 1
    return dict(dimms)


VARIABLE: Final = "MLHPC_MACHINE_ROOT"
REAL_ROOT: Final = Path("/")


def find_machine_root(environ: Mapping[str, str]) -> Path:
    """Return the root of the machine to read. InputError if the variable names no folder."""
    root = Path(environ.get(VARIABLE) or REAL_ROOT)
    if not root.is_dir():
        raise InputError(f"{VARIABLE}={root}: expected the folder of a simulated machine's /proc and /sys")
    return root


def is_simulated(root: Path) -> bool:
    """Return True if the probes read another root than the machine's own."""
    return root.resolve() != REAL_ROOT
