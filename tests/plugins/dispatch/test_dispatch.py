"""Modes of a controller: what runs in which order, what a cost shows as, and who ends when the controller dies.

No time of this machine is asserted: costs are injected, and the clock of most tests is made up.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from mlhpc.analysis.drawing.charts import build_specification
from mlhpc.plugins.dispatch import command, loops, measure
from mlhpc.plugins.dispatch.figures import dispatch_ceiling
from mlhpc.plugins.dispatch.loops import FirstRank, Mode, list_modes, serve, time_mode
from mlhpc.plugins.dispatch.measure import extrapolate, find_crossing, measure_rows
from mlhpc.plugins.dispatch.results import Dispatch, Interval
from mlhpc.suite.launch.local import make_mpiexec_command
from tests.fixtures.cli import mlhpc
from tests.fixtures.wings import needs_network
from tests.plugins.dispatch.examples import make_result


class ThreadLink:
    """Ranks that are threads. ``ran`` has the programs of each rank's all-reduces, in order."""

    def __init__(self, rank: int, shared: dict[Any, Any], size: int, clients: int, patience_s: float) -> None:
        self.rank, self.size, self._shared, self.ran = rank, size, shared, []
        if not shared:
            shared.update(
                {(to, of, tag): queue.SimpleQueue() for to in range(size) for of in range(size) for tag in (0, 1)}
            )
            shared.update({program: threading.Barrier(size, timeout=patience_s) for program in range(clients)})

    def send(self, rank: int, message: array[float], tag: int) -> None:
        self._shared[rank, self.rank, tag].put(array("d", message))

    def receive(self, rank: int, message: array[float], tag: int) -> None:
        message[:] = self._shared[self.rank, rank, tag].get(timeout=60)

    def reduce(self, program: int) -> None:
        self.ran.append(program)
        self._shared[program].wait()


def run_threads(
    size: int, clients: int, patience_s: float, body: Callable[[FirstRank], object]
) -> tuple[list[list[int]], bool]:
    """Run ranks as threads, rank 0 here. Returns the programs that each ran, and if one was waited for in vain."""
    shared: dict[Any, Any] = {}
    links = [ThreadLink(rank, shared, size, clients, patience_s) for rank in range(size)]
    stuck: list[threading.BrokenBarrierError] = []

    def serve_until_stuck(link: ThreadLink) -> None:
        try:
            serve(link)
        except threading.BrokenBarrierError as error:
            stuck.append(error)

    others = [threading.Thread(target=serve_until_stuck, args=(link,)) for link in links[1:]]
    for thread in others:
        thread.start()
    controller = FirstRank(links[0], "threads")
    try:
        body(controller)
    except threading.BrokenBarrierError as error:
        stuck.append(error)
    finally:
        controller.stop()
        for thread in others:
            thread.join()
    return [link.ran for link in links], bool(stuck)


def test_with_gang_order_clients_never_deadlock_in_1000_runs() -> None:
    chance = random.Random(70)
    for _ in range(1000):
        clients, depth = chance.randint(2, 4), chance.randint(1, 9)
        mode, count = Mode("gang", depth, chance.choice((1, 1, 3)), clients), chance.randint(4, 12)
        ran, stuck = run_threads(2, clients, 60, partial(time_mode, mode=mode, count=count, length_s=0.0))
        assert not stuck
        assert ran[0] == ran[1]
        assert len(ran[0]) == count


def test_without_gang_order_clients_deadlock() -> None:
    for clients in (2, 3, 4):
        mode = Mode("free", 8, 1, clients, gang=False)
        ran, stuck = run_threads(2, clients, 0.5, partial(time_mode, mode=mode, count=64, length_s=0.0))
        assert stuck
        last = min(map(len, ran)) - 1  # a deadlock and no slow machine: each waits in another program's all-reduce
        assert ran[0][last] != ran[1][last]


