"""What the size of a machine is counted in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.figures import figures
from analysis.results.extent import extent
from analysis.study import NotAnswerableError, study
from suite.card import Card


@pytest.mark.parametrize(
    ("units", "nodes", "cores", "ranks", "count", "sizes"),
    [
        ([1, 2], [1, 2], [8, 16], [2, 4], "compute units", [1, 2]),
        ([4, 4], [1, 2], [8, 8], [2, 4], "nodes", [1, 2]),
        ([1, 1], [1, 1], [1, 4], [1, 4], "cores", [1, 4]),
        ([1, 1], [1, 1], [4, 16], [1, 1], "cores", [4, 16]),
        ([1, 1], [1, 1], [None, None], [1, 4], "ranks", [1, 4]),
        ([1, 1], [1, 1], [None, 4], [1, 4], "ranks", [1, 4]),
        ([1, 1], [1, 1], [4, 4], [1, 4], "compute units", [1, 1]),  # more ranks on the same cores are no larger machine
        ([1, 1], [None, 2], [4, 4], [1, 4], "compute units", [1, 1]),
    ],
)
def test_size_is_counted_in_what_varies(
    units: list[Any], nodes: list[Any], cores: list[Any], ranks: list[Any], count: str, sizes: list[float]
) -> None:
    found, name = extent(pd.DataFrame({"units": units, "nodes": nodes, "cores": cores, "ranks": ranks}))
    assert (found.tolist(), name) == (sizes, count)


def test_ranks_on_one_cpu_node_are_a_scaling_experiment(
    tmp_path: Path, run_folder: Callable[..., Path], cards: dict[str, Card]
) -> None:
    folders = [run_folder(tmp_path, f"of{ranks}", ranks=ranks, train_s=40.0 / ranks) for ranks in (2, 4, 8)]
    known = study(folders, cards)
    one_node = known.results.assign(units=1, nodes=1, cores=known.results["ranks"], machine="laptop", device="CPU")
    rows = figures()["scaling"].table(replace(known, results=one_node))
    assert (rows["counts"].unique().tolist(), rows["size"].tolist()) == (["cores"], [2, 4, 8])
    assert rows["system"].iloc[-1] < 1  # evaluations did not become shorter
    assert "at 8 cores" in figures()["scaling"].answer(replace(known, results=one_node))
    same_cores = one_node.assign(cores=8)
    with pytest.raises(NotAnswerableError, match="units, nodes or cores"):
        figures()["scaling"].table(replace(known, results=same_cores))
