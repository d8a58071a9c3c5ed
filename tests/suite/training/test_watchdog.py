"""A run that hangs ends by itself, with one line that names who did not arrive; a run that is only slow goes on."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlhpc.suite.config import WatchdogSettings
from mlhpc.suite.launch.local import run_local
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.training import watchdog
from mlhpc.suite.training.step_timing import ProgressMarks, make_marking_transport
from mlhpc.suite.training.watchdog import RankState, Watchdog, explain_hang
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.world import World
from tests.fixtures.hosts import host_environment, write_hosts
from tests.fixtures.thread_ranks import Meeting
from tests.fixtures.warm import warm_python

HERE = Path(__file__).parent
MPIEXEC = Path(sys.executable).with_name("mpiexec")


def toy(data: Path, folder: Path, *options: str, python: Sequence[str] = ()) -> list[str]:
    return [
        *(python or warm_python()),
        str(HERE / "toy.py"),
        str(data),
        str(folder),
        "0",
        "11",
        "window_steps=4",
        *options,
    ]


def run(
    data: Path, folder: Path, ranks: int, *options: str, python: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    words = [str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []
    words += toy(data, folder, *options, python=python)
    return subprocess.run(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )


def launched(data: Path, folder: Path, ranks: int, *options: str) -> tuple[int, list[str]]:
    """The exit code and the output as `mlhpc run` starts ranks.

    mpiexec's own code is no promise: mostly 1, that of the rank that ended first, but it has been 9, the signal by which mpiexec
    kills ranks that are left.
    """
    log = folder.parent / "launched.log"
    code = run_local(toy(data, folder, *options), ranks=ranks, log=log, say=lambda text: None)
    return code, log.read_text().splitlines()


@pytest.mark.parametrize(
    ("ranks", "fault", "named", "where"),
    [
        (2, "sleep:loop:9", "did not arrive: forward pass of step 8", "backward pass of step 8"),
        pytest.param(2, "halt:evaluation:1", "did not answer", "in evaluation of epoch 1", marks=pytest.mark.long),
        pytest.param(
            *(
                4,
                "sleep:window:2",
                "did not arrive: after sum in backward pass of step 7",
                "sum in backward pass of step 7",
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(1, "sleep:loop:9", "", "forward pass of step 8", marks=pytest.mark.long),
        pytest.param(2, "halt:loop:9", "did not answer", "backward pass of step 8", marks=pytest.mark.long),
        pytest.param(4, "halt:loop:9", "did not answer", "backward pass of step 8", marks=pytest.mark.long),
        pytest.param(2, "sleep:evaluation:1", "did not arrive", "in evaluation of epoch 1", marks=pytest.mark.long),
        pytest.param(4, "halt:window:2", "did not answer", "sum in backward pass of step 7", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_hangs_is_named_and_the_run_ends_with_a_checkpoint_left(
    data: Path, tmp_path: Path, ranks: int, fault: str, named: str, where: str
) -> None:
    folder = tmp_path / "run"
    settings = [f"watchdog.silence_s={5 * (ranks + 1)}", "checkpoint.interval_s=0.002"]
    if "evaluation" in fault:
        settings.append(f"TOY_WAIT_FOR={folder / 'checkpoint' / 'trial_0.pt'}")
    code, output = launched(data, folder, ranks, *settings, f"TOY_FAULT={fault}")
    assert code == 1, output
    said = [text for text in output if text.startswith("mlhpc: ")]
    assert len(said) == 1, output
    line = said[0]
    assert re.search(r"trial 0: no progress for [\d.]+ (?:s|min): ", line)
    assert f"rank {ranks - 1}" in line if ranks > 1 else True, line
    assert named in line
    assert where in line
    assert f"{folder}/output/stack_0_rank*.txt" in line
    stacks = {path.name: path.read_text() for path in (folder / "output").glob("stack_0_rank*.txt")}
    live = ranks - fault.startswith("halt")
    assert set(stacks) == {f"stack_0_rank{rank}.txt" for rank in range(live)}
    assert all("toy.py" in text and "silent for" in text for text in stacks.values())
    if fault.startswith("sleep"):
        assert ", in fault" in stacks[f"stack_0_rank{ranks - 1}.txt"].replace(" in fault", ", in fault")
    log = read_events(folder / "result_0.txt")
    (stop,) = [event for event in log.events if event.key == "run_stop"]
    assert stop.metadata["status"] == "aborted"
    assert "no progress" in stop.metadata["reason"]
    if "evaluation" in fault:
        assert (folder / "checkpoint" / "trial_0.pt").exists()


@pytest.mark.parametrize(
    ("fault", "named", "where"),
    [
        (
            "sleep:verification:1",
            "rank 1 on .* did not arrive: comparing data with their",
            "in comparing data with their checksums",
        ),
        pytest.param("halt:staging:1", "rank 1 did not answer", "in staging and opening data", marks=pytest.mark.long),
        pytest.param(
            "sleep:barrier:1", "rank 1 on .* did not arrive", "barrier in beginning the run", marks=pytest.mark.long
        ),
        pytest.param("halt:barrier:3", "rank 1 did not answer", "barrier in ending the run", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_hangs_outside_the_training_is_named_too(
    data: Path, tmp_path: Path, fault: str, named: str, where: str
) -> None:
    folder, stage = tmp_path / "run", [f"staging.directory={tmp_path}/node"] if "staging" in fault else []
    code, output = launched(data, folder, 2, "watchdog.silence_s=9", "max_epochs=1", f"TOY_FAULT={fault}", *stage)
    assert code == 1, output
    (line,) = [text for text in output if text.startswith("mlhpc: ")]
    assert re.search(named, line)
    assert where in line
    (folder / "output" / "stack_0_rank0.txt").stat()


@pytest.mark.parametrize(("action", "code"), [("end", 1), pytest.param("report", 0, marks=pytest.mark.long)])
def test_ranks_that_are_not_connected_with_each_other_end_with_their_stacks(
    data: Path, tmp_path: Path, action: str, code: int
) -> None:
    settings = ("watchdog.silence_s=3", f"watchdog.action={action}", "TOY_SLEEP_S=9", "TOY_FAULT=sleep:connect:1")
    done = run(data, tmp_path / "run", 2, *settings, python=[sys.executable])
    assert done.returncode == code, done.stdout + done.stderr
    assert "Timeout (0:00:03)!" in done.stderr.splitlines()
    assert "in _connect" in done.stderr  # the rank that waits in MPI's start, which holds Python's lock


@pytest.mark.long
def test_a_report_only_watchdog_lets_the_run_go_on(data: Path, tmp_path: Path) -> None:
    done = run(
        *(data, tmp_path / "run", 1, "watchdog.silence_s=4", "watchdog.action=report", "max_epochs=1"),
        "TOY_SLEEP_S=8",
        "TOY_FAULT=sleep:loop:3",
    )
    assert done.returncode == 1
    assert "target not reached in 1 epochs" in done.stdout
    assert len(re.findall(r"no progress for [\d.]+ (?:s|min): forward pass of step 2\b", done.stderr)) == 1, done.stderr


def state(rank: int, count: int, silent_s: float = 700, staging: int = 0, label: str = "") -> RankState:
    return RankState(rank, f"n{rank // 2}", {"training": count, "staging": staging}, label or f"mark {count}", silent_s)


@pytest.mark.parametrize(
    ("states", "missing", "expected"),
    [
        ([state(0, 5), state(1, 4)], (), "rank 1 on n0 did not arrive: mark 4; 1 of 2 ranks wait in: mark 5"),
        ([state(0, 4), state(1, 5)], (), "rank 0 on n0 did not arrive: mark 4; 1 of 2 ranks wait in: mark 5"),
        ([state(0, 5)], (1,), "rank 1 did not answer: stopped, or the node is gone; 1 of 2 ranks wait in: mark 5"),
        ([state(0, 5), state(2, 5)], (3, 1), "ranks 1, 3 did not answer: stopped, or the node is gone; 2 of 4 ranks"),
        (
            [state(0, 5), state(1, 3), state(2, 5)],
            (3,),
            "rank 3 did not answer: stopped, or the node is gone; rank 1 on n0 did not arrive: mark 3; 2 of 4",
        ),
        ([state(0, 5), state(1, 5)], (), "all 2 ranks are in: mark 5"),
        ([state(0, 5)], (), "no progress for 11.7 min: mark 5"),
        ([state(0, 5, staging=2), state(1, 5, staging=1)], (), "rank 1 on n0 did not arrive: mark 5; 1 of 2 ranks"),
        (
            [state(n, 5 - (n > 0)) for n in range(12)],
            (),
            "rank 7 on n3, rank 8 on n4 and 3 more did not".replace("rank ", ""),
        ),
        ([state(0, 5, 700), state(1, 5, 650)], (), "no progress for 10.8 min"),
    ],
)
def test_who_did_not_arrive(states: Sequence[RankState], missing: Sequence[int], expected: str) -> None:
    text = explain_hang(states, missing, 600)
    assert text is not None
    assert expected in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("states", "missing"),
    [
        ([state(0, 5), state(1, 5, 0.1)], ()),
        ([state(0, 5), state(1, 4, 0.1)], ()),  # reads its share of the data while the other waits
        ([state(0, 5), state(1, 4, 599)], ()),
        ([state(0, 5, 10)], (1,)),
        ([state(0, 5), state(1, 5), state(2, 5, 3)], (3,)),
    ],
)
def test_ranks_that_wait_for_one_that_works_do_not_hang(states: Sequence[RankState], missing: Sequence[int]) -> None:
    assert explain_hang(states, missing, 600) is None


def question(dog: Watchdog, **changes: object) -> bytes:
    """A question that the watchdog answers, with some fields changed."""
    return json.dumps({"run": dog._run_number, "kind": "ask"} | changes).encode()


def test_a_datagram_of_another_run_or_another_form_is_neither_answered_nor_obeyed(tmp_path: Path) -> None:
    world = World("test", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
    dog = Watchdog(world, ProgressMarks(), WatchdogSettings(silence_s=60), tmp_path / "stack_0_rank0.txt", print)
    address = dog._addresses[0]
    strangers = [
        question(dog, run=dog._run_number ^ 1),
        question(dog, run=dog._run_number ^ 1, kind="end"),
        question(dog, run=str(dog._run_number), kind="end"),
        question(dog, kind="stop"),
        b'{"kind": "end"}',
        b"",
        b"x" * 16,
        b"\xff" * 4000,
    ]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.settimeout(0.3)
        for text in strangers:
            other.sendto(text, address)
        with pytest.raises(TimeoutError):
            other.recvfrom(100)
        other.sendto(question(dog), address)
        other.settimeout(300)
        assert b'"silent_s"' in other.recvfrom(4096)[0]
    dog.close()


class Threads(SingleProcessTransport):
    """Two ranks that are threads of one process."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, 2, meeting

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.sum(self._meeting.exchange(self.rank, values), axis=0)  # type: ignore[no-any-return]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self._meeting.exchange(self.rank, value)[root]


