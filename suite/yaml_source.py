"""A YAML file that remembers its lines, so that a mistake can be answered with file, line, value and what was expected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError


@dataclass(frozen=True)
class YamlSource:
    """Plain data of a YAML mapping and the line of every key path in it."""

    path: Path
    data: dict[str, Any]
    lines: dict[tuple[str, ...], int]

    @staticmethod
    def read(path: Path) -> YamlSource:
        """Read a mapping. ValueError for a missing file, bad YAML, a repeated key or anything but a mapping."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
            raise ValueError(f"{path}: cannot be read: {reason}") from None
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark else str(path)
            raise ValueError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
        if not isinstance(data, dict) or not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path}: expected a mapping, found {type(data).__name__}")
        lines: dict[tuple[str, ...], int] = {}
        _collect(node, (), lines, path)
        return YamlSource(path, data, lines)

    def where(self, *key: str) -> str:
        """``file:line`` of a key path, or of its nearest parent that the file contains."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.lines:
                return f"{self.path}:{self.lines[key[:end]]}"
        return str(self.path)


def _collect(node: yaml.Node, prefix: tuple[str, ...], lines: dict[tuple[str, ...], int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*prefix, str(key.value))
            if here in lines and key.value != "<<":
                raise ValueError(f"{path}:{key.start_mark.line + 1}: key {key.value!r} is given twice")
            lines[here] = key.start_mark.line + 1
            _collect(value, here, lines, path)


def first_error(error: ValidationError, source: YamlSource) -> str:
    """One line for the first mistake pydantic found: file, line, key, value, what was expected."""
    item = error.errors()[0]
    key = tuple(str(part) for part in item["loc"])
    name = ".".join(key)
    if item["type"] == "extra_forbidden":
        return f"{source.where(*key)}: unknown key {name!r}"
    if item["type"] == "missing":
        return f"{source.where(*key)}: missing key {name!r}"
    value = repr(item.get("input"))
    return f"{source.where(*key)}: {name} = {value if len(value) < 80 else value[:77] + '...'}: {item['msg']}"


def unknown_key(model: type[BaseModel], key: str) -> str:
    """The end of a message about an unknown key: the keys that are valid there."""
    return f"unknown key {key!r}; valid keys: {', '.join(sorted(model.model_fields))}"
