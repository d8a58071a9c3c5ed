"""A node is measured within its time, whatever happens on it: a hang, a death, a benchmark that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mlhpc.plugins.fleet import benches
from mlhpc.plugins.fleet.benches import BENCHES, Bench, BenchContext, make_step_benches
from mlhpc.plugins.fleet.samples import read_samples
from mlhpc.suite.launch.local import make_suite_command
from mlhpc.suite.launcher import Launch
from mlhpc.suite.machine.facts import Sample
from mlhpc.suite.world import World
from tests.fixtures.cli import mlhpc

ALONE = Launch("none", 0, 1)


def measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: dict[str, Callable[[BenchContext], object]],
    seconds: float = 0.3,
) -> dict[str, Sample]:
    found = [Bench(name, "part", "s", "less", prepare) for name, prepare in chosen.items()]  # type: ignore[arg-type]
    monkeypatch.setattr(benches, "BENCHES", found)
    path = tmp_path / "n.jsonl"
    benches.measure_node(
        World.create(ALONE), device=torch.device("cpu"), directory=tmp_path, workloads={}, seconds=seconds, output=path,
        at=lambda text: None, say=print,
    )  # fmt: skip
    return {sample.metric: sample for sample in read_samples(path)}


def test_benchmarks_are_repeated_in_turn_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def bench(name: str) -> Callable[[BenchContext], object]:
        def repetition() -> float:
            order.append(name)
            time.sleep(0.01)
            return 2.0

        return lambda place: repetition

    found = measured(tmp_path, monkeypatch, {"a": bench("a"), "b": bench("b")})
    assert order[:4] == ["a", "b", "a", "b"]
    assert len(found["a"].values) == order.count("a") - 1  # the first round warms up
    assert len(found["a"].values) > 5
    assert set(found) == {"a", "b", "free_space", "descriptors", "free_memory"}


def test_a_benchmark_that_fails_is_said_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: BenchContext) -> object:
        raise OSError(28, "No space left on device")

    calls = iter(range(100))

    def later() -> float:
        if next(calls) > 0:  # in the second round, which is made however short the time
            raise RuntimeError("the accelerator\nfell off")
        return 1.0

    found = measured(
        tmp_path,
        monkeypatch,
        {"early": broken, "later": lambda p: later, "well": lambda p: lambda: 1.0, "not here": lambda p: None},
    )
    assert "disk full" in found["early"].failed
    assert found["later"].failed.startswith("RuntimeError: the accelerator")
    assert found["well"].values
    assert "not here" not in found


def test_one_repetition_is_made_however_short_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tmp_path, monkeypatch, {"a": lambda p: lambda: 1.0}, seconds=1e-9)
    assert found["a"].values == (1.0,)


def test_every_real_benchmark_gives_a_value_or_is_not_for_this_place(tmp_path: Path, smoke_data: Path) -> None:
    world = World.create(ALONE)
    place = BenchContext(world, torch.device("cpu"), tmp_path, (), 1 << 30)
    values = {}
    for bench in (*BENCHES, *make_step_benches({"cosmoflow": smoke_data / "cosmoflow-smoke"})):
        repeat = bench.prepare(place)
        if repeat is not None:
            values[bench.metric] = repeat()
    assert {"gemm/float32", "memory/main", "memory/cache", "storage/write", "storage/read", "step/cosmoflow"} <= set(
        values
    )
    assert not {"all_reduce/node", "all_to_all/node", "overlap", "host_link"} & set(values)  # one rank, no accelerator
    assert all(value > 0 or name.startswith("check/") for name, value in values.items())
    assert all(values[name] <= 1 for name in ("check/product", "check/convolution", "check/repeat", "check/storage"))
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_node_is_measured_on_its_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"SLURMD_NODENAME": "n7"}
    done = mlhpc(
        "preflight",
        "node",
        "--ranks",
        "2",
        "--budget",
        "150",
        "--rounds",
        "2",
        "-o",
        "out",
        cwd=tmp_path,
        environment=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training step of cosmoflow not measured" in done.stdout + done.stderr
    found = {sample.metric: sample for sample in read_samples(tmp_path / "out/n7.jsonl")}
    assert {"all_reduce/node", "all_to_all/node", "overlap", "measuring"} <= set(found)
    assert found["measuring"].values[0] <= 150.0 == found["measuring"].bound
    assert not [sample for sample in found.values() if sample.failed]
    again = mlhpc("preflight", "node", "-o", "out", cwd=tmp_path, environment=environment)
    assert again.returncode == 2
    assert "n7.jsonl: exists already" in again.stderr


@pytest.mark.parametrize(
    "kind", [pytest.param(signal.SIGSTOP, marks=pytest.mark.long), signal.SIGKILL], ids=["hangs", "dies"]
)
def test_a_node_that_hangs_or_dies_says_so_in_time(tmp_path: Path, kind: signal.Signals) -> None:
    command = make_suite_command("preflight", "node", "--budget", "6", "-o", "out")
    environment = os.environ | {"SLURMD_NODENAME": "n1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    rank = wait_for_rank(process.pid)
    os.kill(rank, kind)
    text = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 1
    assert ("the time limit of 6 s (--budget) ended it" if kind == signal.SIGSTOP else "ended after") in text
    end = json.loads((tmp_path / "out/n1.jsonl").read_text().splitlines()[-1])
    said = "time limit of 6 s" if kind == signal.SIGSTOP else "of 6 s, at "
    assert (end["metric"], said in end["failed"]) == ("measuring", True)
    assert not Path(f"/proc/{rank}").exists() or "Z" in Path(f"/proc/{rank}/stat").read_text()


def wait_for_rank(parent: int) -> int:
    """The process of the rank that a command has started."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if b"--started-at" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.02)
    raise AssertionError("no rank was started")


def test_wrong_words_are_one_line(tmp_path: Path) -> None:
    for words, text in {
        ("--budget", "2"): "2 is not in the range",
        ("--workload", "cosmo"): "unknown workload 'cosmo'",
    }.items():
        done = mlhpc("preflight", "node", *words, "-o", "out", cwd=tmp_path)
        assert done.returncode == 2
        assert text in done.stderr


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    done = mlhpc("preflight", "node", "-o", tmp_path / "file" / "below")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
