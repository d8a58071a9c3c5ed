"""Every number that the page says stands in the rows that the sentence is made of."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from mlhpc.analysis.drawing.view import Answer, list_timed_runs
from mlhpc.analysis.figures import list_views
from mlhpc.analysis.page.cells import HtmlTable
from mlhpc.analysis.page.issues import list_issues
from mlhpc.analysis.page.summary import build_score_sections, build_summary
from mlhpc.analysis.results.machine_size import find_training_units
from mlhpc.analysis.results.names import CLASS_COLUMNS, render_heading
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.suite.card import Card
from mlhpc.suite.descriptor import list_installed_cards
from tests.fixtures.published import published_results

Build = Callable[..., Any]
Cards = dict[str, Card]
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?:\s?(?:s|ms|µs|min|h)\b)?")
SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}


class Page(NamedTuple):
    study: Study
    numbers: dict[str, pd.DataFrame]
    answers: dict[str, str]


def read_page(data: Study) -> Page:
    numbers, answers = {}, {}
    for name, view in list_views().items():
        with suppress(NotAnswerableError):
            numbers[name], answers[name] = view.table(data), view.answer(data)
    return Page(data, numbers, answers)


@pytest.fixture(scope="module", params=["made", pytest.param("rounds", marks=pytest.mark.long)])
def page(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, package: Build, cards: Cards
) -> Page:
    """Two systems with two benchmarks each, in rounds and of devices that are not alike; and the four public rounds."""
    if request.param == "rounds":
        return read_page(
            read_study(sorted(published_results(tmp_path_factory).glob("hpc_results_v*")), list_installed_cards())
        )
    root = tmp_path_factory.mktemp("sentences")
    for place, benchmark in enumerate(("cosmoflow", "deepcam")):
        for system, seconds in (("daint_a", 5.0 + 20 * place), ("eos_b", 12.0)):
            package(
                root / "hpc_results_v2.0",
                submitter=system,
                system=system,
                benchmark=benchmark,
                train_s=seconds,
                step_s=0.1,
            )
    shutil.copytree(root / "hpc_results_v2.0/eos_b", root / "hpc_results_v3.0/eos_b")
    package(root / "hpc_results_v3.0", submitter="juwels_c", system="juwels_c", nodes=8, train_s=4.0, step_s=0.1)
    (description,) = (root / "hpc_results_v3.0/juwels_c/systems").glob("*.json")
    description.write_text(description.read_text().replace('"A1"', '"H100"'))
    return read_page(read_study([root / "hpc_results_v2.0", root / "hpc_results_v3.0"], cards))


def strip_names(text: str, data: Study) -> str:
    """Remove what names a result, a device or rounds, whose digits are no measurement."""
    known = {
        name
        for column in ("label", "name", "machine", "device", "rounds", "submitter")
        for name in data.results[column]
    }
    known |= {task.short for task in data.tasks()} | {"v1.0 and v2.0", "oc20", "95 %", "5 % in 8 of 10"}
    for name in sorted(map(str, known), key=len, reverse=True):
        text = text.replace(name, "")
    return re.sub(r"\bv\d\.\d\b", "", text)


def list_values(rows: pd.DataFrame) -> list[float]:
    """List the numbers of cells, and those in their texts."""
    found = [float(len(rows))]
    for value in rows.to_numpy().ravel():
        if isinstance(value, int | float | np.number) and not isinstance(value, bool):
            found.append(float(value))
        elif isinstance(value, str):
            found += [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", value)]
    return [value for value in found if math.isfinite(value)]


def find_strangers(text: str, values: Iterable[float]) -> list[str]:
    """Find the numbers of a text that are none of the values, as they are rounded in it."""
    known = np.array(list(values))
    strangers = []
    for said in NUMBER.findall(text):
        number, unit = re.fullmatch(r"([\d,.e+-]+?)\s?([a-zµ]*)", said).groups()  # type: ignore[union-attr]
        number = number.rstrip(",.").replace(",", "")
        digits = number.partition("e")[0]
        # The ends of intervals are rounded outwards, so by one of the last digit
        last = 10.0 ** -len(digits.partition(".")[2]) * (float(number) / float(digits) if float(digits) else 1.0)
        if float(number) >= 1000 and "." not in digits:
            last = 10.0 ** (len(digits) - len(digits.rstrip("0")))
        scales = [SECONDS[unit] / other for other in (1.0, 60.0, 3600.0)] if unit else [1.0]
        if not any((abs(known - float(number) * scale) <= 1.001 * last * scale).any() for scale in scales):
            strangers.append(said)
    return strangers


def derive_values(name: str, part: pd.DataFrame, values: list[float]) -> list[float]:
    """List the numbers that a view computes from its rows."""
    if name == "time_split":  # shares of the run
        times = [name for name in part if name.endswith("[s]")]
        return list((100 * part[times].div(part["run [s]"], axis=0)).to_numpy().ravel())
    if name == "scaling":  # shares as per cent
        return [100 * value for value in values]
    if name == "extended_roofline":  # a step in times at the roof
        return list(part["step [s]"] / part["band from [s]"])
    if name == "run_to_run":
        causes = ("epochs", "seconds per epoch", "staging and other time")
        sure = [part[f"{cause}, 95 % from [%]"] > 50 for cause in causes]
        return [*(each.sum() for each in sure), (~sure[0] & ~sure[1] & ~sure[2]).sum()]
    if name == "learning_curves":
        return [part["run"].nunique()]
    if name == "convergence":
        most = 2 * part["reference mean [epochs]"] - part["least allowed mean [epochs]"]
        return [(part["epochs to target, mean"] <= most).sum(), most.notna().sum()]
    return []


def test_every_number_of_an_answer_is_in_its_rows(page: Page) -> None:
    checked = 0
    for name, answer in page.answers.items():
        table = page.numbers[name]
        for text, rows in answer.parts if isinstance(answer, Answer) else [(answer, ())]:
            part = table.loc[list(rows)] if rows else table
            if rows and "benchmark" in part:
                assert part["benchmark"].nunique() == 1, text
            values = list_values(part)
            for _, column in part.select_dtypes("number").items():
                values += [column.median()]
            values += derive_values(name, part, values)
            assert not find_strangers(strip_names(text, page.study), values), (name, text)
            checked += bool(NUMBER.search(strip_names(text, page.study)))
    assert checked > 5


def read_lines(table: HtmlTable | None) -> list[dict[str, str]]:
    if table is None:
        return []
    return [dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows]


def test_every_number_of_a_summary_row_is_in_the_tables_of_its_class(page: Page) -> None:
    summary = build_summary(page.study, page.numbers, page.answers)
    tasks = {task.short: task for task in page.study.tasks()}
    lines = [*read_lines(summary.table), *read_lines(summary.history)]
    assert lines
    for line in lines:
        rows = tasks[line["task"]].rows
        title = render_heading(*(rows[name].iloc[0] for name in CLASS_COLUMNS))
        labels = set(rows["label"])
        known = list_values(rows[["units", "units_described", "unit_hours", "models_per_min", "n_reached"]])
        a_model = rows["unit_hours"] / rows["models"]
        known += list(a_model)
        with_staging = rows["score_with_staging_s"] / rows["score_s"]
        for hours in (rows["unit_hours"], a_model, rows["unit_hours"] * with_staging, a_model * with_staging):
            known += [a / b for a, b in permutations(hours, 2)]  # times the cost
        compared = page.numbers["comparison"]
        known += list_values(compared[compared["class"] == tasks[line["task"]].title])
        if rows["mode"].iloc[0] == "weak":
            standing, spread = page.numbers["standing"], page.numbers["run_to_run"]
            known += list_values(standing[standing["class"] == tasks[line["task"]].title])
            # A result that was carried over stands there once, under both rounds.
            names = {label.split(" · v")[0] for label in labels}
            named = spread["label"].map(lambda label: label.split(" · v")[0])
            alike = (spread["benchmark"] == rows["benchmark"].iloc[0]) & (spread["mode"] == "weak")
            known += list_values(spread[named.isin(names) & alike])
        factors = page.numbers["waterfall"]
        mine = factors[(factors["class"] == title) & factors["from"].isin(labels) & factors["to"].isin(labels)]
        for name, text in line.items():
            if name == "task":
                continue
            only_evaluate = list(rows["units"] - find_training_units(rows))
            batches = list_values(rows[["global_batch_size"]])
            values = list_values(mine) + only_evaluate + batches if name == "why" else known
            assert not find_strangers(strip_names(text, page.study), values), (line["task"], name, text)


def test_what_the_order_of_runs_shows_is_recomputed(page: Page) -> None:
    step = re.compile(r"seconds per epoch: runs (\d+) to (\d+) of .* take ([\d.]+) times as long as 1 to (\d+)")
    strong = page.study.results[page.study.results["mode"] == "strong"].to_dict("records")
    of_place = {f"{row['label']} ({row['benchmark']} {row['size']})": row["group"] for row in strong}
    for issue in list_issues(page.study):
        found = step.fullmatch(issue.text)
        if found is None:
            continue
        times = [run.time_s for run in list_timed_runs(page.study, of_place[issue.where], "tau_s")]
        first, end, begin = int(found[1]) - 1, int(found[2]), int(found[4])
        apart = np.log(times[first:end]).mean() - np.log(times[:begin]).mean()
        assert float(found[3]) == pytest.approx(math.exp(apart), rel=0.05)  # an outlier is left out


def test_classes_of_the_same_two_systems_are_explained_apart(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    paths = [
        run_folder(tmp_path / size, name, size=size, **more)
        for size, slow in (("mini", {"train_s": 30.0}), ("other", {"errors": (0.5, 0.4, 0.4, 0.4, 0.3, 0.3, 0.3, 0.1)}))
        for name, more in (("one", {}), ("two", slow))
    ]
    data = read_page(read_study(paths, cards))
    why = {line["task"]: line["why"] for line in read_lines(build_summary(*data).table)}
    assert ["each " in why["cosmoflow mini"], "epochs" in why["cosmoflow mini"]] == [True, False]
    assert ["each " in why["cosmoflow other"], "epochs" in why["cosmoflow other"]] == [False, True]


def test_a_copy_is_ranked_where_the_rules_differ(page: Page) -> None:
    tables = [section.table for section in build_score_sections(page.study)]
    cells = [cell.text for table in tables for row in table.rows for cell in row]
    copies = page.study.results[page.study.results["same_as"].notna() & (page.study.results["round"] == "v3.0")]
    assert sum(cell.startswith("carried over from v") for cell in cells) == len(copies)
    if copies.empty:
        pytest.skip("no copies among these rounds: the shared archive has a part of them")
    compared = page.numbers["comparison"]
    assert compared["label"].str.startswith(("Eos 4 · v3.0", "Fugaku 512 · v3.0")).any()
    machines = {line["why"] for line in read_lines(build_summary(*page).table)}
    assert any(re.search("each H100 does .* of each A", why) for why in machines)


def test_what_is_not_ranked_is_shown_and_neither_fastest_nor_advised(
    tmp_path: Path, package: Build, cards: Cards
) -> None:
    paths = [
        package(tmp_path / "hpc_results_v3.0", submitter=name, system=name, train_s=seconds, step_s=0.1)
        for name, seconds in (("quick", 3.0), ("middle", 6.0), ("slow", 9.0))
    ]
    data = read_study(paths, cards)
    reason = "NOT compliant (rcp-speed)"
    data.results["not_ranked"] = [reason if name == "quick" else None for name in data.results["name"]]
    known = read_page(data)
    summary = build_summary(data, known.numbers, known.answers)
    (line,) = read_lines(summary.table)
    assert line["fastest"] == "middle, of the ranked; quick is faster"
    said = "; MLCommons' review accepted it"  # all published results passed it
    assert f"quick (cosmoflow full) is not ranked: {reason}{said}." in summary.sentences
    (section,) = build_score_sections(data)
    assert [row[0].text for row in section.table.rows] == ["middle", "slow", "quick"]
    assert section.table.rows[-1][section.table.columns.index("remark")].text == f"not ranked: {reason}"
    for name in ("comparison", "waterfall", "time_and_units", "pareto", "throughput", "progress"):
        assert "quick" not in known.answers.get(name, ""), name
