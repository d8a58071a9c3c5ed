"""Ends a trial that hangs, and names the ranks that the others wait for.

A thread of every rank looks at the rank's last mark (mlhpc.suite.training.step_timing). If that is old, it writes the rank's
Python stacks to a file. Then it asks the other ranks by UDP what they are doing. If any rank has made progress, this is
not a hang. Otherwise the run hangs. Ranks that do not answer are stopped or gone; ranks with fewer marks did not
arrive.

A process that has ended is found sooner. A rank that waits asks the next rank, and the kernel of that node answers that
the port is closed. This counts only if the next rank has answered before: a firewall may say the same.

Why datagrams: a socket costs a rank one descriptor, and almost nothing is sent while the run goes on. The store and the
communicators of torch.distributed and MPI may be what hangs. A datagram is one JSON record of numbers and short texts.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from mlhpc.suite.config import WatchdogSettings
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import make_folder, print_line, render_duration, render_reason
from mlhpc.suite.training.step_timing import ProgressMarks, make_marking_transport
from mlhpc.suite.world import World, find_node_name, find_own_address

ANSWER_TIMEOUT_S = 3.0  # for the other ranks to say what they do
ASK_INTERVAL_S = 0.5
ASK_BATCH = 256  # more answers at a time would overflow a socket's buffer
BACKUP_RANKS = 8  # ranks below this one of which one would do the asking if it lived
MAX_NAMED_RANKS = 8
LOOK_INTERVAL_S = 5.0
NEIGHBOUR_CHECK_S = 10.0  # without a mark, from which on a rank asks whether the next one is still there
ENDED_CONFIRM_S = 1.0  # without a mark after it is not: the last collective of a run may just have ended
FIRST_TRIES = 3  # to hear from the next rank at all
MAX_REPORTS = 6  # times that rank 0 is told, before the rank that tells it ends the run itself

Address = tuple[str, int]
Kind = Literal["ask", "state", "taken", "ended", "closed", "end"]


@dataclass(frozen=True)
class RankState:
    """The state that a rank reports. ``counts`` are those of `ProgressMarks`."""

    rank: int
    node: str
    counts: dict[str, int]
    label: str
    silent_s: float


class Datagram(msgspec.Struct, omit_defaults=True):
    """A message between ranks.

    ``run`` is a number that rank 0 draws. ``text`` says why the run ends. ``state`` answers "ask". There is no
    signature: the number keeps out other runs and port scanners, but nobody who can read it.
    """

    run: int
    kind: Kind
    text: str = ""
    state: RankState | None = None


def explain_hang(states: Sequence[RankState], missing: Iterable[int], silence_s: float) -> str | None:
    """Return one line that names the ranks the others wait for. None if a rank has made progress: then nothing hangs.

    ``states``: of the ranks that answered, this one included. ``missing``: ranks that did not answer.
    """
    if any(state.silent_s < silence_s for state in states):
        return None
    absent = sorted(missing)
    most = {channel: max(state.counts[channel] for state in states) for channel in states[0].counts}
    channel = next((name for name in most if any(state.counts[name] < most[name] for state in states)), None)
    behind = [state for state in states if channel is not None and state.counts[channel] < most[channel]]
    rest = [state for state in states if state not in behind]
    parts = []
    if absent:
        parts.append(f"{_render_ranks(map(str, absent))} did not answer: stopped, or the node is gone")
    if behind:
        names = _render_ranks(f"{state.rank} on {state.node}" for state in behind)
        parts.append(f"{names} did not arrive: {behind[0].label}")
    if absent or behind:
        parts.append(f"{len(rest)} of {len(states) + len(absent)} ranks wait in: {rest[0].label}")
    else:
        parts.append(f"all {len(states)} ranks are in: {rest[0].label}" if len(states) > 1 else rest[0].label)
    return f"no progress for {render_duration(min(state.silent_s for state in states))}: " + "; ".join(parts)


def _render_ranks(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(listed[:MAX_NAMED_RANKS])
    more = f" and {len(listed) - MAX_NAMED_RANKS} more" if len(listed) > MAX_NAMED_RANKS else ""
    return f"rank{'s' if len(listed) > 1 else ''} {text}{more}"


class Watchdog:
    """Watches one rank. All ranks construct it at the same time, to exchange addresses and the run's number.

    ``stacks``: the file for this rank's stacks. ``say`` prints the line. ``before_end`` is called with the line before
    the run ends, on the rank that found the hang.
    """

    def __init__(
        self,
        world: World,
        progress: ProgressMarks,
        settings: WatchdogSettings,
        stacks: Path,
        say: Callable[[str], None],
    ) -> None:
        assert settings.silence_s is not None
        self._world, self._progress, self._stacks, self._say = world, progress, stacks, say
        self._silence_s, self._ends = settings.silence_s, settings.action == "end"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        # On one node the loopback address works without a network and behind any firewall.
        here = "127.0.0.1" if world.nodes == 1 else find_own_address((find_node_name(), socket.gethostname()))
        self._socket.bind((here if world.nodes == 1 else "", 0))
        # A port may be reused by the next job: its datagrams have another number.
        self._run_number: int = world.broadcast(secrets.randbits(63) if world.is_first else None, int)
        self._addresses = _exchange_addresses(world, (here, self._socket.getsockname()[1]))
        self._reported = -1
        self._dumped = -1
        self._taken_until = 0.0  # another rank is ending the run: this one keeps silent for so long
        self._closed = self._ending = False
        self._next = (world.rank + 1) % world.size
        self._heard, self._told, self._ended = False, 0, ""
        self.before_end: Callable[[str], None] = lambda text: None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and let the previous rank know that this one ends properly."""
        self._closed = True
        if self._world.size > 1:
            self._send(self._addresses[(self._world.rank - 1) % self._world.size], "closed")

    @contextmanager
    def first(self) -> Iterator[None]:
        """Hold back an error of the body while this rank's watchdog ends the run. The other ranks' end has
        caused it.
        """
        try:
            yield
        except Exception:
            while self._ending and self._thread.is_alive():
                time.sleep(0.05)
            raise

    def _run(self) -> None:
        if self._world.size > 1:
            # Only a rank that has answered once can later be called ended: a firewall also refuses datagrams.
            self._heard = any(self._ask([self._next]) for _ in range(FIRST_TRIES))
        while not self._closed:
            # Short limits, as in tests, need shorter looks.
            self._receive(min(LOOK_INTERVAL_S, self._silence_s / 4))
            if self._progress.silent_s >= self._silence_s and not self._closed:
                self._write_stacks()
                self._investigate()
            elif self._ended and self._progress.silent_s >= ENDED_CONFIRM_S and not self._closed:
                self._write_stacks()
                self._finish(self._ended, range(self._world.size))
            elif self._next_has_ended() and not self._closed:
                self._write_stacks()
                self._tell_first()
        self._socket.close()

    def _next_has_ended(self) -> bool:
        """Return True if this rank waits and the next rank's process is gone."""
        progress, marks = self._progress, self._marks()
        if not self._heard or not progress.waits or self._reported == marks:
            return False
        if progress.silent_s < min(NEIGHBOUR_CHECK_S, self._silence_s / 2) or not self._is_refused(self._next):
            return False
        # The last collective of the run may just have ended: then this rank makes a mark within this time.
        time.sleep(ENDED_CONFIRM_S)
        return self._heard and marks == self._marks() and progress.waits

    def _is_refused(self, rank: int) -> bool:
        """Return True if the node of a rank answers that its port is closed. Others are answered meanwhile: all may ask
        at once.
        """
        until = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                asking.setblocking(False)
                asking.connect(self._addresses[rank])
                asking.send(msgspec.json.encode(Datagram(self._run_number, "ask")))
                while time.monotonic() < until:
                    self._receive(0.1)
                    with suppress(BlockingIOError):
                        asking.recv(4096)
                        return False
        except ConnectionRefusedError:
            return True
        except OSError:  # no way to that node, or no descriptor left
            return False
        return False

    def _tell_first(self) -> None:
        """Ask rank 0, which has the log, to end the run, or end it here."""
        state = self._state()
        waits = f"rank {state.rank} on {state.node} waits for it in: {state.label}"
        text = f"no progress for {render_duration(state.silent_s)}: rank {self._next} has ended; {waits}"
        # Rank 0 has the log. If it is the one that ended, or does not react, this rank ends the run without it.
        if 0 in (self._world.rank, self._next) or self._told == MAX_REPORTS:
            self._finish(text, range(self._world.size))
        else:
            self._told += 1
            self._send(self._addresses[0], "ended", text)
            if not self._ends:
                self._reported = self._marks()

    def _receive(self, wait_s: float) -> RankState | None:
        """Wait for one datagram: answer a question, obey an end, or return another rank's state."""
        self._socket.settimeout(wait_s)
        try:
            data, address = self._socket.recvfrom(4096)
        except OSError:  # nothing came, or the last answer reached nobody
            return None
        try:
            message = msgspec.json.decode(data, type=Datagram)
        except msgspec.DecodeError:
            return None
        if message.run != self._run_number:
            return None
        match message.kind:
            case "ask":
                self._send(address, "state", state=self._state())
            case "taken":
                self._taken_until = time.monotonic() + self._silence_s
            case "ended":  # this rank may still compute, and write to the log
                self._ended = message.text
            case "closed":
                self._heard = False
            case "end":
                self._write_stacks()
                os._exit(ExitCode.FAILED)
        return message.state

    def _investigate(self) -> None:
        below = self._ask(range(max(0, self._world.rank - BACKUP_RANKS), self._world.rank))
        if below:
            return  # a lower rank asks; it waits as long as this one
        answers = self._ask(rank for rank in range(self._world.size) if rank != self._world.rank)
        missing = set(range(self._world.size)) - answers.keys() - {self._world.rank}
        # Ranks that hang together fell silent at slightly different moments, so the others need not have reached the
        # limit.
        text = explain_hang([self._state(), *answers.values()], missing, 0.9 * self._silence_s)
        if text is None:
            return
        cut_off = (
            bool(missing) and self._world.nodes > 1 and {each.node for each in answers.values()} <= {find_node_name()}
        )
        if cut_off:
            text += "; no other node answered: datagrams may be blocked between nodes, so the run is not ended for it"
        self._finish(text, answers, ends=not cut_off)

    def _finish(self, text: str, ranks: Iterable[int], *, ends: bool = True) -> None:
        """Report a hang once for each silence. End the run with these ranks if the settings say so."""
        marks = self._marks()
        if self._reported == marks or time.monotonic() < self._taken_until:
            return
        self._reported = marks
        self._say(f"{text}; stacks: {self._stacks.parent}/{self._stacks.name.rpartition('_')[0]}_rank*.txt")
        if self._ends and ends:
            self._ending = True
            self._tell(ranks, "taken")  # what comes before the end may take longer than they wait for an answer
            self.before_end(text)
            # Datagrams may be lost: a rank that hears none of three has its own watchdog.
            for _ in range(3):
                self._tell(ranks, "end")
                time.sleep(0.2)  # the launcher may discard what ranks print once one of them has ended
            os._exit(ExitCode.FAILED)

    def _marks(self) -> int:
        return sum(self._progress.counts.values())

    def _tell(self, ranks: Iterable[int], kind: Literal["taken", "end"]) -> None:
        for rank in ranks:
            if rank != self._world.rank:
                self._send(self._addresses[rank], kind)

    def _ask(self, ranks: Iterable[int]) -> dict[int, RankState]:
        """Ask ranks for their states, at most 256 at a time. Returns those of the ranks that answer."""
        answers: dict[int, RankState] = {}
        wanted = list(ranks)
        for begin in range(0, len(wanted), ASK_BATCH):
            some = wanted[begin : begin + ASK_BATCH]
            until = time.monotonic() + ANSWER_TIMEOUT_S
            asked = 0.0
            while time.monotonic() < until and not answers.keys() >= set(some):
                if time.monotonic() - asked >= ASK_INTERVAL_S:
                    asked = time.monotonic()
                    for rank in some:
                        if rank not in answers:
                            self._send(self._addresses[rank], "ask")
                state = self._receive(ASK_INTERVAL_S)
                if state is not None:
                    answers[state.rank] = state
        return {rank: answers[rank] for rank in wanted if rank in answers}

    def _state(self) -> RankState:
        progress = self._progress
        return RankState(self._world.rank, find_node_name(), dict(progress.counts), progress.label, progress.silent_s)

    def _send(self, address: Address, kind: Kind, text: str = "", state: RankState | None = None) -> None:
        try:
            self._socket.sendto(msgspec.json.encode(Datagram(self._run_number, kind, text, state)), address)
        except OSError:  # nobody is there: it counts as no answer
            return

    def _write_stacks(self) -> None:
        """Write the Python stacks of all threads, once per silence."""
        if self._dumped == self._marks():
            return
        self._dumped = self._marks()
        try:
            make_folder(self._stacks.parent)
            with self._stacks.open("a", encoding="utf-8") as file:
                file.write(f"rank {self._world.rank} on {find_node_name()}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}: ")
                file.write(f"silent for {render_duration(self._progress.silent_s)} in: {self._progress.label}\n")
                file.flush()
                faulthandler.dump_traceback(file)
        except OSError as error:
            print_line(f"mlhpc: {self._stacks}: {render_reason(error)}", error=True)


def start_watchdog(
    world: World, settings: WatchdogSettings, stacks: Path, say: Callable[[str], None], progress: ProgressMarks
) -> tuple[World, Watchdog | None]:
    """Watch this rank until the process ends, if the settings ask for it. All ranks call it.

    Returns the world whose calls are marked.
    """
    if settings.silence_s is None:
        return world, None
    watchdog = Watchdog(world, progress, settings, stacks, say)
    marked = make_marking_transport(world.transport, progress)
    return replace(
        world, transport=marked, peers=make_marking_transport(world.peers, progress, counted=False)
    ), watchdog


def _exchange_addresses(world: World, own: Address) -> list[Address]:
    """Exchange the addresses of all ranks by one sum of numbers."""
    # Transports sum float64, which holds a 32-bit address and a port exactly.
    table = np.zeros((2, world.size))
    table[:, world.rank] = int.from_bytes(socket.inet_aton(own[0])), own[1]
    table = world.transport.sum(table)
    return [(socket.inet_ntoa(int(host).to_bytes(4)), int(port)) for host, port in table.T.tolist()]
