"""Criteria of rule files: what SuperBench's say, and that nothing else is run."""

from __future__ import annotations

import pytest

from analysis.fleet.grammar import Criteria
from suite.errors import InputError


@pytest.mark.parametrize(
    ("text", "value", "violated"),
    [
        ("lambda x:x>0.05", 0.06, True),
        ("lambda x:x>0.05", 0.05, False),
        ("lambda x: x < -0.05", -0.0501, True),
        ("lambda x: not -1 <= x <= 1", 2, True),
        ("lambda x: not -1 <= x <= 1", 0.5, False),
        ("lambda x: x < 0 or (x > 2 and x != 3)", 3, False),
        ("lambda y: abs(y) > 0.1", -0.2, True),
        ("lambda x: True if x*2-1 >= 1 else False", 1, True),
        ('lambda label:True if label["a"]+label["b"]>=2 else False', {"a": 1, "b": 1}, True),
        ('lambda label:True if label["a"]+label["b"]>=2 else False', {"a": 1, "b": 0}, False),
        (
            'lambda label: bool(min(label["r"].values())/max(label["r"].values())<0.95)',
            {"r": {"x": 9.0, "y": 10.0}},
            True,
        ),
        ('lambda label: sum(label["r"].values())/len(label["r"].values())<1', {"r": {"x": 1.0, "y": 2.0}}, False),
    ],
)
def test_what_a_rule_says(text: str, value: object, violated: bool) -> None:
    assert Criteria(text, "rules.yaml")(value) is violated


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (">", "expected 'lambda x: ...'"),
        ("5", "expected 'lambda x: ...' with one argument"),
        (">5", "expected 'lambda x: ...'"),
        ("x>5", "with one argument"),
        ("lambda x, y: x > y", "with one argument"),
        ("lambda x=1: x > 0", "with one argument"),
        ("lambda *x: x > 0", "with one argument"),
        ("lambda: True", "with one argument"),
        ("lambda x: __import__('os').system('true')", "not allowed"),
        ("lambda x: open('/etc/passwd')", "not allowed"),
        ("lambda x: x.__class__", "'x.__class__' is not allowed"),
        ("lambda x: x.values.__globals__", "not allowed"),
        ("lambda x: [y for y in x]", "not allowed"),
        ("lambda x: x ** 9 ** 9 > 0", "not allowed"),
        ("lambda x: 'a' * 9999999999 > x", "not allowed"),
        ("lambda x: (lambda y: y)(x)", "not allowed"),
        ("lambda x: min(x, key=print) > 0", "not allowed"),
        ("lambda x: y > 0", "'y' is not allowed"),
        ("lambda x: x if x > 0 else (yield)", "not allowed"),
        ("lambda x: " + "+".join(["x"] * 150) + " > 0", "longer than 200"),
        ("lambda x: " + "(" * 300 + "x" + ")" * 300, "expected"),
        (5, "expected a text"),
        ("lambda x: x > 0" + " " * 600, "expected a text"),
    ],
)
def test_what_is_not_in_the_grammar_is_refused_when_it_is_read(text: str, found: str) -> None:
    with pytest.raises(InputError, match=r"^rules\.yaml: criteria ") as error:
        Criteria(text, "rules.yaml")
    assert found in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value", "found"),
    [
        ("lambda x:x+1", 1.0, "gives 2.0; expected a comparison"),
        ("lambda x: 1/x > 0", 0.0, "ZeroDivisionError"),
        ('lambda label: label["b"] > 0', {"a": 1}, "KeyError 'b'"),
        ('lambda x: x["b"] > 0', 1.0, "TypeError"),
        ("lambda x: min(x.values()) > 0", 1.0, "AttributeError"),
    ],
)
def test_criteria_that_do_not_fit_the_value_say_so(text: str, value: object, found: str) -> None:
    with pytest.raises(InputError, match=r"^rules\.yaml: criteria ") as error:
        Criteria(text, "rules.yaml")(value)
    assert found in str(error.value)
