"""What a rule's explanation says is true and short: sections that exist, thresholds, lines that a screen can show."""

import re
from pathlib import Path

import pytest

from mlhpc.suite.compliance.all_rules import RULES
from mlhpc.suite.compliance.output import explain_rule
from mlhpc.suite.compliance.rules.base import SECTIONS, cite
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset

HEADINGS = Path(__file__).parents[2] / "fixtures" / "training_policies_headings.txt"


def numbered_headings() -> dict[tuple[str, str], str]:
    """The headings of both rules documents by document and number, as asciidoc's sectnums counts them."""
    found: dict[tuple[str, str], str] = {}
    document, counts = "", [0, 0, 0]
    for line in HEADINGS.read_text().splitlines():
        match = re.fullmatch(r"(==+) (.*?)(?: *\[\[.*\]\])? *", line)
        if match is None:
            document, counts = line, [0, 0, 0]
            continue
        level = len(match[1]) - 2
        counts = [*counts[:level], counts[level] + 1, *[0] * (2 - level)]
        found[document, ".".join(str(count) for count in counts[: level + 1])] = match[2]
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_a_cited_section_has_the_heading_of_the_commit_that_the_rulesets_name(section: tuple[str, str]) -> None:
    assert numbered_headings()[section] == SECTIONS[section]
    assert any(cite(*section) in rule.source for rule in RULES.values()), "nothing cites it"


def test_the_rulesets_name_the_commit_of_the_headings() -> None:
    assert "training_policies d73e20f" in HEADINGS.read_text()
    assert all("training_policies d73e20f" in read_ruleset(name).data.reference for name in ("1.0.0", "2.0.0", "3.0.0"))


def test_no_rule_cites_a_section_by_hand() -> None:
    """A number without its heading would not be compared."""
    for rule in RULES.values():
        rest = rule.source
        for section in SECTIONS:
            rest = rest.replace(cite(*section), "")
        assert not re.search(r"\.adoc \d", rest), rule.name


@pytest.mark.parametrize("rule", RULES)
def test_no_line_of_an_explanation_is_longer_than_300_characters(rule: str) -> None:
    assert [line for line in explain_rule(rule).splitlines() if len(line) > 300] == []


@pytest.mark.parametrize(
    ("rule", "threshold"),
    [
        ("init-gap", "1 s"),
        ("init-limit", "30 minutes"),
        ("target-missed", "target in 3.0.0: cosmoflow eval_error <= 0.124"),
        ("run-count", "required runs in 3.0.0: cosmoflow 10"),
        ("energy-plausible", "100 kW"),
    ],
)
def test_a_threshold_stands_in_the_text(rule: str, threshold: str) -> None:
    assert threshold in explain_rule(rule)


def test_every_ruleset_has_its_thresholds_once() -> None:
    text = explain_rule("target-missed")
    named = [name for line in text.splitlines() if line.startswith("  target in ") for name in
             line.removeprefix("  target in ").partition(":")[0].split(", ")]  # fmt: skip
    assert sorted(named) == sorted(list_rulesets())
