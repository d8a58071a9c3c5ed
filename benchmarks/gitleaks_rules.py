"""Makes suite/machine/gitleaks_rules.json from the rules of gitleaks.

    python -m benchmarks.gitleaks_rules CHECKOUT

CHECKOUT: a clone of https://github.com/gitleaks/gitleaks (MIT). Its expressions are Go's; Python's differ in three spellings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

TARGET = Path(__file__).parent.parent / "suite" / "machine" / "gitleaks_rules.json"
# mlhpc.suite.machine.secrets has rules of its own for names, headers and flags, which these are a part of.
LEFT_OUT = {"generic-api-key", "curl-auth-header", "curl-auth-user", "hashicorp-tf-password"}


def as_python(expression: str) -> str:
    """Rewrite ``\\z``, ``[`` in a set, and a flag ``(?i)`` that holds from its place to the end of its group."""
    expression = expression.replace(r"\z", r"\Z").replace("[[", r"[\[")
    while (at := expression.find("(?i)", 1)) > 0:
        end = _end_of_group(expression, at + 4)
        expression = f"{expression[:at]}(?i:{expression[at + 4 : end]}){expression[end:]}"
    return expression


def _end_of_group(expression: str, at: int) -> int:
    """Find the parenthesis that closes the group around a place, or the end."""
    depth, in_set = 0, False
    while at < len(expression):
        char = expression[at]
        if char == "\\":
            at += 1
        elif in_set:
            in_set = char != "]"
        elif char == "[":
            in_set = True
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth < 0:
                return at
        at += 1
    return at


def main(checkout: Path) -> None:
    """Write the file."""
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    show = [*git, "show", "HEAD:config/gitleaks.toml"]
    rules = tomllib.loads(subprocess.run(show, capture_output=True, text=True, check=True).stdout)["rules"]
    kept = []
    for rule in rules:
        if "regex" not in rule or "path" in rule or rule["id"] in LEFT_OUT:
            continue
        expression = as_python(rule["regex"])
        re.compile(expression)
        names = {"id": rule["id"], "regex": expression, "keywords": rule["keywords"]}
        kept.append(names | {key: rule[key] for key in ("entropy", "secretGroup") if key in rule})
    licence = subprocess.run([*git, "show", "HEAD:LICENSE"], capture_output=True, text=True, check=True).stdout
    document = {
        "version": 1,
        "source": f"https://github.com/gitleaks/gitleaks, config/gitleaks.toml at commit {commit}",
        "licence": licence,
        "made_by": "python -m benchmarks.gitleaks_rules",
        "rules": kept,
    }
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(kept)} rules")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
