"""Collectives between ranks: of one process alone, through MPI, through torch.distributed with signed messages; and MPI's start.

Ranks that connect over TCP exchange pickles, and to load a pickle is to run it. So every message carries an HMAC over its sender,
its number and its bytes, with a key that only the ranks of one launch have; what does not fit is refused unread. Gradients are
plain numbers and are not signed.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import hmac
import os
import pickle
import re
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from suite.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

LARGEST_MESSAGE = 2**31  # bytes of a pickled object
SEAL = "MLHPC_WORLD_SEAL"  # the key, in hexadecimal; a job script makes one per job
SPIN_S = 1e-4  # for which to look for the other ranks without a pause: twice what going to sleep and waking takes
PAUSES_S = 1e-6, 2e-3  # the first and the longest between two looks for the other ranks
LISTEN_S = 300.0  # how long the first rank may take to listen: a cold file system, torch not imported yet
PMI_LINE = 1024  # bytes that Slurm's pmi2 reads at once
MORE = b"+"  # ends a value whose rest stands under the key with the same ending; no digit of MPICH's encoding
RELAY = """
import sys
sys.path.insert(0, sys.argv[1])
from suite.transport import Wire, relay
relay(Wire(int(sys.argv[2])), Wire(int(sys.argv[3])))
"""
DIGEST = hashlib.sha256().digest_size
LAUNCH_NAMES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"),
)


class Seal:
    """Signs the messages of one group of ranks. ``name`` tells groups apart; each message has the next number."""

    def __init__(self, key: bytes, name: str = "world") -> None:
        self._key, self._name = key, name
        self._number = 0

    def next(self) -> None:
        """Begin the next message, on all ranks."""
        self._number += 1

    def close(self, value: Any, sender: int) -> bytearray:
        """Pickle and sign a value."""
        data = pickle.dumps(value)
        return bytearray(self._sign(data, sender) + data)

    def open(self, sealed: bytes, sender: int) -> Any:
        """The value of a message of this number from this sender. ConnectionError, and nothing is unpickled, if it is not one."""
        signature, data = sealed[:DIGEST], sealed[DIGEST:]
        if not hmac.compare_digest(signature, self._sign(data, sender)):
            raise ConnectionError(
                f"message {self._number} of rank {sender} was not signed by this launch: refused unread"
            )
        return pickle.loads(data)  # noqa: S301  signed by a rank of this launch

    def derive(self, name: str) -> Seal:
        """The seal of a part of the group."""
        return Seal(self._key, f"{self._name}/{name}")

    def _sign(self, data: bytes, sender: int) -> bytes:
        head = f"{self._name} {self._number} {sender} ".encode()
        return hmac.digest(self._key, head + data, "sha256")


def launch_key(rank: int, one_node: bool, environ: Mapping[str, str] = os.environ) -> bytes:
    """The key of this launch: from the environment, or on one node from a file that only this user can read.

    InputError if the ranks are on several nodes and the environment has none. It differs between the steps of a job.
    """
    text = environ.get(SEAL)
    if text is not None and not re.fullmatch(r"[0-9a-fA-F]{32,}", text):
        raise InputError(f"{SEAL}: expected at least 32 hexadecimal digits, the same on every node")
    if text is None and not one_node:
        raise InputError(
            f"ranks of several nodes that connect over TCP need a key that strangers lack: "
            f"export {SEAL}=$(openssl rand -hex 32) before srun or torchrun (job scripts of mlhpc submit do it)"
        )
    key = bytes.fromhex(text[: len(text) // 2 * 2]) if text is not None else _key_of_siblings(rank, environ)
    launch = " ".join(environ.get(name, "") for name in LAUNCH_NAMES)
    return hmac.digest(key, launch.encode(), "sha256")


def _key_of_siblings(rank: int, environ: Mapping[str, str]) -> bytes:
    """The key that rank 0 leaves for the other children of the same launcher. OSError if there is none in time."""
    path = key_path(environ)
    if rank == 0:
        key = secrets.token_bytes(32)
        part = path.with_suffix(f".{secrets.token_hex(8)}")
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        part.replace(path)
        return key
    deadline = time.monotonic() + LISTEN_S
    while not os.path.lexists(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISREG(found.st_mode):
            raise PermissionError(errno.EPERM, "not a file that only this user can read", str(path))
        return file.read()


def key_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file in which rank 0 leaves its key for the others on its node, until all are connected."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return Path(tempfile.gettempdir()) / f"mlhpc-{os.geteuid()}-{parent}-{started}-{environ.get(LAUNCH_NAMES[4], '0')}"


def port_of(key: bytes) -> int:
    """The port of a launch, below those that systems give to clients. Without the key it cannot be computed."""
    return 20000 + int.from_bytes(hmac.digest(key, b"port", "sha256")[:4]) % 12000


class Transport(Protocol):
    """Collectives of Python objects and bytes. Every rank makes every call, in the same order."""

    rank: int
    size: int

    def barrier(self) -> None: ...  # noqa: D102
    def allgather(self, value: Any) -> list[Any]: ...  # noqa: D102
    def gather(self, value: Any) -> list[Any] | None: ...  # noqa: D102
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

    def gather(self, value: Any) -> list[Any]:
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
    """The transport through mpi4py. MPI's own waiting takes a whole core, so each call first waits for all ranks by `meet`."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def barrier(self) -> None:
        """Wait for all."""
        meet(self._comm).Barrier()

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return meet(self._comm).allgather(value)  # type: ignore[no-any-return]

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, in rank order, on rank 0; None on the others."""
        return meet(self._comm).gather(value, root=0)  # type: ignore[no-any-return]

    def broadcast(self, value: Any, root: int) -> Any:
        """The root's value."""
        return meet(self._comm).bcast(value, root=root)

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Element-wise sum."""
        total = values.copy()
        meet(self._comm).Allreduce(values, total)
        return total

    def broadcast_buffer(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Fill every rank's buffer with the root's bytes."""
        meet(self._comm).Bcast(buffer, root=root)

    def split(self, color: int) -> MpiTransport:
        """A transport between the ranks that passed the same color."""
        return MpiTransport(self._comm.Split(color, self.rank))

    def abort(self, code: int) -> None:
        """End every rank at once."""
        self._comm.Abort(code)


