"""All rules, in the order in which they are applied and their findings are listed."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TypeVar

from mlhpc.suite.compliance import selection
from mlhpc.suite.compliance.forensics import copy_rules, course_rules, provenance_rules
from mlhpc.suite.compliance.rules import log_rules, mlhpc_rules, package_rules, power_rules, result_rules, sum_rules
from mlhpc.suite.compliance.rules.base import LogRule, ResultRule, Rule

Kind = TypeVar("Kind", bound=Rule)


def _rules_in(kind: type[Kind], *modules: ModuleType) -> tuple[Kind, ...]:
    """Collect the rules of one kind from modules, in the order in which the modules define them."""
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, kind))


# The order of modules is that of findings in every output, so a new module goes to the end.
LOG_RULES = _rules_in(LogRule, log_rules, course_rules, mlhpc_rules, sum_rules)
RESULT_RULES = _rules_in(ResultRule, result_rules, provenance_rules, power_rules, copy_rules, package_rules)
PACKAGE_RULES: tuple[Rule, ...] = (
    *(*selection.SELECTION_RULES, *copy_rules.REUSE_RULES, *package_rules.PACKAGE_RULES),
    *(provenance_rules.RUNS_AT_ONCE, result_rules.NUMBERS_ALIKE),
)
RULES: Mapping[str, Rule] = {rule.name: rule for rule in (*LOG_RULES, *RESULT_RULES, *PACKAGE_RULES)}
