"""Messages between ranks have a type, ranks wait asleep, and addresses that cannot work are one line."""

from __future__ import annotations

import math
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError
from mlhpc.suite.launch.local import run_local
from mlhpc.suite.launcher import Launch
from mlhpc.suite.transport import MpiTransport, decode, encode
from mlhpc.suite.world import (
    compute_port_of_step,
    find_own_address,
    listen,
    make_refusal_warning,
    read_listen_limit_s,
    refuse_loopback,
    verify_connection,
)
from tests.fixtures.hosts import host_environment, write_hosts
from tests.fixtures.warm import warm_python


@dataclass(frozen=True)
class Record:
    """What a rank may send."""

    number: int
    where: Path
    numbers: tuple[float, ...]
    names: frozenset[str]
    sums: NDArray[np.float64]


def test_a_message_arrives_as_the_type_that_is_expected() -> None:
    sent = Record(1, Path("a/b"), (1.5, math.inf), frozenset(("x",)), np.ones((2, 3)))
    found = decode(encode(sent), Record)
    assert (found.number, found.where, found.numbers, found.names) == (1, sent.where, sent.numbers, sent.names)
    assert found.sums.dtype == np.float64
    assert np.array_equal(found.sums, sent.sums)
    assert decode(encode({"a": (1, np.float64(2.5), None), "b": b"x"})) == {"a": [1, 2.5, None], "b": b"x"}


@pytest.mark.parametrize("data", [b"", b"junk", pickle.dumps({"number": 1}), encode({"number": "one"}), encode([1])])
def test_a_message_of_another_type_is_refused(data: bytes) -> None:
    with pytest.raises(ConnectionError, match="a message between ranks is not a Record"):
        decode(data, Record)


def test_what_has_no_form_as_a_message_is_not_sent() -> None:
    with pytest.raises(NotImplementedError, match="object cannot be sent to other ranks"):
        encode(object())


class Meeting:
    """A communicator whose other rank comes half a second after each call. ``calls`` are its collectives."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._due = 0.0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append(name)
            return 1 if name.startswith("Get_") else arguments and arguments[0]

        return call

    def Ibarrier(self) -> Meeting:
        self.calls.append("Ibarrier")
        self._due = time.monotonic() + 0.5
        return self

    def Test(self) -> bool:
        return time.monotonic() >= self._due


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("barrier", "Barrier"),
        ("allgather", "allgather"),
        ("gather", "gather"),
        ("broadcast", "bcast"),
        ("sum", "Allreduce"),
    ],
)
def test_ranks_under_mpi_wait_for_each_other_asleep(name: str, exchange: str) -> None:
    comm = Meeting()
    world = MpiTransport(comm)
    comm.calls.clear()
    arguments = {"barrier": (), "broadcast": (b"1", 0), "sum": (np.ones(1),)}.get(name, (b"1",))
    begin = time.thread_time()
    getattr(world, name)(*arguments)
    assert comm.calls == ["Ibarrier", exchange]
    assert time.thread_time() - begin < 0.25  # of the half second


def test_steps_of_a_job_meet_at_ports_of_their_own() -> None:
    steps = [{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(step)} for step in range(5)]
    assert len({compute_port_of_step(step) for step in steps}) == 5
    assert all(20000 <= compute_port_of_step({"SLURM_JOB_ID": str(job)}) < 32000 for job in range(100))


RANK = """
import sys, time
from pathlib import Path
from mlhpc.suite.world import World
world = World.create()
for number in range(int(sys.argv[1])):
    everyone = [[rank, number] for rank in range(world.size)]
    assert world.allgather((world.rank, number)) == everyone
    assert world.gather((world.rank, number)) == (everyone if world.is_first else None)
    assert world.broadcast({"number": number} if world.is_first else None) == {"number": number}
print("nodes", world.nodes, flush=True)
"""


def ranks(environments: list[Mapping[str, str]], *prefixes: list[str], rounds: int = 20) -> list[tuple[int, str]]:
    """Start a rank with each environment and return how each ended and what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MLHPC", "PMI"))}
    clean |= {"SLURM_STEP_NUM_TASKS": str(len(environments)), "SLURM_JOB_ID": "4711", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*(prefixes[rank] if prefixes else []), *warm_python(), "-c", textwrap.dedent(RANK), str(rounds)],
            env=clean | {"SLURM_PROCID": str(rank)} | dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, environment in enumerate(environments)
    ]
    outputs = [process.communicate(timeout=280)[0] for process in processes]  # one that waits waits for 300
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


