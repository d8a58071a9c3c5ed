"""Write docs/rules.md and the schemas of verdict and result from the code. Run it after a rule or one of these changes.

python docs/write_rules.py
"""

from __future__ import annotations

from pathlib import Path

from suite.compliance.exchange.document import SCHEMA, schema
from suite.compliance.exchange.result_document import RESULT_SCHEMA, result_schema
from suite.compliance.explanations import rules_page
from suite.compliance.rules.table import PAGE
from suite.files import print_line

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    pages = ((ROOT / PAGE, rules_page()), (SCHEMA, schema()), (RESULT_SCHEMA, result_schema()))
    for path, text in pages:
        path.write_text(text, encoding="utf-8")
        print_line(str(path))
