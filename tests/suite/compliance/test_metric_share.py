"""An accuracy of part of the validation samples, or of others, shows in its steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.rules.result_rules import check_course_required, check_metric_share
from mlhpc.suite.descriptor import load_descriptor
from tests.fixtures.logs import our_run, results

DUE = 800  # validation samples of SwinV2-MoE smoke
HYPER = {"global_batch_size": 20}


def draw_runs(seed: int, samples: int) -> list[list[float]]:
    """Accuracies of ``samples`` images in five runs of five evaluations, as a network's that learns."""
    rates = (0.6, 0.75, 0.83, 0.88, 0.93)
    return (np.random.default_rng(seed).binomial(samples, rates, (5, 5)) / samples).tolist()  # type: ignore[no-any-return]


def judge(runs: list[list[float]], *, share: bool = True) -> list[str]:
    evals: list[Any] = [SimpleNamespace(evals=[SimpleNamespace(value=value) for value in run]) for run in runs]
    card = structs.replace(load_descriptor("swinv2_moe").card().size("smoke"), share=share)
    result: Any = SimpleNamespace(benchmark=SimpleNamespace(card=card), runs=evals)
    return [text for _, text in check_metric_share.check(result)]


@pytest.mark.parametrize(
    ("what", "samples", "seen"),
    [
        ("all", DUE, 0),
        ("a tenth", 80, 20),
        ("a quarter", 200, 20),
        ("without a shard", 700, 20),
        ("all but one", 799, 20),
    ],
)
def test_what_was_evaluated_shows_in_20_of_20_results(what: str, samples: int, seen: int) -> None:
    assert sum(bool(judge(draw_runs(seed, samples))) for seed in range(20)) == seen


def test_200_healthy_results_are_not_accused_nor_a_run_that_learns_nothing() -> None:
    assert not any(judge(draw_runs(seed, DUE)) for seed in range(100, 300))
    assert judge([[0.1] * 6, [1.0] * 6]) == []


def test_where_a_card_does_not_say_it_most_values_show_that_a_metric_is_a_share() -> None:
    for seed in range(20):
        runs = draw_runs(seed, DUE)
        assert judge(runs, share=False) == []
        assert judge([*runs[1:], [*runs[0][1:], 0.9037124513]], share=False)
        # Another metric, and one that is rounded to two digits
        assert judge([[value * 0.987654 for value in run] for run in runs], share=False) == []
        assert judge([[round(value, 2) for value in run] for run in runs], share=False) == []


def test_the_checker_says_it(tmp_path: Path) -> None:
    runs = draw_runs(1, 80)
    found = check(
        [results(tmp_path, 5, lambda n: our_run(workload="swinv2_moe", seed=n, values=runs[n], hyperparameters=HYPER))]
    ).findings
    (said,) = [each for each in found if each.rule == "metric-share"]
    assert said.severity == "error"
    assert "are shares of 80 samples, by chance once in" in said.message


@pytest.mark.parametrize(("low", "high"), [(1.085, 1.667), (5.55, 5.59), (14.4, 81.4)])  # as of three workloads
@pytest.mark.parametrize("same", [True, False])
def test_the_first_loss_is_that_of_an_untrained_network(low: float, high: float, same: bool) -> None:
    course = SimpleNamespace(
        global_batch_size=8, precision="float32", hyperparameters={"lr": 1}, values={"loss of step 1": [low, high]}
    )
    wide = max(1.5, high / low)
    losses = [low / wide * 0.99, low / wide * 1.01, low, high, high * wide * 0.99, high * wide * 1.01]
    runs: list[Any] = [
        SimpleNamespace(
            path=number, first_losses=(loss,), resumed=False, course={}, global_batch_size=8 if same else 4,
            precision="float32", hyperparameters={"lr": 1},
        )
        for number, loss in enumerate(losses)
    ]  # fmt: skip
    for closed in (True, False):
        benchmark = SimpleNamespace(card=None, reference_courses=[course])
        result: Any = SimpleNamespace(closed=closed, benchmark=benchmark, runs=runs)
        assert [path for path, _ in check_course_required.check(result)] == [0, 5] * (same and closed)
