"""A number has the digits that its interval allows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlhpc.analysis.drawing.view import render_interval, render_seconds_interval


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (12.345, 9.2, 16.1, "12 [9, 17]"),
        (0.36, 0.335, 0.972, "0.4 [0.3, 1.0]"),
        (99.71, 99.42, 99.93, "99.7 [99.4, 100.0]"),
        (20.4, 19.8, 45.3, "20 [19, 46]"),
        (13885.0, 13885.0, 110333.0, "10,000 [10,000, 120,000]"),
        (1e-5, 0.9e-5, 1.3e-5, "0.000010 [0.000009, 0.000013]"),
        (100.0, 100.0, 100.0, "100"),
        (2.625, 2.6249999, 2.6250001, "2.625 [2.624, 2.626]"),  # four digits at most, however narrow
        (5.0, float("nan"), 6.0, "5 [unknown]"),
        (float("nan"), 1.0, 2.0, "–"),
    ],
)
def test_digits_follow_the_interval(value: float, low: float, high: float, text: str) -> None:
    assert render_interval(value, low, high) == text


@given(st.floats(1e-6, 1e6), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_the_written_interval_holds_the_interval(value: float, below: float, above: float) -> None:
    low, high = value / (1 + below), value * (1 + above)
    text = render_interval(value, low, high)
    ends = re.search(r"\[(.*), (.*)\]", text)
    if ends is None:
        assert high - low <= 0
        return
    written_low, written_high = (float(end.replace(",", "")) for end in re.findall(r"[\d,]*\d(?:\.\d+)?", ends.group()))
    assert written_low <= low * (1 + 1e-6)
    assert written_high >= high * (1 - 1e-6)
    assert len(text.split(" [")[0].replace(",", "").replace(".", "").strip("0")) <= 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((0.36, 0.335, 0.972), "400 ms [300, 1,000]"),
        ((4000.0, 3900.0, 4300.0), "67 min [65, 72]"),
        ((3e-5, 2.5e-5, 3.4e-5), "30 µs [25, 34]"),
        ((90000.0, 70000.0, 140000.0), "25 h [19, 39]"),
    ],
)
def test_times_have_a_unit_that_fits(seconds: tuple[float, float, float], text: str) -> None:
    assert render_seconds_interval(*seconds) == text
