"""MLCommons' own engine: generated rules are golden, and it agrees with us wherever it can judge."""

import json
import logging
import subprocess
from pathlib import Path

import pytest
from msgspec import structs

pytest.importorskip("mlperf_logging", reason="pip install 'mlhpc[official]'")

from mlperf_logging.compliance_checker import mlp_compliance

from mlhpc.suite.card import Constraint, OfficialRules, SizeCard
from mlhpc.suite.compliance import official
from mlhpc.suite.compliance.check import check_log
from mlhpc.suite.compliance.official import render_official_rules, write_rules
from mlhpc.suite.compliance.ruleset import Benchmark, KeyRule, read_ruleset
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.workload import load_workload
from tests.fixtures.logs import Line, edit, hpc_run, our_run, our_runs, results, write
from tests.fixtures.mutations import Case, hpc, ours
from tests.fixtures.systems import system_fields

GOLDEN = Path(__file__).resolve().parents[2] / "fixtures" / "official_rules_toy_mini_closed.yaml"

# What mlperf_logging's engine cannot say in a rule file, by the rule of ours that says it.
BEYOND_THEIR_LANGUAGE = {
    *("clock-jump", "clock-order", "interval-open", "interval-negative", "before-run", "init-gap", "energy-plausible"),
    *("throughput-true", "config-agrees", "event-valid", "event-after-stop", "staging-order", "eval-every-epoch"),
    *("log-empty", "key-conflict", "clock-unit", "metric-agrees", "samples-agree", "eval-order", "stated-twice"),
    *("duration-agrees", "ranks-agree", "cache-agrees", "resumed", "data-verified"),
    *("data-expected", "names-known", "events-whole", "sums-agree", "plan-stated"),
}


def accepts(path: Path, config: str) -> bool:
    """The verdict of mlp_compliance itself; a crash of it is a rejection."""
    logging.disable(logging.CRITICAL)
    mlp_compliance.enqueued_configs.clear()
    checker = mlp_compliance.make_checker("hpc", "3.0.0", False, False)
    try:
        return bool(mlp_compliance.main(str(path), config, checker)[0])
    except Exception:
        return False
    finally:
        logging.disable(logging.NOTSET)


def toy() -> Benchmark:
    card = SizeCard(
        description="a toy", metric="eval_accuracy", metric_name="accuracy", threshold=0.8, direction="max",
        required_runs=5, train_samples=100, eval_samples=10, model_parameters=1, forward_flops_per_sample=1,
        training_flops_per_sample=3, sample_bytes=4,
        official=OfficialRules(benchmark="deepcam", threshold=0.82, identical=False, required_runs=5), constraints={},
    )  # fmt: skip
    keys = {
        "opt_name": Constraint(one_of=("Adam", "LAMB")),
        "dropout": Constraint(at_least=0, less_than=1, count="optional"),
        "train_samples": Constraint(equals=100),
        "shuffle": Constraint(equals=True),
        "opt_max_grad_norm": Constraint(when={"opt_name": "LAMB"}, equals=1.0),
    }
    closed = {key: KeyRule(**structs.asdict(rule)) for key, rule in keys.items()}
    return Benchmark(
        metric="eval_accuracy", threshold=0.8, direction="max", required_runs=5, metric_name="IoU", source="this test",
        name="deepcam", size="mini", workload="toy", closed=closed, card=card,
    )  # fmt: skip


def test_generated_rules_are_golden() -> None:
    assert render_official_rules(toy()) == GOLDEN.read_text(encoding="utf-8")


def test_rules_are_written_for_every_workload_size_and_division(tmp_path: Path) -> None:
    names = {path.name for path in write_rules(tmp_path / "rules")}
    expected = {
        f"{item.name}_{size}_{division}.yaml"
        for item in load_descriptors().values()
        for size in item.card().sizes
        for division in ("closed", "open")
    }
    assert names == expected