def meet(comm: Any) -> Any:
    """Wait for all ranks of MPI's communicator, and return it."""
    wait_for(comm.Ibarrier())
    return comm


def wait_for(request: Any) -> None:
    """Wait until MPI has done what was asked. Looks again and again for a moment, then sleeps longer and longer between looks."""
    awake_until, pause_s = time.perf_counter() + SPIN_S, PAUSES_S[0]
    while not request.Test():
        if time.perf_counter() > awake_until:
            time.sleep(pause_s)
            pause_s = min(PAUSES_S[1], 1.5 * pause_s)


class TorchTransport:
    """The transport through torch.distributed with gloo: for torchrun, and for srun without an MPI plug-in.

    Objects are signed by their sender, because any program can connect to the port. The group is the transport's own.
    """

    def __init__(self, seal: Seal, group: Any) -> None:
        import torch.distributed as dist

        self._seal, self._group = seal, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        atexit.register(vars(self).clear)  # ends the group: a thread of gloo that outlives Python can abort the process

    def barrier(self) -> None:
        """Wait for all."""
        import torch.distributed as dist

        dist.barrier(self._group)

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        import torch
        import torch.distributed as dist

        self._seal.next()
        mine = torch.frombuffer(self._seal.close(value, self.rank), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), self._group)
        longest = max(_message_size(int(size)) for size in sizes)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))), self._group)
        return [
            self._seal.open(tensor_bytes(parts[sender][: int(sizes[sender])]), sender) for sender in range(self.size)
        ]

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, in rank order, on rank 0; None on the others."""
        import torch
        import torch.distributed as dist

        self._seal.next()
        mine = torch.frombuffer(self._seal.close(value, self.rank), dtype=torch.uint8)
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
        return [self._seal.open(tensor_bytes(rows[sender][: lengths[sender]]), sender) for sender in range(self.size)]

    def broadcast(self, value: Any, root: int) -> Any:
        """The root's value."""
        import torch
        import torch.distributed as dist

        self._seal.next()
        message = torch.frombuffer(self._seal.close(value, root), dtype=torch.uint8) if self.rank == root else None
        size = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(size, group=self._group, group_src=root)
        if message is None:
            message = torch.zeros(_message_size(int(size)), dtype=torch.uint8)
        dist.broadcast(message, group=self._group, group_src=root)
        return value if self.rank == root else self._seal.open(tensor_bytes(message), root)

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
        import torch.distributed as dist

        assert self.size == dist.get_world_size()
        colors = self.allgather(color)
        mine = None
        seal = self._seal.derive(str(color))
        for each in sorted(set(colors)):
            group = dist.new_group([rank for rank, c in enumerate(colors) if c == each], backend="gloo")
            if each == color:
                mine = group
        return TorchTransport(seal, mine)

    def abort(self, code: int) -> None:
        """End this rank at once; the launcher then ends the others."""
        os._exit(code)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of uint8."""
    return tensor.numpy().tobytes()


def _message_size(size: int) -> int:
    """The size of a message in bytes. ConnectionError for one that no rank sends."""
    if not 0 < size <= LARGEST_MESSAGE:
        raise ConnectionError(f"a message of {size} bytes was announced: refused unread")
    return size


@contextmanager
def long_values(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """While MPI starts, a relay carries its messages: on several nodes under srun's pmi2. Elsewhere nothing happens.

    Slurm's plug-in offers values of 1,024 bytes and reads a line of at most 1,024, command and key included. MPICH 5.0 with UCX
    publishes 4,096 bytes of its memory of which the address is the first part; what lies behind it decides whether a line is too
    long, and then the start fails or hangs (docs/upstream.md, "MPICH under srun's pmi2"). The relay puts a long value in two parts.
    """
    descriptor = environ.get("PMI_FD", "")
    if environ.get("SLURM_STEP_NUM_NODES", "1") == "1" or not descriptor.isdecimal():
        yield
        return
    server = os.dup(number := int(descriptor))
    client, relay_end = socket.socketpair()
    program = [sys.executable, "-I", "-S", "-c", RELAY]
    program += map(str, (Path(__file__).parents[1], relay_end.fileno(), server))
    with subprocess.Popen(program, pass_fds=(relay_end.fileno(), server)) as process:
        relay_end.close()
        os.dup2(client.fileno(), number)
        client.close()
        try:
            yield
        finally:
            os.dup2(server, number)
            os.close(server)
            process.terminate()


class Wire:
    """Lines from and to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = b""

    def read(self) -> bytes:
        """The next line with its end; empty when the other side is gone."""
        while b"\n" not in self._waiting:
            data = os.read(self._descriptor, 65536)
            if not data:
                return b""
            self._waiting += data
        line, end, self._waiting = self._waiting.partition(b"\n")
        return line + end

    def write(self, line: bytes) -> None:
        """Write all of a line."""
        while line:
            line = line[os.write(self._descriptor, line) :]

    def ask(self, line: bytes) -> bytes:
        """Write a line and read the answer."""
        self.write(line)
        return self.read()


def relay(rank: Wire, server: Wire) -> None:
    """Answer the rank's requests through the server until one of them is gone."""
    with suppress(OSError):
        _relay(rank, server)


def _relay(rank: Wire, server: Wire) -> None:
    while request := rank.read():
        if request.startswith(b"mcmd="):  # has several lines; none in a start
            server.write(request)
            continue
        answer = _put(server, request) if request.startswith(b"cmd=put ") else server.ask(request)
        if request.startswith(b"cmd=get ") and answer.endswith(MORE + b"\n"):
            rest = server.ask(request.rstrip() + MORE + b"\n")
            answer = answer[: -len(MORE) - 1] + rest.partition(b"value=")[2]
        if not answer:
            return
        rank.write(answer)


def _put(server: Wire, request: bytes) -> bytes:
    if len(request) <= PMI_LINE:
        return server.ask(request)
    head, _, value = request.partition(b" value=")
    half = len(value) // 2
    answer = server.ask(head + b" value=" + value[:half] + MORE + b"\n")
    if b" rc=0" not in answer:
        return answer
    return server.ask(head + MORE + b" value=" + value[half:])
