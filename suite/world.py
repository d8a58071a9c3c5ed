"""Connects the ranks of a run, for communication outside the gradient path, through MPI or torch's gloo.

`World.create` connects the ranks of a launch (mlhpc.suite.launcher). Control messages, sums of a few numbers and staged
bytes go through `World`. Gradients go through torch.distributed, which `World.init_torch` starts.

Nothing between ranks is signed. Anybody who can reach their ports can disturb a run, but cannot make it execute
anything (mlhpc.suite.transport).
"""

from __future__ import annotations

import atexit
import errno
import ipaddress
import os
import re
import socket
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlhpc.suite.errors import InputError, explain_missing
from mlhpc.suite.files import print_line, render_duration, render_error
from mlhpc.suite.launcher import (
    Launch,
    describe_launcher,
    explain_steering,
    explain_unconnected,
    find_launch,
    remove_stale_variables,
    render_unset_command,
)
from mlhpc.suite.node_list import parse_first_node
from mlhpc.suite.pmi_relay import start_pmi_relay
from mlhpc.suite.processes import is_running_here
from mlhpc.suite.stopping import use_default_handlers
from mlhpc.suite.transport import MpiTransport, SingleProcessTransport, TorchTransport, Transport, decode, encode

if TYPE_CHECKING:
    import torch

# Of a collective. Another rank may still be in a staging or an evaluation, which must be shorter.
TIMEOUT = timedelta(minutes=30)
# How long the first rank may take to listen: a cold file system, torch not imported yet. LISTEN sets another limit
LISTEN_S, LISTEN = 300.0, "MLHPC_LISTEN_S"
LIVENESS_INTERVAL_S, WARN_AFTER_S = (
    2.0,
    10.0,
)  # between two looks whether it lives; after which a line says what is waited for

MASTER = "MLHPC_MASTER_ADDR"  # set by a person where a name does not resolve
INTERFACE = "MLHPC_INTERFACE"  # the same, by the name of an interface
CONNECT_LIMIT_S = 15.0  # how long a connection may take that nobody refuses
OTHER_PORT = "give torchrun another --master-port, or start the step again, which then has another"
STORE_LIMIT_S = 20.0  # how long the store that listens may take to answer


# The launcher of ranks that no launcher's variables name, but whose process group is there
CALLER = "torch.distributed"