# Each rank notes the client in whose all-reduce it is, before it begins
BEGIN_PROGRAM = """
import random, sys, time
from array import array
from mpi4py import MPI
from mlhpc.plugins.dispatch.loops import FirstRank, Mode, compute, make_link, serve, time_mode
from mlhpc.suite.world import World
world, gang = World.create(), sys.argv[1] == "gang"
link, version = make_link("mpi", world, 2, 2)
reduce, notes = link.reduce, open(f"{sys.argv[2]}/{world.rank}", "w", buffering=1)
link.reduce = lambda client: (print(client, file=notes), reduce(client))
world.barrier()
"""
TURNS_PROGRAM = """
if world.is_first:
    controller = FirstRank(link, version)
    time_mode(controller, Mode("two", 8, 1, 2, gang), 1000, 0.0)
    controller.stop()
else:
    serve(link)
"""
# Ranks 2 and 3 are clients. In gang order they ask rank 0; otherwise each commands the ranks itself, as they come
CLIENTS_PROGRAM = """
every, each = MPI.COMM_WORLD, 500
if world.rank >= 2:
    for _ in range(each):
        for rank in (0,) if gang else random.sample((0, 1), 2):
            every.Send(array("d", [world.rank - 2]), rank)
            time.sleep(random.random() / 1e4)
elif not gang or world.is_first:
    controller, taken, asked = FirstRank(link, version), [0, 0], array("d", [0])
    for _ in range(2 * each):
        every.Recv(asked, MPI.ANY_SOURCE)
        client = int(asked[0])
        if gang:
            controller.submit(Mode("gang", 1, 1, 2), 2 * taken[client] + client, 1, 0.0)
            controller.wait(None)
            taken[client] += 1
        else:
            compute(link, client, 1, 0.0)
    if gang:
        controller.stop()
else:
    serve(link)
"""