@dataclass
class Pair:
    """The watchdogs of two ranks, rank 1 of which is about to end, and the lines they say."""

    dogs: list[Watchdog]
    said: list[str]
    waiting: ProgressMarks  # of rank 0

    def end_rank_1(self) -> None:
        """As when its process is killed: without a word."""
        self.dogs[1]._closed = True
        self.dogs[1]._thread.join(300)

    def say_within(self, seconds: float) -> list[str]:
        until = time.monotonic() + seconds
        while not self.said and time.monotonic() < until:
            time.sleep(0.05)
        return self.said


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    for name, seconds in (("LOOK_INTERVAL_S", 0.3), ("NEIGHBOUR_CHECK_S", 1.0), ("ENDED_CONFIRM_S", 0.3)):
        monkeypatch.setattr(watchdog, name, seconds)
    meeting, said, waiting = Meeting(2), list[str](), ProgressMarks()
    settings = WatchdogSettings(silence_s=10_000, action="report")  # nobody is named for having been silent

    def begin(rank: int) -> Watchdog:
        threads = Threads(rank, meeting)
        world = World("test", rank, 2, rank, 2, 0, 1, ("here",), threads, threads)
        progress = ProgressMarks() if rank else waiting
        return Watchdog(world, progress, settings, tmp_path / f"stack_0_rank{rank}.txt", said.append)

    with ThreadPoolExecutor(2) as both:
        dogs = list(both.map(begin, range(2)))
    yield Pair(dogs, said, waiting)
    for dog in dogs:
        dog.close()


