"""The page: valid, complete, the same every time, and safe against what logs may contain."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from mlhpc.analysis.commands.report import report as command
from mlhpc.analysis.drawing.view import FACTORS, GOALS
from mlhpc.analysis.figures import group_views_by_goal, list_views
from mlhpc.analysis.page.cells import render_ranges, render_spreads
from mlhpc.analysis.page.issues import check_path
from mlhpc.analysis.page.pictures import build_vega_script
from mlhpc.analysis.page.report import NOT_VERIFIED, Report, render_report
from mlhpc.analysis.sources.readers import Inputs
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.suite.card import Card
from mlhpc.suite.files import render_duration
from tests.fixtures.charts import drawn, panels

Cards = dict[str, Card]
Build = Callable[..., Any]
HOSTILE = "<script>alert(1)</script>\"'&$\\frac{x}$\x00\x1b[31m]]>\u202e{{7*7}}" + "x" * 300
VOID = {"meta", "br", "hr", "link", "img", "input"}


class Page(HTMLParser):
    """Ids, tags and whether every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: Counter[str] = Counter()
        self.tags: Counter[str] = Counter()
        self.open: list[str] = []
        self.targets: list[str] = []
        self.external: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags[tag] += 1
        if values.get("id"):
            self.ids[str(values["id"])] += 1
        for name in ("href", "xlink:href", "src"):
            value = values.get(name) or ""
            (self.targets if value.startswith("#") else self.external).extend([value] if value else [])
        self.targets += [f"#{name}" for name in (values.get("aria-labelledby") or "").split()]
        if tag == "th":
            assert values.get("scope") in {"col", "row"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def made(paths: list[Path], cards: Cards, inputs: Inputs | None = None) -> Report:
    return render_report(read_study(paths, cards, inputs), [check_path(path) for path in paths])


# figures of ceilings files and all-to-all sweeps: tests/analysis/roofline and tests/plugins/network
NEED_A_FILE = {
    name
    for name, view in list_views().items()
    if name.startswith(("moe_", "energy_", "course"))
    or name == "what_if"
    or name.endswith("roofline")
    or not view.table.__module__.startswith("mlhpc.analysis.")
}  # or power readings or a reference course, which these runs lack, or the files of a wing


def test_the_page_is_well_formed_with_unique_ids_and_nothing_external(rich: Report) -> None:
    page = Page(rich.html)
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert {target[1:] for target in page.targets} <= set(page.ids)
    assert all(re.fullmatch(r"tables/figure_\w+\.csv", target) for target in page.external)
    assert {target[7:-4] for target in page.external} <= set(rich.csv)
    assert len(page.external) >= page.tags["figure"] > 12  # answers without a figure have numbers, too
    own = rich.html.replace(
        build_vega_script(), ""
    )  # Vega makes SVG, in which url() names a part of the picture itself
    assert "@import" not in own
    assert not re.search(r"url\((?!#)", own)


def test_every_view_has_a_title_a_caption_a_chart_and_its_numbers(rich: Report) -> None:
    page = Page(rich.html)
    drawn = [figure["name"] for figure in json.loads(rich.json)["figures"] if not figure["not_answerable"]]
    shown = [name for name in drawn if f'id="{name}"' in rich.html]
    assert page.tags["figure"] == page.tags["figcaption"] == len(shown) > 15
    for figure in json.loads(rich.json)["figures"]:
        name, table = figure["name"], pd.DataFrame(figure["table"])
        assert (name in shown) == (name in drawn and list_views()[name].worth(table)), name
        if name not in shown:
            continue
        article = rich.html.split(f' id="{name}" data-title=')[1].split("</article>")[0]
        said = re.sub("<[^>]*>", "", article)  # each statement may have its results
        assert escape(figure["answer"]).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in said
        chart = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', article, re.DOTALL)[0])
        assert chart["$schema"].startswith("https://vega.github.io/schema/vega-lite/v6")
        rows = {row["_row"] for data in chart["datasets"].values() for row in data if "_row" in row}
        assert rows <= set(range(article.count("<tr data-of=") or article.count("<tr>") - 1)), name
    assert set(list_views()) - set(drawn) <= {"throughput_mode", *NEED_A_FILE}
    assert {f"figure_{name}" for name in drawn} <= set(rich.csv)
    assert rich.html.count("How to read it, and the numbers") == len(shown)


def test_every_figure_answers_a_question_and_every_metric_is_a_column(rich: Report) -> None:
    grouped = group_views_by_goal()
    assert tuple(grouped) == GOALS
    assert sorted(view.name for views in grouped.values() for view in views) == sorted(list_views())
    columns = {*rich.frames["runs"].columns, *rich.frames["results"].columns}
    own = {figure["name"]: set(figure["table"][0]) for figure in json.loads(rich.json)["figures"] if figure["table"]}
    for name, view in list_views().items():
        if name not in NEED_A_FILE:
            assert set(view.question.metrics) <= columns | own.get(name, set()), view.question.text
    assert len({view.question.text for view in list_views().values()}) == len(list_views())


def test_every_question_is_answered_or_says_what_is_missing(rich: Report) -> None:
    for name, view in list_views().items():
        asked = escape(view.question.text).replace("&#x27;", "&#39;")
        if f' id="{name}" data-title=' in rich.html:
            assert f">{asked}</figcaption>" in rich.html
            continue
        after = rich.html.split(f"<dt>{asked}</dt>")[1].split("</dd>")[0]
        assert "Not answerable:</strong> missing " in after or f"figure_{name}.csv" in after


def test_questions_without_an_answer_are_one_line_that_says_what_they_need(
    tmp_path: Path, run_folder: Build, cards: Cards
) -> None:
    html = made([run_folder(tmp_path)], cards).html
    line = re.search(r'<details class="waiting"><summary>([^<]*)</summary>(.*?)</details>', html, re.DOTALL)
    assert line is not None
    needs = dict(re.findall(r"(?:: | · )([^·(]*[^·( ]) \((\d+)\)", line[1]))
    assert int(needs["a second result of the same benchmark and size"]) >= 3
    assert html.count("Not answerable:") == line[2].count("Not answerable:") == int(line[1].split()[0]) > 10
    assert line[1].count("(") < 8  # one line: equal needs are counted, not repeated
    assert "Choose how to run experts" not in html  # a goal without any answer has no heading


def test_rows_about_a_result_name_it_for_the_filters(rich: Report) -> None:
    for name, article in re.findall(r'<article class="view[^"]*" id="(\w+)"(.*?)</article>', rich.html, re.DOTALL):
        heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', article)
        if {"label", "to"} & set(heads):
            assert "<tr data-of=" in article, name


def test_a_score_says_which_it_is(rich: Report) -> None:
    assert ">score by the rules<" in rich.html
    assert ">official tool prints<" in rich.html
    assert "Result not verified" in rich.html


def test_a_first_report_shows_the_published_machines(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    html = made([run_folder(tmp_path)], cards).html
    for machine in ("Fugaku", "Perlmutter", "Selene", "Eos"):
        assert machine in html
    assert "a different problem" in html
    assert "Not at hand" not in html  # of what the table holds


@pytest.mark.long
def test_a_chart_is_the_same_the_second_time(rich_study: tuple[Study, list[Path]]) -> None:
    seen = 0
    for name in list_views():
        with suppress(NotAnswerableError):
            assert drawn(name, rich_study[0]) == drawn(name, rich_study[0]), name
            seen += 1
    assert seen > 15


def test_no_path_of_a_disk_is_in_a_report(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    """The same runs in two places, drawn twice: the same bytes."""
    reports = []
    for place in ("here", "far/away"):
        (tmp_path / place).mkdir(parents=True)
        reports.append(made([run_folder(tmp_path / place)], cards))
    first, second = reports
    assert first == second
    assert str(tmp_path) not in first.html + first.json + "".join(first.csv.values())


def test_our_results_say_that_nobody_verified_them(rich: Report, tmp_path: Path, package: Build, cards: Cards) -> None:
    assert NOT_VERIFIED in rich.html
    published = package(tmp_path / "again" / "hpc_results_v3.0", system="other", runs=1)
    assert NOT_VERIFIED not in made([published], cards).html


def test_hostile_names_are_text_everywhere(tmp_path: Path, log: Build, run_folder: Build, cards: Cards) -> None:
    folder = run_folder(
        tmp_path, platform=HOSTILE, extra=(("opt_name", HOSTILE), ("precision", HOSTILE), (HOSTILE, HOSTILE))
    )
    evil = tmp_path / "P" / "results" / "<img src=x onerror=alert(1)>$x^$" / "strong" / "cosmo<b>flow"
    log(benchmark=HOSTILE, size="<b>$_{$").write(evil / "result_0.txt")
    result = made([folder, tmp_path / "P"], cards)
    page = Page(result.html)
    assert page.tags["script"] == 3 + page.tags["figure"]  # Vega, the page's own, what it filters by, and each chart's
    assert (
        page.tags["img"]
        == page.tags["b"]
        - result.html.count("<b>problem")
        - result.html.count("<b>doubt")
        - result.html.count("<b>note")
        == 0
    )
    assert not {"\x00", "\u202e"} & {*result.html}
    json.loads(result.json)


def test_no_cell_of_a_table_is_a_formula(tmp_path: Path, log: Build, cards: Cards) -> None:
    """A spreadsheet runs a cell that begins with one of these; numbers stay numbers."""
    evil = tmp_path / "P" / "results" / "@SUM(1)" / "strong" / "=cosmoflow"
    log(benchmark="=cmd|' /C calc'!A0", size="+1+1", platform="-2+3").write(evil / "result_0.txt")
    tables = made([tmp_path / "P"], cards).csv
    cells = [cell for text in tables.values() for row in csv.reader(StringIO(text)) for cell in row]
    assert any("calc" in cell for cell in cells)
    for cell in cells:
        if cell.startswith(("=", "+", "-", "@", "\t", "\r")):
            float(cell)


def test_a_killed_run_is_listed_as_incomplete_and_counted(
    tmp_path: Path, run_folder: Build, log: Build, cards: Cards
) -> None:
    folder = run_folder(tmp_path, runs=3)
    log(size="mini", ours=True, stop=False, seed=9).write(folder / "result_3.txt")
    result = made([folder], cards)
    assert "1 of 4 runs ended without run_stop" in result.html
    runs = {row["n_started"]: row for row in json.loads(result.json)["results"]}
    assert runs[4]["n_reached"] == 3


@pytest.mark.parametrize(
    "content", ["", ":::MLLOG {}\n", ':::MLLOG {"key": "run_start", "value": 1, "time_ms": 1, "metadata": {}}\n']
)
def test_a_log_that_says_nothing_gives_a_report_that_says_so(tmp_path: Path, cards: Cards, content: str) -> None:
    (tmp_path / "result_0.txt").write_text(content)
    result = made([tmp_path], cards)
    Page(result.html)
    assert "Not answerable" in result.html
    assert "no run_stop" in result.html


def test_two_sizes_and_two_divisions_have_their_own_tables(
    tmp_path: Path, package: Build, run_folder: Build, cards: Cards
) -> None:
    paths = [run_folder(tmp_path, "a", runs=1), run_folder(tmp_path, "b", size="other", runs=1)]
    paths += [package(tmp_path / division, division=division, runs=1) for division in ("open", "closed")]
    headings = re.findall(r"<h3>(cosmoflow · [^<]*)</h3>", made(paths, cards).html)
    assert len(headings) == len(set(headings)) == 4


def test_numbers_of_page_json_and_csv_agree(rich: Report) -> None:
    results = pd.read_csv(StringIO(rich.csv["results"]))
    document = json.loads(rich.json)["results"]
    scores = [row["score_s"] for row in document]
    assert scores == pytest.approx(results["score_s"].to_list())
    for score in scores:
        assert f">{render_duration(score)}<" in rich.html


def test_a_report_without_a_check_does_not_claim_compliance(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    html = render_report(read_study([run_folder(tmp_path)], cards), []).html
    assert "not checked" in html
    assert "no errors" not in html


def test_a_missing_figure_says_what_is_missing(tmp_path: Path, package: Build, cards: Cards) -> None:
    data = read_study([package(tmp_path)], cards)
    with pytest.raises(NotAnswerableError, match="step_phases"):
        list_views()["phases"].table(data)


def test_a_check_without_errors_is_stated(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    folder = run_folder(tmp_path, runs=1)
    checked = check_path(folder)
    fine = replace(checked, verdict=replace(checked.verdict, findings=()))
    html = render_report(read_study([folder], cards), [fine]).html
    assert "no errors" in html


def test_parts_of_the_time_split_sum_to_the_run(rich: Report) -> None:
    table = pd.read_csv(StringIO(rich.csv["figure_time_split"]))
    parts = table[["staging [s]", "training [s]", "evaluation [s]", "other [s]"]].sum(axis=1)
    assert parts.to_list() == pytest.approx(table["run [s]"].to_list())


def test_an_existing_report_is_kept_unless_forced(tmp_path: Path, run_folder: Build) -> None:
    output = tmp_path / "made" / "report"
    arguments = [str(run_folder(tmp_path, runs=1)), "-o", str(output)]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    first = (output / "report.html").read_bytes()
    refused = CliRunner().invoke(command, arguments)
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert CliRunner().invoke(command, [*arguments, "--force"]).exit_code == 0
    assert (output / "report.html").read_bytes() == first
    assert (output / "report.json").exists()
    assert {path.stem for path in (output / "tables").glob("*.csv")} >= {
        "runs",
        "epochs",
        "evals",
        "phases",
        "systems",
        "results",
    }


def test_a_speed_up_is_split_between_the_two_results_that_are_named(
    tmp_path: Path, run_folder: Build, package: Build, cards: Cards
) -> None:
    tree = tmp_path / "hpc_results_v9.9"
    paths = [
        package(tree, system=name, nodes=nodes, train_s=s)
        for name, nodes, s in (("a1", 2, 8), ("b2", 4, 6), ("c3", 8, 5))
    ]
    study_of = read_study(paths[:1], cards, between=[("C3", "a1")])
    ((start, end),) = study_of.between
    assert "/c3/" in start
    assert "/a1/" in end
    waterfall = list_views()["waterfall"]
    row = waterfall.table(study_of).iloc[0]
    assert ("c3" in row["from"], "a1" in row["to"], bool(row["shown"])) == (True, True, True)
    parts = math.prod(row[name] for name in FACTORS)
    assert parts == pytest.approx(row["speed-up"])
    assert row["speed-up"] < 1
    refused = CliRunner().invoke(command, [str(paths[0]), "-o", str(tmp_path / "report"), "--between", "c3", "d4"])
    assert refused.exit_code != 0
    assert "no result is called 'd4'" in str(refused.exception or refused.output)


def test_tables_can_be_parquet(tmp_path: Path, run_folder: Build) -> None:
    pytest.importorskip("pyarrow")
    output = tmp_path / "report"
    said = CliRunner().invoke(command, [str(run_folder(tmp_path, runs=1)), "-o", str(output), "--tables", "parquet"])
    assert said.exit_code == 0, said.output
    names = {path.stem for path in (output / "tables").glob("*.parquet")}
    document = json.loads((output / "report.json").read_text())
    assert {"runs", "epochs", "evals", "phases", "systems", "results"} <= names
    runs = pd.read_parquet(output / "tables" / "runs.parquet")
    assert len(runs) == 1
    assert document["version"] == 1


def test_help_of_report_loads_neither_pandas_nor_matplotlib() -> None:
    code = "import sys, mlhpc.analysis.commands.report; sys.exit(bool({'pandas', 'altair', 'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_whole_of_analysis_loads_no_torch() -> None:
    code = "import sys, mlhpc.analysis.page.report, mlhpc.analysis.study; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_deviation_has_two_digits_and_a_range_one_number_of_decimals() -> None:
    assert render_spreads(pd.Series([99.625, 53.875, 0.2088, 69.0, 4.0]), pd.Series([12.89, 4.853, 0.01939, 0.0, np.nan])) == [
        "100 ± 13", "53.9 ± 4.9", "0.209 ± 0.019", "69 ± 0", 4.0,
    ]  # fmt: skip
    assert render_ranges(pd.Series([111.7, 7.078]), pd.Series([117.0, 7.94])) == ["111.7 – 117.0", "7.078 – 7.940"]


def test_a_result_is_not_compared_with_its_own_copy(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    one = run_folder(tmp_path, "one")
    shutil.copytree(one, tmp_path / "copy")
    data = read_study([one, tmp_path / "copy"], cards)
    with pytest.raises(NotAnswerableError, match="two time-to-train results"):
        list_views()["comparison"].table(data)


def test_scaling_of_one_machine_size_answers_nothing(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    data = read_study([run_folder(tmp_path, "one"), run_folder(tmp_path, "two")], cards)
    with pytest.raises(NotAnswerableError):
        list_views()["scaling"].table(data)


def test_results_are_ranked_only_beside_those_whose_times_mean_the_same(
    tmp_path: Path, package: Build, cards: Cards
) -> None:
    """The time of v2.0 has staging in it, that of v3.0 need not."""

    def made(round_: str, system: str, train_s: float, **more: Any) -> Path:
        folder = tmp_path / f"hpc_results_{round_}"
        return package(folder, system=system, train_s=train_s, step_s=0.01, submitter=system, **more)

    unlike = [made("v2.0", "a1", 8), made("v3.0", "b2", 6), made("v2.0", "c3", 4, division="open")]
    study_of = read_study(unlike, cards)
    assert [len(rows) for *_, rows in study_of.tasks()] == [1, 1, 1]
    for name in ("comparison", "waterfall"):
        with pytest.raises(NotAnswerableError):
            list_views()[name].table(study_of)
    assert "may be ranked" in list_views()["time_and_units"].answer(study_of)
    assert list_views()["pareto"].table(study_of)["on the front"].all()
    like = read_study([*unlike, made("v1.0", "d4", 5)], cards)
    compared = list_views()["comparison"].table(like)
    assert [(row["label"][:2], row["against"][:2]) for row in compared.to_dict("records")] == [("a1", "d4")]
    assert "closed · v1.0 and v2.0" in compared["class"].iloc[0]
    answer = list_views()["time_and_units"].answer(like)
    assert "fastest d4" in answer
    assert "b2" not in answer


def test_a_difference_that_may_be_luck_is_not_explained(tmp_path: Path, package: Build, cards: Cards) -> None:
    def made(system: str, **more: Any) -> Path:
        return package(tmp_path / "hpc_results_v9.9", system=system, submitter=system, **more)

    waterfall, first = list_views()["waterfall"], made("a1")
    luck = read_study([first, made("b2", eval_s=2.3, nodes=4)], cards)
    row = waterfall.table(luck).iloc[0]
    assert (row["verdict"], bool(row["shown"])) == ("inconclusive", False)
    assert row["95 % from"] < 1 < row["95 % to"]
    assert "differ by more than their runs do" in waterfall.answer(luck)
    assert not any(panels(drawn("waterfall", luck)).values())
    real = read_study([first, made("c3", train_s=3, step_s=0.5, nodes=4)], cards)
    assert waterfall.table(real).iloc[0]["verdict"] == "faster"
    assert re.search(r"c3.*: [\d.]+× \[[\d.]+, [\d.]+\], by score", waterfall.answer(real))


def test_the_share_of_epochs_in_the_variance_is_a_share(
    tmp_path: Path, package: Build, log: Callable[..., Any], cards: Cards
) -> None:
    """Runs with more epochs have shorter ones: the covariance is negative and larger than one of the variances."""
    root = tmp_path / "one" / "ACME"
    package(root.parent, system="a1", runs=4)
    for trial, (seconds, errors) in enumerate([(10.0, (0.5, 0.1)), (6.4, (0.5, 0.3, 0.1))] * 2):
        text = log(train_s=seconds + trial / 10, errors=errors, seed=trial, start_s=1000.0 * trial)
        text.write(root / "results" / "a1" / "strong" / "cosmoflow" / f"result_{trial}.txt")
    row = list_views()["run_to_run"].table(read_study([root], cards)).iloc[0]
    assert row["2 x covariance"] < -2 * min(row["variance of log(epochs)"], row["variance of log(seconds per epoch)"])
    assert 0 < row["from epochs [%]"] < 100


def test_what_has_no_score_is_not_the_fastest(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    whole, part = run_folder(tmp_path, "whole"), run_folder(tmp_path, "part", runs=1)
    data = read_study([whole, part], cards)
    assert "fastest whole" in list_views()["time_and_units"].answer(data)
    with pytest.raises(NotAnswerableError):  # one point is no front
        list_views()["pareto"].table(data)
    parts = read_study([part, run_folder(tmp_path, "other", runs=1, seed=7)], cards)
    assert "none with a score" in list_views()["time_and_units"].answer(parts)
