"""MLPerf Training: its logs are judged by its rounds, and its logs among HPC's are told in one line."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlhpc.suite.compliance import rcp_limit
from mlhpc.suite.compliance.check import check, check_log
from mlhpc.suite.compliance.consistency import EvalSchedule
from mlhpc.suite.compliance.output import summarise_verdict
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Line, Lines, Mutation, drop, edit, hpc_run, our_run, results, write
from tests.fixtures.mutations import Case
from tests.fixtures.systems import system_fields
from tests.fixtures.training import START_MS, training, training_run


@pytest.mark.parametrize(("round_", "case"), training(), ids=lambda item: getattr(item, "name", str(item)))
def test_mutations_of_training_logs(tmp_path: Path, round_: str, case: Case) -> None:
    log = check_log(write(tmp_path / "result_0.txt", case.lines()), read_ruleset(f"training-{round_}"))
    found = {finding.rule for finding in log.findings if finding.severity == "error"}
    assert case.rule in found if case.rule else not found, log.findings


# Another suite's log


@pytest.mark.parametrize("name", ["0.7.0", "1.0.0", "2.0.0", "3.0.0"])
@pytest.mark.parametrize("benchmark", ["llama2_70b_lora", "stable_diffusion", "rgat"])
def test_a_training_log_judged_by_hpc_is_one_line(tmp_path: Path, name: str, benchmark: str) -> None:
    path = write(tmp_path / "result_0.txt", training_run(benchmark))
    (finding,) = check([path], name).findings
    assert (finding.rule, finding.severity) == ("benchmark-known", "error")
    assert (
        finding.message
        == f"a log of MLPerf Training ({benchmark!r}): it is not judged by {read_ruleset(name).data.title}"
    )
    assert finding.line is not None


@pytest.mark.parametrize("benchmark", ["resnet", "maskrcnn", "gpt3", "unet3d", "minigo", "ncf"])
def test_a_log_of_a_training_round_without_ruleset_is_one_line(tmp_path: Path, benchmark: str) -> None:
    lines = edit("submission_benchmark", value=benchmark)(training_run())
    verdict = check([write(tmp_path / "result_0.txt", lines)])
    (finding,) = verdict.findings
    assert finding.message.startswith(f"a log of MLPerf Training ({benchmark!r})")
    assert verdict.rulesets == ("none",)


@pytest.mark.parametrize("round_", ["v4.0", "v4.1", "v0.5", "v2.0", "v3.0", "v1.0", "v7.0"])
def test_a_training_round_without_ruleset_is_one_line(tmp_path: Path, round_: str) -> None:
    """MLPerf HPC has rounds v1.0 to v3.0: the folder's name says that they are not meant."""
    for submitter, benchmark in (("ACME", "llama2_70b_lora"), ("Other", "resnet")):
        folder = tmp_path / f"training_results_{round_}" / submitter
        for system in ("big", "small"):
            lines = edit("submission_benchmark", value=benchmark)(training_run())
            results(folder / "results" / system / benchmark, 3, lambda n, lines=lines: lines)
        (folder / "systems").mkdir()
    verdict = check([tmp_path])
    (finding,) = verdict.findings
    assert (finding.rule, finding.severity, Path(finding.file).name) == (
        "round-known",
        "error",
        f"training_results_{round_}",
    )
    assert "v5.0, v5.1, v6.0, v6.1" in finding.message
    assert (verdict.rulesets, verdict.logs, verdict.packages) == (("none",), 12, 2)
    assert summarise_verdict(verdict).startswith("not judged, for lack of rules: 12 logs, 2 packages, ruleset none: ")
    scored = mlhpc("score", tmp_path)
    assert (scored.returncode, scored.stderr.count("\n")) == (2, 1)
    assert f"MLPerf Training {round_} has no ruleset here" in scored.stderr
    assert "--ruleset judges by another" in scored.stderr
    assert "round-known" not in {item.rule for item in check([tmp_path], "training-5.0.0").findings}