def test_a_rank_whose_process_has_ended_is_named_long_before_the_silence_is_over(pair: Pair) -> None:
    _wait_for(lambda: pair.dogs[0]._heard)
    pair.waiting.call("sum in backward pass of step 7")
    pair.end_rank_1()
    (line,) = pair.say_within(300)
    assert re.match(
        r"no progress for [\d.]+ (?:s|min): rank 1 has ended; rank 0 on .* waits for it in: sum in backward pass", line
    )
    time.sleep(2)
    assert len(pair.said) == 1


def test_a_rank_that_is_beyond_the_last_collective_misses_nobody(pair: Pair) -> None:
    _wait_for(lambda: pair.dogs[0]._heard)
    pair.waiting.call("barrier in ending the run")
    pair.waiting.returned()
    pair.end_rank_1()
    assert not pair.say_within(3)


def test_a_rank_that_has_closed_its_watchdog_is_not_missed(pair: Pair) -> None:
    """It has left the run; what the other does afterwards is its own affair, whatever it calls."""
    _wait_for(lambda: pair.dogs[0]._heard)
    pair.dogs[1].close()
    pair.waiting.call("all_reduce in work after the run")
    pair.dogs[1]._thread.join(300)
    assert not pair.say_within(3)


def test_a_rank_that_still_computes_is_told_and_ends_the_run_when_it_waits(pair: Pair) -> None:
    _wait_for(lambda: pair.dogs[0]._heard)
    pair.waiting.enter("evaluation of epoch 1")
    pair.dogs[1]._send(pair.dogs[0]._addresses[0], "ended", "rank 2 has ended")
    for _ in range(20):
        pair.waiting.tick()
        assert not pair.say_within(0.1)
    (line,) = pair.say_within(20)
    assert line.startswith("rank 2 has ended")


