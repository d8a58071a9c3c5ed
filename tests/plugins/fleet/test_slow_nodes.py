"""Good, bad, inconclusive: false alarms at the promised rate, power as printed, and fleets that mislead."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from scipy import stats

from mlhpc.plugins.fleet.outliers import (
    compute_critical_value,
    compute_max_outliers,
    compute_prediction_std,
    find_outliers,
)
from mlhpc.plugins.fleet.samples import Metric, group_by_metric, read_samples
from mlhpc.plugins.fleet.slow_nodes import judge
from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.facts import Sample, render_samples
from tests.fixtures.cli import mlhpc


def fleet(
    nodes: int,
    *,
    metrics: int = 3,
    noise: float = 0.02,
    seed: int = 0,
    slow: dict[int, float] | None = None,
    hardware: str = "",
) -> list[Metric]:
    """``slow``: node number to the part of its speed that is missing, in the first metric."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(metrics):
        levels = 100 * np.exp(noise * chance.standard_normal(nodes))
        for node, part in (slow or {}).items():
            levels[node] *= 1 - part if number == 0 else 1
        samples = {
            f"n{i:02}": tuple(level * np.exp(0.001 * chance.standard_normal(5))) for i, level in enumerate(levels)
        }
        found.append(Metric(f"m{number}", hardware, "GB/s", "more", samples))
    return found


def as_metrics(times: np.ndarray) -> list[Metric]:
    """Make metrics of times (metrics, nodes, repetitions)."""
    samples = [{f"n{node:02}": tuple(row) for node, row in enumerate(one)} for one in times.tolist()]
    return [Metric(f"m{number}", "", "s", "less", one) for number, one in enumerate(samples)]


@pytest.mark.parametrize(("count", "rate"), [(4, 1e-2), (8, 1e-2), (16, 1e-3), (40, 1e-3)])
def test_healthy_values_stand_apart_as_often_as_promised(count: int, rate: float) -> None:
    fleets = 400_000 // count
    values = np.sort(np.random.default_rng(count).standard_normal((fleets, count)), axis=1)[:, ::-1]
    named = np.zeros(fleets, dtype=int)
    for i in range(1, compute_max_outliers(count) + 1):
        rest = values[:, i:]
        limit = (
            compute_critical_value(count, i, rate) * compute_prediction_std(1.0, count - i) * rest.std(axis=1, ddof=1)
        )
        named[values[:, i - 1] - rest.mean(axis=1) > limit] = i
    low, high = stats.binom.interval(0.999, fleets * count, rate)
    assert 0.9 * low <= named.sum() <= high  # a tenth below: what several bad nodes cost is a bound
    assert all(find_outliers(row, rate).count == many for row, many in zip(values[:200], named[:200], strict=True))  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.parametrize(
    "noise", [pytest.param(0.01, marks=pytest.mark.long), 0.05, pytest.param(0.2, marks=pytest.mark.long)]
)
def test_healthy_nodes_are_called_bad_as_often_as_promised_over_all_metrics(noise: float) -> None:
    rate, nodes, metrics = 0.02, 8, 4
    bad = sum(
        word == "bad"
        for seed in range(300)
        for word in judge(fleet(nodes, metrics=metrics, noise=noise, seed=seed), rate=rate).words.values()
    )
    # Fewer: bad is also surely slower than the effect. That the rule finds what it says is the next test
    assert bad <= stats.binom.isf(0.001, 300 * nodes, rate)


@pytest.mark.parametrize(("nodes", "repetitions"), [(4, 5), (4, 1), (8, 2), (16, 5), (16, 1)])
def test_the_slowdown_that_is_printed_is_found_9_times_in_10(nodes: int, repetitions: int) -> None:
    chance = np.random.default_rng(nodes)
    found = found_too = 0
    for _ in range(30):
        levels = chance.standard_normal((3, nodes, 1))
        times = np.exp(0.01 * levels + 0.01 * chance.standard_normal((3, nodes, repetitions)))
        slowdown = judge(as_metrics(times)).metrics[0].found
        assert slowdown is not None
        times[0, 0] /= 1 - slowdown
        found += judge(as_metrics(times)).words["n00"] == "bad"
        times[0, 0] *= (1 - slowdown) / (1 - slowdown / 3)
        found_too += judge(as_metrics(times)).words["n00"] == "bad"
    assert found >= stats.binom.ppf(0.001, 30, 0.9)
    assert found_too < 6  # a third of the slowdown is another matter