def find_node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of this node: Slurm's, else the host's. Several slurmd can share a host."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class World:
    """All ranks of a run, as one of them sees them.

    ``node`` is the 0-based number of this rank's node. ``local_rank`` is the rank's number on it, ``local_size`` the
    number of its ranks. ``peers`` connects the ranks with this local rank on every node, in node order.
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
        """Connect the ranks of a launch (default: that of `find_launch`). All ranks call it."""
        launch = launch or find_launch() or _find_started_group()
        # One rank needs neither MPI nor torch, whose imports take seconds.
        transport = SingleProcessTransport() if launch is None or launch.size == 1 else _connect(launch)
        # Ranks of a node are those with the same node name, whatever order the launcher gave them.
        names = [str(decode(each, str)) for each in transport.allgather(encode(find_node_name()))]
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

    def broadcast(self, value: Any, kind: Any = Any) -> Any:
        """Return rank 0's value on every rank, as a value of type ``kind`` (see `mlhpc.suite.transport.decode`)."""
        return decode(self.transport.broadcast(encode(value) if self.is_first else b"", 0), kind)

    def allgather(self, value: Any, kind: Any = Any) -> list[Any]:
        """Return every rank's value, in rank order, as values of type ``kind``."""
        return [decode(each, kind) for each in self.transport.allgather(encode(value))]

    def gather(self, value: Any, kind: Any = Any) -> list[Any] | None:
        """Return every rank's value, in rank order, on rank 0; None elsewhere. Cheaper than `allgather`."""
        gathered = self.transport.gather(encode(value))
        return None if gathered is None else [decode(each, kind) for each in gathered]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum named numbers over ranks, in float64. Every rank passes the same names in the same order."""
        import numpy as np

        totals = self.transport.sum(np.array(list(values.values()), dtype=np.float64))
        return dict(zip(values, totals.tolist(), strict=True))

    def summary(self, value: float) -> dict[str, float]:
        """Return minimum, median and maximum of one number over ranks."""
        values = self.gather(float(value))
        found = values and {"min": min(values), "median": statistics.median(values), "max": max(values)}
        return self.broadcast(found)  # type: ignore[no-any-return]

    def check_together(self, error: Exception | None) -> None:
        """Raise InputError on every rank if any rank passes an error: that of the lowest rank. All ranks call it.

        Without it the rank with the error would leave the others waiting in their next collective. The usual case,
        without an error, exchanges one number.
        """
        import numpy as np

        # The usual case costs the sum of one number.
        if not self.transport.sum(np.array([float(error is not None)]))[0]:
            return
        errors = self.allgather(None if error is None else render_error(error))
        first = next((text for text in errors if text is not None), None)
        if first is not None:
            raise InputError(first)

    def compute_on_first(self, compute: Callable[[], Any], kind: Any = Any) -> Any:
        """Return on every rank what rank 0 alone computes, such as what a file says, as a value of type ``kind``.

        An OSError or ValueError of rank 0 is an InputError on every rank.
        """
        value, error = None, None
        if self.is_first:
            try:
                value = compute()
            except (OSError, ValueError) as caught:
                error = caught
        # Without this the other ranks would wait in the broadcast for a rank that has failed.
        self.check_together(error)
        return self.broadcast(value, kind)

    def init_torch(self, device: torch.device) -> None:
        """Start torch.distributed with gloo, and NCCL on CUDA. Do nothing on one rank or if it is started."""
        import torch.distributed as dist

        if self.size == 1 or dist.is_initialized():
            return
        with _convert_connection_errors(Launch(self.launcher, self.rank, self.size)):
            place, listener = self._meeting_place()
            _start_distributed(device.type == "cuda", place, self.rank, self.size, listener)

    def split(self, color: int) -> World:
        """Return the world of the ranks that pass the same color, for collectives alone. All ranks call it."""
        transport = self.transport.split(color)
        return replace(self, transport=transport, rank=transport.rank, size=transport.size)

    def _meeting_place(self) -> tuple[tuple[str, int], socket.socket | None]:
        """Return the address and port of rank 0 for torch.distributed, tried from every node; rank 0 listens there.

        InputError on every rank, with both ends, if a node cannot reach it.
        """
        hosts = self.allgather(_read_network_id())
        problem: Exception | None = None
        place = ("127.0.0.1", 0)
        listener = None
        try:
            if self.is_first:
                if len(set(hosts)) > 1:
                    address = find_own_address((find_node_name(), socket.gethostname()))
                    refuse_loopback(address, find_node_name())
                    place = (address, 0)
                listener = listen(place, self.size)
                place = (place[0], int(listener.getsockname()[1]))
        except (InputError, OSError) as error:
            problem = error
        self.check_together(problem)
        address, port = self.broadcast(place, tuple[str, int])
        if len(set(hosts)) > 1:
            problem = None
            try:
                if self.local_rank == 0 and not self.is_first:
                    verify_connection(address, port, here=find_node_name(), there=self.node_names[0])
                use_interface_towards(address)
            except OSError as error:
                problem = error
            self.check_together(problem)
        else:
            use_interface_towards(address)
        return (address, port), listener


def _connect(launch: Launch) -> Transport:
    """Connect the ranks. InputError if the machine, the network or the installed packages refuse it."""
    if _find_started_group() is None:
        # C code waits here, MPI with Python's lock: a signal ends the rank by itself
        with use_default_handlers(), _convert_connection_errors(launch):
            if launch.launcher != "torchrun":
                remove_stale_variables(launch)
                with start_pmi_relay():
                    from mpi4py import MPI

                if MPI.COMM_WORLD.Get_size() == launch.size:
                    return MpiTransport(MPI.COMM_WORLD)
            _rendezvous(launch)
    import torch.distributed as dist

    atexit.register(_end_process_groups)
    return TorchTransport(dist.new_group(backend="gloo"))


@contextmanager
def _convert_connection_errors(launch: Launch) -> Iterator[None]:
    """Turn the reasons for which ranks cannot be connected into InputErrors: none is a defect of the suite."""
    try:
        yield
    except InputError:
        raise
    except (OSError, RuntimeError, ImportError) as error:  # torch has RuntimeError for addresses and ports
        if missing := explain_missing(error):
            raise InputError(missing) from error
        used = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
        way = f"another program uses the port: {OTHER_PORT}; " if used else ""
        raise InputError(
            f"the {launch.size} ranks cannot be connected: {render_error(error)[:300]}; "
            f"{way}{explain_unconnected(str(error))}"
        ) from error


def _find_started_group() -> Launch | None:
    """Return torch.distributed's process group that the caller has already started. None if there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return Launch(CALLER, dist.get_rank(), dist.get_world_size())