@pytest.fixture(scope="module")
def rules_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    benchmark = read_ruleset("mlhpc-1.0").benchmark("cosmoflow", "smoke")
    assert benchmark is not None
    path = tmp_path_factory.mktemp("rules") / "smoke.yaml"
    path.write_text(render_official_rules(benchmark), encoding="utf-8")
    return str(path)


@pytest.mark.drawn(60)
@pytest.mark.parametrize("case", ours(), ids=lambda case: case.name)
def test_their_engine_with_our_rules_agrees_with_us(tmp_path: Path, rules_file: str, case: Case) -> None:
    path = write(tmp_path / "result_0.txt", case.lines())
    if case.rule is None:
        assert accepts(path, rules_file)
    elif case.rule not in BEYOND_THEIR_LANGUAGE:
        assert not accepts(path, rules_file)


def run_of(workload: str, **changes: object) -> list[Line]:
    """A log of a workload's own smoke config that reaches the target in its third epoch."""
    chosen = load_descriptor(workload)
    logged = load_workload(chosen)(load_config(chosen, "smoke")).hyperparameters() | changes
    missed, better = (0.01, 1.0) if chosen.card().size("smoke").direction == "max" else (100.0, 0.9)
    values = (missed, missed * 1.5, chosen.card().size("smoke").threshold * better)
    return our_run(workload=workload, values=values, hyperparameters=logged)


def verdicts(tmp_path: Path, workload: str, lines: list[Line]) -> tuple[list[str], bool]:
    """Errors of ours, and whether their engine accepts the log by the rules that were generated for it."""
    benchmark = read_ruleset("mlhpc-1.0").benchmark(load_descriptor(workload).card().mlperf_name, "smoke")
    assert benchmark is not None
    rules, log = tmp_path / "rules.yaml", write(tmp_path / "result_0.txt", lines)
    rules.write_text(render_official_rules(benchmark), encoding="utf-8")
    found = check_log(log, read_ruleset("mlhpc-1.0")).findings
    return [item.message for item in found if item.severity == "error"], accepts(log, str(rules))


@pytest.mark.parametrize("workload", sorted(load_descriptors()))
def test_the_log_of_every_workload_passes_ours_and_theirs(tmp_path: Path, workload: str) -> None:
    assert verdicts(tmp_path, workload, run_of(workload)) == ([], True)


def test_flags_of_an_optimizer_are_asked_of_runs_with_that_optimizer(tmp_path: Path) -> None:
    flags = {"opt_bias_correction": True, "opt_grad_averaging": True, "opt_max_grad_norm": 1.0}
    assert verdicts(tmp_path / "all", "deepcam", run_of("deepcam", opt_name="LAMB", **flags)) == ([], True)
    for flag in flags:
        rest = {name: value for name, value in flags.items() if name != flag}
        ours, theirs = verdicts(tmp_path / flag, "deepcam", run_of("deepcam", opt_name="LAMB", **rest))
        assert ours == [f"required key {flag!r} is not logged"]
        assert not theirs


@pytest.mark.drawn(20)
@pytest.mark.parametrize("case", [case for case in hpc() if "traversal" not in case.name], ids=lambda case: case.name)
def test_what_their_own_rules_reject_we_reject(tmp_path: Path, case: Case) -> None:
    path = write(tmp_path / "result_0.txt", case.lines())
    ours_accepts = not any(item.severity == "error" for item in check_log(path, read_ruleset("3.0.0")).findings)
    assert ours_accepts is (case.rule is None)
    if not accepts(path, "hpc_3.0.0/common.yaml"):
        assert not ours_accepts


def test_logs_are_judged_by_generated_rules(tmp_path: Path) -> None:
    verdict = official.run_official([our_runs(tmp_path / "runs")])
    assert verdict.accepted, verdict.text()
    assert len(verdict.runs) == 5
    write(tmp_path / "runs" / "result_0.txt", edit("dropout", value=7)(our_run(seed=77)))
    verdict = official.run_official([tmp_path / "runs"])
    assert not verdict.accepted
    assert "CHECK for 'dropout' failed: v['value'] < 1" in verdict.text()


