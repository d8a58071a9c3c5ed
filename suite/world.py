"""The ranks of a run and their communication outside the gradient path: through MPI where there is one, else torch's gloo.

`detect` reads the launcher's environment and imports nothing heavy; `World.create` connects the ranks. Control messages, sums of
a few numbers and staged bytes go through `World`; gradients go through torch.distributed, which `World.init_torch` starts.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from suite.errors import InputError
from suite.files import one_line

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import nn

TIMEOUT = timedelta(
    minutes=30
)  # of a collective; longer than a staging or evaluation that another rank may still be in


@dataclass(frozen=True)
class Launch:
    """The launcher that started this process, and its rank and number of ranks by the launcher's variables."""

    launcher: str
    rank: int
    size: int


# Rank and size variables of each launcher. The first pair that is set counts: an inner launcher stands before an outer one
LAUNCHERS: tuple[tuple[str, str, str], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("pmi", "PMI_RANK", "PMI_SIZE"),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun sets STEP_ variables, the batch script has none
)


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Find the launcher that started this process; None if there was none. ValueError if its variables are inconsistent."""
    for launcher, rank_name, size_name in LAUNCHERS:
        if rank_name in environ and size_name in environ:
            try:
                rank, size = int(environ[rank_name]), int(environ[size_name])
            except ValueError:
                raise InputError(f"{rank_name}={environ[rank_name]!r}: expected an integer") from None
            if not 0 <= rank < size:
                raise InputError(f"{rank_name}={rank} is not below {size_name}={size}")
            return Launch(launcher, rank, size)
    return None


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """The name of this node: Slurm's if set, so that several slurmd on one host count as several nodes; else the host's."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


class Transport(Protocol):
    """Collectives of Python objects and bytes. Every rank makes every call, in the same order."""

    rank: int
    size: int

    def barrier(self) -> None: ...  # noqa: D102
    def allgather(self, value: Any) -> list[Any]: ...  # noqa: D102
    def broadcast(self, value: Any, root: int) -> Any: ...  # noqa: D102
    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]: ...  # noqa: D102
    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None: ...  # noqa: D102
    def split(self, color: int) -> Transport: ...  # noqa: D102
    def abort(self, code: int) -> None: ...  # noqa: D102


class Alone:
    """The transport of a single process."""

    rank, size = 0, 1

    def barrier(self) -> None:
        """Return at once."""

    def allgather(self, value: Any) -> list[Any]:
        """A list with the value."""
        return [value]

    def broadcast(self, value: Any, root: int) -> Any:
        """The value."""
        return value

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The values."""
        return values

    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Leave the buffer as it is."""

    def split(self, color: int) -> Alone:
        """The same transport: the only rank is alone in any group."""
        return self

    def abort(self, code: int) -> None:
        """End this process at once."""
        os._exit(code)


class MpiTransport:
    """The transport through mpi4py."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def barrier(self) -> None:
        """Wait for all."""
        self._comm.Barrier()

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return self._comm.allgather(value)  # type: ignore[no-any-return]

    def broadcast(self, value: Any, root: int) -> Any:
        """The root's value."""
        return self._comm.bcast(value, root=root)

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Element-wise sum."""
        total = values.copy()
        self._comm.Allreduce(values, total)
        return total

    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Fill every rank's buffer with the root's bytes."""
        self._comm.Bcast(buffer, root=root)

    def split(self, color: int) -> MpiTransport:
        """A transport between the ranks that passed the same color."""
        return MpiTransport(self._comm.Split(color, self.rank))

    def abort(self, code: int) -> None:
        """End every rank at once."""
        self._comm.Abort(code)


class TorchTransport:
    """The transport through torch.distributed with gloo: for torchrun, and for srun without an MPI plug-in."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def barrier(self) -> None:
        """Wait for all."""
        import torch.distributed as dist

        dist.barrier(self._group)

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self._group)
        return values

    def broadcast(self, value: Any, root: int) -> Any:
        """The root's value."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=root)
        return box[0]

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Element-wise sum."""
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(values.copy())
        dist.all_reduce(tensor, group=self._group)
        return tensor.numpy()

    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Fill every rank's buffer with the root's bytes."""
        import torch
        import torch.distributed as dist

        dist.broadcast(torch.from_numpy(buffer), group=self._group, group_src=root)

    def split(self, color: int) -> TorchTransport:
        """A transport between the ranks that passed the same color. Only of the whole world: torch makes groups with all ranks."""
        assert self._group is None
        import torch.distributed as dist

        colors = self.allgather(color)
        mine = None
        for each in sorted(set(colors)):
            group = dist.new_group([rank for rank, c in enumerate(colors) if c == each], backend="gloo")
            if each == color:
                mine = group
        return TorchTransport(mine)

    def abort(self, code: int) -> None:
        """End this rank at once; the launcher then ends the others."""
        os._exit(code)