def test_the_slow_node_is_named_with_its_metric_and_the_others_are_good() -> None:
    found = judge(fleet(16, noise=0.005, slow={4: 0.1}))
    assert [node for node, word in found.words.items() if word != "good"] == ["n04"]
    (reason,) = found.reasons["n04"]
    assert reason.startswith("m0: ")
    assert 0.08 < next(v.slower for v in found.metrics[0].verdicts if v.node == "n04") < 0.12  # type: ignore[operator]
    assert found.metrics[0].clusters == (1, 15, 0)


@pytest.mark.parametrize("many", [2, 4, 5])
def test_slow_nodes_do_not_hide_each_other(many: int) -> None:
    found = judge(fleet(16, noise=0.005, slow=dict.fromkeys(range(many), 0.15)))
    assert sorted(node for node, word in found.words.items() if word == "bad") == [f"n{i:02}" for i in range(many)]


def test_more_than_a_third_of_slow_nodes_may_be_another_kind_of_node() -> None:
    slow = dict.fromkeys(range(7), 0.15)
    found = judge(fleet(16, noise=0.005, slow=slow))
    assert sorted(node for node, word in found.words.items() if word == "inconclusive") == [f"n{i:02}" for i in slow]
    assert "as 7 of 16 nodes are: nodes of another kind, or slow ones" in found.reasons["n00"][0]
    found = judge(fleet(16, noise=0.005, slow=slow | {9: 0.6}))  # this one is slower than any of both kinds
    assert [node for node, word in found.words.items() if word == "bad"] == ["n09"]
    assert sum(word == "inconclusive" for word in found.words.values()) == 15
    history = {("", "m0"): [[level] for level in np.linspace(99, 101, 10)]}
    found = judge(fleet(16, noise=0.005, slow=slow), history=history)
    assert sorted(node for node, word in found.words.items() if word == "bad") == [f"n{i:02}" for i in slow]


def test_fast_nodes_are_never_bad_but_make_one_ask_whether_the_others_are_slow() -> None:
    found = judge(fleet(12, noise=0.005, slow=dict.fromkeys(range(3), -0.2)))
    assert "bad" not in found.words.values()
    (warning,) = found.warnings
    assert warning.startswith("m0: 3 of 12 nodes are faster")
    bounded = judge(fleet(12, noise=0.005, slow=dict.fromkeys(range(3), -0.2)), bounds={"m0": 110.0})
    assert sum(word == "bad" for word in bounded.words.values()) == 9


def test_noise_that_hides_the_effect_is_inconclusive_and_not_good() -> None:
    found = judge(fleet(8, noise=0.15, metrics=1))
    assert set(found.words.values()) <= {"inconclusive", "good"}
    assert "inconclusive" in found.words.values()
    (report,) = found.metrics
    assert report.found is not None
    assert report.found > 0.4
    assert set(judge(fleet(8, noise=0.003, metrics=1)).words.values()) == {"good"}


def test_other_hardware_is_never_compared() -> None:
    slow = [
        Metric(m.name, "B", m.unit, m.better, {f"b{k}": tuple(v / 2 for v in s) for k, s in m.samples.items()})
        for m in fleet(6, noise=0.002)
    ]
    found = judge([*fleet(6, noise=0.002, seed=1, hardware="A"), *slow])
    assert set(found.words.values()) == {"good"}


def test_two_nodes_are_inconclusive_without_a_history_and_judged_with_one() -> None:
    now = fleet(2, metrics=1, noise=0.002, slow={1: 0.2})
    assert set(judge(now).words.values()) == {"inconclusive"}
    history = {("", "m0"): (100 * np.exp(0.002 * np.random.default_rng(3).standard_normal((20, 1)))).tolist()}
    assert judge(now, history=history).words == {"n00": "good", "n01": "bad"}


def test_a_metric_that_is_missing_on_a_node_is_inconclusive() -> None:
    metrics = fleet(8, noise=0.002)
    del metrics[1].samples["n03"]
    found = judge(metrics)
    assert found.words["n03"] == "inconclusive"
    assert found.reasons["n03"] == ("m1: not measured on this node",)


def test_equal_values_are_good() -> None:
    assert set(judge([Metric("m", "", "s", "less", {f"n{i}": (1.0, 1.0) for i in range(5)})]).words.values()) == {
        "good"
    }