PORTS = """
import sys, psutil, torch
from mlhpc.suite.world import World
world = World.create()
world.init_torch(torch.device("cpu"))
torch.distributed.all_reduce(torch.ones(2))
mine, others = psutil.Process(), set()
for each in mine.parents()[:2]:  # proxy and mpiexec
    others |= {found.laddr for found in each.net_connections() if found.status == "LISTEN"}
world.barrier()
found = {each.laddr for each in mine.net_connections() if each.status == "LISTEN"}
sys.stdout.write(f"listens {', '.join(sorted({place.ip for place in found - others}))}\\n")  # in one piece
world.barrier()
"""


def test_ranks_of_one_machine_listen_where_only_it_can_reach_them(tmp_path: Path) -> None:
    """MPICH's mpiexec listens on all interfaces, before it starts ranks; who connects there starts nothing."""
    (tmp_path / "ports.py").write_text(PORTS)
    log = tmp_path / "log"
    assert run_local([sys.executable, str(tmp_path / "ports.py")], ranks=2, log=log, say=lambda text: None) == 0
    lines = [line for line in log.read_text().splitlines() if line.startswith("listens")]
    assert lines == ["listens 127.0.0.1"] * 2


def test_an_address_that_no_interface_has_is_listened_for_on_all() -> None:
    with listen(("203.0.113.9", 0), 2) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    with listen(("127.0.0.1", 0), 2) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_stranger_who_comes_first_and_sends_junk_does_not_disturb_the_ranks() -> None:
    environment = {"SLURM_STEP_NODELIST": "here", "SLURM_STEP_NUM_NODES": "1"}
    port = compute_port_of_step({"SLURM_JOB_ID": "4711"})
    ended, connected = threading.Event(), []
    messages = [b"", b"junk", b"junk" * 50, pickle.dumps("junk")]

    def stranger() -> None:
        number = 0
        while not ended.wait(0.02):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(messages[number % len(messages)])
                    connected.append(number)
                    number += 1
            except OSError:
                continue

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        done = ranks([environment, environment], rounds=300)
    finally:
        ended.set()
        thread.join()
    assert [code for code, _ in done] == [0, 0], done
    assert len(connected) >= 10


def test_an_address_is_the_users_choice_or_the_first_name_that_other_nodes_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"node1": "127.0.1.1", "node1-ib": "10.1.0.1", "login": "10.9.0.1"}

    def resolve(name: str) -> str:
        if name not in known:
            raise OSError("unknown")
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert find_own_address(("node1", "node1-ib"), {}) == "10.1.0.1"
    assert find_own_address(("node1", "nowhere"), {}) == "127.0.1.1"
    assert find_own_address(("nowhere",), {}) == "127.0.0.1"
    assert find_own_address(("node1",), {"MLHPC_MASTER_ADDR": "login"}) == "10.9.0.1"
    assert find_own_address(("node1-ib",), {"MLHPC_INTERFACE": "lo"}) == "127.0.0.1"
    with pytest.raises(ValueError, match="MLHPC_MASTER_ADDR=nowhere: expected an address, or a name"):
        find_own_address(("node1",), {"MLHPC_MASTER_ADDR": "nowhere"})
    with pytest.raises(ValueError, match=r"MLHPC_INTERFACE=ib7: no interface with an address; there are: .*lo \(127"):
        find_own_address(("node1",), {"MLHPC_INTERFACE": "ib7"})


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "127.255.0.9"])
def test_loopback_is_refused_for_several_nodes(address: str) -> None:
    with pytest.raises(ValueError, match=f"node7: its name is {address} there .*set MLHPC_MASTER_ADDR=ADDRESS or"):
        refuse_loopback(address, "node7")
    refuse_loopback("10.0.0.1", "node7")


