"""The Python API: what it exports is what docs/api.md names, importing it is cheap, and it says what the commands say."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import mlhpc
from mlhpc.suite.files import render_duration
from tests.fixtures.cli import mlhpc as command
from tests.fixtures.once import made_once
from tests.fixtures.published import published_results
from tests.fixtures.runs import run_folder

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text()
SURFACE = {
    *("load", "check", "score", "compare", "published", "Results", "Verdict", "InputError", "Run", "__version__"),
    *("Descriptor", "Hyperparameters", "Workload", "Dataset", "Optimization", "Work", "UPDATE_FLOPS", "RunConfig"),
    *("report", "World", "Generator", "Synthetic", "ShardReader", "SPLITS", "draws"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with five runs."""
    return made_once(tmp_path_factory, "api_run", run_folder)


def test_what_is_exported_is_what_the_page_names() -> None:
    named = {
        word
        for line in PAGE.splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`(\w+)", line.split("|")[1])
    }
    assert set(mlhpc.__all__) == SURFACE == named
    assert sorted(dir(mlhpc)) == sorted(SURFACE)
    for name in SURFACE:
        assert getattr(mlhpc, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'; it has check"):
        _ = mlhpc.nothing


def test_the_page_has_the_parameters_and_the_members() -> None:
    for name in ("load", "check", "score", "compare"):
        written = re.search(rf"`{name}\((.*?)\)`", PAGE)
        assert written is not None
        parameters = inspect.signature(getattr(mlhpc, name)).parameters.values()
        plain = [re.sub(r":.*?(?= =|$)", "", str(each)).replace(" ", "") for each in parameters]
        assert written[1] == ", ".join(plain)
    for owner, text in ((mlhpc.Results, PAGE), (mlhpc.Run, PAGE + (ROOT / "docs" / "own_loop.md").read_text())):
        public = {name for name, member in vars(owner).items() if not name.startswith("_")} - {"study"}
        assert {name for name in public if not re.search(rf"\b{name}\b", text)} == set()


def test_importing_it_loads_nothing_heavy_and_no_checker() -> None:
    heavy = [
        "torch",
        "mpi4py",
        "h5py",
        "numpy",
        "scipy",
        "pandas",
        "altair",
        "click",
        "msgspec",
        "mlhpc.suite",
        "mlhpc.analysis",
    ]
    probe = f"import mlhpc, sys; dir(mlhpc); print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_checking_and_scoring_load_no_torch_and_no_pandas(run: Path) -> None:
    probe = (
        f"import mlhpc, sys; assert mlhpc.check({str(run)!r}).compliant; mlhpc.score({str(run)!r})\n"
        f"mlhpc.compare({str(run)!r}, {str(run)!r})\n"
        "print([name for name in ('torch', 'pandas', 'altair', 'mpi4py') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_results_are_tables_figures_a_page_and_a_line_in_a_notebook(run: Path, tmp_path: Path) -> None:
    results = mlhpc.load(str(run.parent / "api_ru?"))
    assert len(results.runs) == 5
    assert len(results.results) == 1
    for name in ("epochs", "evals", "phases", "ranks", "experts", "systems"):
        assert isinstance(getattr(results, name), pd.DataFrame)
    assert len(results.evals) == results.runs["evals"].sum()
    assert "time_split" in results.figures
    assert results.table("time_split")["n"].tolist() == [3]
    chart = results.chart("time_split")
    chart.save(str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "vega" in str(chart.to_html())
    html = results._repr_html_()
    assert render_duration(60 * mlhpc.score(run)[0]["score_min"]) in html
    assert "cosmoflow" in html
    assert repr(results).startswith("<1 result of 5 runs")


def test_a_report_is_that_of_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("report", run, "-o", tmp_path / "report").returncode == 0
    page = tmp_path / "report" / "report.html"
    before, written_ns = page.read_bytes(), page.stat().st_mtime_ns
    capsys.readouterr()
    with pytest.raises(mlhpc.InputError, match="exists already; force=True replaces it"):
        mlhpc.load(run).report(tmp_path / "report")
    assert mlhpc.load(run).report(tmp_path / "report", force=True) == page
    assert capsys.readouterr().out == ""
    assert page.stat().st_mtime_ns > written_ns
    assert page.read_bytes() == before


def test_functions_say_what_the_commands_say(run: Path) -> None:
    said = json.loads(command("check", run, "--format", "json").stdout)
    verdict = mlhpc.check(run)
    assert [finding.message for finding in verdict.findings] == [finding["message"] for finding in said["findings"]]
    assert mlhpc.score(run) == json.loads(command("score", run, "--format", "json").stdout)["groups"]
    compared = json.loads(command("compare", run, run, "--format", "json").stdout)["comparisons"]
    assert json.loads(json.dumps(mlhpc.compare(run, run))) == compared


def test_the_published_table_is_the_shipped_one_and_a_copy() -> None:
    table = mlhpc.published()
    assert len(table) == 90
    table["score_s"] = 0.0
    assert mlhpc.published()["score_s"].max() > 0


WRONG = {
    "a path that is not there": (lambda: mlhpc.check("nowhere"), "nowhere: does not exist"),
    "a pattern that matches nothing": (lambda: mlhpc.load("nowhere/*"), r"nowhere/\*: does not exist"),
    "no path": (lambda: mlhpc.score(), "expected at least one path"),
    "a list of paths": (
        lambda: mlhpc.load(["a", "b"]),
        r"\['a', 'b'\]: expected one path, as a str or a Path; pass the paths of a list one by one",
    ),
    "a list to check": (lambda: mlhpc.check([ROOT]), "expected one path"),
    "nothing to load": (lambda: mlhpc.load(), "expected at least one path"),
    "one result": (lambda: mlhpc.compare(ROOT), "give at least two results"),
    "an unknown ruleset": (lambda: mlhpc.check(ROOT / "docs", ruleset="9.9"), "unknown ruleset '9.9'"),
    "a folder without logs": (lambda: mlhpc.load(ROOT / "docs"), "docs"),
    "a file that is no log": (lambda: mlhpc.load(ROOT / "README.md"), "no MLLOG event"),
    "a card that is none": (lambda: mlhpc.check(ROOT / "docs", cards=[ROOT / "README.md"]), "README.md"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_user_can_mend_is_an_input_error_of_one_line(case: str) -> None:
    call, expected = WRONG[case]
    with pytest.raises(mlhpc.InputError, match=expected) as caught:
        call()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["load", "report", "check", "score", "compare", "published", "Run"])
def test_a_call_with_other_arguments_is_an_input_error_that_says_how_it_is_called(name: str) -> None:
    function = getattr(mlhpc, name)
    parameters = [each for each in inspect.signature(function).parameters if each != "self"]
    with pytest.raises(mlhpc.InputError, match=r"unexpected keyword argument 'zzz'") as caught:
        function(zzz=1)
    called = str(caught.value).rpartition(f"call mlhpc.{name}(")[2]
    assert all(each in called for each in parameters)
    for each in parameters:  # two letters change places
        slip = each[:1] + each[2:3] + each[1:2] + each[3:]
        if slip not in parameters and len(each) > 4 and name != "Run":
            with pytest.raises(mlhpc.InputError, match=f"did you mean '{each}'"):
                function(**{slip: 1})
    with pytest.raises(mlhpc.InputError, match=r"config=\{'max_epochs': …\}"):
        mlhpc.Run("a.yaml", max_epochs=3)


def test_an_error_inside_a_function_stays_what_it_is(run: Path) -> None:
    with pytest.raises(TypeError):
        mlhpc.compare(run, run, tolerance="much")


def test_an_attribute_that_is_not_there_is_answered_with_those_that_are(run: Path) -> None:
    for thing in (mlhpc.load(run), mlhpc.check(run)):
        known = [each for each in dir(type(thing)) if not each.startswith("_")]
        with pytest.raises(AttributeError, match="it has .*") as caught:
            _ = thing.nothing_like_it
        assert all(each in str(caught.value) for each in known)
    with pytest.raises(AttributeError, match="did you mean 'results'"):
        _ = mlhpc.load(run).resutls
    with pytest.raises(mlhpc.InputError, match="a table is an attribute"):
        mlhpc.load(run)["runs"]


def test_an_unknown_figure_and_one_without_data_are_named(run: Path) -> None:
    results = mlhpc.load(run)
    with pytest.raises(mlhpc.InputError, match="unknown figure 'convergense'.*did you mean 'convergence'"):
        results.chart("convergense")
    with pytest.raises(mlhpc.InputError, match="ceilings of another machine"):
        results.chart("what_if")


def test_names_of_strangers_are_escaped_in_a_notebook(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "<script>alert(1)</script>".replace("/", "_"))
    for log in folder.glob("result_*.txt"):
        log.write_text(re.sub(r'("key": "submission_platform", "value": )"[^"]*"', r'\1"<img src=x>"', log.read_text()))
    html = mlhpc.load(folder)._repr_html_()
    assert "<img" not in html
    assert "<script" not in html


def test_a_public_round_is_loaded_and_scored(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = published_results(tmp_path_factory) / "hpc_results_v3.0"
    if not folder.exists():
        pytest.skip("round v3.0 is not among the published results")
    assert len(mlhpc.load(folder).results) == len(mlhpc.score(folder))
