"""Goodput: from the logs of attempts to table and answer, by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlhpc.analysis.figures import list_views
from mlhpc.analysis.study import NotAnswerableError, read_study
from mlhpc.suite.card import Card
from tests.analysis.conftest import LogText

RECOVERY = {"replayed_s": 30.0, "detection_s": None, "queue_s": 49.0, "restart_s": 10.0, "reload_s": 4.0}
Build = Callable[..., LogText]


def write(root: Path, name: str, text: LogText, value: Any) -> None:
    text.event(1e6, "goodput", value)
    if "resumed" in name:
        text.event(1e6, "recovery", RECOVERY)
    text.write(root / "runs" / "one" / name)


def value(
    useful: float, lost: float = 0.0, down: float = 0.0, saves: int = 0, interruptions: int = 0
) -> dict[str, Any]:
    parts = {"useful_s": useful, "lost_s": lost, "stalled_s": 1.0 * saves, "starting_s": 20.0, "down_s": down}
    return parts | {
        "wall_s": sum(parts.values()),
        "checkpoint": {"saves": saves},
        "interruptions": [{"lost_s": lost, "down_s": down, "restart_s": 10.0}] * interruptions,
    }


def run_folder(root: Path) -> None:
    folder = root / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"version": 1}')


def test_the_last_attempt_speaks_for_its_trial(tmp_path: Path, log: Build, cards: dict[str, Card]) -> None:
    run_folder(tmp_path)
    given = {"size": "mini", "ours": True}
    write(tmp_path, "result_0.txt", log(**given, seed=1, stop=True), value(80))
    write(tmp_path, "result_1.txt", log(**given, seed=2, start_s=5000.0), value(40, saves=1))
    write(
        tmp_path,
        "resumed_1_1.txt",
        log(**given, seed=2, start_s=9000.0, extra=(("run_resumed", None),)),
        value(100, lost=30, down=49, saves=1, interruptions=1),
    )
    made = read_study([tmp_path / "runs"], cards)
    (row,) = list_views()["goodput"].table(made).to_dict("records")
    assert (row["n"], row["interruptions"]) == (2, 1)
    assert row["useful [%]"] == pytest.approx((80 + 50) / 2)  # 80 of 100 s and 100 of 200 s
    assert row["lost [%]"] == pytest.approx(15 / 2)
    assert row["down [%]"] == pytest.approx(24.5 / 2)
    assert row["starting [%]"] == pytest.approx((20 + 10) / 2)
    assert (row["least useful [%]"], row["most useful [%]"]) == (50, 80)
    said = "65 % (50 to 80), n = 2, 1 interruption; a recovery took 93 s: replayed 30 s, queue 49 s, restart 10 s, reload 4 s"
    assert list_views()["goodput"].answer(made).endswith(said)
    assert row["recoveries"] == 1


def test_nothing_is_shown_where_nothing_was_saved_or_interrupted(
    tmp_path: Path, log: Build, cards: dict[str, Card]
) -> None:
    run_folder(tmp_path)
    write(tmp_path, "result_0.txt", log(size="mini", ours=True), value(80))
    with pytest.raises(NotAnswerableError, match="interrupted or saved"):
        list_views()["goodput"].table(read_study([tmp_path / "runs"], cards))


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "x",
        {"wall_s": "long"},
        {"wall_s": -1.0, "interruptions": [1]},
        {"wall_s": 1e300, "checkpoint": {"saves": "many"}},
    ],
)
def test_whatever_a_log_says_there_is_read(tmp_path: Path, log: Build, cards: dict[str, Card], wrong: Any) -> None:
    run_folder(tmp_path)
    write(tmp_path, "result_0.txt", log(size="mini", ours=True), wrong)
    write(tmp_path, "result_1.txt", log(size="mini", ours=True, seed=2, start_s=9000.0), value(79, saves=1))
    (row,) = list_views()["goodput"].table(read_study([tmp_path / "runs"], cards)).to_dict("records")
    assert (row["n"], row["useful [%]"]) == (1, 79)
