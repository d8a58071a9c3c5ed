"""Carries collectives between ranks: in one process alone, through MPI, or through torch.distributed.

It carries bytes (mlhpc.suite.transport) and arrays of numbers.

Encodes messages between ranks as msgpack, and checks their type when they are read.

Unlike a pickle, a received message executes nothing. Messages carry no signature: they hold numbers, short texts and
records of them. A message of an unexpected type is an error.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_origin

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


LARGEST_MESSAGE = 2**31  # bytes
SPIN_S = 1e-4  # for which to look for the other ranks without a pause: twice what going to sleep and waking takes
PAUSES_S = 1e-6, 2e-3  # the first and the longest between two looks for the other ranks
FORWARD_S = 0.2  # in which mpiexec forwards what a rank has printed: after an abort MPICH's prints no more


class Transport(Protocol):
    """Collectives of bytes and arrays. Every rank makes every call, in the same order."""

    rank: int
    size: int

    def barrier(self) -> None: ...  # noqa: D102
    def allgather(self, data: bytes) -> list[bytes]: ...  # noqa: D102
    def gather(self, data: bytes) -> list[bytes] | None: ...  # noqa: D102
    def broadcast(self, data: bytes, root: int) -> bytes: ...  # noqa: D102
    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]: ...  # noqa: D102
    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None: ...  # noqa: D102
    def split(self, color: int) -> Transport: ...  # noqa: D102
    def abort(self, code: int) -> None: ...  # noqa: D102


class SingleProcessTransport:
    """The transport of a single process."""

    rank, size = 0, 1

    def barrier(self) -> None:
        """Return at once."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Return a list with the bytes."""
        return [data]

    def gather(self, data: bytes) -> list[bytes]:
        """Return a list with the bytes."""
        return [data]

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Return the bytes."""
        return data

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values."""
        return values

    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Leave the buffer as it is."""

    def split(self, color: int) -> SingleProcessTransport:
        """Return the same transport: the only rank is alone in any group."""
        return self

    def abort(self, code: int) -> None:
        """End this process at once."""
        os._exit(code)


class MpiTransport:
    """The transport through mpi4py. MPI waits with a whole core, so each call first waits with `wait_for_all_ranks`."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def barrier(self) -> None:
        """Wait for all."""
        wait_for_all_ranks(self._comm).Barrier()

    def allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        return wait_for_all_ranks(self._comm).allgather(data)  # type: ignore[no-any-return]

    def gather(self, data: bytes) -> list[bytes] | None:
        """Return every rank's bytes, in rank order, on rank 0; None on the others."""
        return wait_for_all_ranks(self._comm).gather(data, root=0)  # type: ignore[no-any-return]

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Return the root's bytes."""
        return wait_for_all_ranks(self._comm).bcast(data, root=root)  # type: ignore[no-any-return]

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the element-wise sum."""
        total = values.copy()
        wait_for_all_ranks(self._comm).Allreduce(values, total)
        return total

    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Fill every rank's buffer with the root's bytes."""
        wait_for_all_ranks(self._comm).Bcast(buffer, root=root)

    def split(self, color: int) -> MpiTransport:
        """Return a transport between the ranks that passed the same color."""
        # With the rank as key the new ranks keep their order.
        return MpiTransport(self._comm.Split(color, self.rank))

    def abort(self, code: int) -> None:
        """End every rank."""
        time.sleep(FORWARD_S)
        self._comm.Abort(code)


def wait_for_all_ranks(comm: Any) -> Any:
    """Wait for all ranks of MPI's communicator, and return it."""
    wait_for_request(comm.Ibarrier())
    return comm


def wait_for_request(request: Any) -> None:
    """Wait until MPI has done the request. Polls for a moment, then sleeps longer and longer between polls."""
    awake_until, pause_s = time.perf_counter() + SPIN_S, PAUSES_S[0]
    # MPI's own wait takes a whole core, which ranks that still compute need.
    while not request.Test():
        if time.perf_counter() > awake_until:
            time.sleep(pause_s)
            pause_s = min(PAUSES_S[1], 1.5 * pause_s)