@pytest.mark.parametrize(
    ("name", "ruleset"),
    [("training_results_v5.0", "training-5.0.0"), ("mlperf_training_results_v5.1", "training-5.1.0"),
     ("training-results-v6.0", "training-6.0.0"), ("v5.0", "training-5.0.0"), ("v4.0", "training-6.1.0")],
)  # fmt: skip
def test_a_training_round_with_a_ruleset_is_judged(tmp_path: Path, name: str, ruleset: str) -> None:
    folder = tmp_path / name / "ACME"
    results(folder / "results" / "big" / "llama2_70b_lora", 10, lambda n: training_run(seed=n + 1))
    (folder / "systems").mkdir()
    verdict = check([tmp_path])
    assert verdict.rulesets == (ruleset,)
    assert "round-known" not in {item.rule for item in verdict.findings}


def test_a_folder_of_them_is_one_line_a_log(tmp_path: Path) -> None:
    folder = tmp_path / "hpc_results_v3.0" / "ACME" / "results" / "big" / "strong" / "bert"
    results(folder, 10, lambda n: edit("submission_benchmark", value="bert")(training_run(seed=n)))
    (folder.parents[3] / "systems").mkdir()
    (folder.parents[3] / "systems" / "big.json").write_text(json.dumps(FIELDS))
    found = [finding.rule for finding in check([tmp_path]).findings if finding.severity == "error"]
    assert found == ["benchmark-known"] * 10, check([tmp_path]).findings


@pytest.mark.parametrize("name", [name for name in list_rulesets() if name.startswith("training")])
def test_an_hpc_log_judged_by_training_is_one_line(tmp_path: Path, name: str) -> None:
    (finding,) = check([write(tmp_path / "result_0.txt", hpc_run())], name).findings
    assert finding.message.startswith("a log of MLPerf HPC ('cosmoflow')")


@pytest.mark.parametrize("benchmark", ["cosmoflw", "", "../bert", "BERT", 7, None])
def test_a_benchmark_of_nobody_is_judged_as_before(tmp_path: Path, benchmark: object) -> None:
    verdict = check([write(tmp_path / "result_0.txt", edit("submission_benchmark", value=benchmark)(hpc_run()))])
    assert "a log of" not in " ".join(finding.message for finding in verdict.findings)
    assert not verdict.compliant


def test_the_newest_round_that_has_the_benchmark_holds_without_a_folder(tmp_path: Path) -> None:
    for benchmark, name in (
        ("stable_diffusion", "5.0.0"),
        ("rgat", "5.1.0"),
        ("llama31_405b", "6.0.0"),
        ("flux1", "6.1.0"),
    ):
        path = write(tmp_path / benchmark / "result_0.txt", training_run(benchmark))
        assert check([path]).rulesets == (f"training-{name}",)
    assert check([write(tmp_path / "ours" / "result_0.txt", our_run())]).rulesets == ("mlhpc-1.0",)


# A result of Training

FIELDS = system_fields(number_of_nodes="1", accelerators_per_node="1", host_processors_per_node="1")


def package(
    root: Path, benchmark: str = "llama2_70b_lora", runs: int = 10, evals: int = 8, round_: str = "5.0"
) -> Path:
    folder = root / f"training_results_v{round_}" / "ACME"
    results(
        folder / "results" / "big" / benchmark,
        runs,
        lambda n: training_run(benchmark, seed=n + 1, evals=evals, start_ms=START_MS + n * 10**6 + 77 * n * n),
    )
    (folder / "systems").mkdir()
    (folder / "systems" / "big.json").write_text(json.dumps(FIELDS | {"accelerators_per_node": "4096"}))
    code = folder / "benchmarks" / benchmark / "implementations" / "ours"
    code.mkdir(parents=True)
    (code / "run.sh").write_text("#\n")
    return folder


def errors(folder: Path) -> set[str]:
    return {finding.rule for finding in check([folder]).findings if finding.severity == "error"}


