"""Prices that the user states."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from mlhpc.analysis.commands.report import report
from mlhpc.analysis.figures import list_views
from mlhpc.analysis.figures.time_and_cost import _choose_cheap, _list_trades
from mlhpc.analysis.results.index import read_prices
from mlhpc.analysis.study import NotAnswerableError, read_study
from mlhpc.suite.card import Card
from mlhpc.suite.errors import InputError


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("H100=2.50 USD/h", 2.5, "USD"),
        ("H100 = 2.5USD/h", 2.5, "USD"),
        ("H100=1e-1 kWh / h", 0.1, "kWh"),
        ("H100=.25 node/h", 0.25, "node"),
        ("H100=3 €/h", 3.0, "€"),
    ],
)
def test_a_price_is_a_number_and_a_unit_an_hour(text: str, amount: float, unit: str) -> None:
    prices = read_prices([text])
    assert (dict(prices.per_unit_hour), prices.unit) == ({"H100": amount}, unit)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["H100=2.5"], "'2.5' is not a price"),
        (["H100=USD/h"], "is not a price"),
        (["H100=-1 USD/h"], "is not a price"),
        (["H100=0 USD/h"], "is not a price"),
        (["H100=nan USD/h"], "is not a price"),
        (["H100=inf USD/h"], "is not a price"),
        (["H100=1e999 USD/h"], "is not a price"),
        (["H100=2..5 USD/h"], "is not a price"),
        (["H100=2.5 USD/day"], "is not a price"),
        (["H100=1 USD/h", "H100=2 USD/h"], "H100 has a price already"),
        (["H100=1 USD/h", "A100=2 EUR/h"], "different units: USD"),
        (["nothing.yaml"], "No such file"),
    ],
)
def test_what_is_no_price_is_one_line(given: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read_prices(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1\n", "H100: [\n", "H100: 2.5\n", "\xff"])
def test_a_file_that_holds_no_prices_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"prices\.yaml") as caught:
        read_prices([str(path)])
    assert "\n" not in str(caught.value)


def test_cheapest_is_said_by_prices_only(tmp_path: Path, package: Callable[..., Path], cards: dict[str, Card]) -> None:
    """The slower system needs fewer unit hours, but its units cost ten times as much."""
    packages = [
        package(tmp_path / "hpc_results_v9.9", system=name, submitter=name, train_s=seconds, nodes=nodes)
        for name, seconds, nodes in (("big", 6.0, 8), ("small", 20.0, 2))
    ]
    text = (packages[1] / "systems" / "small.json").read_text()
    (packages[1] / "systems" / "small.json").write_text(text.replace('"A1"', '"H100"'))
    without = read_study(packages, cards)
    answer = list_views()["time_and_units"].answer(without)
    assert "fewest" not in answer  # hours of unlike devices are not compared
    assert "cheap" not in answer
    with pytest.raises(NotAnswerableError, match="one kind of device"):
        list_views()["pareto"].table(without)
    file = tmp_path / "prices.yaml"
    file.write_text("A1: 1 USD/h\n")
    priced = read_study(packages, cards, prices=read_prices([str(file), "h100=10 USD/h"]))
    assert "cheapest big" in list_views()["time_and_units"].answer(priced)
    rows = list_views()["pareto"].table(priced).set_index("label")
    assert rows.loc["small", "cost"] == pytest.approx(10 * rows.loc["small", "machine hours"])
    assert set(rows["cost in"]) == {"USD"}
    assert rows["on the front"].to_dict() == {"big": True, "small": False}
    partly = read_study(packages, cards, prices=read_prices([str(file)]))
    with pytest.raises(NotAnswerableError, match="a price"):
        list_views()["pareto"].table(partly)
    done = CliRunner().invoke(report, [str(packages[0]), "--price", "A1=free", "-o", str(tmp_path / "none")])
    assert isinstance(done.exception, InputError)
    assert not (tmp_path / "none").exists()


def test_a_price_of_a_device_that_no_result_has_is_told() -> None:
    prices = read_prices(["H100=2 USD/h", "a100=1 USD/h"])
    (text,) = prices.without_result(["A100", "A100", "V100"])
    assert text == "--price: no result has the device 'H100'; devices here: A100, V100"
    assert prices.without_result(["A100", "H100"]) == []


@pytest.mark.parametrize(("dear", "named"), [(100.0, ["quick"]), (104.0, ["quick"]), (110.0, ["quick", "slow"])])
def test_what_hardly_saves_is_no_trade_and_not_called_the_cheapest(dear: float, named: list[str]) -> None:
    """ABCI's 294 V100 hours and HAL's 283 in 7.8 times the time differ by less than their runs do."""
    rows = pd.DataFrame({"label": ["slow", "quick"], "run_s.mean": [8.0, 1.0], "paid": [100.0, dear], "front": True})
    assert _list_trades(rows) == named
    chosen, nearly = _choose_cheap(rows.assign(hours=rows["paid"]))
    assert chosen["label"] == named[-1]
    assert nearly == ("nearly the " if dear == 104.0 else "")
