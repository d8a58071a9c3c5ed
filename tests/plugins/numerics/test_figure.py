"""What changes of a deployment cost, and epochs by framework, from documents to tables, answers and charts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mlhpc.analysis.drawing.charts import build_specification
from mlhpc.analysis.sources.readers import read_file
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.plugins.numerics.figures import numerics
from mlhpc.plugins.numerics.results import KIND
from mlhpc.suite.card import Card
from tests.plugins.numerics.examples import RESULT, write_examples


@pytest.fixture
def study(tmp_path: Path, run_folder: Any, cards: dict[str, Card]) -> Study:
    return read_study([run_folder(tmp_path / "run")], cards, documents={KIND: (RESULT,)})


def test_the_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert [read_file(path) for path in write_examples(tmp_path)] == [RESULT]


def test_the_largest_loss_comes_first_and_what_cannot_act_is_left_out(study: Study) -> None:
    table = numerics.build_deployed_table(study)
    assert table["change"].tolist() == ["nearest", "float16"]
    answer = numerics.render_deployed_answer(study)
    assert "nearest changes eval_accuracy most, by -0.02 [-0.03, -0.01]; 1 of 2 changes by less than seeds" in answer
    build_specification(numerics.draw_deployed_chart(table))
    with pytest.raises(NotAnswerableError, match="mlhpc numerics deploy"):
        numerics.build_deployed_table(replace(study, documents={}))


def test_frameworks_of_one_benchmark_are_compared(study: Study) -> None:
    row = study.results.iloc[0]
    rows = [
        {**row, "group": f"g{n}", "system_key": key, "epochs_to_target.mean": epochs}
        for n, (key, epochs) in enumerate([("a", 10.0), ("a", 12.0), ("b", 20.0), ("c", 7.0)])
    ]
    systems = pd.DataFrame({"system_key": ["a", "b", "c"], "framework": ["NVIDIA MXNet 1.9", "pytorch 1.12", "JAX"]})
    both = replace(study, results=pd.DataFrame(rows), tables=replace(study.tables, systems=systems))
    table = numerics.build_frameworks_table(both)
    assert table[["framework", "results"]].to_numpy().tolist() == [["MXNet", 2], ["PyTorch", 1]]
    assert table["epochs"].tolist() == pytest.approx([120**0.5, 20.0])
    assert "PyTorch 20 (n = 1, median batch " in numerics.render_frameworks_answer(both)
    build_specification(numerics.draw_frameworks_chart(table))
    with pytest.raises(NotAnswerableError, match="two frameworks"):
        numerics.build_frameworks_table(replace(both, tables=replace(study.tables, systems=systems.head(1))))
    # An open result may change the model: it is no other implementation of the closed task
    opened = [{**each, "division": "open" if each["system_key"] == "b" else "closed"} for each in rows]
    with pytest.raises(NotAnswerableError, match="two frameworks"):
        numerics.build_frameworks_table(replace(both, results=pd.DataFrame(opened)))