def _rendezvous(launch: Launch) -> None:
    """Start torch.distributed without MPI, from torchrun's variables or Slurm's node list."""
    import torch

    env = os.environ
    if launch.launcher == "torchrun":
        one_node = env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
        first, port = _read_torchrun_address(env)
        address = resolve_address(first)
    elif "SLURM_JOB_ID" in env:
        one_node = env.get("SLURM_STEP_NUM_NODES") == "1"
        # A step may have fewer nodes than its job.
        first = parse_first_node(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
        address, port = "127.0.0.1" if one_node else _resolve_first_node(first, launch.rank), compute_port_of_step(env)
    else:
        raise InputError(
            f"{describe_launcher()}, but mpi4py sees a world of one: mpi4py and the launcher belong to different MPIs "
            f"(`mlhpc doctor` shows both); {explain_steering() or render_unset_command()}"
        )
    if launch.rank:
        limit_s = read_listen_limit_s(env)
        wait = make_refusal_warning(launch, f"{first} at {address} port {port}", limit_s, env)
        verify_connection(address, port, here=find_node_name(), there=first, listen_s=limit_s, on_refusal=wait)
    use_interface_towards("127.0.0.1" if one_node else address)
    _start_distributed(torch.cuda.is_available(), (address, port), launch.rank, launch.size)


def _read_torchrun_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return name and port at which torchrun's ranks meet. InputError if they are missing or invalid."""
    name, port = environ.get("MASTER_ADDR", "").strip("[]"), environ.get("MASTER_PORT", "")
    if not name or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InputError(
            f"MASTER_ADDR={name!r} and MASTER_PORT={port!r}: expected a name or address, and a port from 1 to 65535, "
            f"as torchrun sets them for RANK and WORLD_SIZE; {render_unset_command(environ)}"
        )
    return name, int(port)


def compute_port_of_step(environ: Mapping[str, str] = os.environ) -> int:
    """Compute the port of a Slurm step, below the range for clients. Steps of a node should not share one."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    step = " ".join(environ.get(name, "") for name in names)
    return 20000 + zlib.crc32(step.encode()) % 12000


def _resolve_first_node(first: str, rank: int) -> str:
    """Return the first node's address, from the scheduler's name for it. InputError if other nodes cannot reach it."""
    if rank == 0:
        address = find_own_address((first,))
    else:
        try:
            address = resolve_address(os.environ.get(MASTER) or first)
        except InputError:
            raise InputError(
                f"{first}, the name of the first node, does not resolve on {find_node_name()}: "
                f"set {MASTER}=ADDRESS, the address of that node"
            ) from None
    refuse_loopback(address, first if rank == 0 else f"{first}, seen from {find_node_name()}")
    return address


def _read_network_id() -> str:
    """Return an identifier that is equal on ranks with one network stack. Loopback reaches all of them."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def _start_distributed(
    cuda: bool, place: tuple[str, int], rank: int, size: int, listener: socket.socket | None = None
) -> None:
    """Start torch.distributed at an address and port, where rank 0 listens, or torchrun's agent does."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    # torchrun's store has keys of its own.
    store = PrefixStore("mlhpc", _open_store(place, rank, size, listener))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    atexit.register(_end_process_groups)


def listen(place: tuple[str, int], size: int) -> socket.socket:
    """Listen for ``size`` ranks at one address: torch by itself would do so on all interfaces, for anybody.

    An address that no interface has, such as one that a router translates, is listened for on all.
    """
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    try:
        return socket.create_server(place, family=family, backlog=size + 16)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", place[1]), family=family, backlog=size + 16)


def _open_store(place: tuple[str, int], rank: int, size: int, listener: socket.socket | None) -> Any:
    """Open the store by which torch's ranks meet. ConnectionError if what listens there answers nothing."""
    from torch._C._distributed_c10d import TCPStore

    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    opening: Future[Any] = Future()

    def open_it() -> None:
        try:
            opened = (listener or listen(place, size)).detach() if listens else None
            opening.set_result(
                TCPStore(*place, size, listens, TIMEOUT, wait_for_workers=False, master_listen_fd=opened)
            )
        except Exception as error:
            opening.set_exception(error)

    # torch's own limit does not hold for the greeting of another program that took the port
    threading.Thread(target=open_it, daemon=True).start()
    try:
        return opening.result(STORE_LIMIT_S)
    except TimeoutError:
        raise ConnectionError(f"what listens at {place[0]} port {place[1]} is another program: {OTHER_PORT}") from None


