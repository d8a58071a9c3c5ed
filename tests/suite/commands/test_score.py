"""`mlhpc score` never shows a score without its verdict: what the checker finds in a result or its package makes it invalid."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import START_MS, Mutation, drop, edit, our_run, our_runs, results, shift_after, write
from tests.fixtures.package_mutations import example, lines_of, strong, weak


def groups(path: Path, code: int) -> list[dict[str, Any]]:
    done = mlhpc("score", path, "--format", "json")
    assert done.returncode == code, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["groups"]
    return found


def test_the_score_of_a_compliant_result_is_valid(tmp_path: Path) -> None:
    (group,) = groups(our_runs(tmp_path / "runs"), 0)
    assert (group["valid"], group["compliant"], group["errors"], group["reason"]) == (True, True, 0, None)
    assert "NOT compliant" not in mlhpc("score", tmp_path / "runs").stdout


@pytest.mark.parametrize(
    "mutation",
    [
        edit("dropout", value=7),
        edit("run_stop", add_ms=-3_000),
        drop("opt_name"),
        edit("seed", value=101),
        edit("submission_org", value=""),
        shift_after("run_start", 0, 5_000),
        edit("eval_error", 1, meta={"epoch_num": 9}),
        edit("ruleset", value="3.0.0"),
    ],
)
def test_a_score_says_that_its_runs_are_not_compliant(tmp_path: Path, mutation: Mutation) -> None:
    runs = our_runs(tmp_path / "runs")
    write(runs / "result_2.txt", mutation(lines_of(runs / "result_2.txt")))
    done = mlhpc("score", runs)
    found = json.loads(mlhpc("check", runs, "--format", "json").stdout)["findings"]
    count = sum(item["severity"] == "error" for item in found)
    line = f"NOT compliant: {count} error{'s' if count > 1 else ''}, see mlhpc check"
    assert done.returncode == 1
    assert done.stdout.splitlines()[2].startswith("  score ")
    assert done.stdout.splitlines()[3] == f"  {line}"
    (group,) = groups(runs, 1)
    assert (group["valid"], group["compliant"], group["errors"], group["reason"]) == (False, False, count, line)
    assert group["score_min"] > 0


@pytest.mark.parametrize(
    ("damage", "of_strong", "of_weak"),
    [
        (lambda f: next((f / "systems").iterdir()).write_text("{"), True, True),  # the package is not compliant
        (lambda f: (f / "systems" / "x.json").write_text("{}"), True, True),
        (
            lambda f: write(strong(f) / "result_0.txt", edit("dropout", value=7)(lines_of(strong(f) / "result_0.txt"))),
            True,
            False,
        ),
        (
            lambda f: write(weak(f) / "result_0.txt", edit("dropout", value=7)(lines_of(weak(f) / "result_0.txt"))),
            False,
            True,
        ),
    ],
)
def test_errors_of_a_package_are_those_of_all_its_results(
    tmp_path: Path, damage: Callable[[Path], object], of_strong: bool, of_weak: bool
) -> None:
    folder = example(tmp_path)
    damage(folder)
    (folder / "manifest.sha256").unlink()
    found = {group["scenario"]: group["valid"] for group in groups(folder, 1)}
    assert found == {"strong": not of_strong, "weak": not of_weak}


def test_what_is_no_score_says_both(tmp_path: Path) -> None:
    runs = our_runs(tmp_path / "runs", 3)
    text = mlhpc("score", runs).stdout
    assert "not a score: 3 of the 5 required runs complete" in text
    assert "NOT compliant: 1 error, see mlhpc check" in text


def test_one_failed_run_is_no_error(tmp_path: Path) -> None:
    runs = our_runs(tmp_path / "runs")
    write(runs / "result_2.txt", our_run(values=(0.5, 0.4), seed=77, start_ms=START_MS + 1))
    (group,) = groups(runs, 0)
    assert (group["valid"], group["runs_converged"]) == (True, 4)


def test_whoever_scores_by_another_ruleset_is_told(tmp_path: Path) -> None:
    runs = results(tmp_path / "runs", 5, lambda n: our_run(seed=n))
    assert "NOT compliant" in mlhpc("score", runs, "--ruleset", "3.0.0").stdout


def test_a_comparison_says_which_side_is_not_compliant(tmp_path: Path) -> None:
    a, b = our_runs(tmp_path / "a"), our_runs(tmp_path / "b", start_ms=START_MS + 10**9)
    write(b / "result_2.txt", edit("dropout", value=7)(lines_of(b / "result_2.txt")))
    text = mlhpc("compare", a, b).stdout
    assert "; B is NOT compliant (" in text
    assert "A is NOT compliant" not in text


def test_a_cut_log_and_missing_baselines_are_said(tmp_path: Path) -> None:
    run = our_runs(tmp_path / "run")
    log = run / "result_2.txt"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 3])
    assert "  result_2.txt did not converge: no run_start" in mlhpc("score", run).stdout.splitlines()
    assert "simple predictors: not logged" not in mlhpc("score", run).stdout
    for path in run.glob("result_*.txt"):
        path.write_text(re.sub(r'("key": "baseline", "value": )\{[^}]*\}', r"\1{}", path.read_text()))
    assert "  simple predictors: not logged (the card of this size states none)" in mlhpc("score", run).stdout


def test_baselines_stand_beside_a_score_and_oracle_baselines_apart(tmp_path: Path) -> None:
    """Logs of earlier versions have the oracle baselines under the name "attainable"."""
    run = our_runs(tmp_path / "r")
    for number, log in enumerate(sorted(run.rglob("result_*.txt"))):
        name = ("oracle", "attainable")[number % 2]
        stated = '{"mean": 0.5}, "metadata": {'
        log.write_text(log.read_text().replace(stated, f'{stated}"{name}": {{"knows": 0.1, "forged": "NaN"}}, '))
        record = summarise_log(read_events(log))
        assert (dict(record.baselines), dict(record.oracle_baselines)) == ({"mean": 0.5}, {"knows": 0.1})
    lines = mlhpc("score", run).stdout.splitlines()
    assert "  simple predictors reach on such data: mean 0.5000" in lines
    assert "  oracle baselines, which know how the data were made: knows 0.1000" in lines


def test_a_score_names_the_seconds_for_which_a_run_was_suspended(tmp_path: Path) -> None:
    run = our_runs(tmp_path / "run")
    log = run / "result_1.txt"
    lines = log.read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines) if '"run_stop"' in line]
    lines.insert(
        place, re.sub(r'"key": "run_stop", "value": [^,]*', '"key": "suspended", "value": 300.0', lines[place])
    )
    log.write_text("\n".join(lines) + "\n")
    assert "  suspended: run 1 for 5 min" in mlhpc("score", run).stdout.splitlines()


def test_a_score_of_two_states_says_so(tmp_path: Path) -> None:
    run = our_runs(tmp_path / "run")

    def score(times_s: tuple[float, ...]) -> str:
        for trial, time_s in enumerate(times_s):
            log = run / f"result_{trial}.txt"
            late_ms = round(1000 * (time_s - (summarise_log(read_events(log)).time_to_train_s or 0.0)))
            write(log, edit("run_stop", add_ms=late_ms)(lines_of(log)))
        return mlhpc("score", run).stdout

    assert "in their order" not in score((20, 20.3, 19.9, 20.2, 20.1))
    said = "  in their order: runs 3 to 5 of this result take 1.24 times as long as 1 to 2"
    assert said in score((20, 20.1, 24.9, 25, 24.8)).splitlines()
