"""Write docs/commands.md from the commands. Run it after a command or an option changes.

python docs/write_commands.py
"""

from __future__ import annotations

from pathlib import Path

from suite.cli.group import LazyGroup
from suite.cli.main import group
from suite.cli.reference import PAGE, page
from suite.files import print_line

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    assert isinstance(group, LazyGroup)
    (ROOT / PAGE).write_text(page(group), encoding="utf-8")
    print_line(str(ROOT / PAGE))
