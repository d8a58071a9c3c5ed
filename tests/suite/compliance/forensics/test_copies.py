"""Copies of runs are found however they are disguised, and honest runs that are alike are not called copies."""

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.forensics.copy_rules import (
    FALSE_ALARMS,
    RunIndex,
    RunSeries,
    _list_fingerprints,
    build_series,
)
from mlhpc.suite.compliance.rules.result_rules import check_seed_distinct, find_odd_numbers
from mlhpc.suite.log.reader import Event, Log
from mlhpc.suite.log.record import MetricValue, summarise_log
from tests.fixtures.logs import Lines, drop, edit, hpc_run, write
from tests.fixtures.published import published_results

START_MS = 1_695_000_000_000
Damage = Callable[[Path], object]


def run(seed: int, **options: float) -> Lines:
    """One honest run; epochs of a minute, so that durations to the millisecond are evidence."""
    return hpc_run(seed=seed, start_ms=START_MS + seed * 10**7, epoch_s=options.pop("epoch_s", 60.0), **options)  # type: ignore[arg-type]


def result(folder: Path) -> Path:
    """Ten honest runs and a pruned one of a throughput result, in a package."""
    runs = folder / "ACME/results/big/weak/cosmoflow"
    for seed in range(1, 11):
        write(runs / f"result_{seed}.txt", run(seed))
    write(runs / "pruned_results/result_11.txt", run(11))
    (folder / "ACME/systems").mkdir()
    return runs


def copied(
    lines: Lines, *, seed: object = 99, by: float = 0.0, jitter_ms: float = 0.0, later_ms: float = 10**9
) -> Lines:
    """The same run at another time, with another seed, values changed by a share and time stamps by milliseconds."""
    draw = random.Random(str(seed))
    changed = []
    for line in lines:
        value = line.value * (1.0 + draw.uniform(-by, by)) if line.key == "eval_error" else line.value
        moved = draw.uniform(-jitter_ms, jitter_ms) if line.key in ("eval_error", "run_stop") else 0.0
        changed.append(replace(line, value=value, time_ms=round(line.time_ms + later_ms + moved)))
    return edit("seed", value=seed)(changed) if seed is not None else drop("seed")(changed)


def renumbered(lines: Lines) -> Lines:
    """Epochs numbered from 1 again."""
    numbers = sorted({line.metadata["epoch_num"] for line in lines if line.metadata and "epoch_num" in line.metadata})
    return [
        replace(line, metadata={**line.metadata, "epoch_num": numbers.index(line.metadata["epoch_num"]) + 1})
        if line.metadata and "epoch_num" in line.metadata
        else line
        for line in lines
    ]


def head(lines: Lines, epochs: int) -> Lines:
    stops = [index for index, line in enumerate(lines) if line.key == "epoch_stop"]
    return [*lines[: stops[epochs - 1] + 1], lines[-1]]


def tail(lines: Lines, epochs: int) -> Lines:
    starts = [index for index, line in enumerate(lines) if line.key == "epoch_start"]
    begin = starts[-epochs]
    skipped = lines[begin].time_ms - lines[starts[0]].time_ms
    before = [replace(line, time_ms=line.time_ms + skipped) for line in lines[: starts[0]]]
    return renumbered([*before, *lines[begin:]])


def valued(lines: Lines, values: Callable[[int, float], float]) -> Lines:
    """The evaluations changed, each by a function of its number and its value."""
    number = 0
    changed = []
    for line in lines:
        if line.key == "eval_error":
            line = replace(line, value=values(number, line.value))
            number += 1
        changed.append(line)
    return changed


def second(make: Callable[[Lines], Lines]) -> Damage:
    """The second log is made of the first."""
    return lambda runs: write(runs / "result_2.txt", make(run(1)))


def pruned(make: Callable[[Lines], Lines]) -> Damage:
    return lambda runs: write(runs / "pruned_results/result_11.txt", make(run(3)))


def aborted(lines: Lines) -> Lines:
    return edit("run_stop", meta={"status": "aborted"})(lines)


def other_values(lines: Lines) -> Lines:
    draw = random.Random(5)
    return valued(copied(lines), lambda number, value: value * draw.uniform(1.0, 1.05) if number < 23 else value)


def seedless(damage: Damage) -> Damage:
    """All logs without their seeds."""

    def apply(runs: Path) -> None:
        for number in range(1, 11):
            write(runs / f"result_{number}.txt", drop("seed")(run(number)))
        damage(runs)

    return apply