def test_a_connection_that_fails_names_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        verify_connection("127.0.0.1", port, here="b", there="a")
    with pytest.raises(
        ConnectionError, match=f"b cannot reach a at 127.0.0.1:{port} .Connection refused, tried for 0 s"
    ):
        verify_connection("127.0.0.1", port, here="b", there="a")


def test_a_first_rank_that_died_before_it_listened_ends_the_others_at_once(tmp_path: Path) -> None:
    """On this machine it is seen to live, and then not to. One that was never seen may be in another container."""
    step = {"SLURM_JOB_ID": f"test-{os.getpid()}", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    launch = Launch("slurm", 1, 2)
    never = make_refusal_warning(launch, "a at 127.0.0.1 port 1", 300.0, step)
    for waited_s in (0.0, 50.0, 200.0):
        never(waited_s)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first = subprocess.Popen(["sleep", "600"], env=os.environ | step | {"SLURM_PROCID": "0"})
    try:
        wait = make_refusal_warning(launch, f"a at 127.0.0.1 port {port}", 300.0, step)

        def killed_meanwhile(waited_s: float) -> None:
            wait(waited_s)
            first.kill()
            first.wait()

        with pytest.raises(
            ConnectionError, match=f"first rank has ended before it listened .a at 127.0.0.1 port {port}."
        ):
            verify_connection("127.0.0.1", port, here="b", there="a", listen_s=300.0, on_refusal=killed_meanwhile)
    finally:
        first.kill()
        first.wait()


def test_a_first_rank_that_is_slow_is_waited_for_and_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 2):
        wait = make_refusal_warning(
            Launch("slurm", rank, 4), "a at 10.0.0.1 port 7", 300.0, {"SLURM_JOB_ID": "none of these"}
        )
        for waited_s in (0.0, 9.0, 11.0, 100.0, 290.0):
            wait(waited_s)
    assert capsys.readouterr().err == (
        "mlhpc: waiting for the first rank to listen: a at 10.0.0.1 port 7 refuses; at most 5 min "
        "(MLHPC_LISTEN_S sets another limit)\n"
    )


def test_the_limit_for_the_first_rank_is_a_setting() -> None:
    assert (read_listen_limit_s({}), read_listen_limit_s({"MLHPC_LISTEN_S": "900"})) == (300.0, 900.0)
    for given in ("nan", "-1", "inf", "1e9", "five", " 3"):
        with pytest.raises(InputError, match="MLHPC_LISTEN_S=.*: expected seconds, such as 300"):
            read_listen_limit_s({"MLHPC_LISTEN_S": given})
    said = r"Connection refused.*MLHPC_LISTEN_S sets another limit than 0.5 s"
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # kept, so that no other test gets the port, but nobody listens
        port = bound.getsockname()[1]
        with pytest.raises(ConnectionError, match=said):
            verify_connection("127.0.0.1", port, here="b", there="a", listen_s=0.5)


def test_two_hosts_meet_by_the_schedulers_names(two_hosts: tuple[list[str], list[str]]) -> None:
    """The host's own name, by which gloo would choose its interface, is loopback on both."""
    for command in two_hosts:
        write_hosts(command, f"127.0.1.1 {socket.gethostname()}\n10.77.0.1 nodea\n10.77.0.2 nodeb\n")
    done = ranks([host_environment("nodea"), host_environment("nodeb")], *two_hosts)
    assert [(code, output.splitlines()[-1]) for code, output in done] == [(0, "nodes 2")] * 2, done


def test_two_hosts_whose_names_are_loopback_are_told_so_in_seconds(two_hosts: tuple[list[str], list[str]]) -> None:
    for command in two_hosts:
        write_hosts(command, "127.0.1.1 nodea nodeb\n")
    done = ranks([host_environment("nodea"), host_environment("nodeb")], *two_hosts)
    for code, output in done:
        assert code == 1
        assert "its name is 127.0.1.1 there (/etc/hosts)" in output
        assert "set MLHPC_MASTER_ADDR=ADDRESS or MLHPC_INTERFACE=NAME, for example MLHPC_INTERFACE=v" in output
    chosen = {"MLHPC_MASTER_ADDR": "10.77.0.1"}
    again = ranks([host_environment("nodea") | chosen, host_environment("nodeb") | chosen], *two_hosts)
    assert [code for code, _ in again] == [0, 0], again
