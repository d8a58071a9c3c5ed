"""Collects all facts of the node on which this process runs.

Environment variables are selected by the form of their names. Values that are secrets by name, form or randomness are
left out.

Reads the operating system, container, Python environment and limits of this process.

Lists the disks of the node and finds the file systems of the folders that the run uses.

Lists the network ports of the node: Ethernet and InfiniBand interfaces, RDMA adapters, HPE Slingshot.

Reads the name of the node and the addresses that /etc/hosts gives it.

Compares the node's clock with that of the file server, and asks the kernel whether the clock is synchronised.

Lists a node's accelerators and their links, from nvidia-smi, the vendors' drivers or the PCI bus.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from mlhpc.suite.machine.facts import (
    UNKNOWN,
    Accelerator,
    BlockDevice,
    Facts,
    FileSystem,
    Firmware,
    Limits,
    NetworkInterface,
    Software,
)
from mlhpc.suite.machine.probes.allowance import read_usable_resources
from mlhpc.suite.machine.probes.processor import (
    Run,
    convert_to_gib,
    find_machine_root,
    is_simulated,
    parse_integer,
    parse_number,
    read_cpu,
    read_memory,
    read_text,
    run_command,
)
from mlhpc.suite.machine.secrets import remove_secret_value
from mlhpc.suite.plugins import read_name_and_version

# Container runtimes, each with the environment variable it sets ("" for none) and a file that exists only inside it
CONTAINERS: tuple[tuple[str, str, str], ...] = (
    ("apptainer", "APPTAINER_CONTAINER", ".singularity.d"),
    ("singularity", "SINGULARITY_CONTAINER", ".singularity.d"),
    ("podman", "", "run/.containerenv"),
    ("docker", "", ".dockerenv"),
    ("pyxis/enroot", "ENROOT_RUNTIME_PATH", "etc/enroot"),
    ("shifter", "SHIFTER_RUNTIME", "var/hostsfs"),
)


def read_software(root: Path, environ: Mapping[str, str]) -> Software:
    """Read names and versions of software, and the loaded environment modules."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', read_text(root / "etc/os-release"), re.M))
    installed = {name: version for name, version in map(read_name_and_version, distributions()) if name}
    return Software(
        operating_system=release.get("PRETTY_NAME") or UNKNOWN,
        kernel=read_text(root / "proc/sys/kernel/osrelease") or platform.release() or UNKNOWN,
        libc=" ".join(platform.libc_ver()).strip() or UNKNOWN,
        container=_find_container(root, environ),
        clock_source=read_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource") or UNKNOWN,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages=dict(sorted(installed.items(), key=lambda item: item[0].lower())),
        mpi=_read_mpi(),
        loader=_find_loader(root),
        preloaded=" ".join(read_text(root / "etc/ld.so.preload").split()),
        time_zone=_read_time_zone(root, environ),
        locale=next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environ.get(name))), "C"),
        modules=tuple(name for name in environ.get("LOADEDMODULES", "").split(":") if name),
    )


def read_limits(root: Path) -> Limits:
    """Read the limits of the control groups and of this process."""
    allowance = read_usable_resources(root)
    return Limits(
        memory_gib=convert_to_gib(allowance.memory_limit, 1),
        cpu_quota=allowance.cpu_quota,
        cpus_allowed=len(allowance.cpus),
        open_files=allowance.open_files,
    )


def _find_loader(root: Path) -> str:
    """Return the file name of the dynamic loader: glibc's, or musl's, which names the architecture."""
    places = ("lib64/ld-linux*.so.*", "lib/ld-linux*.so.*", "lib/ld-musl-*.so.*")
    return next((path.name for place in places for path in sorted(root.glob(place))), UNKNOWN)


def _read_time_zone(root: Path, environ: Mapping[str, str]) -> str:
    """Return the time zone: TZ, else the target of /etc/localtime, else the name in /etc/timezone."""
    if zone := environ.get("TZ"):
        return zone
    link = root / "etc/localtime"
    if link.is_symlink():
        return str(link.readlink()).rpartition("zoneinfo/")[2]
    return read_text(root / "etc/timezone") or UNKNOWN


