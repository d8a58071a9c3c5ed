"""Collects all facts of the node this process runs on.

Environment variables are taken by name from two lists and never as a whole: the others may hold secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suite.machine.facts import UNKNOWN, Facts
from suite.machine.probes.accelerators import list_accelerators, read_accelerator_links
from suite.machine.probes.hosts import read_hostname
from suite.machine.probes.memory import read_memory
from suite.machine.probes.network import list_network_interfaces
from suite.machine.probes.processor import read_cpu
from suite.machine.probes.root import is_simulated, machine_root
from suite.machine.probes.software import read_limits, read_software
from suite.machine.probes.storage import list_block_devices, list_file_systems
from suite.machine.probes.sysfs import Run, read_text, run_command

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


def collect_facts(
    environ: Mapping[str, str], *, run_folder: Path | None = None, root: Path | None = None, run: Run | None = None
) -> Facts:
    """Collect the facts of the node under ``root`` (``/proc``, ``/sys``, ``/etc``); ``run`` replaces `run_command`.

    A probe that fails is named under ``problems`` and leaves its default: no strange node may fail a run. By default the root
    is that of `machine_root`, and no command is run on behalf of a simulated machine: it would answer for the real one.
    """
    root = root or machine_root(environ)
    simulated = is_simulated(root)
    run = run or ((lambda command: "") if simulated else run_command)
    hostname = read_hostname(root)
    facts: dict[str, Any] = {}
    probes: dict[str, Callable[[], Any]] = {
        "product": lambda: _product(root),
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
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
    return Facts(
        collected=datetime.now(UTC).isoformat(timespec="seconds"),
        node=environ.get("SLURMD_NODENAME") or hostname,
        hostname=hostname,
        simulated=simulated,
        slurm={name: environ[name] for name in SLURM_NAMES if name in environ},
        tuning={name: environ[name] for name in TUNING_NAMES if name in environ},
        problems=tuple(problems),
        **facts,
    )


def _product(root: Path) -> str:
    """The manufacturer's name of the machine."""
    names = [read_text(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    return " ".join(name for name in names if name) or UNKNOWN


def _list_folders(environ: Mapping[str, str], run_folder: Path | None) -> dict[str, Path]:
    """The existing folders whose file systems the run may use, by purpose."""
    folders = {
        "working folder": str(Path.cwd()),
        "run folder": str(run_folder or ""),
        "data": environ.get("MLHPC_DATA", ""),
        "scratch": environ.get("SCRATCH", ""),
        "temporary files": environ.get("TMPDIR", "/tmp"),  # noqa: S108  a fact about the node, nothing is written there
        "shared memory": "/dev/shm",  # noqa: S108
    }
    return {purpose: Path(path) for purpose, path in folders.items() if path and Path(path).exists()}
