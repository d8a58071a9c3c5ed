"""Ranks that meet over TCP: what strangers send is never unpickled, and addresses that cannot work are one line."""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suite import transport
from suite.transport import MpiTransport, Seal, launch_key, port_of
from suite.world import own_address, refuse_loopback, try_connection
from tests.fixtures.hosts import KEY, host_environment, write_hosts


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_signed_message_is_opened_by_the_ranks_of_its_launch() -> None:
    one, other = Seal(b"k"), Seal(b"k")
    for value in (None, 1, "text", {"a": [1.5, (2,)]}, b"x" * 100_000):
        one.next()
        other.next()
        assert other.open(one.close(value, 3), 3) == value
    assert other.derive("1").open(one.derive("1").close("x", 0), 0) == "x"


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
    arguments = {"barrier": (), "broadcast": (1, 0), "sum": (np.ones(1),)}.get(name, (1,))
    begin = time.thread_time()
    getattr(world, name)(*arguments)
    assert comm.calls == ["Ibarrier", exchange]
    assert time.thread_time() - begin < 0.25  # of the half second


def forgeries(path: Path) -> Iterator[bytes]:
    """Messages in place of the third of rank 1."""
    data = pickle.dumps(Bomb(path))
    seal = Seal(b"k")
    for _ in range(2):
        seal.next()
    second = seal.close(Bomb(path), 1)
    seal.next()
    good = seal.close(Bomb(path), 1)
    yield b""
    yield b"junk"
    yield data
    yield bytes(32) + data
    yield hashlib.sha256(data).digest() + data
    yield hmac.digest(b"other", data, "sha256") + data
    yield hmac.digest(b"k", data, "sha256") + data  # the key, without number and sender
    yield second  # a replay
    yield seal.close(Bomb(path), 0)  # of another sender
    yield seal.derive("0").close(Bomb(path), 1)  # of another group
    yield good[:-1]
    yield good + b"."
    yield good[:32] + pickle.dumps(Bomb(path.with_name("other")))
    yield bytes([good[0] ^ 1]) + good[1:]


def test_a_forged_message_is_refused_and_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "unpickled"
    cases = list(forgeries(path))
    assert len(cases) >= 10
    for forged in cases:
        seal = Seal(b"k")
        for _ in range(3):
            seal.next()
        with pytest.raises(ConnectionError, match="message 3 of rank 1 was not signed by this launch"):
            seal.open(forged, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_key_comes_from_the_environment_and_differs_between_steps() -> None:
    one = {"MLHPC_WORLD_SEAL": KEY, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    keys = {launch_key(rank, False, one | {"SLURM_STEP_ID": step}) for rank in (0, 5) for step in ("0", "1")}
    assert len(keys) == 2
    assert len({port_of(key) for key in keys}) == 2
    assert all(20000 <= port_of(os.urandom(32)) < 32000 for _ in range(100))


@pytest.mark.parametrize("text", ["", "short", "zz" * 32, "ab" * 15, KEY + "\n"])
def test_a_poor_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="MLHPC_WORLD_SEAL: expected at least 32 hexadecimal digits"):
        launch_key(0, True, {"MLHPC_WORLD_SEAL": text})


def test_several_nodes_need_a_key_that_is_handed_over() -> None:
    with pytest.raises(ValueError, match=r"export MLHPC_WORLD_SEAL=\$\(openssl rand -hex 32\)"):
        launch_key(1, False, {})


def test_on_one_node_the_key_lies_in_a_file_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.tempfile, "gettempdir", lambda: str(tmp_path))
    key = launch_key(0, True, {})
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert launch_key(1, True, {}) == key
    path.chmod(0o644)
    with pytest.raises(OSError, match="not a file that only this user can read"):
        launch_key(1, True, {})
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        launch_key(1, True, {})


