"""`mlhpc history`: what is added stays as it is, like is compared with like, and a machine that became slower is an exit code."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from mlhpc.analysis.history.record import (
    Record,
    Series,
    _compute_digest,
    collect_node_facts,
    group_by_series,
    read_history,
    write_record,
)
from mlhpc.analysis.history.verdict import find_trend
from mlhpc.suite.machine.facts import NetworkInterface
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import START_MS, our_run, write
from tests.fixtures.runs import describe, node

DAY_MS = 86_400_000
SERIES = Series(
    benchmark="cosmoflow",
    size="mini",
    scenario="strong",
    division="closed",
    rules="v3.0",
    system="bed",
    nodes=1,
    ranks=8,
)


def written(root: Path, day: int, **options: Any) -> Path:
    """Runs whose starts and times differ as in `our_runs`."""

    def one(index: int) -> None:
        write(
            root / f"result_{index}.txt",
            our_run(
                seed=1000 * day + index,
                start_ms=START_MS + day * DAY_MS + index * 100_000,
                epoch_s=options.get("factor", 1.0) * (2.0 + 0.1 * index),
                values=(
                    0.42 - 0.001 * index - 1e-5 * day,
                    0.41 + 0.0002 * index + 2e-5 * day,
                    0.4 - 0.0003 * index,
                    0.39,
                    0.355 - 0.0001 * index,
                ),
                trial=index,
            ),
        )

    for index in range(options.get("count", 5)):
        one(index)
    return root


def record(day: int, seconds: float, *, series: Series = SERIES, **facts: str) -> Record:
    stated = {"kernel": "6.1", **facts}
    return Record(
        date=f"2026-{1 + day // 28:02}-{1 + day % 28:02}T03:00:00+00:00",
        added="2026-12-31T00:00:00+00:00",
        source=f"runs/{day}",
        series=series,
        score=f"{seconds * 8 / 60:.4g} min",
        compliant=True,
        time_s=(seconds * 8,),
        epoch_s=(seconds,),
        logs={"result_0.txt": f"{msgspec.json.encode(series).decode()} {day}"},
        facts=stated,
        facts_sha256=_compute_digest(stated),
        suite_version="1.0",
    )


def fill(folder: Path, seconds: list[float], **options: Any) -> Path:
    for day, each in enumerate(seconds):
        facts = {"kernel": "6.5"} if day >= options.get("new_kernel", 10**9) else {}
        write_record(folder, record(day, each, series=options.get("series", SERIES), **facts), [])
    return folder


def nights(count: int, at: float = 60.0, seed: int = 1) -> list[float]:
    generator = random.Random(seed)
    return [at * (1 + generator.gauss(0, 0.01)) for _ in range(count)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_result_is_one_file_that_is_never_touched_again(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    done = mlhpc("history", "add", written(tmp_path / "a", 0), "-o", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": added\n")
    before = files(folder)
    (only,) = read_history(folder)
    assert len(only.time_s) == len(only.epoch_s) == len(only.logs) == 5
    assert only.epoch_s[0] == pytest.approx(2.0, rel=0.01)
    assert only.score is not None
    again = mlhpc("history", "add", tmp_path / "a", "-o", folder)
    assert (again.returncode, again.stdout.endswith(": there already\n")) == (0, True)
    assert mlhpc("history", "add", written(tmp_path / "b", 1), "-o", folder).returncode == 0
    after = files(folder)
    assert len(after) == 2
    assert {name: after[name] for name in before} == before


def test_the_same_runs_count_once(tmp_path: Path) -> None:
    folder, first = tmp_path / "history", written(tmp_path / "a", 0)
    assert mlhpc("history", "add", first, "-o", folder).returncode == 0
    copied = tmp_path / "copied"
    copied.mkdir()
    for number, path in enumerate(sorted(first.iterdir(), reverse=True)):
        (copied / f"result_{number}.txt").write_bytes(path.read_bytes())
    assert "there already" in mlhpc("history", "add", copied, "-o", folder).stdout
    more = mlhpc("history", "add", written(first, 0, count=6), "-o", folder, "--any")
    assert more.returncode == 2
    assert "result_0.txt is in" in more.stderr
    assert len(files(folder)) == 1


def test_what_is_no_score_is_added_only_when_asked(tmp_path: Path) -> None:
    folder, few = tmp_path / "history", written(tmp_path / "few", 0, count=2)
    done = mlhpc("history", "add", few, "-o", folder)
    assert done.returncode == 3
    assert "not a score: 2 of the 5 required runs complete; not added" in done.stderr
    assert not folder.exists()
    assert mlhpc("history", "add", few, "-o", folder, "--any").returncode == 0
    assert read_history(folder)[0].score is None
    failed = write(tmp_path / "failed" / "result_0.txt", our_run(values=(0.9,)))
    assert mlhpc("history", "add", failed.parent, "-o", folder, "--any").returncode == 2
    assert mlhpc("history", "add", tmp_path / "history", "-o", folder).returncode == 2, "no logs"


def test_a_machine_that_became_slower_is_exit_code_1_with_place_size_and_what_changed(tmp_path: Path) -> None:
    folder = fill(tmp_path / "history", nights(15) + nights(15, at=63.0, seed=2), new_kernel=15)
    done = mlhpc("history", "check", folder)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count(": slower: +") == done.stdout.count("against the best level (results 1 to 15)") == 2
    changes = [line for line in done.stdout.splitlines() if line.startswith("  change: +")]
    assert len(changes) == 2
    for line in changes:
        assert "(result 16 of 30" in line
        assert "changed there: kernel: 6.1 -> 6.5" in line
    told = json.loads(mlhpc("history", "check", folder, "--format", "json").stdout)
    (change,) = told["series"][0]["changes"]
    assert change["interval"][0] < 1.05 < change["interval"][1]
    assert change["date"].startswith("2026-01-16")


def test_a_machine_that_did_not_change_is_exit_code_0(tmp_path: Path) -> None:
    done = mlhpc("history", "check", fill(tmp_path / "history", nights(30)))
    assert (done.returncode, done.stdout.count(": no change in 30 results")) == (0, 2)


@pytest.mark.long
def test_a_machine_that_became_faster_or_was_mended_is_exit_code_0(tmp_path: Path) -> None:
    faster = fill(tmp_path / "faster", nights(15) + nights(15, at=57.0, seed=2))
    mended = fill(tmp_path / "mended", nights(14) + nights(14, at=66.0, seed=2) + nights(14, seed=3))
    often = ("--false-alarms", "10%")
    assert mlhpc("history", "check", faster, *often).returncode == 0
    done = mlhpc("history", "check", mended, *often)
    assert (done.returncode, done.stdout.count(": equivalent: ")) == (0, 2)
    assert mlhpc("history", "show", mended, *often).stdout.count("  change: ") == 4


@pytest.mark.parametrize("counts", [(20, 20, 20), (8, 8, 8), (30, 20, 10)], ids=str)
def test_a_slow_down_that_was_mended_in_part_is_still_slower_than_the_best_level(
    tmp_path: Path, counts: tuple[int, int, int]
) -> None:
    levels = zip(counts, (60.0, 73.2, 70.3), (1, 2, 3), strict=True)
    seconds = [each for count, level, seed in levels for each in nights(count, at=level, seed=seed)]
    done = mlhpc("history", "check", fill(tmp_path / "history", seconds))
    assert done.returncode == 1, done.stdout
    assert done.stdout.count(": slower: +") == done.stdout.count("  change: +2") == 2, done.stdout
    assert len(re.findall(r"  (change|not sure): -[34]\.", done.stdout)) == 2, "each change is printed, sure or not"


@pytest.mark.long
def test_the_tolerance_is_what_a_machine_may_be_slower(tmp_path: Path) -> None:
    folder = fill(tmp_path / "history", nights(30) + nights(30, at=63.0, seed=2))
    for tolerance, code, word in ((0, 1, "slower"), (3, 1, "slower"), (5, 4, "inconclusive"), (8, 0, "equivalent")):
        done = mlhpc("history", "check", folder, "--tolerance", tolerance)
        assert (done.returncode, done.stdout.count(f": {word}: ")) == (code, 2), done.stdout
    told = json.loads(mlhpc("history", "check", folder, "--tolerance", 8, "--format", "json").stdout)
    assert told["tolerance_percent"] == 8
    assert told["series"][0]["newest_to_best"]["best"] == [1, 30]


@pytest.mark.parametrize(
    "place", [pytest.param(14, marks=pytest.mark.long), 15, pytest.param(16, marks=pytest.mark.long)]
)
def test_a_fact_that_changed_where_the_change_may_be_is_named(tmp_path: Path, place: int) -> None:
    """A step of three deviations: the place that is found is often one off."""
    folder = fill(tmp_path / "history", nights(15) + nights(15, at=61.8, seed=3), new_kernel=place)
    told = json.loads(mlhpc("history", "show", folder, "--format", "json").stdout)
    series = told["series"][0]
    (change,) = series["changes"] + series["not_sure"]
    first, last = change["results"]
    assert first <= 16 <= last
    assert (change["facts"] == ["kernel: 6.1 -> 6.5"]) == (first <= place + 1 <= last)


def test_too_few_results_are_exit_code_4(tmp_path: Path) -> None:
    done = mlhpc("history", "check", fill(tmp_path / "history", nights(5) + nights(5, at=600.0)))
    assert done.returncode == 4
    assert "inconclusive: 10 of at least 11 results" in done.stdout


@pytest.mark.long
def test_an_accepted_change_is_left_out_with_since(tmp_path: Path) -> None:
    folder = fill(tmp_path / "history", nights(15) + nights(15, at=63.0, seed=2))
    assert mlhpc("history", "check", folder, "--since", "2026-01-16").returncode == 0
    assert mlhpc("history", "check", folder, "--since", "2026-01-16T03:00:00+00:00").returncode == 0
    for wrong, said in (("soon", "expected a date"), ("2030-01-01", "no result since 2030-01-01")):
        done = mlhpc("history", "check", folder, "--since", wrong)
        assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    "other",
    [{"nodes": 2}, {"ranks": 16}, {"size": "small"}, {"system": "other"}, {"division": "open"}, {"rules": "v0.7"}],
    ids=str,
)
def test_unlike_results_are_never_one_series(tmp_path: Path, other: dict[str, Any]) -> None:
    folder = fill(tmp_path / "history", nights(2))
    fill(folder, nights(2, at=30.0, seed=2), series=structs.replace(SERIES, **other))
    assert [len(records) for records in group_by_series(read_history(folder)).values()] == [2, 2]


@pytest.mark.long
def test_two_steady_machines_are_no_change(tmp_path: Path) -> None:
    """One is twice as fast."""
    folder = fill(tmp_path / "history", nights(20))
    fill(folder, nights(20, at=30.0, seed=2), series=structs.replace(SERIES, system="other"))
    done = mlhpc("history", "check", folder)
    assert (done.returncode, done.stdout.count("no change in 20 results")) == (0, 4), done.stdout


def test_results_may_be_added_in_any_order(tmp_path: Path) -> None:
    seconds = nights(15) + nights(15, at=63.0, seed=2)
    days = list(range(30))
    random.Random(1).shuffle(days)
    for day in days:
        write_record(tmp_path / "history", record(day, seconds[day]), [])
    assert "(result 16 of 30" in mlhpc("history", "check", tmp_path / "history").stdout


@pytest.mark.long
def test_results_that_follow_each_other_are_inconclusive_with_the_reason(tmp_path: Path) -> None:
    generator, drift, seconds = random.Random(2), 0.0, []
    for _ in range(40):
        drift = 0.8 * drift + generator.gauss(0, 0.01)
        seconds.append(60 * (1 + drift))
    done = mlhpc("history", "check", fill(tmp_path / "h", seconds))
    assert done.returncode == 4
    assert "reason: neighbouring results may depend on each other" in done.stdout
    assert re.search(r"more such results? (decides?|would not decide) \(mlhpc history add\)", done.stdout)


def test_a_slow_change_is_exit_code_1(tmp_path: Path) -> None:
    seconds = [value * 1.116 ** (day / 29) for day, value in enumerate(nights(30))]
    done = mlhpc("history", "check", fill(tmp_path / "history", seconds))
    assert done.returncode == 1
    assert len(re.findall(r": slower: times grow by 1[12](\.\d)? % in 30 days, interval \[", done.stdout)) == 2, (
        done.stdout
    )
    assert done.stdout.count("assumed: neighbouring results correlate by at most 0.8") == 2
    lax = mlhpc("history", "check", tmp_path / "history", "--tolerance", 20)
    assert (lax.returncode, lax.stdout.count(": equivalent: times grow")) == (0, 2), lax.stdout


@pytest.mark.long
def test_every_verdict_says_what_it_could_have_seen(tmp_path: Path) -> None:
    done = mlhpc("history", "check", fill(tmp_path / "history", nights(30)))
    said = re.findall(
        r"a change of the last 3 results by (\S+) % or more would have been found in 8 of 10", done.stdout
    )
    assert len(said) == 2
    assert all(3 < float(each) < 15 for each in said), said
    few = mlhpc("history", "check", fill(tmp_path / "few", nights(11)))
    assert re.search(r"last [45] results by .*; a change of fewer than [45] is not found", few.stdout), few.stdout


@pytest.mark.long
def test_an_inconclusive_verdict_says_how_many_results_decide(tmp_path: Path) -> None:
    """Twice as slow in the last three of eleven: no order of eleven is rare enough."""
    done = mlhpc("history", "check", fill(tmp_path / "history", nights(8) + nights(3, at=120.0, seed=2)))
    assert done.returncode == 4
    more = re.findall(r"(\d) more such results? decides? \(", done.stdout)
    assert len(more) == 2, done.stdout
    added = nights(8) + (nights(3, at=120.0, seed=2) * 4)[: 3 + int(more[0])]
    assert mlhpc("history", "check", fill(tmp_path / "more", added)).returncode == 1


def test_results_of_a_busy_machine_are_left_out(tmp_path: Path) -> None:
    folder = fill(tmp_path / "history", nights(20))
    for day in range(20, 25):
        write_record(folder, structs.replace(record(day, 300.0), disturbed=0.87), [])
    done = mlhpc("history", "check", folder)
    assert done.returncode == 0
    assert done.stdout.startswith(
        "5 results left out: other programs used up to 87 % of the CPUs; --busy takes them in\n"
    )
    assert mlhpc("history", "check", folder, "--busy").returncode == 1
    told = json.loads(mlhpc("history", "check", folder, "--format", "json").stdout)
    assert (told["left_out"], len(told["series"][0]["results"])) == (5, 20)


def test_runs_of_several_sessions_are_shown_as_such(tmp_path: Path) -> None:
    starts = (*(600.0 * run for run in range(4)), *(150_000.0 + 600.0 * run for run in range(6)))
    ten = structs.replace(record(0, 60.0), time_s=(480.0,) * 10, epoch_s=(60.0,) * 10, begin_s=starts)
    write_record(tmp_path, ten, [])
    assert mlhpc("history", "show", tmp_path).stdout.count("10 runs in 2 sessions") == 2


def test_a_trend_has_an_interval_and_a_level_series_has_none_to_speak_of() -> None:
    days, generator = [float(day) for day in range(40)], random.Random(6)
    rising = find_trend(days, [math.exp(0.01 * day + generator.gauss(0, 0.05)) for day in days])
    assert rising is not None
    assert 0.0 < rising.low < 0.01 < rising.high
    level = [find_trend(days, [math.exp(generator.gauss(0, 0.1)) for _ in days]) for _ in range(200)]
    assert 182 <= sum(each is not None and each.low <= 0.0 <= each.high for each in level) <= 199
    assert find_trend([1.0, 1.0, 1.0, 2.0, 3.0], [1.0] * 5) is None


def test_show_lists_every_result_with_trend_and_changes(tmp_path: Path) -> None:
    folder = fill(tmp_path / "history", nights(15) + nights(15, at=63.0, seed=2))
    done = mlhpc("history", "show", folder)
    assert done.returncode == 0
    assert done.stdout.count(" n=1 ") == 60
    assert done.stdout.count("\n  | 2026-01-16") == 2, "the first result after a change is marked"
    assert done.stdout.count("trend since the newest change") == 2
    told = json.loads(mlhpc("history", "show", folder, "--format", "json").stdout, parse_constant=pytest.fail)
    assert [len(each["results"]) for each in told["series"]] == [30, 30]


def test_facts_of_nodes_are_kept_without_what_changes_every_day(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    for day, model in enumerate(("Model T", "Model U")):
        root = written(tmp_path / str(day), day)
        describe(root)
        facts = structs.replace(
            node("node1", collected=f"2026-11-{20 + day}T14:00:00Z"), cpu=structs.replace(node().cpu, model=model)
        )
        (root / "facts" / "node1.json").write_text(msgspec.json.encode(facts).decode())
        done = mlhpc("history", "add", root, "-o", folder, "--any")
        assert done.returncode == 0, done.stderr
    first, second = read_history(folder)
    assert (first.facts["processor"], second.facts["processor"]) == ("Model T", "Model U")
    assert {name for name in first.facts if first.facts[name] != second.facts[name]} == {"processor"}


@pytest.mark.parametrize("speed", [None, 0.0, 2.5, 100.0])
def test_the_network_of_a_node_has_a_speed_only_if_it_is_known(speed: float | None) -> None:
    port = NetworkInterface(name="eth0", link="ethernet", driver="x", speed_gbit_s=speed, state="up")
    text = collect_node_facts([structs.replace(node(), network=[port])])["network"]
    assert text == (f"ethernet {speed:g} Gbit/s" if speed else "ethernet")


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def spoiled(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return spoiled


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_text("{"), "expected JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "expected JSON"),
        (lambda path: path.write_text("[]"), "expected a record of a history of version 1, found list"),
        (spoil(lambda data: data.update(version=2)), "version 1, found 2"),
        (spoil(lambda data: data.update(date="yesterday")), "field `date` is 'yesterday'"),
        (spoil(lambda data: data.update(date="2026-01-01T00:00:00")), "with its zone"),
        (spoil(lambda data: data.update(time_s=[float("nan")])), "time_s.0 = nan: expected a finite number"),
        (spoil(lambda data: data.update(epoch_s=[-1.0])), "expected seconds from"),
        (spoil(lambda data: data.update(epoch_s=[1e-308])), "expected seconds from"),
        (spoil(lambda data: data.update(time_s=[1e99])), "expected seconds from"),
        (spoil(lambda data: data.update(time_s="long")), "time_s"),
        (spoil(lambda data: data["facts"].update(kernel="9")), "`facts_sha256` does not match the facts"),
        (spoil(lambda data: data.update(surprise=1)), "surprise"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "cannot be read"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
)
def test_a_damaged_record_is_one_line_that_names_it(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    folder = fill(tmp_path / "history", nights(3))
    damage(sorted(folder.iterdir())[1])
    for command in ("check", "show"):
        done = mlhpc("history", command, folder)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert said in done.stderr
        assert "20260102" in done.stderr


@pytest.mark.parametrize("copy", [shutil.copy, lambda one, other: other.symlink_to(one.name)])
def test_a_run_that_two_records_have_is_refused(tmp_path: Path, copy: Callable[[Path, Path], object]) -> None:
    folder = fill(tmp_path / "history", nights(3))
    first = sorted(folder.iterdir())[0]
    copy(first, folder / "copy.json")
    done = mlhpc("history", "check", folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "a run counts once: remove one of the files" in done.stderr
    assert first.name in done.stderr
    assert "copy.json" in done.stderr


@pytest.mark.parametrize(
    ("before", "said"),
    [("<<<<<<< HEAD\n", "two sides of a conflict"), ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull")],
)
def test_what_git_left_in_a_record_is_told(tmp_path: Path, before: str, said: str) -> None:
    folder = fill(tmp_path / "history", nights(1))
    (path,) = folder.iterdir()
    path.write_text(before + path.read_text())
    assert said in mlhpc("history", "check", folder).stderr


@pytest.mark.long
def test_other_files_in_the_folder_do_no_harm(tmp_path: Path) -> None:
    folder = fill(tmp_path / "history", nights(30))
    (folder / "README.md").write_text("the nightly runs of our machine")
    (folder / ".hidden.json").write_text("{")
    assert mlhpc("history", "check", folder).returncode == 0


def test_a_result_of_a_folder_whose_name_is_no_utf8_is_added_and_read(tmp_path: Path) -> None:
    root = written(tmp_path / os.fsdecode(b"R\xff"), 0, count=2)
    assert mlhpc("history", "add", root, "-o", tmp_path / "history", "--any").returncode == 0
    assert mlhpc("history", "check", tmp_path / "history").returncode == 4  # too few results


def test_no_history_says_how_to_begin_one(tmp_path: Path) -> None:
    done = mlhpc("history", "check", cwd=tmp_path)
    assert done.returncode == 2
    assert "history: no history here; begin one with: mlhpc history add RUNS -o history" in done.stderr


def test_a_run_folder_from_start_to_verdict(tmp_path: Path) -> None:
    """What a nightly job does, twelve nights."""
    folder = tmp_path / "history"
    for night in range(12):
        root = written(tmp_path / str(night), night, factor=1.3 if night >= 6 else 1.0, count=2)
        assert mlhpc("history", "add", root, "-o", folder, "--any").returncode == 0
    done = mlhpc("history", "check", folder)
    assert done.returncode == 1
    assert "training time of an epoch: slower: +29.9 %" in done.stdout
    assert "(result 7 of 12" in done.stdout


def test_two_machines_that_nobody_named_are_two_series(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    for number, cores in enumerate((64, 128)):
        root = written(tmp_path / str(number), number)
        for path in root.glob("result_*.txt"):
            path.write_text(path.read_text().replace("test bed", "unknown"))
        describe(root)
        facts = structs.replace(node(), cpu=structs.replace(node().cpu, cores=cores))
        (root / "facts" / "node1.json").write_text(msgspec.json.encode(facts).decode())
        assert mlhpc("history", "add", root, "-o", folder, "--any").returncode == 0
    assert [each.series.system for each in read_history(folder)] == ["Model T, 64 cores", "Model T, 128 cores"]


def test_of_many_facts_that_changed_the_first_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    for day, seconds in enumerate(nights(15) + nights(15, at=63.0, seed=2)):
        facts = {f"package p{number:02}": "1" if day < 15 else "2" for number in range(20)}
        write_record(folder, record(day, seconds, **facts), [])
    (_, line, *_) = mlhpc("history", "check", folder).stdout.splitlines()
    assert line.endswith("package p05: 1 -> 2; 14 more")


def test_series_that_are_too_short_to_say_anything_take_no_share_of_the_rate(tmp_path: Path) -> None:
    folder = fill(tmp_path / "history", nights(6) + nights(6, at=90.0, seed=2))
    for number in range(20):
        fill(folder, nights(3, seed=number), series=structs.replace(SERIES, system=f"retired {number}"))
    done = mlhpc("history", "check", folder)
    assert done.returncode == 1
    assert done.stdout.count(": slower: ") == 2
    assert done.stdout.count(": inconclusive: 3 of at least ") == 40
