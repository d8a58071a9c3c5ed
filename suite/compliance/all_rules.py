"""All rules, in the order in which they are applied and their findings are listed."""

from __future__ import annotations

from collections.abc import Mapping

from suite.compliance import choice
from suite.compliance.forensics import copy_rules, course_rules, provenance_rules
from suite.compliance.rules import (
    eval_rules,
    log_rules,
    mlhpc_rules,
    package_rules,
    power_rules,
    result_rules,
    stated_rules,
    training_rules,
)
from suite.compliance.rules.base import LogRule, ResultRule, Rule

LOG_RULES: tuple[LogRule, ...] = (
    *log_rules.RULES,
    *eval_rules.RULES,
    *course_rules.RULES,
    *mlhpc_rules.RULES,
    *stated_rules.RULES,
    *training_rules.RULES,
)
RESULT_RULES: tuple[ResultRule, ...] = (
    *result_rules.RULES,
    *provenance_rules.RULES,
    *power_rules.RULES,
    *copy_rules.RULES,
    *package_rules.RULES,
)
PACKAGE_RULES: tuple[Rule, ...] = (*choice.RULES, *copy_rules.REUSE_RULES, *package_rules.PACKAGE_RULES)
RULES: Mapping[str, Rule] = {rule.name: rule for rule in (*LOG_RULES, *RESULT_RULES, *PACKAGE_RULES)}