RANK = """
import sys, time
from pathlib import Path
from suite.world import World
world = World.create()
for number in range(int(sys.argv[1])):
    everyone = [(rank, number) for rank in range(world.size)]
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
            [*(prefixes[rank] if prefixes else []), sys.executable, "-c", textwrap.dedent(RANK), str(rounds)],
            env=clean | {"SLURM_PROCID": str(rank)} | dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, environment in enumerate(environments)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_no_key_is_left_behind_once_the_ranks_are_connected(tmp_path: Path) -> None:
    environment = {"SLURM_STEP_NODELIST": "here", "SLURM_STEP_NUM_NODES": "1", "TMPDIR": str(tmp_path)}
    assert [code for code, _ in ranks([environment] * 2, rounds=1)] == [0, 0]
    assert list(tmp_path.iterdir()) == []


def test_a_stranger_who_comes_first_and_sends_junk_and_pickles_does_not_disturb_the_ranks(tmp_path: Path) -> None:
    environment = {"MLHPC_WORLD_SEAL": KEY, "SLURM_STEP_NODELIST": "here", "SLURM_STEP_NUM_NODES": "1"}
    port = port_of(launch_key(0, True, environment | {"SLURM_JOB_ID": "4711"}))
    ended, connected = threading.Event(), []
    messages = [b"junk" * 50, *forgeries(tmp_path / "unpickled")]

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
    assert list(tmp_path.iterdir()) == []


def test_an_address_is_the_users_choice_or_the_first_name_that_other_nodes_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"node1": "127.0.1.1", "node1-ib": "10.1.0.1", "login": "10.9.0.1"}

    def resolve(name: str) -> str:
        if name not in known:
            raise OSError("unknown")
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert own_address(("node1", "node1-ib"), {}) == "10.1.0.1"
    assert own_address(("node1", "nowhere"), {}) == "127.0.1.1"
    assert own_address(("nowhere",), {}) == "127.0.0.1"
    assert own_address(("node1",), {"MLHPC_MASTER_ADDR": "login"}) == "10.9.0.1"
    assert own_address(("node1-ib",), {"MLHPC_INTERFACE": "lo"}) == "127.0.0.1"
    with pytest.raises(ValueError, match="MLHPC_MASTER_ADDR=nowhere: expected an address, or a name"):
        own_address(("node1",), {"MLHPC_MASTER_ADDR": "nowhere"})
    with pytest.raises(
        ValueError, match=r"MLHPC_INTERFACE=ib7: no interface with an IPv4 address; there are: .*lo \(127"
    ):
        own_address(("node1",), {"MLHPC_INTERFACE": "ib7"})


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "127.255.0.9"])
def test_loopback_is_refused_for_several_nodes(address: str) -> None:
    with pytest.raises(ValueError, match=f"node7: its name is {address} there .*set MLHPC_MASTER_ADDR=ADDRESS or"):
        refuse_loopback(address, "node7")
    refuse_loopback("10.0.0.1", "node7")


def test_a_connection_that_fails_names_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        try_connection("127.0.0.1", port, here="b", there="a")
    with pytest.raises(
        ConnectionError, match=f"b cannot reach a at 127.0.0.1:{port} .Connection refused, tried for 0 s"
    ):
        try_connection("127.0.0.1", port, here="b", there="a")


def test_two_hosts_meet_by_the_schedulers_names(two_hosts: tuple[list[str], list[str]]) -> None:
    """The host's own name, by which gloo would choose its interface, is loopback on both."""
    for command in two_hosts:
        write_hosts(command, f"127.0.1.1 {socket.gethostname()}\n10.77.0.1 nodea\n10.77.0.2 nodeb\n")
    done = ranks([host_environment("nodea"), host_environment("nodeb")], *two_hosts)
    assert [(code, output.splitlines()[-1]) for code, output in done] == [(0, "nodes 2")] * 2, done


def test_two_hosts_whose_names_are_loopback_are_told_so_in_seconds(two_hosts: tuple[list[str], list[str]]) -> None:
    for command in two_hosts:
        write_hosts(command, "127.0.1.1 nodea nodeb\n")
    started = time.monotonic()
    done = ranks([host_environment("nodea"), host_environment("nodeb")], *two_hosts)
    assert time.monotonic() - started < 30
    for code, output in done:
        assert code == 1
        assert "its name is 127.0.1.1 there (/etc/hosts)" in output
        assert "set MLHPC_MASTER_ADDR=ADDRESS or MLHPC_INTERFACE=NAME, for example MLHPC_INTERFACE=v" in output
    chosen = {"MLHPC_MASTER_ADDR": "10.77.0.1"}
    again = ranks([host_environment("nodea") | chosen, host_environment("nodeb") | chosen], *two_hosts)
    assert [code for code, _ in again] == [0, 0], again
