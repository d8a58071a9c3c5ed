"""What a compute node is: hardware, operating system, software and Slurm environment, collected where the run runs.

Every probe is total. What cannot be known is "unknown" (text) or null (numbers), and a probe that failed is named under
``problems``. Environment variables are taken by name from allow-lists, never as a whole: they may hold secrets.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from suite.files import read_json_document, write_whole

FACTS_VERSION: Final = 1
UNKNOWN = "unknown"
COMMAND_TIMEOUT_S = 20

SLURM_NAMES = (
    *("SLURMD_NODENAME", "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION"),
    *("SLURM_JOB_QOS", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"),
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"),
    *("SLURM_GPUS_ON_NODE", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_MPI_TYPE", "SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_DISTRIBUTION"),
    *("SLURM_HINT", "SLURM_THREADS_PER_CORE", "SLURM_TOPOLOGY_ADDR", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    *("SLURM_RESTART_COUNT", "SLURM_EXCLUSIVE", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"),
)
TUNING_NAMES = (
    *("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_NUM_THREADS"),
    *("OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_HCA"),
    *("NCCL_SOCKET_IFNAME", "NCCL_P2P_LEVEL", "NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL", "GLOO_SOCKET_IFNAME"),
    *("FI_PROVIDER", "UCX_TLS", "UCX_NET_DEVICES", "MPICH_GPU_SUPPORT_ENABLED", "MPICH_OFI_NIC_POLICY"),
)
SIMD_FLAGS = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx_vnni", "amx_bf16", "asimd", "sve", "sve2")
ACCELERATOR_CLASSES = ("0x0302", "0x0380", "0x1200")  # PCI: 3D controller, other display controller, accelerator

Run = Callable[[Sequence[str]], str]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cache(_Part):
    """One level of cache of one kind; ``instances`` on the whole node."""

    level: int
    kind: str
    size_kib: int
    instances: int


class Cpu(_Part):
    """All processors of the node; counts are of the node, not of the job."""

    model: str = UNKNOWN
    architecture: str = UNKNOWN
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    numa_nodes: int | None = None
    max_frequency_mhz: float | None = None
    governor: str = UNKNOWN
    simd: tuple[str, ...] = ()
    virtualised: bool | None = None
    caches: tuple[Cache, ...] = ()


class Memory(_Part):
    """Main memory. ``modules`` counts DIMMs by description."""

    total_gib: float | None = None
    swap_gib: float | None = None
    modules: dict[str, int] = {}
    transparent_hugepages: str = UNKNOWN


class BlockDevice(_Part):
    """A disk."""

    name: str
    model: str
    rotational: bool | None
    size_gib: float | None


class FileSystem(_Part):
    """Where a folder lies that matters to the run."""

    purpose: str
    path: str
    mount: str = UNKNOWN
    type: str = UNKNOWN
    device: str = UNKNOWN
    size_gib: float | None = None
    free_gib: float | None = None


class NetworkInterface(_Part):
    """A network port; ``link`` is ethernet, infiniband, …."""

    name: str
    link: str
    driver: str
    speed_gbit_s: float | None
    state: str


class Accelerator(_Part):
    """One accelerator as the node's driver shows it."""

    vendor: str
    model: str
    memory_gib: float | None = None
    driver: str = UNKNOWN
    max_clock_mhz: float | None = None
    power_limit_w: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    mig: str = UNKNOWN


class Limits(_Part):
    """What the control group and the affinity mask leave of the node."""

    memory_gib: float | None = None
    cpu_quota: float | None = None
    cpus_allowed: int | None = None
    open_files: int | None = None


class Software(_Part):
    """Operating system and Python side."""

    operating_system: str = UNKNOWN
    kernel: str = UNKNOWN
    libc: str = UNKNOWN
    container: str = UNKNOWN
    clock_source: str = UNKNOWN
    python: str = UNKNOWN
    packages: dict[str, str] = {}
    mpi: str = UNKNOWN
    modules: tuple[str, ...] = ()


