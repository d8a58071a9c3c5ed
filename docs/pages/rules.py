"""The page of the checker's rules, from the rules, the rulesets and suite/compliance/rules.yaml."""

from __future__ import annotations

from mlhpc.suite.compliance.output import render_rules_page


def page() -> str:
    """The text of the page."""
    return render_rules_page()