def _end_process_groups() -> None:
    """End the process groups, and with them the threads of unreferenced ones (mlhpc.suite.transport)."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def find_own_address(names: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> str:
    """Return the address by which other nodes reach this one.

    It is the user's choice, else that of the first name that resolves to another address than loopback.

    InputError if the user's own choice cannot be used. "127.0.0.1" if nothing resolves.
    """
    if environ.get(MASTER):
        try:
            return resolve_address(environ[MASTER])
        except InputError:
            raise InputError(
                f"{MASTER}={environ[MASTER]}: expected an address, or a name that resolves on every node"
            ) from None
    if environ.get(INTERFACE):
        return find_interface_address(environ[INTERFACE])
    found = []
    for name in names:
        try:
            found.append(resolve_address(name))
        except InputError:
            continue
    return ([address for address in found if not is_loopback(address)] or found or ["127.0.0.1"])[0]


def resolve_address(name: str) -> str:
    """Return the address of a name: IPv4 if it has one, else IPv6. InputError if it does not resolve."""
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError):
        pass
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET6)[0][4][0])
    except (OSError, UnicodeError, IndexError) as error:
        reason = getattr(error, "strerror", None) or "no name of a host"
        raise InputError(f"{name!r} does not resolve on {find_node_name()} ({reason}): set {MASTER}=ADDRESS") from None


def is_loopback(address: str) -> bool:
    """Return True for an address of the loopback interface."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def refuse_loopback(address: str, node: str) -> None:
    """Raise InputError if an address cannot be reached from other nodes."""
    if is_loopback(address):
        example = next((name for name, own in list_interfaces().items() if not is_loopback(own)), "eth0")
        raise InputError(
            f"{node}: its name is {address} there (/etc/hosts), where no other node can reach it: "
            f"set {MASTER}=ADDRESS or {INTERFACE}=NAME, for example {INTERFACE}={example}"
        )


def find_interface_address(name: str) -> str:
    """Return the address of a network interface. InputError lists the existing ones."""
    interfaces = list_interfaces()
    if name not in interfaces:
        known = ", ".join(f"{each} ({address})" for each, address in interfaces.items())
        raise InputError(f"{INTERFACE}={name}: no interface with an address; there are: {known}")
    return interfaces[name]


