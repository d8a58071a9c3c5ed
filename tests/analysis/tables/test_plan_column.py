"""The plan of a run in the table of runs, whatever a log says of it, and in why one result is faster."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from mlhpc.analysis.figures.waterfall import _plans
from mlhpc.analysis.study import Study
from mlhpc.analysis.tables.run_row import render_plan
from mlhpc.suite.log.reader import read_events

MESH = {"data": 2, "shard": 1, "spatial": [2, 1, 1]}


def said(folder: Path, value: Any) -> str | None:
    line = {
        "namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": "parallel_plan", "value": value,
        "metadata": {},
    }  # fmt: skip
    path = folder / "result_0.txt"
    path.write_text(f":::MLLOG {json.dumps(line)}\n" if value is not None else "")
    return render_plan(read_events(path))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        ({"name": "spatial", "mesh": MESH}, "spatial data=2,spatial=2x1x1"),
        ({"name": "sharded", "mesh": {"data": 2, "shard": 4, "spatial": []}}, "sharded data=2,shard=4"),
        (
            {"name": "mine", "mesh": {"data": 2}, "recompute": {"blocks.*": "full"}},
            "mine data=2, recomputes blocks.* (full)",
        ),
        ({"name": "spatial", "mesh": 3}, None),
        ("spatial", None),
        ({"name": None, "mesh": {"spatial": "2x2"}}, "None data=None"),
        ({"name": "x", "mesh": {"data": {"a": 1}}, "recompute": [1]}, "x data={'a': 1}"),
    ],
)
def test_a_plan_is_told_by_name_mesh_and_what_it_recomputes(value: Any, text: str | None, tmp_path: Path) -> None:
    assert said(tmp_path, value) == text


def test_plans_that_differ_are_named_and_others_are_not() -> None:
    runs = {
        "a": pd.DataFrame({"plan": [None, None]}),
        "b": pd.DataFrame({"plan": ["spatial data=2", "spatial data=2"]}),
        "c": pd.DataFrame({"plan": ["spatial data=2", None]}),
    }
    study = cast(Study, SimpleNamespace(converged_of=lambda group: runs[group]))
    assert _plans(study, "a", "a") == _plans(study, "b", "b") == ""
    assert _plans(study, "a", "b") == "plan: no plan to spatial data=2"
    assert _plans(study, "b", "c") == "plan: spatial data=2 to no plan or spatial data=2"
