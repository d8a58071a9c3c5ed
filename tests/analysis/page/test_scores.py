"""The result tables and tiles: order, units of the machine, and what is said of published results."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlhpc.analysis.drawing.view import list_timed_runs
from mlhpc.analysis.figures import list_views
from mlhpc.analysis.page.issues import CheckedPath, build_tiles
from mlhpc.analysis.page.summary import build_score_sections
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.suite.card import Card
from mlhpc.suite.compliance.check import Verdict
from mlhpc.suite.compliance.rules.base import Finding

Build = Callable[..., Any]


def weak(package: Build, root: Path, system: str, runs: int, **more: Any) -> Path:
    """A throughput-mode result: every instance starts at once."""
    made = Path(package(root, system=system, runs=runs, start_s=0.0, **more))
    shutil.move(made / "results" / system / "strong", made / "results" / system / "weak")
    return made


@pytest.fixture(scope="module")
def throughput(tmp_path_factory: pytest.TempPathFactory, package: Build, cards: dict[str, Card]) -> Study:
    """Three throughput results: the shortest time to train all is that of the fewest models per minute."""
    root = tmp_path_factory.mktemp("weak") / "hpc_results_v9.9"
    weak(package, root, "few", 10, train_s=8.5)
    weak(package, root, "many", 40, train_s=9.0, nodes=80)
    return read_study([weak(package, root, "middle", 12, train_s=8.0, nodes=24)], cards)


def test_a_throughput_table_is_sorted_by_what_is_bold(throughput: Study) -> None:
    (section,) = build_score_sections(throughput)
    table = section.table
    (bold,) = table.strong & set(table.columns)
    at = table.columns.index(bold)
    values = [float(row[at].key) for row in table.rows]
    assert bold == "models/min"
    assert values == sorted(values, reverse=True)
    assert [row[0].text for row in table.rows] == ["many", "middle", "few"]
    assert "compute units" not in table.columns
    systems = [row[table.columns.index("units of the system")].text for row in table.rows]
    assert systems == ["160", "48", "4"]


@pytest.mark.parametrize(
    ("options", "busy"), [({"start_s": 0.0}, 40), ({}, 4)], ids=["together", "one after the other"]
)
def test_a_machine_of_which_a_part_trained_is_not_said_to_have_trained(
    package: Build, cards: dict[str, Card], tmp_path: Path, options: dict[str, float], busy: int
) -> None:
    """Ten instances of four units on a machine of 320."""
    made = Path(package(tmp_path / "hpc_results_v9.9", system="part", runs=10, nodes=160, **options))
    shutil.move(made / "results" / "part" / "strong", made / "results" / "part" / "weak")
    study = read_study([made], cards)
    row = study.results.iloc[0]
    assert (row["units_described"], row["units"], row["units_busy"]) == (320, 4, busy)
    assert f"on {busy} of 320 compute units (part)" in list_views()["throughput_mode"].answer(study)


def test_a_run_that_the_submitter_left_out_is_in_no_spread_and_no_comparison(
    package: Build, cards: dict[str, Card], tmp_path: Path
) -> None:
    folder = Path(package(tmp_path, runs=11)) / "results" / "sys1" / "strong" / "cosmoflow"
    (folder / "pruned_results").mkdir()
    (folder / "result_10.txt").rename(folder / "pruned_results" / "result_10.txt")
    study = read_study([tmp_path], cards)
    assert study.runs.loc[study.runs["pruned"], "converged"].tolist() == [True]
    row = study.results.iloc[0]
    kept = study.runs.loc[~study.runs["pruned"], "run_s"]
    assert (row["n_reached"], row["fastest_s"], row["slowest_s"]) == (11, kept.min(), kept.max())
    assert len(study.converged_of(row["group"])) == len(list_timed_runs(study, row["group"])) == 10


def test_the_throughput_figure_has_the_most_models_first(throughput: Study) -> None:
    rows = list_views()["throughput_mode"].table(throughput)
    assert rows["label"].tolist() == ["many", "middle", "few"]
    assert rows["compute units of the system"].tolist() == [160, 48, 4]
    view, names = list_views()["throughput_mode"], throughput.results["name"]
    assert "on 160 compute units (many)" in view.answer(throughput)
    reasons = names.map({"many": "NOT compliant"}).where(names == "many", None)
    passed = replace(throughput, results=throughput.results.assign(not_ranked=reasons))
    assert re.search(r"\(middle\); more, but not ranked: [\d.]+ \(many\)", view.answer(passed))
    with pytest.raises(NotAnswerableError):
        view.table(replace(throughput, results=throughput.results.assign(not_ranked="NOT compliant")))


def verdict(path: str, *files: str) -> CheckedPath:
    errors = tuple(Finding("rcp-speed", "error", file, None, "is fast") for file in files)
    return CheckedPath(path, Verdict(("3.0.0",), 5, 1, errors))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, package: Build, run_folder: Build, cards: dict[str, Card]) -> Study:
    root = tmp_path_factory.mktemp("mixed")
    own = root / "hpc_results_v3.0" / "US"
    package(own.parent, submitter="US", system="ours", runs=2, ours=True)
    return read_study([package(root / "hpc_results_v3.0", submitter="NV", system="eos"), own, run_folder(root)], cards)


@pytest.mark.parametrize(
    ("files", "state", "said"),
    [
        ([], "good", "no errors"),
        (["hpc_results_v3.0/NV/results/eos/strong/cosmoflow"], "info", "no errors of yours"),
        (["runs/run1/result_0.txt"], "bad", "1 error"),
        (["runs/run1/result_0.txt", "hpc_results_v3.0/NV/results/eos/strong/x"], "bad", "1 error"),
        (["hpc_results_v3.0/US/results/ours/strong/cosmoflow"], "bad", "1 error"),  # in a round's folder, but ours
        (["hpc_results_v3.0/NOBODY/results/x"], "bad", "1 error"),
        (["hpc_results_v2.0/NV/results/eos/strong/cosmoflow"], "bad", "1 error"),  # no run of that round is here
        (["eos/NV/results"], "bad", "1 error"),
    ],
    ids=str,
)
def test_an_accepted_round_does_not_read_as_invalid(mixed: Study, files: list[str], state: str, said: str) -> None:
    (tile,) = (each for each in build_tiles(mixed, [verdict("x", *files)]) if each.title == "Compliance")
    assert (tile.state, tile.value) == (state, said)
    assert ("MLCommons reviewed and accepted" in tile.detail) == any(
        "/NV/" in file and "v3.0" in file for file in files
    )


def test_a_published_round_alone_is_called_published(mixed: Study) -> None:
    alone = replace(mixed, runs=mixed.runs[mixed.runs["published"]])
    tiles = build_tiles(alone, [verdict("x", "hpc_results_v3.0/NV/results/eos/strong/cosmoflow")])
    (tile,) = (each for each in tiles if each.title == "Compliance")
    assert (tile.state, tile.value) == ("info", "published")
    assert "invalid" not in tile.detail
    assert "error" not in tile.detail


def test_results_of_rounds_alike_stand_together_the_fastest_first(
    tmp_path: Path, package: Build, cards: dict[str, Card]
) -> None:
    for round_, system, seconds in (("v1.0", "slow", 9), ("v2.0", "fast", 5), ("v3.0", "new", 7)):
        package(tmp_path / f"hpc_results_{round_}", submitter=system, system=system, train_s=seconds)
    (section,) = build_score_sections(
        read_study([tmp_path / f"hpc_results_{r}" for r in ("v1.0", "v2.0", "v3.0")], cards)
    )
    assert [row[0].text for row in section.table.rows] == ["fast", "slow", "new"]
    assert any("staging before run_start does not count" in remark for remark in section.remarks)


def test_the_table_counts_what_varies(tmp_path: Path, run_folder: Build, cards: dict[str, Card]) -> None:
    known = read_study([run_folder(tmp_path, f"of{n}", ranks=n) for n in (2, 4)], cards)
    rows = known.results.assign(units=1, nodes=1, cores=[8, 4], unit="processor")
    (section,) = build_score_sections(replace(known, results=rows))
    assert "cores" in section.table.columns
    (same,) = build_score_sections(replace(known, results=rows.assign(cores=8)))
    assert "cores" not in same.table.columns
