"""The page of the events of a log, from the comments of suite/log/mllog.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from suite.log import mllog

HEAD = """# Events of a log

A log is one file per trial, `result_<i>.txt`. One event is one line, `:::MLLOG {json}`, with the keys `namespace`, `time_ms` (Unix
milliseconds), `event_type` (`INTERVAL_START`, `INTERVAL_END`, `POINT_IN_TIME`), `key`, `value` and `metadata` (format:
mlcommons/logging). Each line is written before training goes on, so that a killed run leaves whole lines. In Python:
`suite.log.reader.read_events`.

Events of a step stand between `run_start` and `run_stop`; the reader leaves them out where nobody asks for them.
"""
TITLES = {
    "MLPerf HPC 3.0 keys": "Keys of MLPerf HPC 3.0",
    "Ours: what analysis needs and MLPerf has no key for": "Keys of this suite: what analysis needs and MLPerf has no key for",
}


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(title, (key, remark) of each event) of the two sections of the source."""
    lines = Path(mllog.__file__).read_text(encoding="utf-8").splitlines()
    last = next(index for index, line in enumerate(lines) if line.startswith("class "))
    found: list[tuple[str, list[tuple[str, str]]]] = []
    statement = ""
    for line in lines[:last]:
        code, _, remark = line.partition("#")
        statement += code
        if line.startswith("# ") and remark.strip() in TITLES:
            found.append((TITLES[remark.strip()], []))
            statement = ""
        elif found and _whole(statement):
            found[-1][1].extend((key, remark.strip()) for key in _keys(statement))
            statement = ""
    for title, rows in found:
        stems = {key.removesuffix("_start") for key, _ in rows if key.endswith("_start")} | {mllog.BLOCK}
        yield title, [(key, remark) for key, remark in rows if key not in stems]


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for title, rows in sections():
        parts += [f"\n## {title}\n", "| key | meaning |", "| --- | --- |"]
        parts += [f"| `{key}` | {remark.replace('|', chr(92) + '|')} |" for key, remark in rows]
    return "\n".join(parts) + "\n"


def _whole(statement: str) -> bool:
    try:
        return bool(ast.parse(statement.strip()).body)
    except SyntaxError:
        return False


def _keys(statement: str) -> list[str]:
    return [node.value for node in ast.walk(ast.parse(statement.strip())) if isinstance(node, ast.Constant)]