@pytest.mark.parametrize(
    ("benchmark", "runs", "evals"),
    [("llama2_70b_lora", 10, 9), ("rgat", 10, 17), ("llama31_405b", 3, 8), ("stable_diffusion", 10, 6)],
)
def test_a_result_of_training_passes_and_has_a_score(tmp_path: Path, benchmark: str, runs: int, evals: int) -> None:
    folder = package(tmp_path, benchmark, runs, evals)
    verdict = check([folder])
    assert verdict.compliant, verdict.findings
    assert verdict.rulesets == ("training-5.0.0",)
    (scored,) = check([folder]).results
    score = scored.score
    assert score.valid
    assert score.required_runs == runs
    assert sum(run.dropped is None for run in score.runs) == runs - 2


def test_runs_are_counted_by_benchmark(tmp_path: Path) -> None:
    assert "run-count" in errors(package(tmp_path / "a", "llama31_405b", 4))
    assert "run-count" in errors(package(tmp_path / "b", "llama2_70b_lora", 9, 9))


def test_a_result_that_converges_too_fast_is_found(tmp_path: Path) -> None:
    assert errors(package(tmp_path / "a", "llama2_70b_lora", 10, 6)) == {"rcp-speed"}


def test_one_evaluation_sooner_is_allowed_where_the_tool_allows_it(tmp_path: Path) -> None:
    assert not errors(package(tmp_path / "a", "llama31_405b", 3, 7))
    assert errors(package(tmp_path / "b", "llama31_405b", 3, 6)) == {"rcp-speed"}


def test_a_batch_above_all_reference_points_fails(tmp_path: Path) -> None:
    folder = package(tmp_path, "llama2_70b_lora", 10, 9)
    for path in (folder / "results" / "big" / "llama2_70b_lora").iterdir():
        path.write_bytes(
            path.read_bytes().replace(
                b'"key": "global_batch_size", "value": 8', b'"key": "global_batch_size", "value": 256'
            )
        )
    assert errors(folder) == {"rcp-above"}


def test_scenario_folders_are_not_trainings(tmp_path: Path) -> None:
    folder = package(tmp_path, evals=9) / "results" / "big"
    (folder / "llama2_70b_lora").rename(folder / "moved")
    (folder / "strong").mkdir()
    (folder / "moved").rename(folder / "strong" / "llama2_70b_lora")
    assert "results-layout" in errors(folder.parents[1])


# Reference points pruned as the tool of the rounds does


def test_one_pass_of_pruning_keeps_a_point_that_the_hull_has_not() -> None:
    """Submissions at this batch were judged by the point itself; the hull would have asked for more epochs."""
    points = read_ruleset("training-5.0.0").data.benchmarks["dlrm_dcnv2"].reference_points
    assert 55296 in [point.batch for point in rcp_limit.drop_concave_points(points)]
    assert 55296 not in [point.batch for point in rcp_limit.compute_lower_hull(points)]
    once, hull = rcp_limit.compute_limit(points, 55296, 10, hull=False), rcp_limit.compute_limit(points, 55296, 10)
    assert (once.kind, hull.kind) == ("exact", "interpolated")
    assert once.minimum == pytest.approx(0.72832, abs=1e-4)  # what rcp_checker prints
    assert hull.minimum == pytest.approx(0.73826, abs=1e-4)


# When a run is evaluated


@pytest.mark.parametrize(
    ("batch", "first"), [(8192, 25 * 280 * 8192), (16384, 31 * 140 * 16384), (32768, 41 * 70 * 32768)]
)
def test_the_schedule_of_dlrmv4_is_that_of_its_source(batch: int, first: int) -> None:
    """The source states blocks 25, 31 and 41 of the grid at these batch sizes."""
    schedule = read_ruleset("training-6.1.0").data.benchmarks["dlrmv4"].schedule
    assert schedule.first(batch) == first
    step = schedule.step(batch)
    assert schedule.breach(batch, [first, first + step, first + 3 * step]) is None
    assert schedule.breach(batch, [first, first + step // 2]) is not None


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        ([4608, 4864, 5120], None),
        ([], None),
        ([4608], None),
        ([4608, 5120], 1),
        ([4352, 4608], 0),
        ([4864], 0),
        ([None], 0),
        ([4608, None], 1),
        ([4608, 4608], 1),
        ([4608, 4864, 4864], 2),
        ([-4608], 0),
    ],
)
def test_every_evaluation_is_due(seen: list[float | None], wrong: int | None) -> None:
    schedule = read_ruleset("training-6.1.0").data.benchmarks["qwen35_397b_grpo"].schedule
    breach = schedule.breach(256, seen)
    assert (breach[0] if breach else None) == wrong


