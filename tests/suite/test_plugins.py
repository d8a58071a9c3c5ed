"""Packages of strangers: a broken one is left out with one line, cannot change our rules, and fails only when it is asked for."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from mlhpc.analysis.commands.report import ADDS_TO_REPORTS
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.plugins import list_missing_wings
from mlhpc.suite.workload import Workload, load_workload
from tests.fixtures.runs import run_folder
from tests.fixtures.warm import warm_python

ROOT = Path(__file__).resolve().parents[2]
CARD = (ROOT / "workloads" / "cosmoflow" / "card.yaml").read_text()
DESCRIPTOR = """
    from pathlib import Path
    from mlhpc.suite.config import Hyperparameters
    from mlhpc.suite.descriptor import Descriptor
    DESCRIPTOR = Descriptor("{name}", Path(__file__).parent, Hyperparameters, "stranger.work:Work", "stranger.generate")
"""
FIGURE = """
    import altair as alt
    import pandas as pd
    from mlhpc.analysis.drawing.view import CHOOSE_SYSTEMS, Question, View
    TITLE = "Strange figure"
    def table(study): return pd.DataFrame({"n": [len(study.runs)]})
    def answer(study): return f"There are {len(study.runs)} strange runs."
    def chart(table): return alt.Chart(table).mark_bar().encode(x="n:Q")
    QUESTION = Question(CHOOSE_SYSTEMS, "How strange is it?", ("n",))
    VIEWS = (View("strange", "Strange view", QUESTION, "A caption.", table, answer, chart),)
"""


class Site:
    """A folder with one installed package, ``stranger``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, entry_points: str, files: Mapping[str, str]) -> Site:
        info = self.folder / "stranger-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(dedent(entry_points))
        package = self.folder / "stranger"
        for name, text in {"__init__.py": "", **files}.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return self

    def mlhpc(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(self.folder), "TMPDIR": str(self.folder)}
        words = [*warm_python(), "-m", "mlhpc", *map(str, arguments)]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=300, env=environment, check=False, cwd=ROOT
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


WORKLOAD = "[mlhpc.workloads]\nstrange = stranger:DESCRIPTOR\n"
GOOD = DESCRIPTOR.format(name="strange")
BROKEN_WORKLOADS = {
    "card misses a key": (
        {"__init__.py": GOOD, "card.yaml": CARD.replace("title:", "titel:")},
        "did you mean 'title'?",
    ),
    "card is not YAML": ({"__init__.py": GOOD, "card.yaml": "a: [\n"}, "card.yaml"),
    "no card": ({"__init__.py": GOOD}, "card.yaml"),
    "not importable": ({"__init__.py": "import no_such_module"}, "no_such_module"),
    "syntax error": ({"__init__.py": "def"}, "stranger/__init__.py, line 1"),
    "ends the program": ({"__init__.py": "import sys\nsys.exit(3)"}, "SystemExit: 3"),
    "raises": ({"__init__.py": "1 / 0"}, "ZeroDivisionError"),
    "no descriptor there": ({"__init__.py": ""}, "DESCRIPTOR"),
    "another kind of object": (
        {"__init__.py": "DESCRIPTOR = 3"},
        "names an object of type int; expected a mlhpc.Descriptor",
    ),
    "another name": ({"__init__.py": DESCRIPTOR.format(name="other"), "card.yaml": CARD}, "calls itself 'other'"),
    "our benchmark's name": ({"__init__.py": GOOD, "card.yaml": CARD}, "is that of workload 'cosmoflow'"),
}


@pytest.mark.parametrize("case", BROKEN_WORKLOADS)
def test_a_broken_workload_is_left_out_of_everybody_elses_check_with_one_line(
    site: Site, tmp_path: Path, case: str
) -> None:
    files, expected = BROKEN_WORKLOADS[case]
    site.install(WORKLOAD, files)
    run = run_folder(tmp_path / "run")
    alone, beside = (
        Site(tmp_path / "empty").mlhpc("check", run, "--format", "json"),
        site.mlhpc("check", run, "--format", "json"),
    )
    assert (beside.returncode, beside.stdout) == (alone.returncode, alone.stdout)
    assert beside.stderr.startswith("mlhpc: workload 'strange' of package stranger is left out: ")
    assert expected in beside.stderr
    assert len(beside.stderr.splitlines()) == 1 + len(alone.stderr.splitlines())


def test_a_broken_workload_fails_when_it_is_asked_for(site: Site) -> None:
    site.install(WORKLOAD, {"__init__.py": "1 / 0"})
    done = site.mlhpc("run", "strange")
    assert done.returncode == 2
    assert (
        done.stderr
        == "mlhpc: workload 'strange' of package stranger cannot be used: ZeroDivisionError: division by zero\n"
    )


def test_a_workload_with_the_name_of_ours_does_not_replace_it(site: Site) -> None:
    site.install(
        "[mlhpc.workloads]\ncosmoflow = stranger:DESCRIPTOR\n",
        {
            "__init__.py": DESCRIPTOR.format(name="cosmoflow"),
            "card.yaml": CARD.replace("threshold: 0.124", "threshold: 99"),
        },
    )
    done = site.mlhpc("workload", "list", "cosmoflow")
    assert done.returncode == 0
    assert "0.124" in done.stdout
    assert "is left out: its name is taken by mlhpc.workloads.cosmoflow:DESCRIPTOR of mlhpc" in done.stderr