def test_equal_values_are_good_beside_an_equal_history() -> None:
    metric = Metric("m", "", "s", "less", {f"n{i}": (1.0, 1.0) for i in range(5)})
    for sessions in ([[1.0]] * 10, [[1.0] * 5]):
        assert set(judge([metric], history={("", "m"): sessions}).words.values()) == {"good"}
        assert set(judge([metric], history={("", "m"): [[0.4 * v for v in s] for s in sessions]}).words.values()) == {
            "bad"
        }


def test_values_at_the_ends_of_what_a_number_can_be_are_told_as_factors() -> None:
    values = {"a": 1e308, "b": 1e-308, "c": 1.0, "d": 1.0, "e": 1.0, "f": 1.0}
    found = judge([Metric("m", "", "", "more", {node: (value,) for node, value in values.items()})])
    assert set(found.words.values()) == {"inconclusive"}
    assert "times faster" in found.reasons["a"][0]
    assert "times slower" in found.reasons["b"][0]
    assert all(len(reason) < 100 for reasons in found.reasons.values() for reason in reasons)


def samples_of(metrics: list[Metric]) -> list[Sample]:
    return [
        Sample(node=node, metric=metric.name, unit=metric.unit, better=metric.better, values=values)
        for metric in metrics
        for node, values in metric.samples.items()
    ]


def test_the_command_names_bad_nodes_and_the_line_for_slurm(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    path.write_text(render_samples(samples_of(fleet(12, noise=0.004, slow={3: 0.15, 5: 0.2}))))
    assert group_by_metric(read_samples(path)) == group_by_metric(
        samples_of(fleet(12, noise=0.004, slow={3: 0.15, 5: 0.2}))
    )
    done = mlhpc("preflight", "judge", path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-2:] == ["10 good, 2 bad, 0 inconclusive", "to leave them out: --exclude=n03,n05"]
    data = json.loads(mlhpc("preflight", "judge", path, "--format", "json").stdout)
    assert data["nodes"]["n03"]["word"] == "bad"
    assert data["metrics"][0]["slower_alike_faster"] == [2, 10, 0]
    path.write_text(render_samples(samples_of(fleet(12, noise=0.004))))
    assert mlhpc("preflight", "judge", path).returncode == 0
    path.write_text(render_samples(samples_of(fleet(2))))
    done = mlhpc("preflight", "judge", path)
    assert done.returncode == 4
    assert "too few to compare" in done.stdout


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "the file has no sample"),
        ("x", ":1: "),
        (
            '{"node": "a", "metric": "m", "better": "more", "values": [0]}',
            "values.0 = 0: expected float > 0.0",
        ),
        ('{"node": "a", "metric": "m", "better": "up", "values": [1]}', "better = 'up'"),
        ('{"node": "a", "metric": "m", "better": "more", "values": []}', "expected values, or failed with the reason"),
        ('{"node": "a", "metric": "m", "better": "more", "values": [1], "x": 1}', "unknown key 'x'"),
        ('{"version": 2, "node": "a", "metric": "m", "better": "more", "values": [1]}', "version = 2"),
        ('{"node": "a", "metric": "m", "better": "more", "values": [NaN]}', ":1: "),
    ],
)
def test_a_wrong_sample_is_named(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "nodes.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_samples(path)
    assert found in str(error.value)
    assert "\n" not in str(error.value)
    done = mlhpc("preflight", "judge", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_units_and_nodes_that_contradict_are_named() -> None:
    one = Sample(node="a", metric="m", unit="GB/s", better="more", values=(1.0,))
    with pytest.raises(InputError, match="node a: m occurs twice"):
        group_by_metric([one, one])
    with pytest.raises(InputError, match=r"node b: m has unit 'MB/s'.*; another .* has unit 'GB/s' and better = more"):
        group_by_metric([one, structs.replace(one, node="b", unit="MB/s")])


@pytest.mark.parametrize(
    ("text", "found"),
    [("m9: 5\n", ":1: metric 'm9' has no sample; metrics here: m0, m1, m2"),
     ("m0: fast\n", ":1: m0 = 'fast': expected a positive number")],
)  # fmt: skip
def test_wrong_bounds_are_named(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "bounds.yaml").write_text(text)
    (tmp_path / "nodes.jsonl").write_text(render_samples(samples_of(fleet(5))))
    done = mlhpc("preflight", "judge", "nodes.jsonl", "--bounds", "bounds.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert found in done.stderr