@pytest.mark.parametrize("batch", [0, -1, 1e-300, 1e300, float("nan"), float("inf"), "2304", None, True, [], {}])
@pytest.mark.parametrize(
    ("round_", "benchmark"),
    [("5.0.0", "llama31_405b"), ("6.0.0", "llama31_405b"), ("6.1.0", "flux1"), ("6.1.0", "deepseekv3_671b")],
)
def test_no_batch_size_stops_the_check(tmp_path: Path, round_: str, benchmark: str, batch: object) -> None:
    path = write(tmp_path / "result_0.txt", edit("global_batch_size", value=batch)(training_run(benchmark)))
    assert "key-value" in {item.rule for item in check_log(path, read_ruleset(f"training-{round_}")).findings}


def test_a_schedule_rounds_down_or_up() -> None:
    assert EvalSchedule(per_batch=42, plus=24576, up=False, then="any").first(16384) == 16384 * 43
    assert EvalSchedule(per_batch=42, plus=24576, up=True, then="any").first(16384) == 16384 * 44


# Power readings


def readings(
    folder: Path, name: str, *, start_s: float, stop_s: float, watts: object = 700.0, eff: object = 0.94
) -> None:
    lines = [Line("power_measurement_start", None, start_s * 1e3), Line("conversion_eff", eff, start_s * 1e3)]
    lines += [Line("power_reading", watts, 1e3 * (start_s + n)) for n in range(int(stop_s - start_s) + 2)]
    lines.append(Line("power_measurement_stop", None, lines[-1].time_ms))
    write(folder / name, lines)


def powered(root: Path) -> Path:
    """A package whose runs all have readings of two nodes and a switch; returns the folder of the readings."""
    folder = package(root, "llama31_405b", 3) / "results" / "big" / "llama31_405b"
    for path in sorted(folder.glob("result_*.txt")):
        record = check_log(path, read_ruleset("training-5.0.0")).record
        assert record.run_stop_s is not None
        for name in ("node_0.txt", "node_1.txt", "sw_0.txt"):
            readings(folder / "power" / path.stem, name, start_s=record.run_start_s - 1, stop_s=record.run_stop_s)
    return folder / "power"


def again(folder: Path, **changes: object) -> None:
    """Write node 1 of run 1 again, with changes."""
    record = check_log(folder.parent / "result_1.txt", read_ruleset("training-5.0.0")).record
    assert record.run_stop_s is not None
    given: dict[str, object] = {"start_s": record.run_start_s - 1, "stop_s": record.run_stop_s}
    shift = changes.pop("shift_s", 0.0)
    assert isinstance(shift, float)
    readings(folder / "result_1", "node_1.txt", **(given | {"start_s": record.run_start_s - 1 + shift} | changes))  # type: ignore[arg-type]


