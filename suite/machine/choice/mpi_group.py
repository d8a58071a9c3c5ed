"""Runs torch.distributed's collectives on processors through the ranks' own MPI: a backend named ``mpi4py``.

Between ranks of a node MPI copies through shared memory, across nodes it uses the machine's network. gloo sends
everything through TCP. An operation is done when its call returns, ``async_op`` or not, except ``send`` and ``recv``.
MPI makes progress only while it is called, so nothing hides behind computing. Measuring decides which is faster
(`mlhpc.suite.machine.choice.collectives`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlhpc.suite.transport import wait_for_all_ranks, wait_for_request

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mlhpc.suite.world import World

NAME = "mpi4py"


def find_mpi_communicator(world: World) -> Any:
    """Return MPI's communicator of all ranks. None unless MPI connects them and allows several threads."""
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if mpi is None or world.size == 1 or mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return None
    return mpi.COMM_WORLD if mpi.COMM_WORLD.Get_size() == world.size else None


@cache
def register_backend() -> str:
    """Register the backend with torch.distributed and return its name."""
    dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=["cpu"])
    return NAME


def _create_group(options: Any, _: object) -> MpiGroup:
    """Create the group of the ranks. Only they call it, each at its own time: it must not need the other ranks."""
    from mpi4py import MPI

    everyone, ranks = MPI.COMM_WORLD, list(options.global_ranks_in_group)
    comm = everyone.Dup() if len(ranks) in (0, everyone.size) else everyone.Create_group(everyone.group.Incl(ranks))
    return MpiGroup(comm)


class CompletedWork(dist.Work):
    """An operation that has ended. ``tensors`` are its results."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: object = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future that has its result."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class PendingWork(CompletedWork):
    """A message that is being sent or received."""

    def __init__(self, request: Any, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors)
        self._request = request

    def wait(self, timeout: object = None) -> bool:
        """Wait until the tensor may be used again."""
        wait_for_request(self._request)
        return True

    def is_completed(self) -> bool:
        """Return True if the tensor may be used again."""
        return bool(self._request.Test())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait, then return a future with the result."""
        self.wait()
        return super().get_future()


_Group: Any = dist.ProcessGroup  # whose types are those of callers of several versions