def _find_container(root: Path, environ: Mapping[str, str]) -> str:
    for name, variable, marker in CONTAINERS:
        if (variable and variable in environ) or (root / marker).exists():
            return name
    return "none found"


def _read_mpi() -> str:
    """Return the MPI library if this process has loaded one. To load it here could start MPI or fail."""
    module = sys.modules.get("mpi4py.MPI")
    return str(module.Get_library_version()).strip("\0 \n").splitlines()[0].strip() if module else UNKNOWN


def list_block_devices(root: Path) -> tuple[BlockDevice, ...]:
    """List the disks. Leaves out loop, memory, mapped, optical and empty devices."""
    devices = []
    for device in sorted((root / "sys/block").glob("*")):
        sectors = parse_number(read_text(device / "size"))
        if device.name.startswith(("loop", "ram", "zram", "dm-", "sr")) or not sectors:
            continue
        rotational = read_text(device / "queue/rotational")
        devices.append(
            BlockDevice(
                name=device.name,
                model=read_text(device / "device/model") or UNKNOWN,
                rotational=rotational == "1" if rotational else None,
                size_gib=convert_to_gib(sectors, 512),  # the kernel counts in 512 bytes, whatever the disk does
            )
        )
    return tuple(devices)


def list_file_systems(root: Path, folders: Mapping[str, Path]) -> tuple[FileSystem, ...]:
    """List the file system of each folder. ``folders`` maps purpose to path."""
    mounts = _list_mounts(root)
    return tuple(_find_file_system(purpose, path.resolve(), mounts) for purpose, path in folders.items())


def _list_mounts(root: Path) -> list[tuple[str, str, str]]:
    """List (mount point, file-system type, device) of every mount that this process sees."""
    mounts = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, device = right.split()[:2]
        mounts.append((_unescape(left.split()[4]), kind, device))
    return mounts


def _find_file_system(purpose: str, path: Path, mounts: Sequence[tuple[str, str, str]]) -> FileSystem:
    """Find the nearest mount above ``path``, which must be resolved: a link may lead to another file system."""
    above = [mount for mount in mounts if path == Path(mount[0]) or Path(mount[0]) in path.parents]
    mount, kind, device = max(above, key=lambda each: len(each[0]), default=(UNKNOWN, UNKNOWN, UNKNOWN))
    disk = os.statvfs(path)
    return FileSystem(
        purpose=purpose,
        path=str(path),
        mount=mount,
        type=kind,
        device=device,
        size_gib=convert_to_gib(disk.f_blocks, disk.f_frsize),
        free_gib=convert_to_gib(disk.f_bavail, disk.f_frsize),
    )


def _unescape(text: str) -> str:
    """Decode a path of mountinfo, which writes spaces and backslashes as octal numbers."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match.group(1), 8)), text)


LINKS = {"1": "ethernet", "32": "infiniband"}  # ARPHRD_* of the kernel's if_arp.h


def list_network_interfaces(root: Path) -> tuple[NetworkInterface, ...]:
    """List all ports that belong to a device. One InfiniBand port may appear as interface and as RDMA port."""
    return (*_list_interfaces(root), *_list_rdma_ports(root), *_list_slingshot(root))


def _list_interfaces(root: Path) -> Iterator[NetworkInterface]:
    for port in sorted((root / "sys/class/net").glob("*")):
        device = port / "device"
        if port.name == "lo" or not device.exists():  # bridges, tunnels and the like have no device
            continue
        megabit_s = parse_number(read_text(port / "speed"))  # -1 while the link is down
        yield NetworkInterface(
            name=port.name,
            link=LINKS.get(read_text(port / "type"), "other"),
            driver=(device / "driver").resolve().name if (device / "driver").exists() else UNKNOWN,
            speed_gbit_s=megabit_s / 1000 if megabit_s and megabit_s > 0 else None,
            state=read_text(port / "operstate") or UNKNOWN,
        )


def _list_rdma_ports(root: Path) -> Iterator[NetworkInterface]:
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        adapter = port.parent.parent
        yield NetworkInterface(
            name=f"{adapter.name}/{port.name}",
            link=f"rdma over {read_text(port / 'link_layer').lower() or UNKNOWN}",
            driver=read_text(adapter / "hca_type") or UNKNOWN,
            speed_gbit_s=parse_number(read_text(port / "rate")),
            state=read_text(port / "state").partition(": ")[2].lower() or UNKNOWN,
        )


def _list_slingshot(root: Path) -> Iterator[NetworkInterface]:
    for device in sorted((root / "sys/class/cxi").glob("*")):
        yield NetworkInterface(name=device.name, link="slingshot", driver="cxi", speed_gbit_s=None, state=UNKNOWN)


def read_hostname(root: Path) -> str:
    """Return the node's own name, as the kernel has it."""
    return read_text(root / "proc/sys/kernel/hostname") or socket.gethostname()