def test_a_rank_that_goes_on_misses_nobody(pair: Pair) -> None:
    _wait_for(lambda: pair.dogs[0]._heard)
    pair.end_rank_1()
    for step in range(30):
        pair.waiting.enter(f"step {step}")
        assert not pair.say_within(0.1)


def test_a_refusal_of_a_rank_that_never_answered_may_be_a_firewalls(pair: Pair) -> None:
    _wait_for(lambda: pair.dogs[0]._heard)
    pair.dogs[0]._heard = False
    pair.waiting.call("sum")
    pair.end_rank_1()
    assert not pair.say_within(3)


def test_a_rank_that_answers_is_waited_for(pair: Pair) -> None:
    _wait_for(lambda: pair.dogs[0]._heard)
    pair.dogs[1]._progress.enter("a long way to go")
    pair.waiting.call("sum")
    assert not pair.say_within(3)


def test_a_rank_keeps_silent_while_another_ends_the_run(tmp_path: Path) -> None:
    world = World("test", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
    said: list[str] = []
    stacks = tmp_path / "stack_0_rank0.txt"
    dog = Watchdog(world, ProgressMarks(), WatchdogSettings(silence_s=1, action="report"), stacks, said.append)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.sendto(question(dog, kind="taken"), dog._addresses[0])
    _wait_for(lambda: dog._taken_until > 0)
    dog._taken_until += 60
    _wait_for(stacks.exists)
    time.sleep(1)
    assert not said
    dog._taken_until = 0.0  # that rank did not end it
    _wait_for(lambda: bool(said))
    dog.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_follows_from_the_end_of_others_is_not_told(tmp_path: Path) -> None:
    world = World("test", 0, 1, 0, 1, 0, 1, ("here",), SingleProcessTransport(), SingleProcessTransport())
    ended = threading.Event()
    dog = Watchdog(
        world,
        ProgressMarks(),
        WatchdogSettings(silence_s=0.2, action="end"),
        tmp_path / "stack_0_rank0.txt",
        lambda _: None,
    )

    def end(_: str) -> None:
        ended.wait(300)
        sys.exit()  # in place of os._exit: the thread ends

    dog.before_end = end
    _wait_for(lambda: dog._ending)
    told = threading.Thread(target=_fail_under, args=(dog,))
    told.start()
    told.join(0.5)
    assert told.is_alive()
    ended.set()
    told.join(300)
    assert not told.is_alive()
    dog._socket.close()  # its thread has not come to that


def _fail_under(dog: Watchdog) -> None:
    with pytest.raises(RuntimeError), dog.first():
        raise RuntimeError("connection closed by peer")


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_call_on_another_thread_is_no_mark_of_the_training_and_a_split_world_counts_for_staging() -> None:
    progress = ProgressMarks()
    transport = make_marking_transport(SingleProcessTransport(), progress)
    transport.sum(np.zeros(1))
    assert progress.counts == {"training": 1, "staging": 0}
    thread = threading.Thread(target=progress.collective, args=("all_reduce",))
    thread.start()
    thread.join()
    assert progress.counts["training"] == 1
    transport.split(0).barrier()
    assert progress.counts == {"training": 2, "staging": 1}


@pytest.mark.long
def test_a_link_that_goes_down_in_the_middle_of_a_run_is_named_with_the_node_behind_it(
    data: Path, tmp_path: Path, two_hosts: tuple[list[str], list[str]]
) -> None:
    """Two hosts, a rank each, over TCP. Neither can know whether the other is dead: both say so and go on waiting."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MLHPC", "PMI"))}
    clean |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "4711", "OMP_NUM_THREADS": "1"}
    options = ("window_steps=4", "watchdog.silence_s=6", "max_epochs=100000", "hyperparameters.base_learning_rate=1e-9")
    words = [sys.executable, str(HERE / "toy.py"), str(data), str(tmp_path / "run"), "0", "11", *options]
    for command in two_hosts:
        write_hosts(command, "10.77.0.1 nodea\n10.77.0.2 nodeb\n")
    processes = []
    for rank, command in enumerate(two_hosts):
        with (tmp_path / f"rank{rank}.err").open("w") as errors:
            environment = clean | {"SLURM_PROCID": str(rank)} | host_environment(f"node{'ab'[rank]}")
            processes.append(
                subprocess.Popen([*command, *words], env=environment, stdout=subprocess.DEVNULL, stderr=errors)
            )
    try:
        log = tmp_path / "run" / "result_0.txt"
        _until(lambda: log.exists() and '"step_phases"' in log.read_text())
        (wire,) = re.findall(r"^\d+: (v\w+)@", _ip(two_hosts[0], "-o", "link"), re.MULTILINE)
        _ip(two_hosts[0], "link", "set", wire, "down")
        _until(lambda: "did not answer" in (tmp_path / "rank0.err").read_text())
        said = (tmp_path / "rank0.err").read_text()
        assert re.search(r"no progress for [\d.]+ (?:s|min): rank 1 did not answer: stopped, or the node is gone", said)
        assert (tmp_path / "run" / "output" / "stack_0_rank0.txt").exists()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _ip(host: list[str], *words: str) -> str:
    return subprocess.run([*host, "ip", *words], capture_output=True, text=True, check=True).stdout


def _until(holds: Callable[[], bool], limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
