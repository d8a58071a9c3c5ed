"""Runs computations on ranks that a controller commands: what a command is, how modes send them, what a rank does.

One computation is a busy loop of a set length, then an all-reduce of one number that depends on the one before.
Commands and acknowledgements are buffers of numbers, so that no pickle is timed.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mlhpc.suite.errors import InputError

if TYPE_CHECKING:
    from mlhpc.suite.world import World

STOP = -1  # in place of a number of computations: the rank ends
COMMAND, ACKNOWLEDGEMENT = 0, 1  # tags of messages


class Mode(NamedTuple):
    """How computations are commanded: at most ``depth`` commands are not waited for, each of ``chain`` computations.

    The commands of several ``clients`` take turns, each client's computations with all-reduces of their own. With
    ``gang`` all ranks get them in one order. Otherwise each rank gets a turn's commands in an order of its own, as from
    clients that send without a scheduler.
    """

    name: str
    depth: int = 1
    chain: int = 1
    clients: int = 1
    gang: bool = True

    def choose_program(self, number: int, rank: int) -> int:
        """Choose the client whose computation a rank runs as its command ``number``."""
        turn, place = divmod(number, self.clients)
        order = list(range(self.clients))
        if not self.gang:
            random.Random(f"{turn} {rank}").shuffle(order)  # noqa: S311 - every rank's own order, the same each time
        return order[place]


class Controller(Protocol):
    """Commands ranks: those of this suite, of Ray, of Monarch. The commands of a rank run in the order of `submit`."""

    version: str

    def submit(self, mode: Mode, number: int, count: int, length_s: float) -> Any:
        """Command ``count`` computations on all ranks, the command ``number`` of a mode. Returns what `wait` takes."""

    def wait(self, command: Any) -> float:
        """Wait for the oldest command. Returns the seconds that its computations took on the slowest rank known."""

    def stop(self) -> None:
        """End the ranks."""


def spin(seconds: float) -> None:
    """Keep this core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def time_mode(controller: Controller, mode: Mode, count: int, length_s: float, delay_s: float = 0.0) -> float:
    """Time computations: seconds of one. Each command waits ``delay_s`` first.

    From the end of the first command, so that the way of a command to the ranks counts only where it delays the next. A
    mode without chains is SPMD: the ranks themselves time computations that no controller interrupts.
    """
    sent: deque[Any] = deque()
    if not mode.chain:
        # The ranks begin the second command together, when the first one's all-reduce ends
        sent.extend(controller.submit(mode, 0, *each) for each in ((1, 0.0), (count, length_s)))
        controller.wait(sent[0])
        return controller.wait(sent[1]) / count
    begin = 0.0
    for number, done in enumerate(range(0, count, mode.chain)):
        spin(delay_s)
        sent.append(controller.submit(mode, number, min(mode.chain, count - done), length_s))
        if len(sent) >= mode.depth:
            controller.wait(sent.popleft())
            begin = begin or time.perf_counter()
    while sent:
        controller.wait(sent.popleft())
        begin = begin or time.perf_counter()
    return (time.perf_counter() - begin) / (count - mode.chain)


class Link(Protocol):
    """Connects the ranks by one library. Messages are `array` of doubles; a send never waits for the receiver."""

    rank: int
    size: int

    def send(self, rank: int, message: array[float], tag: int) -> None: ...  # noqa: D102
    def receive(self, rank: int, message: array[float], tag: int) -> None: ...  # noqa: D102
    def reduce(self, program: int) -> None: ...  # noqa: D102


def compute(link: Link, program: int, count: int, length_s: float) -> float:
    """Run computations; return their seconds."""
    begin = time.perf_counter()
    for _ in range(count):
        spin(length_s)
        link.reduce(program)
    return time.perf_counter() - begin


def serve(link: Link) -> None:
    """Run the commands of rank 0, and acknowledge those that ask for it, until it says stop."""
    command = array("d", [0.0] * 4)
    while True:
        link.receive(0, command, COMMAND)
        program, count, length_s, asks = command
        if count == STOP:
            return
        compute(link, int(program), int(count), length_s)
        if asks:
            link.send(0, array("d", [0.0]), ACKNOWLEDGEMENT)


