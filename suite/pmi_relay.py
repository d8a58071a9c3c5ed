"""Relays the messages by which MPICH starts under Slurm's pmi2, in cases where Slurm's plug-in cannot.

Slurm's plug-in offers values of 1,024 bytes and reads lines of at most 1,024, command and key included. MPICH 5.0 with
UCX publishes 4,096 bytes of its memory, which begin with the address. The bytes behind it decide whether a line is too
long. Then the start fails or hangs (docs/upstream.md, "MPICH under srun's pmi2"). So the relay splits a long value into
two parts.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mlhpc.suite.processes import make_python_command

PMI_LINE = 1024  # bytes that Slurm's pmi2 reads at once
CONTINUATION = b"+"  # ends a value whose rest stands under the key with the same ending; no digit of MPICH's encoding
RELAY = """
import sys
sys.path.insert(0, sys.argv[1])
from mlhpc.suite.pmi_relay import LineStream, run_pmi_relay
run_pmi_relay(LineStream(int(sys.argv[2])), LineStream(int(sys.argv[3])))
"""


@contextmanager
def start_pmi_relay(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Relay MPI's messages while the body starts MPI on several nodes under srun's pmi2. Otherwise do nothing."""
    descriptor = environ.get("PMI_FD", "")
    if environ.get("SLURM_STEP_NUM_NODES", "1") == "1" or not descriptor.isdecimal():
        yield
        return
    server = os.dup(number := int(descriptor))
    client, relay_end = socket.socketpair()
    # The relay needs no installed package, and starts faster without looking for them.
    program = make_python_command("-I", "-S", "-c", RELAY)
    program += map(str, (Path(__file__).parents[2], relay_end.fileno(), server))
    with subprocess.Popen(program, stdin=subprocess.DEVNULL, pass_fds=(relay_end.fileno(), server)) as process:
        relay_end.close()
        # MPI knows its server by the number in PMI_FD, so the relay takes that number.
        os.dup2(client.fileno(), number)
        client.close()
        try:
            yield
        finally:
            os.dup2(server, number)
            os.close(server)
            process.terminate()


class LineStream:
    """Reads and writes lines on a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = b""

    def read(self) -> bytes:
        """Return the next line with its end; empty if the other side is gone."""
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


def run_pmi_relay(rank: LineStream, server: LineStream) -> None:
    """Answer the rank's requests through the server until one of them is gone."""
    with suppress(OSError):
        _relay(rank, server)


def _relay(rank: LineStream, server: LineStream) -> None:
    while request := rank.read():
        if request.startswith(b"mcmd="):  # has several lines; none in a start
            server.write(request)
            continue
        answer = _send_request(server, request) if request.startswith(b"cmd=put ") else server.ask(request)
        if request.startswith(b"cmd=get ") and answer.endswith(CONTINUATION + b"\n"):
            rest = server.ask(request.rstrip() + CONTINUATION + b"\n")
            answer = answer[: -len(CONTINUATION) - 1] + rest.partition(b"value=")[2]
        if not answer:
            return
        rank.write(answer)


def _send_request(server: LineStream, request: bytes) -> bytes:
    if len(request) <= PMI_LINE:
        return server.ask(request)
    head, _, value = request.partition(b" value=")
    half = len(value) // 2
    answer = server.ask(head + b" value=" + value[:half] + CONTINUATION + b"\n")
    if b" rc=0" not in answer:
        return answer
    return server.ask(head + CONTINUATION + b" value=" + value[half:])