@dataclass(frozen=True)
class World:
    """All ranks of a run, as one of them sees them.

    ``node`` is the 0-based number of this rank's node, ``local_rank`` the rank's number on it, ``local_size`` the number of ranks
    on it. ``peers`` connects the ranks with this local rank on every node, in node order.
    """

    launcher: str
    rank: int
    size: int
    node: int
    nodes: int
    local_rank: int
    local_size: int
    node_names: tuple[str, ...]
    transport: Transport
    peers: Transport

    @staticmethod
    def create(launch: Launch | None = None) -> World:
        """Connect the ranks of a launch (default: that of `detect`). All ranks call it."""
        launch = launch or detect()
        transport = Alone() if launch is None or launch.size == 1 else _connect(launch)
        names = transport.allgather(node_name())
        nodes = list(dict.fromkeys(names))
        node = nodes.index(names[transport.rank])
        on_node = [rank for rank, name in enumerate(names) if name == names[transport.rank]]
        local_rank = on_node.index(transport.rank)
        return World(
            launcher=launch.launcher if launch else "none",
            rank=transport.rank,
            size=transport.size,
            node=node,
            nodes=len(nodes),
            local_rank=local_rank,
            local_size=len(on_node),
            node_names=tuple(nodes),
            transport=transport,
            peers=transport.split(local_rank),
        )

    @property
    def is_first(self) -> bool:
        """True on rank 0, the only rank that writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.transport.barrier()

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The root's value on every rank."""
        return self.transport.broadcast(value, root)

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return self.transport.allgather(value)

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum named numbers over ranks, in float64. Every rank passes the same names in the same order."""
        import numpy as np

        totals = self.transport.sum(np.array(list(values.values()), dtype=np.float64))
        return dict(zip(values, totals.tolist(), strict=True))

    def summary(self, value: float) -> dict[str, float]:
        """Minimum, median and maximum of one number over ranks."""
        values = [float(each) for each in self.allgather(value)]
        return {"min": min(values), "median": statistics.median(values), "max": max(values)}

    def check_together(self, error: Exception | None) -> None:
        """Raise ValueError on every rank if any rank passes an error: that of the lowest rank. All ranks call it.

        Without it the rank with the error would leave the others waiting in their next collective.
        """
        errors = self.allgather(None if error is None else one_line(error))
        first = next((text for text in errors if text is not None), None)
        if first is not None:
            raise InputError(first)

    def init_torch(self, device: torch.device) -> None:
        """Start torch.distributed for gradients with gloo, on CUDA with NCCL too. Does nothing on one rank or if it is started."""
        import torch.distributed as dist

        if self.size == 1 or dist.is_initialized():
            return
        address = self.broadcast(f"tcp://{_address()}:{_free_port()}" if self.is_first else None)
        _init(device.type == "cuda", address, self.rank, self.size)


def average_buffers(model: nn.Module, world: World) -> None:
    """Replace floating-point buffers (running statistics of batch normalisation) by their means over ranks, in float64."""
    import torch

    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world.size == 1 or not buffers:
        return
    flat = torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers]).cpu().numpy()
    mean = torch.from_numpy(world.transport.sum(flat) / world.size)
    for buffer, values in zip(buffers, torch.split(mean, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))


def _connect(launch: Launch) -> Transport:
    if launch.launcher != "torchrun":
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() == launch.size:
            return MpiTransport(MPI.COMM_WORLD)
    _rendezvous(launch)
    return TorchTransport()


def _rendezvous(launch: Launch) -> None:
    """Start torch.distributed without MPI, from torchrun's variables or Slurm's node list and job id."""
    import torch

    env = os.environ
    if launch.launcher == "torchrun":
        address, port = env["MASTER_ADDR"], env["MASTER_PORT"]
    elif "SLURM_JOB_ID" in env:
        first = first_node(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])
        address = "127.0.0.1" if env.get("SLURM_STEP_NUM_NODES") == "1" else first
        # All ranks must compute the same port without communication; jobs and steps on one node should get different ones
        port = str(20000 + (int(env["SLURM_JOB_ID"]) * 131 + int(env.get("SLURM_STEP_ID", "0"))) % 40000)
    else:
        raise InputError(
            f"{launch.launcher} started {launch.size} ranks, but mpi4py sees a world of one: "
            "mpi4py and the launcher belong to different MPIs (`mlhpc doctor` shows both)"
        )
    _init(torch.cuda.is_available(), f"tcp://{address}:{port}", launch.rank, launch.size)


def _init(cuda: bool, address: str, rank: int, size: int) -> None:
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=TIMEOUT)
    atexit.register(_leave)  # threads of gloo that outlive the interpreter sometimes abort it


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def first_node(nodelist: str) -> str:
    """The first host of a Slurm node list: ``node[1-2,7]`` gives ``node1``. Containers have no scontrol to ask."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodelist)
    if match is None:
        raise InputError(f"{nodelist!r} is not a Slurm node list")
    return match.group(1) + (match.group(2) or "")


def _address() -> str:
    """The address by which other nodes reach this one; loopback if the host's name does not resolve."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