def list_own_addresses(root: Path) -> tuple[str, ...]:
    """List the addresses that /etc/hosts gives the node's own name, in file order. Empty if it is not listed."""
    name = read_hostname(root)
    rows = (line.partition("#")[0].split() for line in read_text(root / "etc/hosts").splitlines())
    return tuple(row[0] for row in rows if name in row[1:] or name.partition(".")[0] in row[1:])


def is_loopback(address: str) -> bool:
    """Return True for an address that only the node itself reaches; False for a text that is no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


ACCELERATOR_CLASSES = ("0x0302", "0x0380", "0x1200")  # PCI: 3D controller, other display controller, accelerator
NVIDIA_FIELDS = (
    *("name", "memory.total", "driver_version", "clocks.max.sm", "power.limit"),
    *("pcie.link.gen.max", "pcie.link.width.max", "mig.mode.current"),
)
NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader,nounits")


def list_accelerators(root: Path, run: Run) -> tuple[Accelerator, ...]:
    """List all accelerators, from the first source that knows any: the vendors' tools, then the kernel."""
    sources: tuple[Callable[[], list[Accelerator]], ...] = (
        lambda: _parse_nvidia_smi(run(NVIDIA_SMI)),
        lambda: _list_nvidia_proc(root),
        lambda: _list_amd(root, run),
        lambda: _list_pci(root),
    )
    return tuple(next((found for source in sources if (found := source())), []))


def _parse_nvidia_smi(text: str) -> list[Accelerator]:
    accelerators = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(NVIDIA_FIELDS):
            continue
        model, memory_mib, driver, clock, power, generation, width, mig = values
        accelerators.append(
            Accelerator(
                vendor="NVIDIA",
                model=model,
                memory_gib=convert_to_gib(memory_mib, 1 << 20),
                driver=driver,
                max_clock_mhz=parse_number(clock),
                power_limit_w=parse_number(power),
                pcie_generation=parse_integer(generation),
                pcie_width=parse_integer(width),
                mig=mig if mig[:1].isalpha() else UNKNOWN,
            )
        )
    return accelerators


