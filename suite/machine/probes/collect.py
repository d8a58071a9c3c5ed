"""Collects all facts of the node on which this process runs.

Environment variables are selected by the form of their names. Values that are secrets by name, form or randomness are
left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlhpc.suite.machine.facts import UNKNOWN, Facts, Firmware
from mlhpc.suite.machine.probes.accelerators import list_accelerators, read_accelerator_links
from mlhpc.suite.machine.probes.hosts import read_hostname
from mlhpc.suite.machine.probes.memory import read_memory
from mlhpc.suite.machine.probes.network import list_network_interfaces
from mlhpc.suite.machine.probes.processor import read_cpu
from mlhpc.suite.machine.probes.root import find_machine_root, is_simulated
from mlhpc.suite.machine.probes.software import read_limits, read_software
from mlhpc.suite.machine.probes.storage import list_block_devices, list_file_systems
from mlhpc.suite.machine.probes.sysfs import Run, read_text, run_command
from mlhpc.suite.machine.secrets import remove_secret_value

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
