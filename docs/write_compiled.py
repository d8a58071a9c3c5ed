"""Write the compiled form of every YAML file that commands read often: cards of workloads and rulesets, as JSON with a digest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import yaml

from suite.files import compiled_path, source_digest, write_whole

PATTERNS = ("suite/compliance/rulesets/*.yaml", "suite/compliance/rules.yaml", "workloads/*/card.yaml")
ROOT = Path(__file__).resolve().parent.parent


def compiled_files() -> Iterator[tuple[Path, str]]:
    """Each compiled file, and what it should hold."""
    for path in sorted(chain(*map(ROOT.glob, PATTERNS))):
        text = path.read_bytes()
        document = {"source": source_digest(text), "data": yaml.safe_load(text)}
        yield compiled_path(path), json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for path, content in compiled_files():
        write_whole(path, content)
        print(path.relative_to(ROOT))