class FirstRank:
    """The controller on rank 0, which computes too. It sends commands ahead of its own part of them."""

    def __init__(self, link: Link, version: str) -> None:
        self._link, self.version = link, version
        self._queued: deque[tuple[int, int, float, bool]] = deque()  # sent, and not yet run here
        self._others = range(1, link.size)

    def submit(self, mode: Mode, number: int, count: int, length_s: float) -> None:
        """Send a command to the other ranks. The last one of every ``depth`` asks for an acknowledgement."""
        asks = (number + 1) % mode.depth == 0
        for rank in self._others:
            self._link.send(rank, array("d", [mode.choose_program(number, rank), count, length_s, asks]), COMMAND)
        self._queued.append((mode.choose_program(number, 0), count, length_s, asks))

    def wait(self, command: Any) -> float:
        """Run this rank's part, then wait for the others if the command asks for it."""
        program, count, length_s, asks = self._queued.popleft()
        took_s = compute(self._link, program, count, length_s)
        for rank in self._others if asks else ():
            self._link.receive(rank, array("d", [0.0]), ACKNOWLEDGEMENT)
        return took_s

    def stop(self) -> None:
        """End the loops of the other ranks."""
        for rank in self._others:
            self._link.send(rank, array("d", [0.0, STOP, 0.0, 0.0]), COMMAND)


class MpiLink:
    """mpi4py: small messages are sent at once, and MPI waits with a whole core."""

    def __init__(self, rank: int, size: int, programs: int) -> None:
        from mpi4py import MPI

        self.rank, self.size, self._max = rank, size, MPI.MAX
        self._comm = MPI.COMM_WORLD.Split(int(rank < size), rank)
        self._programs = [self._comm.Dup() for _ in range(programs)]
        self._value = array("d", [1.0])
        self._in_place = MPI.IN_PLACE

    def send(self, rank: int, message: array[float], tag: int) -> None:
        """Send a small message, which the library copies."""
        self._comm.Send(message, rank, tag)

    def receive(self, rank: int, message: array[float], tag: int) -> None:
        """Receive the next message of a rank."""
        self._comm.Recv(message, rank, tag)

    def reduce(self, program: int) -> None:
        """Take the largest of the ranks' numbers: in place, so the next one needs it."""
        self._programs[program].Allreduce(self._in_place, self._value, self._max)


class TorchLink:
    """torch.distributed with gloo, which needs a receiver before it sends: messages on their way are kept."""

    def __init__(self, rank: int, size: int, programs: int) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.size, self._torch, self._dist = rank, size, torch, dist
        self._programs = [dist.new_group(list(range(size)), backend="gloo") for _ in range(programs)]
        self._value = torch.ones(1)
        self._sent: deque[tuple[Any, Any]] = deque()

    def send(self, rank: int, message: array[float], tag: int) -> None:
        """Begin to send a message."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        tensor = self._torch.frombuffer(message, dtype=self._torch.float64)
        self._sent.append((self._dist.isend(tensor, rank, tag=tag), tensor))

    def receive(self, rank: int, message: array[float], tag: int) -> None:
        """Receive the next message of a rank."""
        self._dist.recv(self._torch.frombuffer(message, dtype=self._torch.float64), rank, tag=tag)

    def reduce(self, program: int) -> None:
        """Take the largest of the ranks' numbers: in place, so the next one needs it."""
        self._dist.all_reduce(self._value, self._dist.ReduceOp.MAX, self._programs[program])


def make_link(library: str, world: World, size: int, programs: int) -> tuple[Link, str]:
    """Connect the first ``size`` ranks by ``mpi`` or ``torch``. Returns the link and the versions of what carries it.

    All ranks call it. InputError if MPI does not connect them.
    """
    if library == "mpi":
        import mpi4py
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() != world.size:
            raise InputError(f"mpi4py sees {MPI.COMM_WORLD.Get_size()} of {world.size} ranks")
        name = MPI.Get_library_version().partition("\n")[0].split()
        return MpiLink(world.rank, size, programs), f"mpi4py {mpi4py.__version__}, {' '.join(name)}"
    import torch

    torch.set_num_threads(1)
    world.init_torch(torch.device("cpu"))
    return TorchLink(world.rank, size, programs), f"torch {torch.__version__}, gloo"


def list_modes(depth: int, chain: int, clients: int) -> Sequence[Mode]:
    """List the modes, SPMD first, whose computations no controller commands."""
    return (
        Mode("spmd", chain=0),
        Mode("sync"),
        Mode("ahead", depth),
        Mode("chained", chain=chain),
        Mode("gang", depth, clients=clients),
    )
