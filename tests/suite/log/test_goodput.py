"""Goodput of trials whose times are known to the millisecond; the formulas for intervals against published numbers."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.goodput_rates import TRUTHS, look
from mlhpc.suite.log.goodput import (
    Goodput,
    Interruption,
    compute_advice,
    compute_constant_rate_p,
    compute_daly_interval_s,
    compute_expected_ettr,
    compute_young_interval_s,
    estimate_mtbf_s,
    find_goodput,
    find_recovery,
    render_advice,
)
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.cli import mlhpc
from tests.fixtures.runs import describe

BASE_MS = 1_700_000_000_000


def log(path: Path, *events: tuple[float, str, object, dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        ":::MLLOG "
        + json.dumps(
            {
                "namespace": "",
                "time_ms": BASE_MS + round(1000 * at),
                "event_type": "POINT_IN_TIME",
                "key": key,
                "value": value,
                "metadata": {"file": "x", "lineno": 1, **metadata},
            }
        )
        for at, key, value, metadata in events
    ]
    path.write_text("\n".join(lines) + "\n")


def saved(at: float, step: int, stall: float = 0.5, write: float = 2.0) -> tuple[float, str, object, dict[str, object]]:
    value = {"stall_s": stall, "write_s": write, "bytes": 1, "files": 2}
    return at, "checkpoint_saved", value, {"epoch_num": 1, "next_step": step}


def event(at: float, key: str, **metadata: object) -> tuple[float, str, object, dict[str, object]]:
    return at, key, None, metadata


def interrupted(root: Path) -> Path:
    """Killed at 100 s after checkpoints at 40 and 80 s; goes on at 130 s from the second; done at 200 s."""
    log(
        root / "result_0.txt", event(0, "init_start"), event(10, "run_start"), saved(40, 30), saved(80, 60),
        event(100, "epoch_start", epoch_num=2),
    )  # fmt: skip
    log(
        root / "resumed_0_1.txt",
        event(130, "init_start"),
        event(138, "run_resumed", block=1, next_step=60),
        event(140, "run_start"),
        event(200, "run_stop", status="success"),
    )
    describe(root, count=1)
    return root


def trial_of(root: Path) -> Goodput:
    found = find_goodput(RunFolder(root), 0)
    assert found.wall_s == pytest.approx(
        found.useful_s + found.lost_s + found.stalled_s + found.starting_s + found.down_s, abs=1e-9
    )
    return found


def test_the_time_of_an_interrupted_run(tmp_path: Path) -> None:
    found = trial_of(interrupted(tmp_path / "run"))
    assert (found.attempts, found.interruptions, found.saves) == (2, 1, 2)
    assert found.wall_s == 200
    assert found.lost_s == 22.5  # from 77.5 s, when the second checkpoint was begun, to the last event
    assert found.stalled_s == 0.5  # the second's event is later: what it stalled is lost with the rest
    assert found.useful_s == 67 + 60
    assert (found.starting_s, found.restarting_s, found.down_s) == (20, 10, 30)
    assert (found.stall_s, found.write_s) == (0.5, 2.0)
    assert found.ratio == pytest.approx(127 / 200)
    assert found.each == (Interruption(lost_s=22.5, down_s=30, restart_s=10),)
    assert found.logged()["interruptions"] == [{"lost_s": 22.5, "down_s": 30, "restart_s": 10}]


@pytest.mark.parametrize(
    ("times", "parts"),
    [
        ((103.0, 120.0), (22.5, 3.0, 17.0, 16.0, 4.0)),
        ((None, 120.0), (22.5, None, 20.0, 16.0, 4.0)),  # its launcher was killed too
        ((90.0, 120.0), (22.5, None, 20.0, 16.0, 4.0)),  # an end before the last event is another one's
        ((125.0, 120.0), (22.5, None, 20.0, 16.0, 4.0)),  # clocks that differ
        ((None, None), (22.5, None, 0.0, 36.0, 4.0)),  # an srun by hand
        ((103.0, 500.0), (22.5, 3.0, 29.0, 4.0, 4.0)),
    ],
)
def test_the_phases_of_a_recovery_are_the_time_between_two_steps_that_count(
    tmp_path: Path, times: tuple[float | None, float | None], parts: tuple[float | None, ...]
) -> None:
    given = zip(("MLHPC_ENDED", "MLHPC_BEGAN"), times, strict=True)
    environ = {name: "" if at is None else str(BASE_MS / 1000 + at) for name, at in given}
    folder = RunFolder(interrupted(tmp_path / "run"))
    found = find_recovery(folder, 0, BASE_MS + 132_000, 4.0, environ)
    assert found is not None
    assert tuple(found.values()) == pytest.approx(parts)
    assert sum(filter(None, found.values())) == pytest.approx(
        140 - 77.5
    )  # from the checkpoint's last step to run_start
    (folder.resumed(0)[0]).unlink()
    assert find_recovery(folder, 0, BASE_MS, 4.0, environ) is None


def test_the_time_before_the_first_event_is_start_too(tmp_path: Path) -> None:
    spread = {"interpreter": {"max": 1.5}, "imports": {"max": 2.5}, "init": {"max": 4.0}}
    root = interrupted(tmp_path / "run")
    for name in ("result_0.txt", "resumed_0_1.txt"):
        path = root / name
        first, rest = path.read_text().split("\n", 1)
        at = int(json.loads(first.removeprefix(":::MLLOG "))["time_ms"] - BASE_MS) / 1000
        log(tmp_path / "more.txt", (at + 1, "startup", spread, {}))
        path.write_text(f"{first}\n{(tmp_path / 'more.txt').read_text()}{rest}")
    found = trial_of(root)
    assert (found.wall_s, found.starting_s, found.restarting_s, found.down_s) == (204, 28, 14, 26)
    assert found.each == (Interruption(lost_s=22.5, down_s=26, restart_s=14),)


def test_what_is_logged_after_the_run_is_not_of_the_run(tmp_path: Path) -> None:
    late = (event(0, "init_start"), event(5, "run_start"), event(105, "run_stop"), event(300, "goodput"))
    log(tmp_path / "result_0.txt", *late)
    assert trial_of(describe(tmp_path, count=1)).wall_s == 105


@pytest.mark.parametrize("attempts", [1, 2])
def test_logs_in_which_no_time_passed_are_no_number(tmp_path: Path, attempts: int) -> None:
    """NaN is not JSON, and nothing is learned from failures in no time."""
    log(tmp_path / "result_0.txt", event(0, "init_start"))
    if attempts == 2:
        log(tmp_path / "resumed_0_1.txt", event(0, "init_start"))
    describe(tmp_path, count=1)
    said = mlhpc("status", tmp_path, "--goodput").stdout
    assert said.startswith(f"{tmp_path} trial 0: no part of 0 s was useful training; ")
    data = json.loads(mlhpc("status", tmp_path, "--goodput", "--format", "json").stdout, parse_constant=pytest.fail)
    assert data["trials"][0]["ratio"] is None
    assert data["advice"]["mtbf_s"] is None


def test_checkpoints_that_cost_nothing_divide_nothing_by_nothing(tmp_path: Path) -> None:
    log(tmp_path / "result_0.txt", event(0, "run_start"), saved(50, 1, stall=0.0, write=0.0), event(100, "run_stop"))
    describe(tmp_path, count=1)
    assert "those saved cost no time" in mlhpc("status", tmp_path, "--goodput", "--mtbf-h", "1").stdout
    log(tmp_path / "result_0.txt", event(0, "run_start"), saved(50, 1, stall=0.0, write=3.0), event(100, "run_stop"))
    advice = json.loads(mlhpc("status", tmp_path, "--goodput", "--mtbf-h", "1", "--format", "json").stdout)["advice"]
    assert (advice["interval_s"], advice["daly_s"]) == (3.0, 0.0)  # not while one is being written


def test_a_run_without_interruption_loses_nothing(tmp_path: Path) -> None:
    log(
        tmp_path / "result_0.txt",
        event(0, "init_start"),
        event(5, "run_start"),
        event(105, "run_stop", status="success"),
    )
    found = trial_of(describe(tmp_path, count=1))
    assert (found.ratio, found.lost_s, found.saves, found.stall_s) == (100 / 105, 0, 0, None)


def test_an_attempt_that_nothing_went_on_from_is_lost_whole(tmp_path: Path) -> None:
    log(tmp_path / "failed_0_1.txt", event(0, "init_start"), event(10, "run_start"), event(50, "epoch_start"))
    log(tmp_path / "result_0.txt", event(60, "init_start"), event(70, "run_start"), event(100, "run_stop"))
    found = trial_of(describe(tmp_path, count=1))
    assert (found.lost_s, found.useful_s, found.down_s, found.starting_s) == (40, 30, 10, 20)


def test_a_trial_that_died_for_good_keeps_what_its_last_checkpoint_has(tmp_path: Path) -> None:
    log(
        tmp_path / "result_0.txt",
        event(0, "init_start"),
        event(10, "run_start"),
        saved(50, 1, stall=0.5, write=2.0),
        event(1000, "epoch_start"),
    )
    root = describe(tmp_path, count=1)
    found = trial_of(root)
    assert (found.died, found.interruptions, found.each) == (True, 1, ())
    assert (found.useful_s, found.lost_s) == (37.5, 952.5)  # the checkpoint was begun at 47.5 s, before its event
    assert "; 1 interruption; it never finished" in mlhpc("status", root, "--goodput").stdout


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_attempt_that_ends_while_it_starts_loses_nothing_of_the_ones_before(tmp_path: Path, goes_on: bool) -> None:
    root = interrupted(tmp_path / "run")
    if goes_on:
        (root / "resumed_0_1.txt").rename(root / "resumed_0_2.txt")
    log(root / "resumed_0_1.txt", event(110, "init_start"), event(115, "seed"))
    found = trial_of(root)
    assert (found.lost_s, found.useful_s) == (22.5, 67 + 60 * goes_on)
    assert found.died is not goes_on


@pytest.mark.parametrize("truth", ["constant rate", "checkpoints stall for 60 s", "killed while starting, one in four"])
def test_the_share_that_counts_is_that_of_simulated_trials(truth: str) -> None:
    chance = np.random.default_rng(4)
    found = [look(chance, TRUTHS[truth]) for _ in range(4)]
    assert max(abs(each.error) for each in found) < 0.01
    assert sum(low <= TRUTHS[truth].mtbf <= high for _, low, high in (each.mtbf_s for each in found)) >= 2


def test_time_between_failures_is_time_up(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    found = trial_of(interrupted(tmp_path / "run"))
    assert found.up_s == found.wall_s - 30
    assert compute_advice([found], None)["mtbf_s"] == pytest.approx(170)


def test_an_attempt_that_never_began_is_start(tmp_path: Path) -> None:
    log(tmp_path / "failed_0_1.txt", event(0, "init_start"), event(8, "seed"))
    log(tmp_path / "result_0.txt", event(60, "init_start"), event(70, "run_start"), event(100, "run_stop"))
    found = trial_of(describe(tmp_path, count=1))
    assert (found.lost_s, found.starting_s, found.useful_s) == (0, 18, 30)


def test_a_folder_without_events_has_none(tmp_path: Path) -> None:
    describe(tmp_path, count=1)
    assert find_goodput(RunFolder(tmp_path), 0) is None
    done = mlhpc("status", tmp_path, "--goodput")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def job_mtbf_h(nodes: int, failures_per_1000_node_days: float) -> float:
    """Hours between failures of a job whose nodes fail independently at that rate."""
    return 24.0 / (nodes * failures_per_1000_node_days / 1000.0)


@pytest.mark.parametrize(
    ("gpus", "per_1000", "mtbf_h", "ratio"),
    [(16_384, 6.5, 1.803, 0.829), (16_384, 2.34, 5.008, 0.906), (131_072, 6.5, 0.225, 0.367)],
)
def test_metas_numbers_and_the_one_that_the_law_misses(gpus: int, per_1000: float, mtbf_h: float, ratio: float) -> None:
    found = job_mtbf_h(gpus // 8, per_1000)
    assert found == pytest.approx(mtbf_h, abs=5e-4)
    assert compute_expected_ettr(60, 300, compute_young_interval_s(60, 3600 * found), 3600 * found) == pytest.approx(
        ratio, abs=5e-4
    )
    assert job_mtbf_h(128, 6.5) == pytest.approx(28.8, abs=0.05)  # 7.9 h were measured: docs/fleet.md says so


def test_young_and_daly() -> None:
    assert compute_young_interval_s(60, 3600 * 1.803) == pytest.approx(60 * 14.7, rel=2e-3)
    assert compute_daly_interval_s(60, 3600 * 1.803) == pytest.approx(compute_young_interval_s(60, 3600 * 1.803) - 60)
    assert compute_daly_interval_s(100, 40) == 40


def test_the_expected_ratio_is_best_near_dalys_interval() -> None:
    best = max((compute_expected_ettr(60, 300, each, 20_000), each) for each in range(100, 6000, 10))[1]
    assert best == pytest.approx(compute_young_interval_s(60, 20_000), rel=0.1)


def test_the_learned_time_between_failures_has_an_interval() -> None:
    mean, low, high = estimate_mtbf_s(36_000, 4)
    assert mean == 9_000
    assert low < mean < high
    mean, low, high = estimate_mtbf_s(36_000, 0)
    assert (mean, high) == (math.inf, math.inf)
    assert 10_000 < low < 20_000


def judge_gaps(seed: int, clustered: bool) -> float | None:
    """Judge five trials of six attempts: gaps of a constant rate, or every third attempt crashes at once."""
    chance = random.Random(seed)
    ups = [
        tuple(chance.expovariate(1) * (0.03 if clustered and chance.random() < 1 / 3 else 1.0) for _ in range(6))
        for _ in range(5)
    ]
    return compute_constant_rate_p([Goodput(Path(), 0, 6, *[0.0] * 7, 0, None, None, (), ups=each) for each in ups])


def test_failures_in_clusters_are_told_from_a_constant_rate() -> None:
    pytest.importorskip("scipy")
    refuted = [sum((judge_gaps(seed, clustered) or 0.0) < 0.05 for seed in range(200)) for clustered in (False, True)]
    assert refuted[0] <= 20
    assert refuted[1] >= 170


def test_the_advice_names_what_its_interval_assumes() -> None:
    known = {"mtbf_s": 100.0, "interruptions": 9, "saves": 1, "interval_s": 9.0, "young_s": 9.0, "save_s": 1.0}
    known |= {"restart_s": 1.0, "expected_ratio": 0.5, "mtbf_interval_s": (50.0, 200.0)}
    assert "if failures come at a constant rate: too few to test)" in render_advice(known)
    assert "if failures come at a constant rate: p = 0.4)" in render_advice(known | {"constant_rate_p": 0.4})
    refuted = render_advice(known | {"constant_rate_p": 0.001, "mtbf_interval_s": None})
    assert "(from 9 seen, not at a constant rate (p = 0.001), so without an interval)" in refuted
    assert "90 %" not in refuted


def test_the_command_says_where_the_time_went_and_what_to_set(tmp_path: Path) -> None:
    root = interrupted(tmp_path / "run")
    trial, advice = mlhpc("status", root, "--goodput").stdout.splitlines()
    assert trial == (
        f"{root} trial 0: 63.5% of 3.33 min was useful training; "
        "lost 22.5 s, checkpoints 0.5 s, starting 20 s, down 30 s; 1 interruption"
    )
    assert advice.startswith(
        "checkpoint.interval_s=12.5 (Daly; Young 13) for a failure every 2.83 min (from 1 seen, 90 % "
    )
    assert advice.endswith("% would count (modelled)")
    data = json.loads(mlhpc("status", root, "--goodput", "--mtbf-h", 6, "--format", "json").stdout)
    assert data["trials"][0]["ratio"] == pytest.approx(0.635)
    assert data["advice"]["young_s"] == pytest.approx(compute_young_interval_s(0.5, 6 * 3600))
    for wrong in ("0", "-1", "soon"):
        assert mlhpc("status", root, "--goodput", "--mtbf-h", wrong).returncode == 2
    for words in (("--mtbf-h", "6"), ("--goodput", "--follow")):
        done = mlhpc("status", root, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