class MpiGroup(_Group):  # type: ignore[misc]
    """A process group on MPI's communicator ``comm``, for contiguous tensors on the processor.

    torch calls its methods by these names and arguments. Each collective first waits for all ranks asleep, so that
    others can use the processor. Numbers that MPI cannot add (float16, bfloat16) are added in float32.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm, self._group_name = comm, ""

    @property
    def group_name(self) -> str:  # torch's own keeps it in a backend of C++, of which there is none
        """The name that torch gave the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def getBackendName(self) -> str:
        """The name of the backend."""
        return NAME

    def shutdown(self) -> None:
        """Do nothing: MPI's end frees the communicator.

        To free it here is a collective, which not all ranks may reach.
        """

    def barrier(self, opts: object = None) -> CompletedWork:
        """Wait for all ranks."""
        wait_for_all_ranks(self._comm)
        return CompletedWork()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> CompletedWork:
        """Reduce a tensor over all ranks, in place."""
        (tensor,) = tensors
        numbers = _make_mpi_buffer(tensor)
        wait_for_all_ranks(self._comm).Allreduce(_load_in_place(), numbers, _find_operation(opts))
        _copy_result(numbers, tensor)
        return CompletedWork(tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> CompletedWork:
        """Reduce a tensor over all ranks, in place on the root."""
        (tensor,) = tensors
        numbers, root = _make_mpi_buffer(tensor), opts.rootRank
        here = self.rank() == root
        wait_for_all_ranks(self._comm).Reduce(
            _load_in_place() if here else numbers, numbers if here else None, _find_operation(opts), root
        )
        if here:
            _copy_result(numbers, tensor)
        return CompletedWork(tensors)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> CompletedWork:
        """Sum a tensor that has a part for each rank, and keep this rank's part."""
        got = _make_mpi_buffer(output)
        wait_for_all_ranks(self._comm).Reduce_scatter_block(_make_mpi_buffer(given), got, _find_operation(opts))
        _copy_result(got, output)
        return CompletedWork([output])

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> CompletedWork:
        """Copy the root's tensor to all ranks."""
        (tensor,) = tensors
        wait_for_all_ranks(self._comm).Bcast(_view_bytes(tensor), opts.rootRank)
        return CompletedWork(tensors)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: object = None) -> CompletedWork:
        """Gather all ranks' tensors into one, in rank order. FSDP2 gives this rank's part of ``output`` itself."""
        there = output.data_ptr() + self.rank() * given.nbytes == given.data_ptr()
        wait_for_all_ranks(self._comm).Allgather(_load_in_place() if there else _view_bytes(given), _view_bytes(output))
        return CompletedWork([output])

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: object = None) -> CompletedWork:
        """Gather all ranks' tensors, which have one size."""
        (parts,), (mine,) = outputs, given
        every = mine.new_empty(len(parts), *mine.shape)
        self.all_gather_single(every, mine)
        for part, one in zip(parts, every, strict=True):
            part.copy_(one)
        return CompletedWork(parts)

    def gather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> CompletedWork:
        """Gather all ranks' tensors, which have one size, on the root."""
        (mine,), here = given, self.rank() == opts.rootRank
        every = mine.new_empty(self.size(), *mine.shape) if here else None
        wait_for_all_ranks(self._comm).Gather(
            _view_bytes(mine), None if every is None else _view_bytes(every), opts.rootRank
        )
        if every is not None:
            for part, one in zip(outputs[0], every, strict=True):
                part.copy_(one)
        return CompletedWork(given)

    def scatter(self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any = None) -> CompletedWork:
        """Give each rank one of the root's tensors, which have one size."""
        (mine,) = outputs
        every = torch.stack(given[0]) if self.rank() == opts.rootRank else None
        wait_for_all_ranks(self._comm).Scatter(
            None if every is None else _view_bytes(every), _view_bytes(mine), opts.rootRank
        )
        return CompletedWork(outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: object = None
    ) -> CompletedWork:
        """Exchange rows: each rank gets a part of every rank's rows. ``sent`` and ``received`` count rows; empty: equal
        parts.
        """
        wait_for_all_ranks(self._comm).Alltoallv(self._parts(given, sent), self._parts(output, received))
        return CompletedWork([output])

    def alltoall(self, outputs: list[Tensor], given: list[Tensor], opts: object = None) -> CompletedWork:
        """Give each rank one tensor and get one from each."""
        flat = torch.cat([each.reshape(-1) for each in given])
        got = flat.new_empty(sum(each.numel() for each in outputs))
        sizes = [each.numel() for each in outputs]
        self.all_to_all_single(got, flat, sizes, [each.numel() for each in given])
        for each, part in zip(outputs, torch.split(got, sizes), strict=True):
            each.copy_(part.view_as(each))
        return CompletedWork(outputs)

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> PendingWork:
        """Send a tensor."""
        return PendingWork(self._comm.Isend(_view_bytes(tensors[0]), receiver, tag), tensors)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> PendingWork:
        """Receive a tensor."""
        return PendingWork(self._comm.Irecv(_view_bytes(tensors[0]), sender, tag), tensors)

    # What torch up to 2.12 calls them
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    # DTensors call these three, with a list of one tensor
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> CompletedWork:
        """Reduce each tensor over all ranks, in place."""
        for tensor in tensors:
            self.allreduce([tensor], opts)
        return CompletedWork(tensors)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: object = None
    ) -> CompletedWork:
        """Gather all ranks' tensors into one, for each pair."""
        for output, mine in zip(outputs, given, strict=True):
            self.all_gather_single(output, mine)
        return CompletedWork(outputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], given: list[Tensor], opts: Any = None
    ) -> CompletedWork:
        """Sum a tensor that has a part for each rank, and keep this rank's part, for each pair."""
        for output, every in zip(outputs, given, strict=True):
            self.reduce_scatter_single(output, every, opts)
        return CompletedWork(outputs)

    def _parts(self, rows: Tensor, counts: list[int]) -> Any:
        """Return the bytes of rows, with the size of each rank's part."""
        data, size = _view_bytes(rows), self.size()
        if not counts:
            return data, [len(data) // size] * size
        row = len(data) // max(1, len(rows))
        return data, [row * count for count in counts]


def _require_contiguous(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"a tensor {shape} that is sent has to be contiguous; its strides are {strides}")
    return tensor.detach()


def _view_bytes(tensor: Tensor) -> NDArray[Any]:
    return _require_contiguous(tensor).reshape(-1).view(torch.uint8).numpy()


def _make_mpi_buffer(tensor: Tensor) -> NDArray[Any]:
    """Return what MPI adds: the tensor's own memory, or its values in float32."""
    given = _require_contiguous(tensor)
    narrow = given.is_floating_point() and given.element_size() < torch.float32.itemsize
    return (given.float() if narrow else given).numpy()


def _copy_result(numbers: NDArray[Any], tensor: Tensor) -> None:
    if numbers.itemsize != tensor.element_size():
        tensor.copy_(torch.from_numpy(numbers))


def _load_in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


def _find_operation(opts: Any) -> Any:
    """Return MPI's operation. ValueError for one that it lacks, such as torch's mean."""
    from mpi4py import MPI

    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for ours, theirs in (("SUM", MPI.SUM), ("MAX", MPI.MAX), ("MIN", MPI.MIN), ("PRODUCT", MPI.PROD)):
        if wanted == getattr(dist.ReduceOp, ours):
            return theirs
    raise ValueError(f"{NAME} has no reduction {wanted}: expected SUM, MAX, MIN or PRODUCT")
