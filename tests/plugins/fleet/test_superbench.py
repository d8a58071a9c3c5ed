"""SuperBench's results are read as samples: its own fixtures where they are at hand, and files made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlhpc.plugins.fleet.samples import group_by_metric, parse_results, read_samples
from mlhpc.plugins.fleet.slow_nodes import judge
from mlhpc.suite.errors import InputError
from tests.fixtures.published import validation_fixtures


def test_its_own_results_are_read_and_missing_metrics_are_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    metrics = group_by_metric(read_samples(validation_fixtures(tmp_path_factory) / "superbench" / "test_results.jsonl"))
    overhead = next(metric for metric in metrics if metric.name == "kernel-launch/event_overhead")
    assert overhead.better == "less"
    assert overhead.samples["sb-validation-01"][0] == 0.1
    found = judge(metrics)
    assert set(found.words) == {"sb-validation-01", "sb-validation-02", "sb-validation-03"}
    assert "mem-bw/return_code: failed, but not on others: it is 1" in found.reasons["sb-validation-03"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "the file has no node"), ("5\n", ":1: field `node` is missing"),
     ('{"node": "a"}\nx\n', ":2: 'x': expected a JSON object"),
     ('{"node": "a"}\n{"node": "a"}\n', ":2: node 'a' occurs twice"), ('{"a": 1}\n', ":1: field `node` is missing")],
)  # fmt: skip
def test_wrong_results_are_named(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(InputError) as error:
        parse_results(tmp_path / "results.jsonl", text.encode())
    assert found in str(error.value)


def test_ranks_are_repetitions_and_return_codes_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(
        '{"node": "a", "mem/bw:0": 25.0, "mem/bw:1": 26.0, "kernel/launch_time:0": 0.01, "mem/return_code": 0}\n'
    )
    launch, bandwidth = group_by_metric(read_samples(path))
    assert (launch.name, launch.better, launch.samples) == ("kernel/launch_time", "less", {"a": (0.01,)})
    assert (bandwidth.name, bandwidth.better, bandwidth.samples) == ("mem/bw", "more", {"a": (25.0, 26.0)})


def test_a_benchmark_that_failed_on_a_node_makes_it_bad(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rows = [{"node": f"n{i}", "mem/bw:0": 25.0 + i / 100, "mem/return_code": int(i == 3)} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = judge(group_by_metric(read_samples(path)))
    assert [node for node, word in found.words.items() if word == "bad"] == ["n3"]
    assert "mem/return_code: failed, but not on others: it is 1" in found.reasons["n3"]


@pytest.mark.parametrize("value", [None, "25.0", "NaN", 0, -1, [25.0], True])
def test_a_node_is_not_judged_by_the_ranks_that_a_broken_value_leaves(tmp_path: Path, value: object) -> None:
    path = tmp_path / "results.jsonl"
    rows = [{"node": f"n{i}", "mem/bw:0": 25.0, "mem/bw:1": value if i == 3 else 25.1, "x": 1.0} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = judge(group_by_metric(read_samples(path)))
    assert [node for node, word in found.words.items() if word != "good"] == ["n3"]
    assert found.words["n3"] == "inconclusive"
    assert "mem/bw" in str(found.reasons["n3"])


@pytest.mark.parametrize(
    "text", ["# nThread 1 nGpus 8\n8388608 float sum\n", "node,metric,value\nn01,triad,412\n", "T/V  N\n"]
)
def test_the_output_of_another_tool_is_answered_with_what_is_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=r"is no JSON object; expected one in each line, as `mlhpc preflight node`"):
        read_samples(path)


def test_a_return_code_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    rows = [{"node": f"n{i}", "mem/bw": 25.0, "mem/return_code": None if i == 3 else 0} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (said,) = judge(group_by_metric(read_samples(path))).reasons["n3"]
    assert said.endswith("it is no number")


def test_results_without_a_metric_are_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"node": "a", "mem": {"bw": {"mean": 3}}}\n')
    with pytest.raises(InputError, match="no node has a metric"):
        read_samples(path)