@pytest.mark.parametrize(
    ("ranks", "program"), [(2, TURNS_PROGRAM), pytest.param(4, CLIENTS_PROGRAM, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("order", ["gang", "free"])
def test_two_clients_of_mpi_deadlock_without_gang_order_only(
    ranks: int, program: str, order: str, tmp_path: Path
) -> None:
    """The ranks never end once each is in the all-reduce of another client: no time limit could show it as well."""
    whole = f"{BEGIN_PROGRAM}{program}world.barrier()"
    words = [*make_mpiexec_command(ranks=ranks), sys.executable, "-c", whole, order, tmp_path]
    process = subprocess.Popen(words, start_new_session=True)
    apart = False
    while process.poll() is None and not apart:
        ran = [path.read_text().split() if (path := tmp_path / str(rank)).exists() else [] for rank in (0, 1)]
        apart = len(ran[0]) == len(ran[1]) > 0 and ran[0][-1] != ran[1][-1]
        time.sleep(0.05)
    if apart:
        os.killpg(process.pid, signal.SIGKILL)
    assert (process.wait(), apart) == ((0, False) if order == "gang" else (-signal.SIGKILL, True))
    if order == "gang":
        assert len((tmp_path / "0").read_text().split()) == 1000


def test_the_order_of_commands_and_acknowledgements_is_that_of_the_mode() -> None:
    """A controller that acknowledges waits for each; one that runs ahead has at most ``depth`` on their way."""

    class Recorder:
        version = "recorder"

        def __init__(self) -> None:
            self.events: list[str] = []

        def submit(self, mode: Mode, number: int, count: int, length_s: float) -> str:
            self.events.append(f"{number}x{count}")
            return f"{number}"

        def wait(self, command: str) -> float:
            self.events.append(command)
            return 1.0

    def events(mode: Mode, count: int) -> list[str]:
        recorder = Recorder()
        time_mode(recorder, mode, count, 0.0)  # type: ignore[arg-type]  # it never stops
        return recorder.events

    assert events(Mode("sync"), 2) == ["0x1", "0", "1x1", "1"]
    assert events(Mode("ahead", 2), 3) == ["0x1", "1x1", "0", "2x1", "1", "2"]
    assert events(Mode("chained", 1, 4), 6) == ["0x4", "0", "1x2", "1"]
    assert events(Mode("spmd", chain=0), 5) == ["0x1", "0x5", "0", "0"]


class Simulated:
    """A controller beside the ranks, on a made-up clock: ``message_s`` to and from the ranks, ``send_s`` per command."""

    version = "simulated"

    def __init__(self, reduce_s: float, message_s: float, send_s: float, noise: float = 0.0, seed: int = 0) -> None:
        self.now, self._free = 0.0, 0.0
        self._costs, self._noise, self._chance = (reduce_s, message_s, send_s), noise, random.Random(seed)

    def spin(self, seconds: float) -> None:
        self.now += seconds

    def submit(self, mode: Mode, number: int, count: int, length_s: float) -> tuple[float, float]:
        reduce_s, message_s, send_s = (each * self._chance.gauss(1, self._noise) for each in self._costs)
        self.now += send_s
        begin = max(self._free, self.now + message_s)
        self._free = begin + count * (length_s + reduce_s)
        return self._free - begin, self._free + message_s

    def wait(self, command: tuple[float, float]) -> float:
        self.now = max(self.now, command[1])
        return command[0]

    def stop(self) -> None: ...


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Simulated]:
    def make(*arguments: float, **more: Any) -> Simulated:
        controller = Simulated(*arguments, **more)
        monkeypatch.setattr(loops.time, "perf_counter", lambda: controller.now)
        monkeypatch.setattr(loops, "spin", controller.spin)
        return controller

    return make


@pytest.mark.parametrize("seed", range(20))
def test_break_even_is_foreseen_and_modes_are_in_order(seed: int, simulated: Callable[..., Simulated]) -> None:
    chance = random.Random(seed)
    costs = 10 ** chance.uniform(-5, -4), 10 ** chance.uniform(-5, -3), 10 ** chance.uniform(-5.3, -4.7)
    controller = simulated(*costs, noise=0.005, seed=seed)
    rows = {row.mode: row for row in measure_rows("simulated", controller, list_modes(16, 128, 2), 4)}
    ratios = {name: row.ratio.value for name, row in rows.items()}
    assert ratios["sync"] > ratios["ahead"] > 0.99
    assert ratios["sync"] > ratios["chained"]
    _, message_s, send_s = costs
    sync = rows["sync"]
    assert sync.break_even_s is not None
    assert sync.predicted_s == pytest.approx(sync.break_even_s.value, rel=0.2)
    assert sync.predicted_s == pytest.approx(19 * (2 * message_s + send_s), rel=0.2)
    # What runs ahead is slowed only while sending takes longer than computing
    for row in (rows["ahead"], rows["gang"]):
        if row.break_even_s is not None:
            assert row.predicted_s == pytest.approx(row.break_even_s.value, rel=0.2)


def test_an_injected_millisecond_shows(simulated: Callable[..., Simulated]) -> None:
    """On each acknowledged command, and running ahead as far as the computation does not hide it."""

    def overhead(mode: Mode, length_s: float, delay_s: float) -> float:
        controller = simulated(20e-6, 10e-6, 2e-6)
        return time_mode(controller, mode, 4096, length_s, delay_s)

    for length in (0.0, 0.3e-3, 2e-3):
        sync, ahead = (
            overhead(mode, length, 1e-3) - overhead(mode, length, 0.0) for mode in (Mode("sync"), Mode("ahead", 16))
        )
        assert sync == pytest.approx(1e-3, abs=0.05e-3)
        assert ahead == pytest.approx(max(0.0, 1e-3 - length - 20e-6), abs=0.05e-3)


def test_a_crossing_is_interpolated_and_stays_within_the_lengths() -> None:
    def pairs(cost: float) -> list[tuple[float, float]]:
        return [(length, length + cost) for length in (0.5, 0.75, 1.5)]

    assert find_crossing(pairs(1 / 19)) == pytest.approx(1.0, rel=0.01)
    assert find_crossing(pairs(0.001)) == 0.5
    assert find_crossing(pairs(1.0)) == 1.5


def test_without_the_wing_network_nothing_is_extrapolated_and_what_was_measured_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "list_missing_wings", lambda: ["network"])
    assert extrapolate("mpi", "sync", {2: [1e-6] * 8, 4: [2e-6] * 8, 8: [4e-6] * 8}) == []


@needs_network
def test_extrapolation_is_as_sure_as_it_says() -> None:
    chance, inside, above = random.Random(3), 0, 0
    for _ in range(200):
        constant, each = chance.uniform(10e-6, 50e-6), 10 ** chance.uniform(-6, -5)

        def draw(ranks: int, constant: float = constant, each: float = each) -> list[float]:
            return [(constant + each * ranks) * chance.gauss(1, 0.03) for _ in range(8)]

        found = extrapolate("mpi", "sync", {ranks: draw(ranks) for ranks in (2, 4, 8)})
        assert [row.ranks for row in found] == [16, 32]
        near, far = (row.overhead_s for row in found)
        assert near.high is not None
        inside += near.low <= constant + 16 * each <= near.high
        above += far.low <= constant + 32 * each
        assert far.high is None
    assert inside >= 170  # 90 %
    assert above >= 180  # 95 %
    assert extrapolate("mpi", "sync", {2: [1e-6] * 8, 4: [2e-6] * 8}) == []


def test_what_is_not_installed_is_a_row_and_an_error_only_if_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name in ("ray", "monarch"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    monkeypatch.setattr(command, "_start_own", lambda ranks, words: command.Part(rows=list(make_result().rows[:4])))
    done = mlhpc("dispatch")
    assert done.returncode == 0, done.stderr
    for extra in ("ray", "monarch"):
        assert f"is not installed (pip install 'mlhpc[{extra}]')" in done.stdout
        assert mlhpc("dispatch", "--over", extra).returncode == 1
    assert "more than 2 ranks: inconclusive" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"), [(["-n", "1"], "--ranks 1: expected 2 to"), (["--over", "mpl"], "expected one of mpi, torch")]
)
def test_a_mistake_is_one_line(words: list[str], said: str) -> None:
    done = mlhpc("dispatch", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_more_ranks_than_cores_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    done = mlhpc("dispatch", "--ranks", cores + 1)
    assert done.returncode == 2
    assert "one on each core" in done.stderr


@pytest.mark.long
def test_two_ranks_are_measured(tmp_path: Path) -> None:
    words = ["--over", "mpi", "--repeats", 2, "--depth", 4, "--chain", 8, "--format", "json", "-o", tmp_path / "a"]
    done = mlhpc("dispatch", *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a").read_text() == done.stdout
    found = msgspec.json.decode(done.stdout, type=Dispatch)
    assert [row.mode for row in found.rows] == ["sync", "ahead", "chained", "gang"]
    assert {row.version.split()[0] for row in found.rows} == {"mpi4py"}


def test_a_dead_controller_ends_all_ranks() -> None:
    words = [sys.executable, "-m", "mlhpc", "dispatch", "--over", "mpi", "--delay", "10000"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "empty computations" in process.stderr.readline()
    import psutil

    ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if "--part" in each.cmdline()]
    ranks = [each for each in ranks if "PMI_RANK" in each.environ()]
    assert len(ranks) == 2
    next(each for each in ranks if each.environ()["PMI_RANK"] == "0").kill()
    process.communicate(timeout=300)
    assert process.returncode not in (0, 2)
    psutil.wait_procs(ranks, timeout=300)
    assert not any(each.is_running() for each in ranks)


@pytest.mark.long
@pytest.mark.parametrize(("name", "rank"), [("ray", "ray::Rank"), ("monarch", "monarch._src.actor")])
def test_a_dead_controller_of_another_project_ends_its_ranks(name: str, rank: str) -> None:
    pytest.importorskip(name)
    import psutil

    words = [sys.executable, "-m", "mlhpc", "dispatch", "--over", name, "--delay", "10000"]
    process, ranks = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL), list[Any]()
    while len(ranks) < 2 and process.poll() is None:
        time.sleep(0.5)
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            ranks = [each for each in children if rank in " ".join(each.cmdline())]
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert psutil.wait_procs(ranks, timeout=300)[1] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["torch", "ray", "monarch"])
def test_a_controller_of_another_project_is_measured(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    words = [
        sys.executable,
        "-m",
        "mlhpc",
        "dispatch",
        "--over",
        name,
        "--repeats",
        "2",
        "--depth",
        "4",
        "--chain",
        "8",
    ]
    done = subprocess.run([*words, "-o", tmp_path / "a"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert len(msgspec.json.decode((tmp_path / "a").read_bytes(), type=Dispatch).rows) == 4


class Given:
    def __init__(self, *files: Dispatch) -> None:
        self._files = files

    def documents_of(self, kind: str, what: str) -> tuple[Dispatch, ...]:
        return self._files


def test_the_figure_names_the_longest_limit_the_steps_and_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(step_ms: float | None, *files: Dispatch) -> str:
        monkeypatch.setattr(dispatch_ceiling, "_find_shortest_step", lambda study: step_ms)
        return str(dispatch_ceiling.render_answer(Given(*files)))  # type: ignore[arg-type]

    said = answer(None, make_result(busy=1.5))
    assert "from 17.1 ms [16.2, 18] on (ray sync) no measured mode costs a computation 5 %; other processes" in said
    assert "step" not in said
    assert "a step of 17 ms may be too short for ray sync" in answer(17, make_result())
    assert "a step of 15 ms is too short for ray sync" in answer(15, make_result())
    assert "a step of 18.1 ms is long enough for all" in answer(18.1, make_result())
    wide = structs.replace(make_result().rows[2], ratio=Interval(1.0, 0.9, 1.2))
    assert "no controller is seen to cost a computation 5 %; inconclusive: mpi chained" in answer(
        3, structs.replace(make_result(), rows=(wide,))
    )
    table = dispatch_ceiling.build_table(Given(make_result()))  # type: ignore[arg-type]
    assert build_specification(dispatch_ceiling.draw_chart(table))["datasets"]
