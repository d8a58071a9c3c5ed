"""Workers that become slower while a job runs: the four jobs of Alibaba's trace, and jobs made here."""

from __future__ import annotations

import bz2
import csv
import gzip
import itertools
import json
import lzma
import math
import random
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlhpc.plugins.fleet.watch import ASSUMED, COLUMNS, Job, find_slowdowns, read_times
from mlhpc.suite.errors import InputError
from tests.fixtures.cli import mlhpc
from tests.fixtures.published import validation_fixtures

Times = dict[str, dict[float, float]]


@pytest.fixture(scope="module")
def alibaba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return validation_fixtures(tmp_path_factory) / "alibaba"


def job(folder: Path, number: int) -> Times:
    found: Times = {}
    with (folder / f"job_{number}_norm.csv").open() as file:
        for row in csv.DictReader(file):
            if row["batch_time_norm"]:
                found.setdefault(row["worker"], {})[float(row["time"])] = float(row["batch_time_norm"])
    return found


def test_the_straggler_of_job_1_is_named_while_it_straggles_and_nobody_else(alibaba: Path) -> None:
    (found,) = find_slowdowns(job(alibaba, 1))
    assert found.worker == "6"
    times = job(alibaba, 1)["6"]
    assert [step for step, time in times.items() if time > 530] == [
        step for step, time in times.items() if time > 530 and found.first <= step < (found.last or math.inf)
    ]
    assert found.times > 1.3


def test_the_other_jobs_are_as_their_authors_saw_them(alibaba: Path) -> None:
    assert find_slowdowns(job(alibaba, 2)) == []  # stable, although workers differ
    third = find_slowdowns(job(alibaba, 3))  # several stragglers
    assert {each.worker for each in third} == {"6", "7", "8", "9"}
    assert all(each.last is None and each.first > 2_000 for each in third)
    fourth = find_slowdowns(job(alibaba, 4))  # several, and they come and go
    assert {"5", "6"} <= {each.worker for each in fourth if each.times > 3}
    assert any(each.last is not None for each in fourth)


def simulated(seed: int, noise: float, workers: int = 8, steps: int = 300) -> Times:
    chance = np.random.default_rng(seed)
    return {
        f"w{number}": dict(enumerate(np.exp(0.05 * chance.standard_normal() + noise * chance.standard_normal(steps)).tolist()))
        for number in range(workers)
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.02, pytest.param(0.2, marks=pytest.mark.long)])
def test_a_job_without_a_change_has_no_alarm(noise: float) -> None:
    alarms = sum(bool(find_slowdowns(simulated(seed, noise))) for seed in range(100))
    assert alarms <= 5  # 1 in 100 is promised; more than 5 has a chance of 5e-4


def lasting(seed: int) -> Times:
    """Ten equal workers whose noise of 10 % correlates by 0.97 from step to step."""
    noise = 0.1 * np.random.default_rng(seed).standard_normal((200, 10))
    for before, after in itertools.pairwise(noise):
        after *= math.sqrt(1 - 0.97**2)
        after += 0.97 * before
    return {f"w{number}": dict(enumerate(each.tolist())) for number, each in enumerate(np.exp(noise).T)}


def waves(seed: int) -> Times:
    """Ten equal workers with a season of 60 steps each."""
    chance = np.random.default_rng(seed)
    noise = 0.02 * chance.standard_normal((10, 200))
    noise += 0.15 * np.sin(2 * math.pi * (np.arange(200) / 60 + chance.random((10, 1))))
    return {f"w{number}": dict(enumerate(each.tolist())) for number, each in enumerate(np.exp(noise))}


@pytest.mark.parametrize("make", [lasting, waves])
def test_noise_that_lasts_for_many_windows_is_noise(make: Callable[[int], Times]) -> None:
    assert sum(bool(find_slowdowns(make(seed))) for seed in range(20)) <= 1


def test_silence_says_what_could_have_been_seen() -> None:
    quiet = Job.create(simulated(5, 0.1, steps=200), 0.01, 0.15)
    visible = quiet.find_visible()
    assert quiet.find_slowdowns() == []
    assert visible == pytest.approx(0.55, abs=0.1)
    assert f"slower by {100 * visible:.2g} % or more" in quiet.describe_silence()
    for seed, share in ((6, 1.25), (7, 1.25), (6, 0.6), (7, 0.6)):
        times = simulated(seed, 0.1, steps=200)
        for step in range(100, 200):
            times["w3"][step] *= 1 + visible * share
        assert bool(find_slowdowns(times)) == (share > 1)


def test_a_short_job_says_that_nothing_can_be_found() -> None:
    times = simulated(1, 0.01, workers=4, steps=20)
    for step in range(10, 20):
        times["w1"][step] *= 2
    assert (
        Job.create(times, 0.01, 0.15).describe_silence() == "no verdict: nothing can be found before step 25 of a job"
    )


def test_what_slows_all_workers_is_no_workers() -> None:
    times = simulated(1, 0.02)
    for worker in times:
        for step in range(100, 160):
            times[worker][step] *= 2
    assert find_slowdowns(times) == []


@pytest.mark.parametrize(("slow", "named"), [(0.05, False), (0.3, True), (1.0, True), (-0.4, False)])
def test_one_worker_that_changes(slow: float, named: bool) -> None:
    times = simulated(2, 0.02)
    for step in range(120, 200):
        times["w3"][step] *= 1 + slow
    found = find_slowdowns(times)
    assert [each.worker for each in found] == (["w3"] if named else [])
    if named:
        assert (found[0].first, found[0].last) == (120, 200)
        assert found[0].times == pytest.approx(1 + slow, rel=0.05)


