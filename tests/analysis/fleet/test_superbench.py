"""SuperBench's rule files and results: its own fixtures to the digit where they are at hand, and the same cases made here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from analysis.fleet.grammar import Criteria
from analysis.fleet.samples import by_metric, read_samples
from analysis.fleet.superbench import Rule, diagnose, fixed_threshold_baseline, read_baseline, read_results, read_rules
from suite.errors import InputError
from tests.fixtures.cli import mlhpc
from tests.fixtures.published import validation_fixtures


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return validation_fixtures(tmp_path_factory) / "superbench"


def test_the_verdicts_of_its_own_test(shipped: Path) -> None:
    nodes = read_results(shipped / "test_results.jsonl")
    rules, baseline = read_rules(shipped / "test_rules.yaml"), read_baseline(shipped / "test_baseline.json")
    first, second, third = diagnose(nodes, rules, baseline)
    assert (first.node, first.defective, first.categories) == ("sb-validation-01", True, ("KernelLaunch",))
    assert first.details == (
        "kernel-launch/event_overhead:0(B/L: 0.0060 VAL: 0.1000 VAR: 1577.85% Rule:lambda x:x>0.05)",
    )
    assert (second.defective, second.details) == (False, ())
    assert third.defective
    assert third.categories == ("FailedTest",)
    assert sum(detail.endswith("_miss") for detail in third.details) == 16
    assert "mem-bw/H2D_Mem_BW:0_miss" in third.details
    assert third.details[-1] == "mem-bw/return_code(VAL: 1.0000 Rule:lambda x:x>0)"


def test_the_baselines_of_its_own_test(shipped: Path) -> None:
    nodes = read_results(shipped / "test_generate_baseline_results.jsonl")
    rules = {rule.categories: rule for rule in read_rules(shipped / "test_generate_baseline_diagnosis_rules.yaml")}
    values: dict[str, list[float]] = {}
    for row in nodes.values():
        for name, value in row.items():
            values.setdefault(re.sub(r":\d+$", "", name), []).append(value)
    wanted = {
        "kernel-launch/event_time": 0.0054939130434782605,
        "kernel-launch/wall_time": 0.008994347826086957,
        "mem-bw/d2h_bw": 26.216666666666665,
        "mem-bw/h2d_bw": 26.070833333333336,
    }
    for name, value in wanted.items():
        criteria = rules["KernelLaunch" if name.startswith("kernel") else "Mem"].criteria
        assert criteria is not None
        assert fixed_threshold_baseline(values[name], criteria) == pytest.approx(value, rel=1e-15)


def test_every_shipped_rule_file_is_read(shipped: Path) -> None:
    counts = {path.name: len(read_rules(path)) for path in shipped.rglob("*rule*.yaml") if "summary" not in path.name}
    assert counts == {
        "test_rules.yaml": 3,
        "test_rules_without_baseline.yaml": 3,
        "test_generate_baseline_diagnosis_rules.yaml": 3,
        "quickscan_rule.yaml": 8,
    }
    assert len(read_baseline(shipped / "ndv4_v0.4.0" / "baseline.json")) == 32


def rules_file(path: Path, **rules: object) -> Path:
    path.write_text(json.dumps({"superbench": {"rules": rules}}))
    return path


def rule(function: str, criteria: str, *metrics: str, categories: str = "Kernel", store: bool = False) -> Rule:
    return Rule("r", function, Criteria(criteria, "here"), categories, metrics, store)


def test_a_variance_rule_says_how_far_from_the_baseline() -> None:
    nodes = {"a": {"k/t:0": 3.1, "k/t:1": 2.0}}
    (found,) = diagnose(nodes, [rule("variance", "lambda x:x>0.5", r"k/t:\d+")], {"k/t": 2.0})
    assert found.details == ("k/t:0(B/L: 2.0000 VAL: 3.1000 VAR: 55.00% Rule:lambda x:x>0.5)",)
    (found,) = diagnose({"a": {"m/t": 100.0}}, [rule("variance", "lambda x:x<-0.5", "m/t")], {"m/t": 300.0})
    assert "VAR: -66.67%" in found.details[0]


@pytest.mark.parametrize(("speed", "bad"), [(300.0, False), (100.0, True)])
def test_rules_over_stored_rules(tmp_path: Path, speed: float, bad: bool) -> None:
    stored = {"categories": "TMP", "function": "variance", "criteria": "lambda x:x<-0.5", "store": True}
    path = rules_file(
        tmp_path / "rules.yaml",
        one=stored | {"metrics": ["resnet/throughput"]},
        two=stored | {"metrics": ["vgg/throughput"]},
        both={
            "categories": "CNN",
            "function": "multi_rules",
            "criteria": 'lambda label:True if label["one"]+label["two"]>=2 else False',
        },
    )
    nodes = {"a": {"resnet/throughput": speed, "vgg/throughput": 100.0}}
    (found,) = diagnose(nodes, read_rules(path), {"resnet/throughput": 300.0, "vgg/throughput": 300.0})
    assert found.defective is bad
    assert found.categories == (("CNN",) if bad else ())


def test_a_failure_check_misses_what_no_metric_matches() -> None:
    check = rule("failure_check", "lambda x:x!=0", r"gemm/return_code:[01]", r"gemm/return_code:2", categories="Failed")
    (good,) = diagnose(
        {"a": {"gemm/return_code:0": 0.0, "gemm/return_code:1": 0.0, "gemm/return_code:2": 0.0}}, [check], {}
    )
    assert not good.defective
    (bad,) = diagnose({"a": {"gemm/return_code:0": 0.0, "gemm/return_code:1": -1.0}}, [check], {})
    assert bad.details == ("gemm/return_code:2_miss", "gemm/return_code:1(VAL: -1.0000 Rule:lambda x:x!=0)")


def test_a_node_without_what_a_rule_over_rules_needs_is_a_failed_test(tmp_path: Path) -> None:
    path = rules_file(
        tmp_path / "rules.yaml",
        bw={"categories": "Mem", "store": True, "metrics": ["mem/bw"]},
        even={
            "categories": "Mem",
            "function": "multi_rules",
            "criteria": 'lambda label: min(label["bw"].values())/max(label["bw"].values())<0.95',
        },
    )
    good, bad, missing = diagnose(
        {"a": {"mem/bw": 1.0, "mem/bw:1": 0.99}, "b": {"mem/bw": 1.0, "mem/bw:1": 0.9}, "c": {"x/y": 1.0}},
        read_rules(
            rules_file(
                tmp_path / "r2.yaml",
                **json.loads(path.read_text().replace('"mem/bw"', '"mem/bw.*"'))["superbench"]["rules"],
            )
        ),
        {},
    )
    assert (good.defective, bad.defective, missing.defective) == (False, True, True)
    assert missing.details == ("even_miss",)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"criteria": "lambda x:x>0", "categories": "K", "metrics": ["a/b"]}, "unknown function 'None'"),
        (
            {"criteria": "lambda x:x>0", "function": "varience", "categories": "K", "metrics": ["a/b"]},
            "did you mean 'variance'",
        ),
        ({"criteria": "lambda x:x>0", "function": "value", "metrics": ["a/b"]}, "categories = None: expected a text"),
        ({"function": "value", "categories": "K", "metrics": ["a/b"]}, "no criteria"),
        ({"criteria": "lambda x:x>0", "function": "value", "categories": "K"}, "no metrics"),
        (
            {"criteria": "lambda x:x>0", "function": "value", "categories": "K", "metrics": ["a/(b"]},
            "no regular expression",
        ),
        ({"criteria": "lambda x:x>0", "function": "value", "categories": "K", "metrics": [5]}, "patterns of metrics"),
        (
            {"criteria": "lambda x:x>0", "function": "value", "categories": "K", "metrics": ["a/b"], "store": "true"},
            "true or false",
        ),
        ({"criteria": "exec('1')", "function": "value", "categories": "K", "metrics": ["a/b"]}, "with one argument"),
        (5, "expected function"),
    ],
)
def test_a_wrong_rule_is_named(tmp_path: Path, entry: object, found: str) -> None:
    with pytest.raises(InputError, match="rule 'mine'") as error:
        read_rules(rules_file(tmp_path / "rules.yaml", mine=entry))
    assert found in str(error.value)


def test_a_baseline_of_zero_is_named() -> None:
    with pytest.raises(InputError, match="a/b has the baseline 0"):
        diagnose({"n": {"a/b": 1.0}}, [rule("variance", "lambda x:x>0", "a/b")], {"a/b": 0.0})


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "no node"), ("5\n", ":1: expected an object"), ('{"node": "a"}\nx\n', ":2: 'x': expected a JSON object"),
     ('{"node": "a"}\n{"node": "a"}\n', ":2: node 'a' is there twice"), ('{"a": 1}\n', ":1: expected an object")],
)  # fmt: skip
def test_wrong_results_are_named(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_results(path)
    assert found in str(error.value)


def test_results_are_samples_too(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(
        '{"node": "a", "mem/bw:0": 25.0, "mem/bw:1": 26.0, "kernel/launch_time:0": 0.01, "mem/return_code": 0}\n'
    )
    launch, bandwidth = by_metric(read_samples(path))
    assert (launch.name, launch.better, launch.samples) == ("kernel/launch_time", "less", {"a": (0.01,)})
    assert (bandwidth.name, bandwidth.better, bandwidth.samples) == ("mem/bw", "more", {"a": (25.0, 26.0)})


def test_the_command_judges_by_rules(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"node": "a", "mem/bw:0": 25.0}\n{"node": "b", "mem/bw:0": 20.0}\n')
    (tmp_path / "baseline.json").write_text('{"mem/bw": 25.0}')
    path = rules_file(
        tmp_path / "rules.yaml",
        mem={"function": "variance", "criteria": "lambda x:x<-0.05", "categories": "Mem", "metrics": [r"mem/bw:\d+"]},
    )
    done = mlhpc("preflight", "judge", "results.jsonl", "--rules", path, "--baseline", "baseline.json", cwd=tmp_path)
    assert done.returncode == 1
    for other in ("--history", "--bounds"):
        refused = mlhpc("preflight", "judge", "results.jsonl", "--rules", path, other, "results.jsonl", cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert done.stdout.splitlines() == [
        "a: good", "b: bad (Mem)", "  mem/bw:0(B/L: 25.0000 VAL: 20.0000 VAR: -20.00% Rule:lambda x:x<-0.05)",
    ]  # fmt: skip