def test_a_good_workload_is_listed(site: Site) -> None:
    card = CARD.replace("mlperf_name: cosmoflow", "mlperf_name: strange").replace(
        "workload: cosmoflow", "workload: strange"
    )
    site.install(WORKLOAD, {"__init__.py": GOOD, "card.yaml": card})
    done = site.mlhpc("workload", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert "strange" in done.stdout


class Incomplete:
    """Does not inherit from Workload."""

    def loss(self) -> None: ...


class Forgetful(Workload):
    def loss(self, model: object, batch: object) -> Any: ...


def test_a_workload_without_a_method_is_refused_when_it_is_loaded() -> None:
    asked = replace(load_descriptor("cosmoflow"), implementation=f"{__name__}:Incomplete")
    with pytest.raises(InputError, match=r"lacks the methods dataset, build_model, .*work \(see") as caught:
        load_workload(asked)
    assert "loss" not in str(caught.value)


def test_a_forgotten_method_is_named_when_the_workload_is_constructed() -> None:
    with pytest.raises(TypeError, match="build_model"):
        Forgetful()  # type: ignore[abstract]


COMMAND = '''
    import click

    @click.command()
    def command() -> None:
        """Say hello. Nothing more."""
        print("hello")
'''


def test_a_broken_command_stands_in_the_help_with_its_reason_and_fails_alone(site: Site) -> None:
    names = {"strange": "stranger.missing", "hurt": "stranger.hurt", "good": "stranger.good", "check": "stranger.good"}
    lines = [f"{name} = {module}:command" for name, module in names.items()]
    site.install("\n".join(["[mlhpc.commands]", *lines, ""]), {"hurt.py": "1 / 0", "good.py": COMMAND})
    done = site.mlhpc("--help")
    assert done.returncode == 0
    assert re.search(r"good +Say hello", done.stdout)
    assert "(command 'strange' of package stranger cannot be loaded: " in " ".join(done.stdout.split())
    assert "command 'check' of package stranger is left out: its name is taken by mlhpc.suite." in done.stderr
    assert site.mlhpc("good").stdout == "hello\n"
    called = site.mlhpc("hurt")
    assert called.returncode == 2
    *_, last = called.stderr.splitlines()
    assert last == "mlhpc: command 'hurt' of package stranger cannot be loaded: ZeroDivisionError: division by zero"


FIGURES = "[mlhpc.figures]\nstranger = stranger.figures\n"
NAMED = "FIGURES = ('strange',)\n"


def report(site: Site, tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    run = run_folder(tmp_path / "run")
    done = site.mlhpc("report", run, "-o", tmp_path / "report", "--quiet")
    page = tmp_path / "report" / "report.html"
    return done, page.read_text() if page.exists() else ""


def test_a_figure_of_another_package_is_on_the_page_with_its_question(site: Site, tmp_path: Path) -> None:
    files = {"figures/__init__.py": NAMED, "figures/strange.py": FIGURE}
    done, page = report(site.install(FIGURES, files), tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (0, len({*list_missing_wings()} & {*ADDS_TO_REPORTS})), (
        done.stderr
    )
    assert "How strange is it?" in page
    assert "There are 5 strange runs." in page
    assert (tmp_path / "report" / "tables" / "figure_strange.csv").read_text() == "n\n5\n"


BROKEN_FIGURES = {
    "chart fails": (
        {"strange.py": FIGURE.replace("return alt", "{}['x']; return alt")},
        "figure 'strange' failed: KeyError: 'x'",
    ),
    "answer fails": (
        {"strange.py": FIGURE.replace("return f", "return None + f")},
        "figure 'strange' failed: TypeError",
    ),
    "no question": (
        {"strange.py": FIGURE.replace("QUESTION, ", "")},
        "figure 'strange' of package stranger is left out: TypeError: View.__init__() missing 1 required",
    ),
    "not importable": (
        {"strange.py": "import nothing_there"},
        "figure 'strange' of package stranger is left out: No module",
    ),
    "no views": (
        {"strange.py": "TITLE = 'x'"},
        "figure 'strange' of package stranger is left out: figure module stranger.figures.strange has no VIEWS",
    ),
    "package missing": ({}, "figure 'stranger' of package stranger is left out"),
}


@pytest.mark.parametrize(
    "case",
    [case if case == "chart fails" else pytest.param(case, marks=pytest.mark.long) for case in BROKEN_FIGURES],
)
def test_a_faulty_figure_is_named_and_the_rest_of_the_report_is_there(site: Site, tmp_path: Path, case: str) -> None:
    files, expected = BROKEN_FIGURES[case]
    named = {f"figures/{name}": text for name, text in files.items()}
    done, page = report(site.install(FIGURES, named | ({"figures/__init__.py": NAMED} if files else {})), tmp_path)
    assert done.returncode == 0, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    is_drawn = case in ("chart fails", "answer fails")  # the others are no figures
    assert ("report it to the authors of stranger with " in done.stderr) == is_drawn
    assert "Where the time goes" in page


def test_a_faulty_figure_of_ours_ends_with_the_code_of_a_defect_after_the_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlhpc.analysis.figures import list_views
    from tests.fixtures.cli import mlhpc

    def fail(study: object) -> None:
        raise KeyError("tau_s")

    monkeypatch.setitem(list_views(), "time_split", replace(list_views()["time_split"], chart=fail))
    done = mlhpc("report", run_folder(tmp_path / "run"), "-o", tmp_path / "report")
    assert done.returncode == 70
    assert "mlhpc: figure 'time_split' failed: KeyError: 'tau_s' (please report it with " in done.stderr
    assert "failed with KeyError" in (tmp_path / "report" / "report.html").read_text()
