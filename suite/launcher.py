"""Detects which launcher started this process: srun, mpiexec, torchrun, or a person's shell.

Every command that uses ranks asks `find_world`. It looks only at the environment and imports nothing heavy.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlhpc.suite import LAUNCH
from mlhpc.suite.errors import InputError, explain_limit

# Rank and size variables of each launcher: one that may start inside another stands before it
LAUNCHERS: tuple[tuple[str, str, str], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("pmi", "PMI_RANK", "PMI_SIZE"),
    ("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("pjm", "PMIX_RANK", "PJM_MPI_PROC"),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun sets STEP_ variables, the batch script has none
)
_NAMES = {launcher: (rank, size) for launcher, rank, size in LAUNCHERS}
# Variables by which a launcher speaks to its ranks, and a scheduler to mpiexec. A user's own settings are not among
# them: HYDRA_*, MPICH_*, most of OMPI_MCA_*
_LAUNCHER_VARIABLES = re.compile(
    r"(?:SLURM|PMI|PMIX|PRTE|PALS|PLE|PJM|JSM_NAMESPACE|FLUX|HYDI|TORCHELASTIC|PBS|LSB|COBALT)_.*|PE_HOSTFILE|OMPI_(?!MCA_).*"
    r"|OMPI_MCA_(?:orte|prte|ess|pmix|initial).*|MPI_LOCALN?RANK(?:S|ID)|MV2_COMM_WORLD_.*"
    r"|(?:(?:LOCAL|GROUP|ROLE)_)?(?:RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(?:ADDR|PORT)"
)


@dataclass(frozen=True)
class Launch:
    """The launcher that started this process, and rank and number of ranks by the launcher's variables."""

    launcher: str
    rank: int
    size: int


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Find the launcher that started this process, or None. InputError if its variables are inconsistent.

    Of several launchers the innermost counts. Variables of several ranks count before those of one. A shell, a
    container or a notebook keeps the latter long after their launcher has ended.
    """
    found = [_read(*each, environ) for each in _list_present(environ)]
    for place, launch in enumerate(found):
        if launch.size > 1:
            _refuse_contradiction(launch, found[place + 1 :], environ)
            return launch
        if _is_active(launch, environ):
            return launch
    return found[0] if found else None


def _read(launcher: str, rank_name: str, size_name: str, environ: Mapping[str, str]) -> Launch:
    given = f"{rank_name}={environ[rank_name]!r} and {size_name}={environ[size_name]!r}"
    try:
        rank, size = int(environ[rank_name]), int(environ[size_name])
    except ValueError:
        raise InputError(f"{given}: expected integers; {render_unset_command(environ)}") from None
    if not 0 <= rank < size:
        raise InputError(f"{given}: expected a rank below the number of ranks; {render_unset_command(environ)}")
    return Launch(launcher, rank, size)


def _is_active(launch: Launch, environ: Mapping[str, str]) -> bool:
    """Return True if a launcher's variables are surely not left over.

    Then torchrun's agent named the run, or the PMI socket is open.
    """
    if launch.launcher == "torchrun":
        return "TORCHELASTIC_RUN_ID" in environ
    try:
        return launch.launcher == "pmi" and stat.S_ISSOCK(os.fstat(int(environ["PMI_FD"])).st_mode)
    except (KeyError, ValueError, OSError, OverflowError):
        return False


def _refuse_contradiction(launch: Launch, others: Sequence[Launch], environ: Mapping[str, str]) -> None:
    """Raise InputError if another launcher of several ranks disagrees, and cannot be the outer one."""
    # RANK and WORLD_SIZE without torchrun's other variables were set by a person, or are left over.
    by_hand = launch.launcher == "torchrun" and not {"TORCHELASTIC_RUN_ID", "LOCAL_RANK"} & environ.keys()
    if launch.launcher == "torchrun" and not by_hand:
        return
    for other in others:
        outer = (
            other.launcher in ("slurm", "flux") and not by_hand
        )  # mpiexec may have started a process per node through it
        if other.size > 1 and not outer and (other.rank, other.size) != (launch.rank, launch.size):
            unset = " or ".join(f"env -u {_NAMES[each.launcher][0]}" for each in (launch, other))
            raise InputError(
                f"{_render_variables(launch)} and {_render_variables(other)} contradict each other: "
                "expected the variables of one launcher; "
                f"to remove the variables that are left over, write {unset} before mlhpc"
            )


def find_world(ranks: int | None, environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the launch whose rank a command with ``--ranks`` is. None: the command starts the ranks itself.

    A launcher of one rank does not count if more are asked for. It is a person's shell: an interactive Slurm step, say.
    InputError if a launcher started several ranks, and another number is asked for.
    """
    launch = find_launch(environ)
    if launch is None or ranks in (None, 1, launch.size):
        return launch
    if launch.size == 1:
        return None
    raise InputError(
        f"--ranks {ranks}: {describe_launcher(environ)}: leave --ranks out; {render_unset_command(environ)}"
    )


