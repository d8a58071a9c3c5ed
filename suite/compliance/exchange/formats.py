"""The forms in which a verdict is printed."""

from __future__ import annotations

from collections.abc import Callable

from suite.compliance.check import Verdict
from suite.compliance.output import as_github, as_junit, as_table


def as_json(verdict: Verdict) -> str:
    """The verdict as `suite.compliance.exchange.document` has it, whose models are built when they are asked for."""
    from suite.compliance.exchange import document

    return document.as_json(verdict)


def as_sarif(verdict: Verdict) -> str:
    """The verdict as `suite.compliance.exchange.sarif` has it."""
    from suite.compliance.exchange import sarif

    return sarif.as_sarif(verdict)


FORMATS: dict[str, Callable[[Verdict], str]] = {
    "text": as_table,
    "json": as_json,
    "sarif": as_sarif,
    "junit": as_junit,
    "github": as_github,
}
