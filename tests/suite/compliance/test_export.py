"""Results for other tools: one expression reads every figure, no score without compliance, forms that their readers take."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import validate

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.exchange import figures_of_merit
from mlhpc.suite.compliance.exchange.figures_of_merit import (
    FOM_PATTERN,
    compute_figures_of_merit,
    make_result_names,
    render_lines,
)
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Line, chain, drop, edit, insert, our_run, our_runs, write
from tests.fixtures.package_mutations import example
from tests.fixtures.runs import run_folder

UNITS = {"1", "s", "min", "{model}/min"}
NAME = "unknown/cosmoflow-smoke/strong/1x2"


def lines_of(text: str) -> list[tuple[str, str, float, str]]:
    """What the one expression of docs/exchange.md finds, and that it finds every line."""
    found = re.findall(FOM_PATTERN, text, re.MULTILINE)
    assert len(found) == text.count("\n")
    return [(result, key, float(value), unit) for result, key, value, unit in found]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "a run")


def test_one_expression_reads_every_figure(runs: Path) -> None:
    found = lines_of(mlhpc("score", "--format", "fom", runs).stdout)
    (scored,) = check([runs]).results
    assert [(key, value, unit) for _, key, value, unit in found] == [
        each[:3] for each in compute_figures_of_merit(scored)
    ]
    assert {unit for *_, unit in found} <= UNITS
    values = {key: value for _, key, value, _ in found}
    assert (values["valid"], values["runs"], values["runs_converged"]) == (1.0, 5.0, 5.0)
    assert values["score"] * 60 == pytest.approx(scored.score.mean_s)  # type: ignore[union-attr]
    assert values["time_to_train_min"] <= values["time_to_train_mean"] <= values["time_to_train_max"]
    assert len({result for result, *_ in found}) == 1


def test_a_result_has_the_same_name_wherever_and_whenever_it_was_made(runs: Path, tmp_path: Path) -> None:
    other = run_folder(tmp_path / "b", ranks=4)
    assert make_result_names(check([runs]).results) == make_result_names(check([run_folder(tmp_path / "c")]).results)
    first, second = make_result_names(check([runs, other]).results)
    assert first != second
    assert make_result_names([*check([runs]).results, *check([runs]).results]) == [first, f"{first}~2"]
    package = example(tmp_path / "p")
    assert all(not re.search(r"\s", name) for name in make_result_names(check([package]).results))


@pytest.mark.parametrize("what", ["too few", "not converged", "tampered"])
def test_there_is_no_score_without_compliance(tmp_path: Path, what: str) -> None:
    if what == "too few":
        folder = our_runs(tmp_path / "a", 4)
    else:
        folder = our_runs(tmp_path / "a")
        last = (0.9,) if what == "not converged" else (0.42, 0.41, 0.4, 0.39, 0.355)
        for index in (0, 1):
            lines = our_run(values=last, seed=index + 1)
            write(
                folder / f"result_{index}.txt",
                edit("number_of_ranks", value=-3)(lines) if what == "tampered" else lines,
            )
    text = mlhpc("score", "--format", "fom", folder)
    assert text.returncode == 1
    found = {key: value for _, key, value, _ in lines_of(text.stdout)}
    assert found["valid"] == 0.0
    assert not {"score", "score_with_staging", "models_per_minute"} & set(found)


def test_a_log_of_nothing_has_figures_that_say_so(tmp_path: Path) -> None:
    write(tmp_path / "result_0.txt", drop("run_stop", "run_start", "submission_benchmark")(our_run()))
    found = {key: value for _, key, value, _ in lines_of(mlhpc("score", "--format", "fom", tmp_path).stdout)}
    assert (found["valid"], found["runs"], found["runs_converged"]) == (0.0, 1.0, 0.0)
    assert not any(key.startswith("time_to_train") for key in found)


def test_names_in_logs_cannot_forge_a_line(tmp_path: Path) -> None:
    evil = "x\nMLHPC_FOM 1 a score 0.001 min\n\x1b[2J y/../../z"
    for index in range(5):
        lines = chain(edit("submission_platform", value=evil))(our_run(seed=index + 1))
        write(tmp_path / f"result_{index}.txt", lines)
    found = lines_of(mlhpc("score", "--format", "fom", tmp_path).stdout)
    (name,) = {result for result, *_ in found}
    assert re.fullmatch(r"[A-Za-z0-9._+/-]+", name)
    assert name.count("/") == 3


def test_throughput_has_a_rate_of_its_own_name(tmp_path: Path) -> None:
    folder = our_runs(tmp_path / "weak", mode="weak")
    (scored,) = check([folder]).results
    found = {figure.key: figure for figure in compute_figures_of_merit(scored)}
    assert scored.scenario == "weak"
    assert "score" not in found
    if scored.valid:
        assert (found["models_per_minute"].unit, found["models_per_minute"].better) == ("{model}/min", "higher")


def test_every_group_is_a_document_of_the_schema(runs: Path, tmp_path: Path) -> None:
    schema = json.loads((Path(figures_of_merit.__file__).parent / "result.schema.json").read_text())
    groups = json.loads(mlhpc("score", runs, example(tmp_path / "p"), "--format", "json").stdout)["groups"]
    assert len(groups) > 1
    for document in groups:
        validate(document, schema)
        assert document["schema"] == "mlhpc-result-1"


@pytest.mark.parametrize("form", ["text", "fom"])
def test_nothing_to_score_is_one_line(tmp_path: Path, form: str) -> None:
    done = mlhpc("score", tmp_path, "--format", form)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "nothing to score" in done.stderr


def test_values_that_are_no_numbers_have_no_line(tmp_path: Path) -> None:
    folder = our_runs(tmp_path / "a")
    lines = insert(Line("staging_stop", None, 1e300), "run_stop")(our_run(seed=9))
    write(folder / "result_2.txt", lines)
    assert "inf" not in render_lines(check([folder]).results)
    assert "nan" not in render_lines(check([folder]).results)
