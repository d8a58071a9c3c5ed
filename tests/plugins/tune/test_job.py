"""Real jobs of seconds: settings take turns in one process, a failure has its reason, a hang ends in its time limit."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest

from mlhpc.plugins.tune import job
from mlhpc.plugins.tune.candidates import Candidates, Launch, Limits
from mlhpc.plugins.tune.job import BOUND, DEFAULT, ENERGY, GRADIENT, TUNED, Blocks, FailedJobError, Meter, run_job
from mlhpc.plugins.tune.space import build_space
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from tests.fixtures.wings import needs_axes

pytestmark = needs_axes  # `tune` predicts with it what can run
BLOCKS = Blocks(2, 1, 0)


@pytest.mark.long
def test_settings_of_one_job_take_turns_and_the_environment_is_left_alone(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    chosen = load_descriptor("swinv2_moe")
    configs = [load_config(chosen, "smoke", [*settings, f"precision={each}"]) for each in ("float32", "bfloat16")]
    sides = run_job("swinv2_moe", configs, Launch(1, 1), BLOCKS, None)
    assert [len(side) for side in sides] == [2, 2]
    assert all(block["CPU time"] > 0 and block["step time"] > 0 for side in sides for block in side)
    assert sides[0][0]["loss"] != sides[1][0]["loss"]
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_a_job_that_fails_has_the_reason_of_its_rank(settings: list[str]) -> None:
    config = load_config(load_descriptor("swinv2_moe"), "smoke", [*settings, "precision=tf32"])
    with pytest.raises(FailedJobError, match="precision tf32: cpu here has none"):
        run_job("swinv2_moe", [config], Launch(1, 1), BLOCKS, None)


def test_a_job_that_hangs_ends_in_its_time_limit(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(load_descriptor("swinv2_moe"), "smoke", settings)
    start = job.start_ranks

    def hang(words: list[str], ranks: int, **options: object) -> int:
        return start(["tune", "--help"], ranks, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "start_ranks", hang)
    monkeypatch.setattr("mlhpc.suite.launch.command_on_ranks.make_suite_command", lambda *words: ["sleep", "3600"])
    with pytest.raises(FailedJobError, match=r"was ended after its time limit of 1 s"):
        run_job("swinv2_moe", [config], Launch(1, 1), BLOCKS, 1.0)


def make_meter(settings: list[str], memory: int | None = None) -> Meter:
    chosen = load_descriptor("swinv2_moe")
    space = build_space({}, places=2, cores=2, gpu=False, batch=20, plans=[])
    candidates = Candidates(chosen, "smoke", settings, space, Limits(2, memory), "cpu-time")
    return Meter(candidates, {"ranks": 1, "threads": 1, "precision": "float32"}, BLOCKS)


def test_pairs_share_a_job_only_if_they_start_alike_and_fit(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[tuple[list[str], Launch, float | None]] = []

    def run(workload: str, configs: list[object], launch: Launch, blocks: Blocks, limit_s: float | None) -> object:
        jobs.append(([each.precision for each in configs], launch, limit_s))  # type: ignore[attr-defined]
        return [[{"step time": 0.02, "CPU time": 2.0 if each.precision == "float32" else 1.0}] * 2 for each in configs]  # type: ignore[attr-defined]

    monkeypatch.setattr("mlhpc.plugins.tune.job.run_job", run)
    meter = make_meter(settings)
    meter.measure_default()
    assert meter.blocks.steps == 25, "half a second of the default"
    assert (jobs[0][2], meter.limit_s) == (None, 60.0)
    jobs.clear()
    short = {"ranks": 1, "threads": 1, "precision": "bfloat16"}
    assert meter.measure(short).ratio == 0.5
    assert meter.measure(short).ratio == 0.5
    assert jobs == [(["float32", "bfloat16"], Launch(1, 1), 60.0), (["bfloat16", "float32"], Launch(1, 1), 60.0)]
    jobs.clear()
    assert meter.measure({**short, "ranks": 2}).ratio == 0.5
    assert [(each[0], each[1].ranks) for each in jobs] == [(["float32"], 1), (["bfloat16"], 2)]
    jobs.clear()
    tight = make_meter(settings, memory=1)
    pair = tight.compare(short, (TUNED, DEFAULT))
    assert (pair[TUNED], pair[DEFAULT]) == (1.0, 2.0)
    assert [each[0] for each in jobs] == [["bfloat16"], ["float32"]]


def test_a_failed_measurement_is_no_end(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        raise FailedJobError("a rank was ended by signal 9")

    monkeypatch.setattr("mlhpc.plugins.tune.job.run_job", fail)
    meter = make_meter(settings)
    found = meter.measure({"ranks": 1, "threads": 1, "precision": "bfloat16"})
    assert (found.ratio, found.why) == (None, "a rank was ended by signal 9")
    assert meter.compare({"ranks": 1, "threads": 1}, (TUNED, DEFAULT))[TUNED] == math.inf
    with pytest.raises(FailedJobError):
        meter.measure_default()


def test_a_setting_whose_gradient_rounding_does_not_explain_is_refused(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[int, ...]] = []
    errors = {"float32": (1e-6, 1e-5), "bfloat16": (random.uniform(2e-2, 1), 1e-2)}

    def run(workload: str, configs: list[Any], launch: Launch, blocks: Blocks, limit_s: float | None) -> object:
        judged.append(blocks.judged)
        times = {"step time": 1.0, "CPU time": 1.0}
        return [[times | dict(zip((GRADIENT, BOUND), errors[each.precision], strict=True))] for each in configs]

    monkeypatch.setattr("mlhpc.plugins.tune.job.run_job", run)
    meter = make_meter(settings)
    meter.measure_default()
    found = meter.measure({**meter.default, "precision": "bfloat16"})
    assert (found.ratio, found.error) == (None, errors["bfloat16"][0])
    assert found.why.endswith("rounding gives at most 0.01: refused, it computes something else")
    assert meter.measure({**meter.default, "loader_threads": 2}).error == 1e-6
    assert meter.compare({**meter.default, "precision": "bfloat16"}, (DEFAULT, TUNED))[TUNED] == 1.0
    assert judged == [(0,), (1,), (0,), ()]


def test_time_to_quality_is_step_time_times_the_steps_of_each(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(workload: str, configs: list[object], *_: object) -> object:
        return [[{"step time": 1.0, "CPU time": 1.0}] * 2 for _ in configs]

    monkeypatch.setattr("mlhpc.plugins.tune.job.run_job", run)
    meter = make_meter(settings)
    half = {"precision": "bfloat16"}
    monkeypatch.setattr(Candidates, "count_steps", lambda self, point: 50.0 if point == half else 100.0)
    meter.limit_s = 1.0
    assert meter.measure(half).ratio == pytest.approx(0.5)
    pair = meter.compare(half, (DEFAULT, TUNED))
    assert pair[TUNED] == pytest.approx(0.5 * pair[DEFAULT])


def test_joules_are_those_of_the_counters_and_without_one_there_is_a_reason(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: dict[str, float] = {}

    def run(workload: str, configs: list[object], *_: object) -> object:
        return [[{"step time": 1.0, **counted}] * 2 for _ in configs]

    monkeypatch.setattr("mlhpc.plugins.tune.job.run_job", run)
    meter = make_meter(settings)
    meter.candidates = replace(meter.candidates, objective="joules")
    with pytest.raises(FailedJobError, match=r"no counter of energy can be read here \(docs/energy.md"):
        meter.measure_default()
    counted[ENERGY] = 20.0
    meter.measure_default()
    assert meter.measure({"precision": "bfloat16"}).ratio == 1.0
