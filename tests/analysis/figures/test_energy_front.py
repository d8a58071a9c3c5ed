"""The front of time and energy: who is on it, what is never beside each other, and what it needs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlhpc.analysis.figures import list_views
from mlhpc.analysis.page.summary import build_score_sections
from mlhpc.analysis.study import NotAnswerableError, read_study
from mlhpc.suite.card import Card
from tests.fixtures.charts import drawn, panels

FIGURE = "energy_front"


def counted(package: Path, counter: str, watts: float) -> Path:
    """Give every run of a package an energy event, written before its end."""
    for log in package.rglob("result_*.txt"):
        lines = log.read_text().splitlines(keepends=True)
        events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
        times = {event["key"]: event["time_ms"] for event in events if event["key"] in ("run_start", "run_stop")}
        nodes = next((event["value"] for event in events if event["key"] == "number_of_nodes"), 1)
        seconds = (times["run_stop"] - times["run_start"]) / 1e3
        value = {counter: {"joules": watts * seconds, "counters": nodes}}
        event = {"namespace": "", "time_ms": times["run_stop"], "event_type": "POINT_IN_TIME", "key": "energy"}
        place = next(index for index, each in enumerate(events) if each["key"] == "run_stop")
        lines.insert(place, f":::MLLOG {json.dumps(event | {'value': value, 'metadata': {'seconds': seconds}})}\n")
        log.write_text("".join(lines))
    return package


def test_the_front_says_what_speed_costs(tmp_path: Path, package: Callable[..., Path], cards: dict[str, Card]) -> None:
    made = {
        name: package(tmp_path / "hpc_results_v9.9", system=name, submitter=name, train_s=seconds, nodes=4)
        for name, seconds in (("fast", 5.0), ("slow", 20.0), ("worse", 30.0), ("part", 10.0))
    }
    unmeasured = read_study(list(made.values()), cards)
    assert not [name for name in unmeasured.results if "energy" in name]
    with pytest.raises(NotAnswerableError, match=r"docs/energy\.md"):
        list_views()[FIGURE].table(unmeasured)
    for name, watts in (("fast", 9000.0), ("slow", 1000.0), ("worse", 1100.0)):
        counted(made[name], "pm_counters/node", watts)
    counted(made["part"], "nvml/gpu", 100.0)
    data = read_study(list(made.values()), cards)
    rows = list_views()[FIGURE].table(data).set_index("label")
    assert rows["on the front"].to_dict() == {"fast": True, "slow": True, "worse": False, "part": True}
    assert rows.loc["part", "energy of"] == "device, AC or DC not stated"
    times = rows["time to train [min]"] * 60
    assert rows.loc["slow", "energy [MJ]"] == pytest.approx(1000 * times["slow"] / 1e6, rel=1e-3)
    assert (rows["energy, low [MJ]"] < rows["energy [MJ]"]).all()
    assert (rows["energy, high [MJ]"] > rows["energy [MJ]"]).all()
    answer = list_views()[FIGURE].answer(data)
    speed, cost = times["slow"] / times["fast"], rows.loc["fast", "energy [MJ]"] / rows.loc["slow", "energy [MJ]"]
    assert f"fast is {speed:.3g} times faster than slow for {cost:.3g} times the energy" in answer
    assert "part is both" in answer  # devices alone are in a panel of their own
    assert len(panels(drawn(FIGURE, data))) == 2
    assert "energy [MJ]" in str(build_score_sections(data))
    assert "energy [MJ]" not in str(build_score_sections(unmeasured))