def linked(path: Path) -> None:
    """A link to a file outside the package takes the place of a file."""
    outside = path.parents[7] / "outside.txt"
    path.rename(outside)
    path.symlink_to(outside)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rename(name: str, other: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).rename(folder / other) and None


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("rule", "damage"),
    [
        (None, lambda folder: None),
        (None, lambda folder: (folder / "README.txt").write_text("notes")),
        (None, lambda folder: again(folder, watts=12)),
        (None, lambda folder: again(folder, eff=1.0)),
        (None, lambda folder: again(folder, shift_s=2.0)),
        ("power-files", remove("result_1/node_1.txt")),
        ("power-files", rename("result_1/node_1.txt", "result_1/node_2.txt")),
        ("power-files", rename("result_1/node_1.txt", "result_1/node_01.txt")),
        ("power-files", rename("result_1/node_1.txt", "result_1/node_-1.txt")),
        ("power-files", rename("result_1/node_1.txt", "result_1/node_x.txt")),
        ("power-files", rename("result_1/sw_0.txt", "result_1/sw_1.txt")),
        ("power-files", remove("result_1/sw_0.txt")),
        ("power-files", rename("result_1", "result_7")),
        ("power-files", lambda folder: linked(folder / "result_1" / "node_1.txt")),
        ("power-files", lambda folder: os.mkfifo(folder / "result_1" / "node_2.txt")),
        ("power-readings", lambda folder: again(folder, watts=0.0)),
        ("power-readings", lambda folder: again(folder, watts=-700.0)),
        ("power-readings", lambda folder: again(folder, watts="much")),
        ("power-readings", lambda folder: again(folder, watts=float("nan"))),
        ("power-efficiency", lambda folder: again(folder, eff=0.0)),
        ("power-efficiency", lambda folder: again(folder, eff=-0.9)),
        ("power-efficiency", lambda folder: again(folder, eff=94)),
        ("power-window", lambda folder: again(folder, shift_s=60.0)),
        ("power-readings", lambda folder: (folder / "result_1" / "node_1.txt").write_text("")),
    ],
)
def test_power_readings(tmp_path: Path, rule: str | None, damage: Callable[[Path], object]) -> None:
    folder = powered(tmp_path)
    damage(folder)
    found = {finding.rule for finding in check([tmp_path]).findings if finding.severity != "info"}
    of_any_file = {"link-outside", "special-file"}  # what rules for every file of a package say too
    if rule == "power-files":
        of_any_file.add("power-nodes")  # a switch that is gone
    assert found - of_any_file == ({rule} if rule else set()), check([tmp_path]).findings


def test_a_run_that_logs_no_seed_is_an_error_of_the_result(tmp_path: Path) -> None:
    folder = package(tmp_path, evals=9)
    path = folder / "results" / "big" / "llama2_70b_lora" / "result_3.txt"
    write(path, drop("seed")(training_run(seed=4, evals=9)))
    assert errors(folder) == {"seed-missing"}


def with_rates(factor: float, faster: float = 1.0) -> Mutation:
    """A rate beside each evaluation, ``factor`` times the true one, of a run whose times were then made shorter."""

    def apply(lines: Lines) -> Lines:
        start = next(line.time_ms for line in lines if line.key == "run_start")
        result: Lines = []
        for line in lines:
            at = start + (line.time_ms - start) * faster if line.time_ms > start else line.time_ms
            if line.key == "block_stop":
                rate = {"throughput": factor * 384 / 30.0}
                result.append(
                    Line("tracked_stats", rate, at, {"samples_count": (line.metadata or {})["samples_count"]})
                )
            result.append(replace(line, time_ms=at))
        return result

    return apply


@pytest.mark.parametrize(
    ("factor", "faster", "legal"),
    [
        (1.0, 1.0, True), (1.1, 1.0, True), (0.95, 1.0, True), (30.0, 1.0, True), (1000.0, 1.0, True),
        (1.0, 0.9, True), (1.0, 2.0, True), (1.2, 0.8, True), (0.8, 1.0, True), (1e6, 0.001, True),
        (1.0, 0.1, False), (1.0, 0.3, False), (1.0, 0.5, False), (1.0, 0.01, False), (0.3, 1.0, False),
        (0.1, 1.0, False), (1.1, 0.1, False), (2.0, 0.2, False), (0.9, 0.45, False), (1.0, 0.001, False),
    ],
)  # fmt: skip
def test_a_training_run_is_no_faster_than_its_rates(tmp_path: Path, factor: float, faster: float, legal: bool) -> None:
    path = write(tmp_path / "result_0.txt", with_rates(factor, faster)(training_run(evals=9)))
    found = [item.rule for item in check_log(path, read_ruleset("training-5.0.0")).findings if item.severity == "error"]
    assert ("throughput-run" not in found) == legal
