"""The figure of courses shows what runs logged beside what healthy runs did, and marks what is unlike them."""

from pathlib import Path

import pytest

from mlhpc.analysis.figures import list_views
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.suite.card import read_reference_courses
from mlhpc.suite.descriptor import list_installed_cards, load_descriptor
from tests.analysis.conftest import write_course_runs
from tests.fixtures.charts import drawn, panels


def test_a_broken_run_is_marked_among_healthy_ones(tmp_path: Path) -> None:
    known = read_study([write_course_runs(tmp_path, last_metric=0.5)], list_installed_cards())
    table = list_views()["course"].table(known)
    marked = table[table["unlike healthy runs"]]
    assert marked["run"].nunique() == 1
    assert "eval_accuracy after epoch 6" in set(marked["number"])
    assert list_views()["course"].answer(known).endswith("2 of 3 runs trained as 25 healthy runs of swinv2_moe smoke")
    (course,) = read_reference_courses(load_descriptor("swinv2_moe").folder, "smoke")
    for row in table.to_dict("records"):
        values = sorted(course.values[row["number"]])
        shown = [row[f"{name} of healthy runs"] for name in ("lowest", "median", "highest")]
        assert shown == [values[0], values[len(values) // 2], values[-1]]
    # the last window of an epoch ends where its evaluation is
    losses = table[table["what"] == "training loss"]
    assert losses["epochs"].max() == table[table["what"] != "training loss"]["epochs"].max() == 6


def test_losses_and_metric_have_a_panel_each(tmp_path: Path) -> None:
    known = read_study([write_course_runs(tmp_path, "cosmoflow", runs=2)], list_installed_cards())
    of_title = panels(drawn("course", known))
    assert [title.rpartition(" · ")[2] for title in of_title] == ["training loss", "val MAE"]
    assert {len(rows) for rows in of_title.values()} == {2 * 6 * 3, 2 * 6}


def test_runs_without_a_reference_course_have_no_figure(sizes: Study) -> None:
    with pytest.raises(NotAnswerableError, match="reference course"):
        list_views()["course"].table(sizes)