def list_interfaces() -> dict[str, str]:
    """List the interfaces of this node with an address: IPv4 if they have one, else IPv6."""
    import psutil

    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        # In a dict the last value stays: reversed, that is the first address of a family.
        by_family = {each.family: each.address for each in reversed(addresses)}
        address = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6)
        if address:
            found[name] = address
    return found


def use_interface_towards(address: str, environ: Mapping[str, str] = os.environ) -> None:
    """Make gloo use the interface by which this node reaches an address, unless the user chose one."""
    import psutil

    name = environ.get(INTERFACE)
    if name is None:
        family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            mine = probe.getsockname()[0]
        interfaces = psutil.net_if_addrs().items()
        name = next((each for each, known in interfaces if mine in {item.address for item in known}), None)
    if name is not None:
        # By itself gloo takes the interface of the host's name, which may be the loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def read_listen_limit_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return how long the first rank may take to listen, in seconds."""
    given = environ.get(LISTEN, "")
    if not given:
        return LISTEN_S
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", given):
        raise InputError(f"{LISTEN}={given[:60]}: expected seconds, such as {LISTEN_S:.0f}")
    return float(given)


def make_refusal_warning(
    launch: Launch, place: str, limit_s: float, environ: Mapping[str, str] = os.environ
) -> Callable[[float], None]:
    """Return what to call while the first rank refuses connections. It prints once what is waited for.

    It is called with the seconds so far. ConnectionError if the first rank ran on this machine and has ended: nobody
    else will listen. On another machine it may be slow or gone; only its launcher knows.
    """
    of_launch = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    rank_name = "RANK" if launch.launcher == "torchrun" else "SLURM_PROCID"
    first = {name: environ[name] for name in of_launch if name in environ} | {rank_name: "0"}
    seen, told, next_s = False, False, 0.0

    def wait(waited_s: float) -> None:
        nonlocal seen, told, next_s
        if waited_s >= next_s:
            # The search looks at every process of the node, so it is not made at every refusal.
            next_s = waited_s + LIVENESS_INTERVAL_S
            lives = is_running_here(first)
            # Before it was seen once, the first rank may not have started yet.
            if seen and not lives:
                raise ConnectionError(
                    f"the first rank has ended before it listened ({place}): look for its own error message in the"
                    " output"
                )
            seen = lives
        # One rank speaks for all.
        if launch.rank == 1 and waited_s >= WARN_AFTER_S and not told:
            told = True
            print_line(
                f"mlhpc: waiting for the first rank to listen: {place} refuses; at most {render_duration(limit_s)} "
                f"({LISTEN} sets another limit)",
                error=True,
            )

    return wait


def verify_connection(
    address: str,
    port: int,
    *,
    here: str,
    there: str,
    listen_s: float = 0.0,
    on_refusal: Callable[[float], None] = lambda waited_s: None,
) -> None:
    """Connect once and close. ConnectionError names both ends; a refused connection is tried for ``listen_s``."""
    begun = time.monotonic()
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_LIMIT_S)
        except OSError as error:
            waited = time.monotonic() - begun
            refused = isinstance(error, ConnectionRefusedError)
            if waited <= listen_s and refused:
                on_refusal(waited)
            elif waited > min(CONNECT_LIMIT_S, listen_s):
                place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
                longer = (
                    f"; {LISTEN} sets another limit than {render_duration(listen_s)}" if refused and listen_s else ""
                )
                raise ConnectionError(
                    f"{here} cannot reach {there} at {place} "
                    f"({error.strerror or error}, tried for {render_duration(round(waited))}): "
                    f"set {MASTER}=ADDRESS or {INTERFACE}=NAME, or ask for the firewall between them{longer}"
                ) from None
            time.sleep(0.2)
        else:
            connection.close()
            return