class TorchTransport:
    """The transport through torch.distributed with gloo, for torchrun and for srun without MPI."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        atexit.register(vars(self).clear)  # ends the group: a thread of gloo that outlives Python can abort the process

    def barrier(self) -> None:
        """Wait for all."""
        import torch.distributed as dist

        dist.barrier(self._group)

    def allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        import torch
        import torch.distributed as dist

        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), self._group)
        longest = max(_message_size(int(size)) for size in sizes)  # gloo gathers only parts of equal size
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))), self._group)
        return [_tensor_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def gather(self, data: bytes) -> list[bytes] | None:
        """Return every rank's bytes, in rank order, on rank 0; None on the others."""
        import torch
        import torch.distributed as dist

        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        largest, size = torch.tensor([len(mine)]), torch.tensor([len(mine)])
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        longest = _message_size(int(largest))
        row = torch.nn.functional.pad(mine, (0, longest - len(mine)))
        sizes = None if self.rank else [torch.zeros_like(size) for _ in range(self.size)]
        rows = None if self.rank else [torch.zeros_like(row) for _ in range(self.size)]
        dist.gather(size, sizes, group=self._group, group_dst=0)
        dist.gather(row, rows, group=self._group, group_dst=0)
        if sizes is None or rows is None:
            return None
        lengths = [min(_message_size(int(length)), longest) for length in sizes]
        return [_tensor_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Return the root's bytes."""
        import torch
        import torch.distributed as dist

        # torch warns of memory that may not be written, such as that of bytes.
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == root else None
        size = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(size, group=self._group, group_src=root)
        if message is None:
            message = torch.zeros(_message_size(int(size)), dtype=torch.uint8)
        dist.broadcast(message, group=self._group, group_src=root)
        return _tensor_bytes(message)

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the element-wise sum."""
        import torch
        import torch.distributed as dist

        # The reduction works in place; the caller's array stays.
        tensor = torch.from_numpy(values.copy())
        dist.all_reduce(tensor, group=self._group)
        return tensor.numpy()

    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Fill every rank's buffer with the root's bytes."""
        import torch
        import torch.distributed as dist

        dist.broadcast(torch.from_numpy(buffer), group=self._group, group_src=root)

    def split(self, color: int) -> TorchTransport:
        """Return a transport between the ranks that passed the same color. Only the whole world can be split."""
        import torch.distributed as dist

        assert self.size == dist.get_world_size()
        colors = [int(each) for each in self.allgather(b"%d" % color)]
        mine = None
        # torch asks every rank to create every group, also those that it is not in, in one order.
        for each in sorted(set(colors)):
            group = dist.new_group([rank for rank, c in enumerate(colors) if c == each], backend="gloo")
            if each == color:
                mine = group
        return TorchTransport(mine)

    def abort(self, code: int) -> None:
        """End this rank at once; the launcher then ends the others."""
        os._exit(code)


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _message_size(size: int) -> int:
    """Check the size of a message in bytes. ConnectionError for one that no rank sends."""
    if not 0 < size <= LARGEST_MESSAGE:
        raise ConnectionError(f"a message of {size} bytes was announced: it is not read")
    return size


class ObservedTransport:
    """A transport that makes each collective inside ``observe(name, bytes)``, with this rank's bytes.

    ``on_split`` makes the transport of a part of the ranks from the inner one. By default nobody observes it.
    """

    def __init__(
        self,
        inner: Transport,
        observe: Callable[[str, int], AbstractContextManager[None]],
        on_split: Callable[[Transport], Transport] = lambda part: part,
    ) -> None:
        self._inner, self._observe, self._on_split = inner, observe, on_split
        self.rank, self.size = inner.rank, inner.size

    def barrier(self) -> None:
        """Wait for all."""
        with self._observe("barrier", 0):
            self._inner.barrier()

    def allgather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        with self._observe("gather", len(data)):
            return self._inner.allgather(data)

    def gather(self, data: bytes) -> list[bytes] | None:
        """Return every rank's bytes, in rank order, on rank 0; None on the others."""
        with self._observe("gather", len(data)):
            return self._inner.gather(data)

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Return the root's bytes."""
        with self._observe("broadcast", len(data) if root == self.rank else 0):
            return self._inner.broadcast(data, root)

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the element-wise sum."""
        with self._observe("sum", values.nbytes):
            return self._inner.sum(values)

    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Fill every rank's buffer with the root's bytes."""
        with self._observe("broadcast", buffer.nbytes if root == self.rank else 0):
            self._inner.broadcast_buffer(buffer, root)

    def split(self, color: int) -> Transport:
        """Connect the ranks that passed the same color."""
        with self._observe("split", 0):
            part = self._inner.split(color)
        return self._on_split(part)

    def abort(self, code: int) -> None:
        """End every rank at once."""
        self._inner.abort(code)


def encode(value: Any) -> bytes:
    """Encode numbers, texts, bytes, lists, dicts, data classes, Structs, paths and numpy arrays."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_other)


def decode(data: bytes, kind: Any = Any) -> Any:
    """Decode a message as a value of this type. ConnectionError if it is none.

    Without a type, tuples and sets become lists, data classes become dicts, and paths become texts.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_other)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConnectionError(f"a message between ranks is not a {getattr(kind, '__name__', kind)}: {error}") from None


def convert(value: Any, kind: Any) -> Any:
    """Convert a value that was decoded without a type into this type."""
    return msgspec.convert(value, kind, dec_hook=_decode_other)


def _encode_other(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.ndarray):
        # `str` includes the byte order, which the name of a dtype leaves out.
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to other ranks")


def _decode_other(kind: Any, value: Any) -> Any:
    import numpy as np

    if get_origin(kind) is np.ndarray:
        dtype, shape, data = value
        # The array is a view of the message and cannot be written to.
        return np.frombuffer(data, dtype).reshape(shape)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} cannot be received from other ranks")