def test_a_log_that_names_a_file_is_not_given_to_their_tools(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    evil = tmp_path / "evil_common.yaml"
    evil.write_text(f"- BEGIN:\n    CODE: \"open({str(marker)!r}, 'w')\"\n")
    path = write(
        tmp_path / "result_0.txt", edit("submission_division", value=f"../../../../../../..{tmp_path}/evil")(hpc_run())
    )
    verdict = official.run_official([path])
    assert not verdict.accepted
    assert "not a plain word" in verdict.text()
    assert not marker.exists()


def package(root: Path, size: str = "smoke", **system: str) -> Path:
    folder = root / "ACME"
    our_runs(folder / "results" / "bed" / "strong" / "cosmoflow", size=size)
    one_cpu = {"number_of_nodes": "1", "accelerators_per_node": "0"}
    (folder / "systems").mkdir(parents=True)
    (folder / "systems" / "bed.json").write_text(json.dumps(system_fields(**one_cpu | system)))
    return folder


def test_the_package_checker_may_complain_of_the_size_alone(tmp_path: Path) -> None:
    folder = package(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    verdict = official.run_official([folder])
    assert verdict.accepted, verdict.text()
    text = verdict.text()
    assert "MLPerf has 0.124" in text
    assert "needs 5 runs where MLPerf needs 10" in text
    assert "reference points are of its own configuration" in text
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_fewer_instances_than_mlperf_needs_are_accepted_if_the_card_asks_for_no_more(tmp_path: Path) -> None:
    benchmark = read_ruleset("mlhpc-1.0").benchmark("cosmoflow", "smoke")
    assert benchmark is not None

    def accepted(instances: int) -> bool:
        text = f"ERROR - Expected at least 10 runs, but detected {instances} runs.\nFOUND ERRORS"
        return official._judge_package_text(tmp_path, text, [benchmark]).accepted

    assert accepted(5)
    assert not accepted(4)


@pytest.mark.parametrize("late", ["compliance_checker", "system_desc_checker", "package_checker"])
def test_a_tool_that_is_stopped_has_not_rejected_anything(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if f"mlperf_logging.{late}" in command:
            raise subprocess.TimeoutExpired(command, 1)
        said = "FOUND NO ERRORS, SUCCESS\n" if "mlperf_logging.package_checker" in command else "SUCCESS\n"
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(official.subprocess, "run", run)
    verdict = official.run_official([package(tmp_path)])
    text = verdict.text()
    assert not verdict.accepted
    assert f"  no answer  {late}" in text
    assert "without a verdict, which is none against the results" in text
    assert "REJECTED" not in text
    assert text.count("verdict") == text.count("no answer")


@pytest.mark.long
def test_any_other_complaint_and_a_missing_field_of_the_system_description_are_errors(tmp_path: Path) -> None:
    folder = package(tmp_path)
    logs = folder / "results" / "bed" / "strong" / "cosmoflow"
    write(logs / "result_1.txt", edit("opt_name", value="adam")(our_run(seed=100)))
    write(logs / "result_2.txt", edit("seed", value=100)(our_run()))
    path = folder / "systems" / "bed.json"
    fields = json.loads(path.read_text())
    del fields["cooling"]
    path.write_text(json.dumps(fields))
    text = official.run_official([folder]).text()
    assert "REJECTED  package_checker" in text
    assert "error: CHECK for 'opt_name' failed: v['value'] in ['sgd', 'SGD']" in text
    assert "error: Seed checker failed" in text
    assert "REJECTED  system_desc_checker" in text
    assert "Missing field cooling" in text


def test_published_form_is_judged_by_their_own_rules(tmp_path: Path) -> None:
    runs = results(tmp_path / "runs", 2, lambda index: hpc_run(seed=index + 1))
    verdict = official.run_official([runs])
    assert verdict.accepted, verdict.text()
    assert "compliance_checker (hpc 3.0.0)" in verdict.text()