def test_half_of_the_workers_may_become_slow() -> None:
    times = simulated(3, 0.02)
    for worker in ("w0", "w1", "w2", "w3"):
        for step in range(200, 300):
            times[worker][step] *= 1.5
    assert {each.worker for each in find_slowdowns(times)} == {"w0", "w1", "w2", "w3"}


def test_steps_that_a_worker_lacks_do_no_harm() -> None:
    times = simulated(4, 0.02)
    times["w1"] = {step: time for step, time in times["w1"].items() if not 50 < step < 100 and step % 7}
    for step in range(150, 300):
        times["w2"][step] *= 1.4
    (found,) = find_slowdowns(times)
    assert (found.worker, found.first, found.last) == ("w2", 150, None)


def test_a_job_that_is_too_short_names_nobody() -> None:
    assert find_slowdowns({worker: {0.0: 1.0, 1.0: 9.0} for worker in "abc"}) == []


def write(path: Path, times: Times) -> Path:
    rows = [f"{worker},{step},{time!r}" for worker, each in times.items() for step, time in each.items()]
    path.write_text("\n".join(["worker,step,time", *rows]) + "\n")
    return path


def test_the_command_names_them(tmp_path: Path) -> None:
    times = simulated(2, 0.02)
    done = mlhpc("preflight", "watch", write(tmp_path / "a.csv", times))
    assert (done.returncode, done.stdout) == (
        0,
        "no worker is known to have become slower; one that became slower by 15 % or more around the middle would have"
        " been named in 8 of 10 cases; nothing can be found before step 25\n",
    )
    for step in range(120, 200):
        times["w3"][step] *= 1.5
    path = write(tmp_path / "b.csv", times)
    assert read_times(path) == times
    done = mlhpc("preflight", "watch", path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "worker w3: 1.51 times as slow as before from step 120 until step 200",
        ASSUMED,
    ]
    assert json.loads(mlhpc("preflight", "watch", path, "--format", "json").stdout)["slowdowns"][0]["worker"] == "w3"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ":1: column worker, step, time is missing"),
        ("worker,step\na,1\n", ":1: column time is missing"),
        ("worker,step,time\na,1,x\n", ":2: time = 'x': expected a number"),
        ("worker,step,time\na,1,nan\n", ":2: time = 'nan': expected a number"),
        ("worker,step,time\na,1\n", ":2: the row has more or fewer cells"),
        ("worker,step,time\na,1,\n", ":2: time = '': expected a number"),
        ("host;step;time\na;1;1\n", ":1: column worker is missing; the head is 'host;step;time'; expected the columns"),
        ("worker step time\na 1 1\n", ":1: column worker, step, time is missing; the head is 'worker step time'"),
        ('worker,step,time\n"a' + 200000 * "x" + ",1,1\n", ":2: is no row of a CSV file: field larger"),
        ("PK\3\4\0", ": is a packed file or a workbook; expected a CSV file: save its table as CSV"),
        ("a\0b", ": is no text; expected a CSV file"),
        ("worker,step,time\na,1,0\n", ":2: worker 'a': time = 0: expected a positive number"),
        ("worker,step,time\na,1,1\na,1,2\n", ":3: worker 'a': step 1 occurs twice"),
        ("worker,step,time\na,1,1\nb,1,1\n", ": 2 workers; expected at least 3"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_times(path)
    assert str(error.value).startswith(f"{path}{found}")
    done = mlhpc("preflight", "watch", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("seed", range(30))
def test_a_table_that_a_spreadsheet_wrote_is_read(tmp_path: Path, seed: int) -> None:
    """A byte order mark, blanks around cells, other separators, ends of lines and columns change nothing."""
    draw = random.Random(seed)
    names = [*COLUMNS, *draw.sample(["node", "", "note"], draw.randrange(4))]
    draw.shuffle(names)
    wanted = {worker: {float(step): draw.randint(1, 99) / 8 for step in range(3)} for worker in ("a 1", "b", "c")}
    separator, end, blank = draw.choice(",;\t|"), draw.choice(["\n", "\r\n", "\r"]), draw.choice(["", " ", "  "])
    rows = [
        {"worker": worker, "step": step, "time": time} for worker in wanted for step, time in wanted[worker].items()
    ]
    cells = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    text = draw.choice(["", "\n"]) + "".join((separator + blank).join(row) + blank + end for row in cells) + end
    path = tmp_path / "times.csv"
    path.write_bytes(text.encode(draw.choice(["utf-8", "utf-8-sig", "utf-16"])))
    assert read_times(path) == wanted


@pytest.mark.parametrize("tool", [gzip, bz2, lzma])
@pytest.mark.parametrize("name", ["f.csv.gz", "my times", "f.csv"])
def test_a_compressed_table_comes_with_the_command_that_fits_it(tmp_path: Path, tool: Any, name: str) -> None:
    text = b"worker,step,time\n" + b"".join(b"%c,1,1\n" % letter for letter in b"abc")
    (tmp_path / name).write_bytes(tool.compress(text))
    with pytest.raises(InputError, match=r"is a packed file \(\w+\); expected a CSV file: ") as error:
        read_times(tmp_path / name)
    said = mlhpc("preflight", "watch", name, cwd=tmp_path).stderr
    assert said.endswith(f" < {shlex.quote(name)} > {shlex.quote(name.partition('.')[0] + '_text.csv')}\n")
    subprocess.run(str(error.value).partition("a CSV file: ")[2], shell=True, cwd=tmp_path, check=True)
    assert [path.read_bytes() for path in tmp_path.glob("*_text.csv")] == [text]
