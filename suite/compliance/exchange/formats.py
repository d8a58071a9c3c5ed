"""The forms in which a verdict is printed."""

from __future__ import annotations

from collections.abc import Callable

from suite.compliance.check import Verdict
from suite.compliance.exchange.document import as_json
from suite.compliance.exchange.sarif import as_sarif
from suite.compliance.output import as_github, as_junit, as_table

FORMATS: dict[str, Callable[[Verdict], str]] = {
    "text": as_table,
    "json": as_json,
    "sarif": as_sarif,
    "junit": as_junit,
    "github": as_github,
}
