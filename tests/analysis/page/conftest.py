"""A report with nearly every figure, made once for all tests of the page."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlhpc.analysis.page.issues import check_path
from mlhpc.analysis.page.report import Report, render_report
from mlhpc.analysis.sources.readers import read_inputs
from mlhpc.analysis.study import Study, read_study
from mlhpc.suite.card import Card
from tests.fixtures.once import made_once

Build = Callable[..., Any]


@pytest.fixture(scope="session")
def rich_study(
    tmp_path_factory: pytest.TempPathFactory,
    run_folder: Build,
    package: Build,
    cards: dict[str, Card],
    ceilings: Build,
    counters: Build,
) -> tuple[Study, list[Path]]:
    """Two sizes of ours with ceilings here and elsewhere, and a public round; and their paths."""
    tmp_path = tmp_path_factory.mktemp("rich")
    paths = [
        run_folder(tmp_path, "one"),
        run_folder(tmp_path, "two", size="other"),
        package(tmp_path / "hpc_results_v9.9", system="daint_a"),
        package(tmp_path / "hpc_results_v9.9", system="daint_b", nodes=4, train_s=4.0, step_s=0.5),
        package(tmp_path / "hpc_results_v9.8", system="older", staging=(-9.0, -2.0)),
        package(tmp_path / "hpc_results_v9.7", system="open", division="open", eval_s=2.5),
    ]
    here, there = ceilings(tmp_path / "here.json"), ceilings(tmp_path / "there.json", "other", faster=3.0)
    return read_study(paths, cards, read_inputs([here, counters(tmp_path / "counters.json")], [there])), paths


@pytest.fixture(scope="session")
def rich(rich_study: tuple[Study, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of that study, with all figures."""
    data, paths = rich_study

    def make(folder: Path) -> None:
        report = render_report(data, [check_path(path) for path in paths])
        (folder / "report.pickle").write_bytes(pickle.dumps(report))

    made = pickle.loads((made_once(tmp_path_factory, "rich-report", make) / "report.pickle").read_bytes())
    assert isinstance(made, Report)
    return made