def refuse_several_ranks(what: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError if a launcher started several ranks: each would do what one command does."""
    launch = find_launch(environ)
    if launch is not None and launch.size > 1:
        raise InputError(f"{describe_launcher(environ)}, and {what}; {render_unset_command(environ)}")


def describe_launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Describe this process's launcher, with the variables that show it."""
    launch = find_launch(environ)
    if launch is None:
        return "no launcher: a command in a shell"
    ranks = "the only rank" if launch.size == 1 else f"rank {launch.rank} of {launch.size} ranks"
    others = [
        f"{rank_name}={environ[rank_name]}" for name, rank_name, _ in _list_present(environ) if name != launch.launcher
    ]
    not_counted = f"; not counted: {', '.join(others)}" if others else ""
    return f"{launch.launcher} started this process as {ranks} ({_render_variables(launch)}{not_counted})"


def render_unset_command(environ: Mapping[str, str] = os.environ) -> str:
    """Return what to type in a shell that inherited a launcher's variables."""
    return (
        f"in a shell of your own: env {' '.join(f'-u {rank_name}' for _, rank_name, _ in _list_present(environ))}"
        " mlhpc …"
    )


def drop_launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of launchers and schedulers.

    With them an mpiexec would start its ranks through the scheduler. A rank would connect to the outer launcher.
    """
    return {name: value for name, value in environ.items() if not _LAUNCHER_VARIABLES.fullmatch(name)}


# They choose MPI's library or how its launcher starts ranks. A site sets others, UCX_* and FI_*, for its network
_STEERING = re.compile(r"(?:HYDRA|MPI4PY)_.+")


def explain_steering(environ: Mapping[str, str] = os.environ) -> str:
    """Return what to do first where ranks cannot be connected: unset what steers MPI. "" if nothing is set."""
    names = sorted(filter(_STEERING.fullmatch, environ))
    if not names:
        return ""
    changes = f"which change{'s' * (len(names) == 1)} the MPI library or how mpiexec starts ranks"
    return f"unset {' '.join(names)}, {changes}; then run mlhpc doctor again"


# Variables that choose how ranks speak to each other, by library, and the words by which its messages are known
_NETWORKS: tuple[tuple[str, str, str], ...] = (
    ("how gloo connects ranks", r"(?:GLOO|TP)_.+", r"gloo"),
    ("how NCCL connects ranks", r"R?NCCL_.+", r"NCCL"),
    (
        "how libfabric connects ranks",
        r"FI_.+|MPIR_CVAR_.+|MPICH_.+|I_MPI_(?:FABRICS|OFI).*",
        r"\bOFI\b|_OFI_|libfabric|\bfi_[a-z]+|getinfo",
    ),
    ("how UCX connects ranks", r"UCX_.+|MPIR_CVAR_.+", r"\bUC[XTPS]\b|\buc[xtps]_"),
    (
        "how Open MPI connects ranks",
        r"(?:OMPI|PMIX|PRTE)_MCA_.+",
        r"Open MPI|open-?mpi|\bPML\b|\bBTL\b|\bopal_|orte|prte",
    ),
    (
        "how MPICH connects ranks",
        r"(?:MPIR_CVAR|MPICH|I_MPI|HYDRA)_.+",
        r"MPIDI?_|MPICH|MPII?R_|internal_Init|HYDU?_|mpiexec@",
    ),
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch 2.13 ends ranks by a signal
    ("what torch checks", r"(?:TORCH|PYTORCH|ATEN)_.+", r"Segmentation fault|Aborted|SIGSEGV|SIGABRT"),
    ("when mpiexec ends the ranks", r"MPIEXEC_TIMEOUT\w*", r"(?i)timed? ?out"),
)
_INTERFACES = re.compile(r"[A-Z0-9_]*(?:_IFNAME|_IFACE|_NET_DEVICES|_if_include|_INTERFACE)")
_DEFAULTS = {"UCX_NET_DEVICES": "lo"}  # that the launcher of this suite sets


def explain_network(said: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return which variables of the network cause a failure to connect ranks, and the command without them.

    First variables with an interface that this machine lacks, then variables of the library that wrote ``said``. "" if
    none is set.
    """
    set_here = {name: value for name, value in environ.items() if _DEFAULTS.get(name) != value}
    known = list_interfaces()
    strange = {
        name: value
        for name, value in set_here.items()
        if _INTERFACES.fullmatch(name) and value and not value.startswith("^") and not _names_one_of(value, known)
    }
    if strange:
        here = f"no interface of this machine has that name ({', '.join(sorted(known))})"
        return f"{_render_set(strange)}: {here}; {_render_without(strange)}"
    for what, form, words in _NETWORKS:
        own = {name: value for name, value in set_here.items() if re.fullmatch(form, name)}
        if own and re.search(words, said):
            many = len(own) > 1
            return f"{_render_set(own)} choose{'s' * (not many)} {what}; {_render_without(own)}"
    return ""


def _names_one_of(value: str, known: Collection[str]) -> bool:
    """Return whether a list of interfaces names one that exists, or holds what is no name, such as a subnet."""
    names = [re.sub(r"^=|:.*$", "", each.strip()) for each in value.split(",")]
    return any(
        each in ("", "all") or "/" in each or re.match(r"\d+\.", each) or any(one.startswith(each) for one in known)
        for each in names
    )


def list_interfaces() -> frozenset[str]:
    """List the network interfaces of this machine, and its InfiniBand devices."""
    with suppress(OSError):
        devices = os.listdir("/sys/class/infiniband") if os.path.isdir("/sys/class/infiniband") else []  # noqa: PTH112, PTH208
        return frozenset([*(name for _, name in socket.if_nameindex()), *devices])
    return frozenset()


def _render_set(names: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value if value.isprintable() else repr(value)}" for name, value in sorted(names.items()))


def _render_without(names: Collection[str]) -> str:
    return (
        f"without {'it' if len(names) == 1 else 'them'}: env {' '.join(f'-u {name}' for name in sorted(names))} mlhpc …"
    )


def explain_unconnected(said: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return what to do where ranks cannot be connected, by the first cause that applies.

    A variable of the network, one that steers MPI, the machine, and last the variables of a launcher: in a shell they
    may be left over. Those of the mpiexec that this suite started are not foreign.
    """
    known = explain_network(said, environ) or explain_steering(environ) or explain_machine(said)
    left = "" if LAUNCH in environ else f"{describe_launcher(environ)}; {render_unset_command(environ)}"
    return known or left or "mlhpc doctor shows what MPI and the network of this machine lack"


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where MPI and NCCL exchange within a node
SHARED_NEEDED_BYTES = 256 << 20  # containers have 64 MiB by default, which MPI and data loaders exceed
_MORE_SHARED = "more shared memory: mount -o remount,rw,size=1G /dev/shm; in a container --shm-size=1g"


def has_shared_memory() -> bool:
    """Return whether processes of this node have room to exchange through shared memory."""
    try:
        return os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= SHARED_NEEDED_BYTES
    except OSError:
        return False


# What MPI says of a machine that it cannot run on: no other library would help
_FIXES: tuple[tuple[str, str], ...] = (
    (r"gethostname failed", "give this machine a host name of fewer than 64 characters: hostnamectl hostname NAME"),
    (r"Bus error|signal 7\b|SIGBUS|shm_open|/dev/shm|shared memory", _MORE_SHARED),
    (r"No space left|Disk quota", "make room, or export TMPDIR=<a folder with room>"),
    (r"Read-only file system|Permission denied", "export TMPDIR=<a folder that you may write to and run programs in>"),
    (r"Cannot allocate memory|out of memory|signal 9\b", "end what else runs here, or ask for more memory"),
    (
        r"gethostbyname|getaddrinfo|Name or service not known|[Cc]onnection refused|[Uu]nable to (?:connect|get host)"
        r"|Network is unreachable|no active ports|Hostname lookup",
        "let this machine's name lead to it: a line 127.0.0.1 and the name in /etc/hosts, and ip link set lo up",
    ),
    (r"Illegal instruction|signal 4\b", "install an MPI that was built for this processor"),
    (r"(?:running|run) \S+ as root", "start it as another user, or export OMPI_ALLOW_RUN_AS_ROOT{,_CONFIRM}=1"),
    (r"not enough slots", "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"),
)


def explain_machine(said: str) -> str:
    """Return what to do about what a message says of the machine. "" if it blames nothing that is known."""
    if limit := explain_limit(said):
        return limit
    for pattern, fix in _FIXES:
        # A damaged library ends with the same signal
        if re.search(pattern, said) and (fix != _MORE_SHARED or not has_shared_memory()):
            return fix
    return ""


def remove_stale_variables(launch: Launch, environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables of an mpiexec of one rank, in which another launcher started this launch.

    MPI would look for that mpiexec and end the process.
    """
    if launch.launcher != "pmi" and environ.get("PMI_SIZE") == "1" and launch.size > 1:
        for name in [name for name in environ if name.startswith("PMI_")]:
            del environ[name]


def _render_variables(launch: Launch) -> str:
    rank_name, size_name = _NAMES[launch.launcher]
    return f"{rank_name}={launch.rank} {size_name}={launch.size}"


def _list_present(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [each for each in LAUNCHERS if each[1] in environ and each[2] in environ]


# The job script's own word, Slurm, PBS, LSF, Flux, PJM, Grid Engine; the last name is the least telling
JOB_VARIABLES = ("MLHPC_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "PJM_JOBID", "JOB_ID")
RESTART_VARIABLES = ("SLURM_RESTART_COUNT", "RESTARTED")  # Slurm, Grid Engine: how often this job began again
ARRAY_VARIABLES = ("MLHPC_INDEX", "SLURM_ARRAY_TASK_ID")  # of a process whose runs are jobs of their own

# Of a trial, in Unix seconds: when its launcher began, and when that of the attempt before had seen its end
BEGAN, ENDED = "MLHPC_BEGAN", "MLHPC_ENDED"


def find_batch_job(environ: Mapping[str, str]) -> str | None:
    """Return the batch job of this process as its scheduler names it. None outside of one."""
    return next((environ[name] for name in JOB_VARIABLES if environ.get(name)), None)