class Facts(_Part):
    """Everything known of one node."""

    version: Literal[1] = FACTS_VERSION
    collected: str
    node: str
    hostname: str
    product: str = UNKNOWN
    cpu: Cpu = Cpu()
    memory: Memory = Memory()
    storage: tuple[BlockDevice, ...] = ()
    file_systems: tuple[FileSystem, ...] = ()
    network: tuple[NetworkInterface, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    accelerator_links: str = UNKNOWN
    limits: Limits = Limits()
    software: Software = Software()
    slurm: dict[str, str] = {}
    tuning: dict[str, str] = {}
    problems: tuple[str, ...] = ()


def write_facts(run_folder: Path) -> Path:
    """Collect this node's facts into ``<run folder>/facts/<node>.json``, atomically."""
    folder = run_folder / "facts"
    facts = collect(os.environ, run_folder=run_folder)
    path = folder / f"{facts.node.replace('/', '_')}.json"
    write_whole(path, json.dumps(facts.model_dump(mode="json"), indent=1) + "\n")
    return path


def read_facts(path: Path) -> Facts:
    """Read one node's facts. ValueError says file, what was wanted and what was found."""
    return read_json_document(path, Facts, "facts", FACTS_VERSION)


def collect(
    environ: Mapping[str, str], *, run_folder: Path | None = None, root: Path = Path("/"), run: Run | None = None
) -> Facts:
    """Facts of the node under ``root`` (``/proc``, ``/sys``, ``/etc``); ``run`` gives a command's output or "".

    A probe that fails is noted and leaves its default: no node may fail a run by being strange.
    """
    run = run or _run
    found: dict[str, Any] = {}
    probes: dict[str, Callable[[], Any]] = {
        "product": lambda: _product(root),
        "cpu": lambda: _cpu(root),
        "memory": lambda: _memory(root, run),
        "storage": lambda: _storage(root),
        "file_systems": lambda: _file_systems(root, _places(environ, run_folder)),
        "network": lambda: _network(root),
        "accelerators": lambda: _accelerators(root, run),
        "accelerator_links": lambda: _links(found.get("accelerators", ()), run),
        "limits": lambda: _limits(root),
        "software": lambda: _software(root, environ),
    }
    problems = []
    for name, probe in probes.items():
        try:
            found[name] = probe()
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return Facts(
        collected=datetime.now(UTC).isoformat(timespec="seconds"),
        node=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        hostname=socket.gethostname(),
        slurm={name: environ[name] for name in SLURM_NAMES if name in environ},
        tuning={name: environ[name] for name in TUNING_NAMES if name in environ},
        problems=tuple(problems),
        **found,
    )


def _product(root: Path) -> str:
    """The maker's name of the machine."""
    names = [_text(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    return " ".join(name for name in names if name) or UNKNOWN


def _cpu(root: Path) -> Cpu:
    entries = _cpuinfo(root)
    first = entries[0] if entries else {}
    cpus = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*"), key=lambda p: int(p.name[3:]))
    topology = [(_text(cpu / "topology/physical_package_id"), _text(cpu / "topology/core_id")) for cpu in cpus]
    topology = [place for place in topology if all(place)]
    frequency = _number(_text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    listed = [_number(entry.get("cpu MHz", "")) for entry in entries]
    mhz = frequency / 1000 if frequency else max((value for value in listed if value), default=None)
    flags = set((first.get("flags") or first.get("Features") or "").split())
    return Cpu(
        model=first.get("model name") or _text(root / "sys/firmware/devicetree/base/model").strip("\0") or UNKNOWN,
        architecture=platform.machine() or UNKNOWN,
        sockets=len({package for package, _ in topology}) or None,
        cores=len(set(topology)) or None,
        threads=len(entries) or None,
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        max_frequency_mhz=mhz,
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or UNKNOWN,
        simd=tuple(flag for flag in SIMD_FLAGS if flag in flags),
        virtualised="hypervisor" in flags if flags else None,
        caches=_caches(cpus),
    )


def _cpuinfo(root: Path) -> list[dict[str, str]]:
    """/proc/cpuinfo as one mapping for each hardware thread."""
    entries = []
    for block in _text(root / "proc/cpuinfo").split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
        entry = {key.strip(): value.strip() for key, _, value in pairs}
        if "processor" in entry:
            entries.append(entry)
    return entries


def _caches(cpus: Sequence[Path]) -> tuple[Cache, ...]:
    seen: dict[tuple[int, str, int], set[str]] = {}
    for cpu in cpus:
        for index in cpu.glob("cache/index[0-9]*"):
            level, size = _number(_text(index / "level")), _size_kib(_text(index / "size"))
            if level and size:
                kind = _text(index / "type").lower() or UNKNOWN
                seen.setdefault((int(level), kind, size), set()).add(_text(index / "shared_cpu_list") or cpu.name)
    return tuple(
        Cache(level=level, kind=kind, size_kib=size, instances=len(shared))
        for (level, kind, size), shared in sorted(seen.items())
    )


def _memory(root: Path, run: Run) -> Memory:
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), re.M))
    hugepages = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return Memory(
        total_gib=_gib(info.get("MemTotal"), 1024),
        swap_gib=_gib(info.get("SwapTotal"), 1024),
        modules=_dimms_edac(root) or _dimms_dmi(run(["dmidecode", "-t", "memory"])),
        transparent_hugepages=hugepages.group(1) if hugepages else UNKNOWN,
    )


def _dimms_edac(root: Path) -> dict[str, int]:
    found: Counter[str] = Counter()
    for dimm in (root / "sys/devices/system/edac/mc").glob("mc*/dimm*"):
        size = _number(_text(dimm / "size"))
        if size:
            found[f"{size / 1024:g} GiB {_text(dimm / 'dimm_mem_type')}".strip()] += 1
    return dict(found)


def _dimms_dmi(text: str) -> dict[str, int]:
    """Modules from dmidecode, which needs root: often nothing."""
    found: Counter[str] = Counter()
    for block in text.split("Memory Device\n")[1:]:
        fields = dict(re.findall(r"^\s+(Size|Type|Configured Memory Speed): (.+)$", block.split("\n\n")[0], re.M))
        if re.match(r"\d", fields.get("Size", "")):
            parts = (fields.get(key, "") for key in ("Size", "Type", "Configured Memory Speed"))
            found[" ".join(part for part in parts if part and part != "Unknown")] += 1
    return dict(found)


def _storage(root: Path) -> tuple[BlockDevice, ...]:
    devices = []
    for device in sorted((root / "sys/block").glob("*")):
        sectors = _number(_text(device / "size"))
        if device.name.startswith(("loop", "ram", "zram", "dm-", "sr")) or not sectors:
            continue
        rotational = _text(device / "queue/rotational")
        devices.append(
            BlockDevice(
                name=device.name,
                model=_text(device / "device/model") or UNKNOWN,
                rotational=rotational == "1" if rotational else None,
                size_gib=_gib(sectors, 512),
            )
        )
    return tuple(devices)


def _places(environ: Mapping[str, str], run_folder: Path | None) -> dict[str, Path]:
    """The folders whose file systems matter, by purpose."""
    named = {
        "working folder": str(Path.cwd()),
        "run folder": str(run_folder or ""),
        "data": environ.get("MLHPC_DATA", ""),
        "scratch": environ.get("SCRATCH", ""),
        "temporary files": environ.get("TMPDIR", "/tmp"),  # noqa: S108  a fact about the node, nothing is written there
        "shared memory": "/dev/shm",  # noqa: S108
    }
    return {purpose: Path(path) for purpose, path in named.items() if path and Path(path).exists()}


def _file_systems(root: Path, places: Mapping[str, Path]) -> tuple[FileSystem, ...]:
    mounts = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mounts.append((_unescape(left.split()[4]), *right.split()[:2]))
    found = []
    for purpose, path in places.items():
        real = path.resolve()
        inside = [mount for mount in mounts if real == Path(mount[0]) or Path(mount[0]) in real.parents]
        mount, kind, device = max(inside, key=lambda each: len(each[0]), default=(UNKNOWN, UNKNOWN, UNKNOWN))
        disk = os.statvfs(real)
        size, free = _gib(disk.f_blocks, disk.f_frsize), _gib(disk.f_bavail, disk.f_frsize)
        found.append(
            FileSystem(
                purpose=purpose, path=str(real), mount=mount, type=kind, device=device, size_gib=size, free_gib=free
            )
        )
    return tuple(found)


def _unescape(text: str) -> str:
    """A path of mountinfo, where spaces are written in octal."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match.group(1), 8)), text)


def _network(root: Path) -> tuple[NetworkInterface, ...]:
    found = []
    for port in sorted((root / "sys/class/net").glob("*")):
        device = port / "device"
        if port.name == "lo" or not device.exists():  # without a device: bridges, tunnels and the like
            continue
        speed = _number(_text(port / "speed"))
        driver = (device / "driver").resolve().name if (device / "driver").exists() else UNKNOWN
        link = {"1": "ethernet", "32": "infiniband"}.get(_text(port / "type"), "other")
        state = _text(port / "operstate") or UNKNOWN
        gbit = speed / 1000 if speed and speed > 0 else None
        found.append(NetworkInterface(name=port.name, link=link, driver=driver, speed_gbit_s=gbit, state=state))
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = _number(_text(port / "rate"))
        adapter = port.parent.parent
        state = _text(port / "state").partition(": ")[2].lower() or UNKNOWN
        link = f"rdma over {_text(port / 'link_layer').lower() or UNKNOWN}"
        model = _text(adapter / "hca_type") or UNKNOWN
        name = f"{adapter.name}/{port.name}"
        found.append(NetworkInterface(name=name, link=link, driver=model, speed_gbit_s=rate, state=state))
    for device in sorted((root / "sys/class/cxi").glob("*")):  # HPE Slingshot
        name = device.name
        found.append(NetworkInterface(name=name, link="slingshot", driver="cxi", speed_gbit_s=None, state=UNKNOWN))
    return tuple(found)


NVIDIA_FIELDS = (
    *("name", "memory.total", "driver_version", "clocks.max.sm", "power.limit"),
    *("pcie.link.gen.max", "pcie.link.width.max", "mig.mode.current"),
)


def _accelerators(root: Path, run: Run) -> tuple[Accelerator, ...]:
    """From the first source that knows any: the vendors' tools, then the kernel."""
    sources: tuple[Callable[[], list[Accelerator]], ...] = (
        lambda: _nvidia(run(["nvidia-smi", f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader,nounits"])),
        lambda: _nvidia_proc(root),
        lambda: _amd(root, run),
        lambda: _pci(root),
    )
    return tuple(next((found for source in sources if (found := source())), []))


def _nvidia(text: str) -> list[Accelerator]:
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(NVIDIA_FIELDS):
            continue
        model, memory_mib, driver, clock, power, generation, width, mig = values
        found.append(
            Accelerator(
                vendor="NVIDIA",
                model=model,
                memory_gib=_gib(memory_mib, 1 << 20),
                driver=driver,
                max_clock_mhz=_number(clock),
                power_limit_w=_number(power),
                pcie_generation=_whole(generation),
                pcie_width=_whole(width),
                mig=mig if mig[:1].isalpha() else UNKNOWN,
            )
        )
    return found


def _nvidia_proc(root: Path) -> list[Accelerator]:
    texts = [_text(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    models = [match.group(1) for text in texts if (match := re.search(r"Model:\s+(.+)", text))]
    version = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", _text(root / "proc/driver/nvidia/version"))
    driver = version.group(1) if version else UNKNOWN
    return [Accelerator(vendor="NVIDIA", model=model.strip(), driver=driver) for model in models]


def _amd(root: Path, run: Run) -> list[Accelerator]:
    cards = [
        card / "device"
        for card in sorted((root / "sys/class/drm").glob("card[0-9]*"))
        if card.name[4:].isdigit() and _text(card / "device/mem_info_vram_total")
    ]
    if not cards:
        return []
    names = re.findall(r"Card [Ss]eries:\s*(.+)", run(["rocm-smi", "--showproductname"]))
    driver = _text(root / "sys/module/amdgpu/version") or UNKNOWN
    return [
        Accelerator(
            vendor="AMD",
            model=_text(card / "product_name") or (names[i].strip() if i < len(names) else UNKNOWN),
            memory_gib=_gib(_text(card / "mem_info_vram_total"), 1),
            driver=driver,
        )
        for i, card in enumerate(cards)
    ]


def _pci(root: Path) -> list[Accelerator]:
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _text(device / "class").startswith(ACCELERATOR_CLASSES):
            vendor, model = _text(device / "vendor"), _text(device / "device")
            found.append(Accelerator(vendor=f"PCI {vendor}", model=f"PCI {vendor}:{model}, no driver tool found"))
    return found


def _links(accelerators: Sequence[Accelerator], run: Run) -> str:
    """How the accelerators of the node are linked, in words."""
    if not accelerators or accelerators[0].vendor != "NVIDIA":
        return UNKNOWN
    matrix = re.sub(r"\x1b\[[\d;]*m", "", run(["nvidia-smi", "topo", "-m"])).split("Legend")[0]
    lanes = sorted(set(re.findall(r"\bNV\d+\b", matrix)))
    if lanes:
        return "NVLink (" + ", ".join(lanes) + " in nvidia-smi topo)"
    return "PCIe" if len(accelerators) > 1 and matrix else UNKNOWN


def _limits(root: Path) -> Limits:
    import resource

    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").partition(" ")
    return Limits(
        memory_gib=_gib(_text(root / "sys/fs/cgroup/memory.max"), 1),
        cpu_quota=int(quota) / int(period) if quota.isdigit() and period.isdigit() else None,
        cpus_allowed=len(os.sched_getaffinity(0)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _software(root: Path, environ: Mapping[str, str]) -> Software:
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', _text(root / "etc/os-release"), re.M))
    installed = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
    return Software(
        operating_system=release.get("PRETTY_NAME") or UNKNOWN,
        kernel=_text(root / "proc/sys/kernel/osrelease") or platform.release() or UNKNOWN,
        libc=" ".join(platform.libc_ver()).strip() or UNKNOWN,
        container=_container(root, environ),
        clock_source=_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource") or UNKNOWN,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=dict(sorted(installed.items(), key=lambda item: item[0].lower())),
        mpi=_mpi(),
        modules=tuple(name for name in environ.get("LOADEDMODULES", "").split(":") if name),
    )


# A container runtime and what it leaves behind: a variable, or a file.
CONTAINERS: tuple[tuple[str, str, str], ...] = (
    ("apptainer", "APPTAINER_CONTAINER", ".singularity.d"),
    ("singularity", "SINGULARITY_CONTAINER", ".singularity.d"),
    ("podman", "", "run/.containerenv"),
    ("docker", "", ".dockerenv"),
    ("pyxis/enroot", "ENROOT_RUNTIME_PATH", "etc/enroot"),
    ("shifter", "SHIFTER_RUNTIME", "var/hostsfs"),
)


def _container(root: Path, environ: Mapping[str, str]) -> str:
    for name, variable, marker in CONTAINERS:
        if (variable and variable in environ) or (root / marker).exists():
            return name
    return "none found"


def _mpi() -> str:
    """The MPI library, if this process already uses one: a fact is not worth starting MPI for."""
    module = sys.modules.get("mpi4py.MPI")
    return str(module.Get_library_version()).strip("\0 \n").splitlines()[0].strip() if module else UNKNOWN


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", text.strip())
    return float(match.group()) if match else None


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _size_kib(text: str) -> int | None:
    match = re.fullmatch(r"(\d+)([KMG])", text)
    return int(match.group(1)) * {"K": 1, "M": 1024, "G": 1024**2}[match.group(2)] if match else None


def _gib(amount: str | float | None, unit_bytes: int) -> float | None:
    """GiB of an amount of units, to three digits; None for what is not a number ("max", "[N/A]")."""
    value = _number(amount) if isinstance(amount, str) else amount
    return round(value * unit_bytes / 2**30, 3) if value is not None else None
