"""Reads categories of a CIF file as tables of text; a single item is a table of one row. Errors name file and line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from suite.errors import InputError

Token = tuple[int, str, bool]  # line, text, quoted
UNSET = (".", "?")


@dataclass(frozen=True)
class Row:
    """One row of a table: item names without the category to texts. ``line`` is where it begins."""

    line: int
    values: dict[str, str]


def read_tables(path: Path, wanted: Collection[str]) -> dict[str, list[Row]]:
    """Read the ``wanted`` categories of a file, which may be gzipped (``.gz``). Categories that it lacks are absent."""
    tables: dict[str, list[Row]] = {}
    tokens = list(_tokens(path))
    position = 0
    while position < len(tokens):
        line, token, quoted = tokens[position]
        position += 1
        if quoted:
            continue
        if token.lower() == "loop_":
            position = _read_loop(path, tokens, position, wanted, tables)
        elif token.startswith("_") and position < len(tokens) and not _ends_loop(tokens[position]):
            category, _, item = token.partition(".")
            if category in wanted:
                rows = tables.setdefault(category, [Row(line, {})])
                rows[0].values[item] = tokens[position][1]
            position += 1
    return tables


def _read_loop(
    path: Path, tokens: list[Token], position: int, wanted: Collection[str], tables: dict[str, list[Row]]
) -> int:
    """Read the loop whose names begin at ``position`` into ``tables`` if it is wanted. Returns where it ends."""
    line = tokens[position - 1][0]
    keys: list[str] = []
    while position < len(tokens) and _is_name(tokens[position]):
        keys.append(tokens[position][1])
        position += 1
    begin = position
    while position < len(tokens) and not _ends_loop(tokens[position]):
        position += 1
    category = keys[0].partition(".")[0] if keys else ""
    if category not in wanted:
        return position
    names = [key.partition(".")[2] for key in keys]
    if (position - begin) % len(names):
        last = tokens[position - 1][0]
        raise InputError(
            f"{path}: line {last}: the {category} loop from line {line} has {position - begin} values, "
            f"not rows of {len(names)}: broken or cut off"
        )
    tables[category] = [
        Row(tokens[at][0], dict(zip(names, (token[1] for token in tokens[at : at + len(names)]), strict=True)))
        for at in range(begin, position, len(names))
    ]
    return position


def _is_name(token: Token) -> bool:
    return not token[2] and token[1].startswith("_")


def _ends_loop(token: Token) -> bool:
    return not token[2] and token[1].lower().startswith(("_", "loop_", "data_", "save_"))


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _tokens(path: Path) -> Iterator[Token]:
    """Yield (line, text, quoted) of every value: words, quotes that end before white space, text between semicolons."""
    lines = _text(path).splitlines()
    number = 0
    while number < len(lines):
        text, number = lines[number], number + 1
        if text.startswith(";"):
            begin, field = number, [text[1:]]
            while number < len(lines) and not lines[number].startswith(";"):
                field.append(lines[number])
                number += 1
            if number == len(lines):
                raise InputError(f"{path}: line {begin}: text field without its closing semicolon")
            yield begin, "\n".join(field), True
            text, number = lines[number][1:], number + 1
        if "'" not in text and '"' not in text and "#" not in text:
            for word in text.split():
                yield number, word, False
            continue
        yield from _quoted(path, text, number)


def _quoted(path: Path, text: str, number: int) -> Iterator[tuple[int, str, bool]]:
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text[at] == "#":
            return
        elif text[at] in "'\"":
            end = at + 1
            while end < len(text) and not (text[end] == text[at] and (end + 1 == len(text) or text[end + 1].isspace())):
                end += 1
            if end == len(text):
                raise InputError(f"{path}: line {number}: quote {text[at:][:20]!r} does not end")
            yield number, text[at + 1 : end], True
            at = end + 1
        else:
            end = at
            while end < len(text) and not text[end].isspace():
                end += 1
            yield number, text[at:end], False
            at = end