def _list_nvidia_proc(root: Path) -> list[Accelerator]:
    texts = [read_text(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    models = [match.group(1) for text in texts if (match := re.search(r"Model:\s+(.+)", text))]
    version = re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", read_text(root / "proc/driver/nvidia/version"))
    driver = version.group(1) if version else UNKNOWN
    return [Accelerator(vendor="NVIDIA", model=model.strip(), driver=driver) for model in models]


def _list_amd(root: Path, run: Run) -> list[Accelerator]:
    cards = [
        card / "device"
        for card in sorted((root / "sys/class/drm").glob("card[0-9]*"))
        if card.name[4:].isdigit() and read_text(card / "device/mem_info_vram_total")
    ]
    if not cards:
        return []
    names = re.findall(r"Card [Ss]eries:\s*(.+)", run(["rocm-smi", "--showproductname"]))
    driver = read_text(root / "sys/module/amdgpu/version") or UNKNOWN
    return [
        Accelerator(
            vendor="AMD",
            model=read_text(card / "product_name") or (names[i].strip() if i < len(names) else UNKNOWN),
            memory_gib=convert_to_gib(read_text(card / "mem_info_vram_total"), 1),
            driver=driver,
        )
        for i, card in enumerate(cards)
    ]


def _list_pci(root: Path) -> list[Accelerator]:
    """List PCI devices of accelerator classes. Their driver or its tool may be missing, so only numbers are known."""
    accelerators = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if read_text(device / "class").startswith(ACCELERATOR_CLASSES):
            vendor, model = read_text(device / "vendor"), read_text(device / "device")
            name = f"PCI {vendor}:{model}, no driver tool found"
            accelerators.append(Accelerator(vendor=f"PCI {vendor}", model=name))
    return accelerators


def read_accelerator_links(accelerators: Sequence[Accelerator], run: Run) -> str:
    """Return how the node's accelerators are linked, for people to read. Known only for NVIDIA's."""
    if not accelerators or accelerators[0].vendor != "NVIDIA":
        return UNKNOWN
    # The table underlines its head with terminal codes. Columns of network cards follow those of the GPUs, in every row
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", run(["nvidia-smi", "topo", "-m"])).splitlines()]
    matrix = [words for words in rows if words and re.fullmatch(r"GPU\d+", words[0])]
    width = sum(re.fullmatch(r"GPU\d+", word) is not None for word in matrix[0]) if matrix else 0
    links = {word for words in matrix[1:] for word in words[1 : width + 1]}
    lanes = sorted((word for word in links if re.fullmatch(r"NV\d+", word)), key=lambda word: int(word[2:]))
    pcie = links & {"PIX", "PXB", "PHB", "NODE", "SYS", "SOC"}
    if lanes:
        return f"NVLink ({', '.join(lanes)} in nvidia-smi topo)" + ", PCIe between others" * bool(pcie)
    return "PCIe" if pcie else UNKNOWN


TUNING = re.compile(  # variables that change how fast or how exactly a run computes, of the libraries that it may use
    "(?:NCCL|RCCL|OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|CUDA|CUDNN|CUBLAS"
    "|ROCR|HIP|HSA|MIOPEN|XLA|UCX|FI|MPICH|MPIR|OMPI_MCA|I_MPI|PSM2|PSM3|GLOO|ATEN|ONEDNN|DNNL"
    "|MALLOC|GLIBC|JEMALLOC|HDF5)_[A-Z0-9_a-z]+"
    "|LD_PRELOAD|LD_LIBRARY_PATH|LD_BIND_NOW|MALLOC_CONF|PYTHONHASHSEED|PYTHONOPTIMIZE|PYTHONMALLOC"
    "|TZ|LANG|LANGUAGE|LC_[A-Z]+"
)
SLURM = re.compile("SLURMD?_[A-Z0-9_]+")
# Of people and of one job's sockets: who submitted from where, ports, addresses that a launcher made for this start
_PERSONAL_VARIABLES = re.compile(
    ".*(?:_USER|_UID|_GID|_ACCOUNT|_JWT|_SUBMIT_HOST|_SUBMIT_DIR|_IPADDR|_COMM_HOST|_COMM_PORT|_SRUN_COMM.*"
    "|_PORT|_COOKIE|_PID|_SCRIPT_CONTEXT|_LOCALID|_PROCID|_TASK_PID|_GTIDS|_NODEID)"
    "|OMPI_MCA_(?:orte|ess|pmix|initial).*|MPIR_(?:MPI_)?DEBUG.*"
)
MAX_VALUE_LENGTH = 4096  # characters of a value that are kept


def collect_facts(
    environ: Mapping[str, str], *, run_folder: Path | None = None, root: Path | None = None, run: Run | None = None
) -> Facts:
    """Collect the facts of the node under ``root`` (``/proc``, ``/sys``, ``/etc``). ``run`` replaces `run_command`.

    A probe that fails is named under ``problems`` and leaves its default: no strange node may fail a run. The default
    root is that of `find_machine_root`. No command is run for a simulated machine, because it would answer for the real
    one.
    """
    root = root or find_machine_root(environ)
    simulated = is_simulated(root)
    run = run or ((lambda command: "") if simulated else run_command)
    hostname = read_hostname(root)
    facts: dict[str, Any] = {}
    probes: dict[str, Callable[[], Any]] = {
        "product": lambda: _read_product_name(root),
        "firmware": lambda: _read_firmware(root),
        "cpu": lambda: read_cpu(root),
        "memory": lambda: read_memory(root, run),
        "storage": lambda: list_block_devices(root),
        "file_systems": lambda: list_file_systems(root, _list_folders(environ, run_folder)),
        "network": lambda: list_network_interfaces(root),
        "accelerators": lambda: list_accelerators(root, run),
        "accelerator_links": lambda: read_accelerator_links(facts.get("accelerators", ()), run),
        "limits": lambda: read_limits(root),
        "software": lambda: read_software(root, environ),
    }
    problems = []
    for name, probe in probes.items():
        try:
            facts[name] = probe()
        except Exception as error:  # a probe meets files of every kernel and vendor: none may end a run
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return Facts(
        collected=datetime.now(UTC).isoformat(timespec="seconds"),
        node=environ.get("SLURMD_NODENAME") or hostname,
        hostname=hostname,
        simulated=simulated,
        slurm=_select(environ, SLURM),
        tuning=_select(environ, TUNING),
        problems=tuple(problems),
        **facts,
    )


def _read_product_name(root: Path) -> str:
    """Return the manufacturer's name of the machine."""
    names = [read_text(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    return " ".join(name for name in names if name) or UNKNOWN


def _read_firmware(root: Path) -> Firmware:
    """Read what every user may read of the board's firmware."""
    names = {
        "bios_vendor": "bios_vendor",
        "bios_version": "bios_version",
        "bios_date": "bios_date",
        "board": "board_name",
    }
    folder = root / "sys/class/dmi/id"
    return Firmware(**{field: read_text(folder / name) or UNKNOWN for field, name in names.items()})


def _select(environ: Mapping[str, str], pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the variables whose whole name has the form, by name; secrets without their value."""
    names = sorted(name for name in environ if pattern.fullmatch(name) and not _PERSONAL_VARIABLES.fullmatch(name))
    return {name: remove_secret_value(name, environ[name][:MAX_VALUE_LENGTH]) for name in names}


def _list_folders(environ: Mapping[str, str], run_folder: Path | None) -> dict[str, Path]:
    """Return the existing folders whose file systems the run may use, by purpose."""
    folders = {
        "working folder": str(Path.cwd()),
        "run folder": str(run_folder or ""),
        "data": environ.get("MLHPC_DATA", ""),
        "scratch": environ.get("SCRATCH", ""),
        "temporary files": environ.get("TMPDIR", "/tmp"),  # noqa: S108  a fact about the node, nothing is written there
        "shared memory": "/dev/shm",  # noqa: S108
    }
    return {purpose: Path(path) for purpose, path in folders.items() if path and Path(path).exists()}


STA_UNSYNC = 5  # TIME_ERROR of adjtimex(2)


def measure_clock_skew(folder: Path) -> float | None:
    """Return by how many seconds a new file in ``folder`` is newer than this node's clock. None if none can be written.

    A shared file system stamps files with its server's clock. A local one uses this node's, so the result is about 0.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mlhpc-clock-") as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            written = Path(file.name).stat().st_mtime
            after = time.time()
    except OSError:
        return None
    return written - min(max(written, before), after)  # what lies between is no difference


def is_synchronised() -> bool | None:
    """Return True if a time service keeps the kernel's clock; None if unknown (containers, other systems)."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes 0: only read
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != STA_UNSYNC
