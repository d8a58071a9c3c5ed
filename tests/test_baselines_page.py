"""The cards quote the dated tables; the page says how far each target lies beyond each baseline, in standard errors."""

from __future__ import annotations

import re

import pytest
import yaml
from msgspec import convert, structs

from benchmarks.baselines.__main__ import RESULTS, card_lines, read_table
from docs.pages import baselines
from mlhpc.suite.card import Baseline, Baselines


def test_the_cards_quote_the_newest_tables() -> None:
    """A size that was measured is in its card, with its values, and no other is."""
    for workload, card in baselines.read_cards().items():
        newest = max(RESULTS.glob(f"*-baselines_{workload}.json"))
        measured = {size: "\n".join(card_lines(newest.name, entry)) for size, entry in read_table(newest).items()}
        stated = {size: each.baselines for size, each in card.sizes.items() if each.baselines}
        assert stated == {
            size: convert(yaml.safe_load(lines)["baselines"], Baselines) for size, lines in measured.items()
        }


def test_the_page_has_every_workload_and_every_row() -> None:
    text, cards = baselines.page(), baselines.read_cards()
    assert all(f"## {each.title}" in text for each in cards.values())
    assert text.count("\n| `") == len([*baselines.rows(cards), *baselines.rows(cards, oracle=True)]) > 40


def test_margins_are_in_standard_errors_and_positive_beyond_a_baseline() -> None:
    for workload, better in (("cosmoflow", -1), ("openfold", 1)):  # an error falls, lDDT rises
        card = baselines.read_cards()[workload]
        size = card.size("smoke")
        entries = {
            "met": Baseline(value=size.threshold + 0.02 * better, standard_error=0.01),
            "beyond": Baseline(value=size.threshold - 0.03 * better, standard_error=0.01),
            "bare": Baseline(value=size.threshold - 0.01 * better),
        }
        stated = Baselines(table="t", seed=0, samples=9, values=entries)
        changed = structs.replace(card, sizes={"smoke": structs.replace(size, baselines=stated)})
        found = {row.name: row for row in baselines.rows({workload: changed})}
        assert found["met"].margin == pytest.approx(-2)
        assert found["beyond"].margin == pytest.approx(3)
        assert found["bare"].margin is None
        assert next(iter(found)) != "beyond"


def test_the_page_names_the_sizes_whose_target_a_baseline_meets() -> None:
    (named,) = re.findall("Baselines meet the target of (.*)[.]\n", baselines.page())
    found = baselines.rows(baselines.read_cards())
    met = [f"{row.workload} `{row.size}`" for row in found if row.margin is not None and row.margin <= 0]
    assert met
    assert named == ", ".join(dict.fromkeys(met))


def test_oracle_baselines_show_that_the_target_can_be_met() -> None:
    oracle = list(baselines.rows(baselines.read_cards(), oracle=True))
    assert {row.name for row in oracle} == {"known_language"}
    assert all(row.margin is not None and row.margin < 0 for row in oracle)
