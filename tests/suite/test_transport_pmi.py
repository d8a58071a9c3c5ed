"""The relay between MPICH and Slurm's pmi2: no line that Slurm reads is longer than 1,024 bytes, and no value changes."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from mlhpc.suite.pmi_relay import PMI_LINE, LineStream, run_pmi_relay, start_pmi_relay


class Slurm:
    """The server's side as Slurm's plug-in has it: one read a line, values by key."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.longest = 0

    def serve(self, connection: socket.socket) -> None:
        """Answer until the relay is gone."""
        while request := connection.recv(PMI_LINE):
            assert request.endswith(b"\n"), "a line is longer than one read"
            self.longest = max(self.longest, len(request))
            fields = dict(part.split(b"=", 1) for part in request.split())
            if fields[b"cmd"] == b"put":
                self.values[fields[b"key"]] = fields[b"value"]
                connection.sendall(b"cmd=put_result rc=0\n")
            elif fields[b"cmd"] == b"get" and fields[b"key"] in self.values:
                connection.sendall(b"cmd=get_result rc=0 value=" + self.values[fields[b"key"]] + b"\n")
            elif fields[b"cmd"] == b"get":
                connection.sendall(b"cmd=get_result rc=1\n")
            else:
                connection.sendall(b"cmd=barrier_out rc=0\n")


@pytest.fixture
def connected() -> Iterator[tuple[LineStream, Slurm]]:
    """A rank's wire to a relay to a server."""
    rank, relay_rank = socket.socketpair()
    relay_server, server = socket.socketpair()
    slurm = Slurm()
    ends = [LineStream(relay_rank.fileno()), LineStream(relay_server.fileno())]
    threads = [threading.Thread(target=run_pmi_relay, args=ends), threading.Thread(target=slurm.serve, args=(server,))]
    for thread in threads:
        thread.start()
    yield LineStream(rank.fileno()), slurm
    rank.shutdown(socket.SHUT_RDWR)
    threads[0].join(300)
    relay_server.shutdown(socket.SHUT_RDWR)
    threads[1].join(300)
    for each in (rank, relay_rank, relay_server, server):
        each.close()


@pytest.mark.parametrize("digits", [1, 500, 963, 964, 1000, 1022])
def test_a_value_comes_back_as_it_was_put(connected: tuple[LineStream, Slurm], digits: int) -> None:
    wire, slurm = connected
    value, head = b"A7" * (digits // 2) + b"F" * (digits % 2), b"kvsname=18323.0 key=-allgather-1-1023-seg-9/9"
    assert wire.ask(b"cmd=put " + head + b" value=" + value + b"\n") == b"cmd=put_result rc=0\n"
    assert wire.ask(b"cmd=get " + head + b"\n") == b"cmd=get_result rc=0 value=" + value + b"\n"
    assert slurm.longest <= PMI_LINE
    assert len(slurm.values) == (1 if digits < 964 else 2)  # what is short goes as it is


def test_other_requests_go_through_as_they_are(connected: tuple[LineStream, Slurm]) -> None:
    wire, _ = connected
    assert wire.ask(b"cmd=get kvsname=1.0 key=none\n") == b"cmd=get_result rc=1\n"
    assert wire.ask(b"cmd=barrier_in\n") == b"cmd=barrier_out rc=0\n"


def test_the_rank_talks_to_the_server_directly_after_the_start() -> None:
    rank, server = socket.socketpair()
    slurm = Slurm()
    thread = threading.Thread(target=slurm.serve, args=(server,))
    thread.start()
    wire, value = LineStream(rank.fileno()), b"B" * 1022
    with start_pmi_relay({"PMI_FD": str(rank.fileno()), "SLURM_STEP_NUM_NODES": "2"}):
        assert wire.ask(b"cmd=put key=a value=" + value + b"\n") == b"cmd=put_result rc=0\n"
        assert wire.ask(b"cmd=get key=a\n").rstrip().endswith(b"=" + value)
    assert sorted(slurm.values) == [b"a", b"a+"]
    assert wire.ask(b"cmd=put key=b value=C\n") == b"cmd=put_result rc=0\n"
    rank.shutdown(socket.SHUT_RDWR)
    thread.join(300)
    rank.close()
    server.close()


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_FD": "{}"},  # mpiexec, or a job of one node
        {"PMI_FD": "{}", "SLURM_STEP_NUM_NODES": "1"},
        {"SLURM_STEP_NUM_NODES": "2"},  # srun --mpi=none
        {"SLURM_STEP_NUM_NODES": "2", "PMI_FD": "socket"},
    ],
)
def test_elsewhere_nothing_stands_between(environ: dict[str, str]) -> None:
    rank, server = socket.socketpair()
    before = os.fstat(rank.fileno())
    with start_pmi_relay({name: text.format(rank.fileno()) for name, text in environ.items()}):
        assert os.fstat(rank.fileno()) == before
    rank.close()
    server.close()
