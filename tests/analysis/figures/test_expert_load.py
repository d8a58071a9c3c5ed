"""Tokens per expert: from the log to table and figure, whatever a log says there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlhpc.analysis.figures import expert_load, list_views
from mlhpc.analysis.study import NotAnswerableError, Study, read_study
from mlhpc.analysis.tables.ingest import parse_counts
from mlhpc.suite.card import Card
from tests.analysis.conftest import LogText
from tests.fixtures.charts import drawn, panels

Build = Callable[..., LogText]


def window(log: LogText, epoch: int, first_step: int, load: Any) -> None:
    stats = {"load": load, "efficiency": {"exposed_communication_s": 0.5}}
    log.event(
        5.0 + 15 * (epoch - 1) + first_step / 100, "window_stats", stats, epoch_num=epoch, first_step=first_step,
        steps=10,
    )  # fmt: skip


def layer(tokens: list[Any], drop: float = 0.0) -> dict[str, Any]:
    return {
        "tokens_per_expert": tokens,
        "imbalance": 7.0,
        "drop_rate": drop,
        "needed_capacity": 2.0,
        "padding_waste": 0.2,
    }


def made(folder: Path, log: Build, cards: dict[str, Card], *loads: Any) -> Study:
    for trial in range(2):
        text = log(ours=True, size="mini", seed=trial, start_s=1000.0 * trial)
        for place, load in enumerate(loads):
            window(text, 1 + place // 2, 10 * (place % 2), load)
        text.write(folder / f"result_{trial}.txt")
    return read_study([folder], cards)


def test_the_load_over_the_training(tmp_path: Path, log: Build, cards: dict[str, Card]) -> None:
    even, skewed = [100, 100, 100, 100], [400, 0, 0, 0]
    data = made(
        tmp_path / "runs", log, cards, {"a": layer(skewed, 0.5), "b": layer(even)}, {"a": layer(even), "b": layer(even)}
    )
    rows = data.tables.experts
    assert list(rows["imbalance"]) == [4.0, 1.0, 1.0, 1.0] * 2, (
        "computed from the tokens, not what the log says of them"
    )
    assert parse_counts(rows["tokens_per_expert"][0]) == [400.0, 0.0, 0.0, 0.0]
    frame = expert_load.build_table(data).set_index("layer")
    assert frame.loc["a", "imbalance at first"] == 4.0
    assert frame.loc["a", "imbalance at last"] == 1.0
    assert frame.loc["a", "dropped [%]"] == 25.0
    assert frame.loc["b", "largest imbalance"] == 1.0
    assert frame.loc["a", "exposed all-to-all, all layers [ms/step]"] == pytest.approx(50.0)
    assert "2.50 times the mean at first, 1.00 times in the end; 12 % of tokens dropped" in expert_load.render_answer(
        data
    )
    _, layers, shares = next(expert_load._find_loads(data)).last_epoch()
    assert layers == ["a", "b"]
    assert shares.tolist() == [[2.5, 0.5, 0.5, 0.5], [1.0] * 4]
    cells = list_views()["expert_tokens"].table(data).set_index(["layer", "expert"])["tokens / mean"]
    assert cells["a"].tolist() == [2.5, 0.5, 0.5, 0.5]
    assert "most tokens has expert 0 of a (2.50 times the mean)" in list_views()["expert_tokens"].answer(data)
    (rows,) = panels(drawn("expert_tokens", data)).values()
    assert len(rows) == 8


def test_without_experts_it_says_what_is_missing(tmp_path: Path, log: Build, cards: dict[str, Card]) -> None:
    data = made(tmp_path / "runs", log, cards, None)
    with pytest.raises(NotAnswerableError, match="load of experts"):
        expert_load.render_answer(data)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
LAYER = st.fixed_dictionaries(
    {},
    optional={
        "tokens_per_expert": ANY | st.lists(st.integers(0, 10**15), max_size=40),
        "drop_rate": ANY,
        "padding_waste": ANY,
    },
)


ANY_LOAD = ANY | st.dictionaries(st.text(max_size=3), LAYER, max_size=3)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(load=ANY_LOAD)
@pytest.mark.long
def test_no_load_stops_the_answer(
    tmp_path_factory: pytest.TempPathFactory, log: Build, cards: dict[str, Card], load: Any
) -> None:
    data = made(tmp_path_factory.mktemp("any"), log, cards, load, {"a": layer([1, 2, 3])})
    expert_load.build_table(data)
    expert_load.render_answer(data)


def check_figure(folder: Path, log: Build, cards: dict[str, Card], load: Any) -> None:
    data = made(folder, log, cards, load, {"a": layer([1, 2, 3])})
    for name in ("expert_load", "expert_tokens"):
        assert drawn(name, data)["datasets"]


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(load=ANY_LOAD)
def test_no_load_stops_the_figure(
    tmp_path_factory: pytest.TempPathFactory, log: Build, cards: dict[str, Card], load: Any
) -> None:
    check_figure(tmp_path_factory.mktemp("any"), log, cards, load)


@pytest.mark.long
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(load=ANY_LOAD)
def test_no_load_of_many_stops_the_figure(
    tmp_path_factory: pytest.TempPathFactory, log: Build, cards: dict[str, Card], load: Any
) -> None:
    check_figure(tmp_path_factory.mktemp("any"), log, cards, load)