COPIES: dict[str, tuple[Damage, str]] = {
    "another seed": (second(copied), "run-copied"),
    "values by 1e-12, times by 50 ms": (second(lambda x: copied(x, by=1e-12, jitter_ms=50)), "run-repeated"),
    "values by 1e-5, times by 50 ms": (second(lambda x: copied(x, by=1e-5, jitter_ms=50)), "run-repeated"),
    "values by 1e-4, times by a second": (second(lambda x: copied(x, by=1e-4, jitter_ms=1000)), "run-repeated"),
    "no seeds": (seedless(second(lambda x: copied(x, seed=None, by=1e-5, jitter_ms=50))), "run-repeated"),
    "a seed of 70 bits": (second(lambda x: copied(x, seed=2**70 + 1, by=1e-5, jitter_ms=50)), "run-repeated"),
    "the end of a run": (second(lambda x: tail(copied(x, by=1e-5, jitter_ms=50), 8)), "run-repeated"),
    "the beginning of a run": (second(lambda x: head(copied(x, by=1e-5, jitter_ms=50), 12)), "run-repeated"),
    "only its second half": (
        second(lambda x: valued(copied(x, jitter_ms=50), lambda n, v: v * (1.05 - 0.01 * (n % 3)) if n < 12 else v)),
        "run-repeated",
    ),
    "invented values, the same times": (second(other_values), "run-repeated"),
    "a power of its values, times by a second": (
        second(lambda x: valued(copied(x, jitter_ms=1000), lambda n, v: v**1.02)), "run-repeated",
    ),
    "a smooth function of its values": (
        second(lambda x: valued(copied(x, jitter_ms=1000), lambda n, v: 1.03 * v - 0.2 * (v - 0.3) ** 2)), "run-repeated",
    ),
    "slower by a tenth": (
        second(lambda x: [replace(y, time_ms=round(x[0].time_ms + 1.1 * (y.time_ms - x[0].time_ms))) for y in copied(x)]),
        "run-repeated",
    ),
    "a kept run among the pruned": (pruned(lambda x: x), "run-copied"),
    "a kept run among the pruned, another seed": (pruned(lambda x: copied(x, by=1e-5, jitter_ms=50)), "run-repeated"),
    "a kept run among the pruned, stopped early": (pruned(lambda x: aborted(head(copied(x, by=1e-6), 9))), "run-repeated"),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_found(tmp_path: Path, name: str) -> None:
    damage, rule = COPIES[name]
    runs = result(tmp_path)
    damage(runs)
    findings = [item for item in check([tmp_path], "3.0.0").findings if item.rule in ("run-copied", "run-repeated")]
    assert [(item.rule, item.severity) for item in findings] == [(rule, "error")], findings
    known = ("(p = ", "to a power", "smooth function")
    assert rule == "run-copied" or any(text in findings[0].message for text in known)


def quantised(step: float) -> Damage:
    """An accuracy of few samples takes few values: all runs have many in common."""

    def apply(runs: Path) -> None:
        for number in range(1, 11):
            log = valued(run(number), lambda n, v: max(round(v / step), 1) * step)
            write(runs / f"result_{number}.txt", log)

    return apply


def counted(of: int, value: Callable[[int, int], float]) -> Damage:
    """Runs that learn in jumps, judged by few samples: `value` is of (wrong samples, samples), as a loop logs it."""

    def apply(runs: Path) -> None:
        for number in range(1, 11):
            draw = random.Random(number)
            wrong = [round(of * (0.4 - 0.01 * n)) + draw.choice((0, 0, 0, of // 20)) for n in range(30)]
            log = valued(run(number), lambda n, v, wrong=wrong: value(wrong[n], of))  # type: ignore[misc]
            write(runs / f"result_{number}.txt", log)

    return apply


def float32(value: float) -> float:
    """As `float(tensor)` gives it."""
    return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]


def of_batches(wrong: int, of: int) -> float:
    """The mean of ten batches' errors, added in single precision."""
    total = 0.0
    for batch in range(10):
        total = float32(total + float32(10 / of * len(range(batch, wrong, 10))))
    return float32(total / 10)


def regular(epoch_s: float) -> Damage:
    def apply(runs: Path) -> None:
        for number in range(1, 11):
            write(runs / f"result_{number}.txt", copied(run(number, epoch_s=epoch_s), seed=number, jitter_ms=1.0))

    return apply


def smooth(runs: Path) -> None:
    """Curves without any noise: the seeds differ in the fourth digit."""
    for number in range(1, 11):
        lines = valued(run(number), lambda n, v, k=number: (0.3 - 0.18 * n / 23) * (1 + 1e-4 * k * (n < 23)))  # type: ignore[misc]
        write(runs / f"result_{number}.txt", lines)


def started_alike(runs: Path) -> None:
    """All runs evaluate the same checkpoint before they train."""
    for number in range(1, 11):
        lines = run(number)
        at = next(index for index, line in enumerate(lines) if line.key == "epoch_start")
        first = replace(lines[at], key="eval_error", value=0.31, metadata={"epoch_num": 0})
        write(runs / f"result_{number}.txt", [*lines[:at], first, *lines[at:]])


LEGAL: dict[str, Damage] = {
    "untouched": lambda runs: None,
    "a pruned run with the seed of a kept one, run again": pruned(lambda x: copied(x, seed=3, jitter_ms=900)),
    "seeds of 70 bits": second(lambda x: edit("seed", value=2**70 + 1)(run(2))),
    "no seeds": seedless(lambda runs: None),
    "values of three digits": quantised(1e-3),
    "accuracies of 200 samples": quantised(1 / 200),
    "errors of 100 samples": counted(100, lambda wrong, of: wrong / of),
    "errors of 100 samples in single precision": counted(100, lambda wrong, of: float32(wrong / of)),
    "errors of 100 samples from accuracies": counted(100, lambda wrong, of: 1.0 - float32((of - wrong) / of)),
    "errors of 100 samples as the mean of batches": counted(100, of_batches),
    "accuracies of 60 samples in single precision": counted(60, lambda wrong, of: float32((of - wrong) / of)),
    "curves without noise": smooth,
    "the same checkpoint evaluated first": started_alike,
    "short epochs that are equal to a millisecond": regular(0.5),
    "two equal evaluations": second(lambda x: valued(run(2), lambda n, v: [0.271, 0.265][n - 4] if n in (4, 5) else v)),
    "runs that stop early": lambda runs: [write(runs / f"result_{n}.txt", head(run(n), 2)) for n in (4, 5)],
    "one epoch of a run within a millisecond of another's": lambda runs: write(runs / "result_2.txt", run(2)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_runs_that_are_alike_by_chance_are_no_copies(tmp_path: Path, name: str) -> None:
    runs = result(tmp_path)
    LEGAL[name](runs)
    found = [item for item in check([tmp_path], "3.0.0").findings if item.rule in ("run-copied", "run-repeated")]
    assert not found


def test_seeds_of_more_than_64_bits_are_compared(tmp_path: Path) -> None:
    runs = result(tmp_path)
    for number in (4, 5):
        write(runs / f"result_{number}.txt", edit("seed", value=2**80 + 7)(run(number)))
    rules = [item.rule for item in check([tmp_path], "3.0.0").findings]
    assert "seed-distinct" in rules
    write(runs / "result_5.txt", edit("seed", value=2**80 + 8)(run(5)))
    assert "seed-distinct" not in [item.rule for item in check([tmp_path], "3.0.0").findings]


def test_a_disguised_copy_in_another_result_is_found(tmp_path: Path) -> None:
    result(tmp_path / "a")
    other = result(tmp_path / "b")
    for number in range(1, 11):
        lines = copied(run(number), seed=500 + number, by=1e-5, jitter_ms=50)
        write(other / f"result_{number}.txt", lines)
    (other / "pruned_results/result_11.txt").unlink()
    found = [item for item in check([tmp_path], "3.0.0").findings if item.rule == "run-reused"]
    assert len(found) == 10
    assert all("/b/" in item.file and "/a/" in item.message for item in found)


@pytest.mark.parametrize(("by", "found"), [(0.0, True), (1e-7, True), (1e-6, True), (1e-5, True), (1e-2, False)])
def test_measured_numbers_of_another_run_are_found_within_a_ten_thousandth(by: float, found: bool) -> None:
    def phases(seed: int, by: float = 0.0) -> list[Event]:
        draw, noise = random.Random(seed), random.Random(99)
        numbers = [1.0 + draw.random() + by * noise.random() for _ in range(40)]
        return [Event("step_phases", {"step": each}, 0.0, "POINT_IN_TIME", {}, 1) for each in numbers]

    log = Log(Path("result_1.txt"), tuple(phases(seed=1)))
    one, other, third = (
        {*_list_fingerprints(summarise_log(replace(log, events=tuple(events))))}
        for events in (phases(1), [*phases(3)[:20], *phases(1, by)[20:]], phases(2))
    )
    assert bool(one & other) == found
    assert not one & third


def honest(draw: random.Random, number: int) -> RunSeries:
    values = [0.3 * 0.96**n * (1.0 + draw.gauss(0.0, 0.01)) for n in range(15)]
    evals = tuple(MetricValue(n + 1.0, v, 5.0 * n + draw.gauss(0, 0.02), n) for n, v in enumerate(values))
    empty = summarise_log(Log(Path(f"result_{number}.txt"), (), ()))
    return build_series(replace(empty, seed=number, evals=evals, time_to_train_s=80.0))


def test_the_search_looks_at_no_more_runs_the_more_are_equal() -> None:
    """A crowd of equal runs finds no more candidates than its first members."""
    one = honest(random.Random(1), 1)
    seen: RunIndex[int] = RunIndex()
    for number in range(300):
        seen.add(number, one)
    assert sum(1 for _ in seen.candidates(one)) <= 32 * 2 * 15 * 3


@pytest.mark.long
def test_no_published_pair_is_called_a_copy_but_those_known(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of the public rounds only two results repeat one curve: ten runs without seeds each, with equal values throughout."""
    verdict = check([published_results(tmp_path_factory)])
    results = {Path(item.file).parents[2].name for item in verdict.findings if item.rule == "run-repeated"}
    assert results <= {"juwelsbooster_gpu_n1024_mxnet1.9", "juwelsbooster_gpu_n512_mxnet1.9"}


@pytest.mark.long
def test_the_false_alarm_rate_is_small() -> None:
    assert FALSE_ALARMS <= 1e-5
    draw = random.Random(8)
    seen: RunIndex[int] = RunIndex()
    for number in range(300):
        item = honest(draw, number)
        assert seen.find_duplicate(item) is None
        seen.add(number, item)


def _single(draw: random.Random) -> float:
    return float(struct.unpack("f", struct.pack("f", draw.random()))[0])


def _ratio(draw: random.Random) -> float:
    return draw.randint(1, 99_999) / draw.randint(100_000, 700_000)


@pytest.mark.parametrize("make", [_single, _ratio])
@pytest.mark.parametrize(("odd", "found"), [(0, False), (1, True), (5, True), (20, False)])
def test_numbers_of_one_name_have_one_form(make: Callable[[random.Random], float], odd: int, found: bool) -> None:
    draw = random.Random(7)
    runs = [[make(draw) for _ in range(6)] for _ in range(5)]
    for number in range(odd):
        runs[4 - number // 6][number % 6] = draw.choice(
            [0.123456789012 + number / 97, 0.7182818284590451 - number / 89]
        )
    records: list[Any] = [
        SimpleNamespace(
            path=Path(f"result_{number}.txt"), benchmark="b", code_file="c", evaluated={"iou": tuple(values)}
        )
        for number, values in enumerate(runs)
    ]
    shown: Any = SimpleNamespace(group=SimpleNamespace(folder=Path("r")), runs=records, pruned=())
    assert bool([*find_odd_numbers([shown])]) == found
    # All results of one code in a package have the form of one of them.
    for code in ("c", "d"):
        other: Any = SimpleNamespace(
            path=Path("s"), benchmark="b", code_file=code, evaluated={"iou": (0.71828182845,) * 9}
        )
        more: Any = SimpleNamespace(group=SimpleNamespace(folder=Path("s")), runs=[other], pruned=())
        assert bool([*find_odd_numbers([shown, more])]) == (found or (code == "c" and odd < 8))


@pytest.mark.parametrize(("late", "found"), [(0, 0), (1, 1), (3, 0), (5, 0)])
def test_seeds_that_are_the_time_are_all_so(late: int, found: int) -> None:
    runs = [
        SimpleNamespace(
            path=Path(f"result_{number}.txt"),
            run_start_s=1.7e9 + 1e4 * number,
            seed=1_700_000_000 + 10_000 * number - 30 + (86_400 if number < late else 0),
            instance=None,
            compute_units=8,
        )
        for number in range(5)
    ]
    shown: Any = SimpleNamespace(runs=runs, pruned=(), system=None, weak=False, run_units=8, total_units=None)
    assert len([*check_seed_distinct.check(shown)]) == found


@pytest.mark.parametrize(("instances", "found"), [([0, 1, 2, 3], 0), ([0, 1, 2, 1], 1), ([0, 0, 0, 0], 0)])
def test_instances_have_numbers_of_their_own(instances: list[int], found: int) -> None:
    runs = [
        SimpleNamespace(path=Path(f"{n}.txt"), run_start_s=1e9, seed=n, instance=i, compute_units=8)
        for n, i in enumerate(instances)
    ]
    shown: Any = SimpleNamespace(runs=runs, pruned=(), system=None, weak=True, run_units=8, total_units=None)
    assert len([*check_seed_distinct.check(shown)]) == found


@pytest.mark.parametrize("series", range(4))
def test_honest_runs_that_log_whole_seconds_are_no_copies(series: int, tmp_path: Path) -> None:
    for seed in range(10):
        lines = run(10 * series + seed, epoch_s=160.0)
        write(tmp_path / f"result_{seed}.txt", [replace(line, time_ms=line.time_ms // 1000 * 1000) for line in lines])
    found = {finding.rule for finding in check([tmp_path], "3.0.0").findings if finding.severity == "error"}
    assert "run-repeated" not in found
