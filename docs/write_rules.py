"""Write docs/rules.md and the schema of the verdict from the code. Run it after a rule or the verdict changes.

python docs/write_rules.py
"""

from __future__ import annotations

from pathlib import Path

from suite.compliance.exchange.document import SCHEMA, schema
from suite.compliance.explanations import PAGE, rules_page
from suite.files import print_line

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    for path, text in ((ROOT / PAGE, rules_page()), (SCHEMA, schema())):
        path.write_text(text, encoding="utf-8")
        print_line(str(path))
