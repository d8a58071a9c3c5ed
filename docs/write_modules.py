"""Write docs/modules.md, every module of the code with the first sentence of its docstring. Run it after a module changes.

python docs/write_modules.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from suite.files import print_line

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Modules

<!-- Written by docs/write_modules.py from the docstrings. -->

What each module does, by folder. The map of the folders, and which may import which, is in [architecture.md](architecture.md).
"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    files = [
        *sorted(ROOT.glob("mlhpc.py")),
        *sorted(path for top in ("suite", "analysis", "workloads") for path in (ROOT / top).rglob("*.py")),
    ]
    for folder in dict.fromkeys(path.parent for path in files):
        name = folder.relative_to(ROOT).as_posix()
        parts += [f"\n## {'Top level' if name == '.' else name}\n", "| module | what it does |", "| --- | --- |"]
        parts += [f"| `{path.stem}` | {_first_sentence(path)} |" for path in files if path.parent == folder]
    return "\n".join(parts) + "\n"


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=[a-z0-9)`'])[.](?:\s|$)", " ".join(text.split()), maxsplit=1)[0]
    return sentence.rstrip(".").replace("|", chr(92) + "|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print_line(str(PAGE))
