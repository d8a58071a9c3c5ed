"""Whatever stands in a log: a report comes out, and the log is in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlhpc.analysis.page.report import render_report
from mlhpc.analysis.study import read_study
from mlhpc.suite.card import Card

ODD = [
    None,
    True,
    -1,
    0,
    10**400,
    1e308,
    "",
    "nan",
    "12",
    "$x_{",
    [],
    [1, "a"],
    {},
    {"throughput": "x"},
    "\ud800",
    -(10**15),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 40))])
def test_odd_values_in_any_place(
    tmp_path: Path, seed: int, run_folder: Callable[..., Path], cards: dict[str, Card]
) -> None:
    check_report(tmp_path, seed, run_folder, cards)


def check_report(tmp_path: Path, seed: int, run_folder: Callable[..., Path], cards: dict[str, Card]) -> None:
    chance = random.Random(seed)
    folder = run_folder(tmp_path, runs=4)
    for path in sorted(folder.glob("result_*.txt")):
        lines = path.read_text().splitlines()
        for _ in range(6):
            at = chance.randrange(len(lines))
            record: dict[str, Any] = json.loads(lines[at].removeprefix(":::MLLOG "))
            place = chance.choice(["value", "metadata", "time_ms", "epoch_num", "inside", "gone"])
            odd = chance.choice(ODD)
            if place == "gone":
                del lines[at]
                continue
            if place == "epoch_num":
                record["metadata"] = {"epoch_num": odd}
            elif place == "inside" and isinstance(record["value"], dict) and record["value"]:
                record["value"][chance.choice(sorted(record["value"]))] = odd
            elif place == "time_ms":
                record["time_ms"] = chance.choice([0, 10**15, 1.5, odd])
            elif place == "metadata":
                record["metadata"] = odd
            else:
                record["value"] = odd
            lines[at] = f":::MLLOG {json.dumps(record)}"
        path.write_text("\n".join(lines))
    made = render_report(read_study([folder], cards), [])
    json.loads(made.json)
    assert all(f"run1/result_{trial}.txt" in made.html for trial in range(4))
