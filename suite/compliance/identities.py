"""Asks what numbers of different places of a package have in common: the rows of identities.yaml, by one function."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlhpc.suite.compliance.ruleset import is_same_value
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.files import render_repr

_GROUPS = YamlSource.read(Path(__file__).with_suffix(".yaml")).data
_CONDITION = r"not [\w.]+|[\w.]+( == None)?|record.mode == 'weak'"
_parse = lru_cache(1024)(lambda text: ast.parse(text, mode="eval").body)
_FUNCTIONS: dict[Any, Any] = {
    "len": len,
    "max": max,
    "sum": math.fsum,
    "near": lambda one, other, share, more=0.0: math.isclose(one, other, rel_tol=share, abs_tol=more),
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.GtE: operator.ge,
    ast.Gt: operator.gt,
    ast.In: lambda part, whole: part in whole,
    ast.Eq: is_same_value,
}


def find_broken(group: str, roots: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each row of a group that is broken: the name of its first object, and a message.

    ``roots`` has the objects by the names that the rows give them.
    """
    for text in _GROUPS[group]:
        try:
            kept = _compute(_parse(text), roots)
        except (TypeError, ValueError, ArithmeticError):  # something else than a number
            kept = False
        if not kept:
            # Without what says where the row is asked.
            asked = " or ".join(each for each in text.split(" or ") if not re.fullmatch(_CONDITION, each))
            paths = dict.fromkeys(re.findall(r"\b[a-z]\w*(?:\.\w+)+", asked))
            said = [f"{path} = {render_repr(_compute(_parse(path), roots))}" for path in paths]
            yield next(iter(paths)).partition(".")[0], f"{', '.join(said)}: expected {asked}"


def _compute(node: ast.AST, roots: Mapping[str, Any]) -> Any:
    """Return the value of an expression. TypeError if it computes with what is no number."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return roots.get(name)
        case ast.Attribute(above, name):
            found = _compute(above, roots)
            return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
        case ast.Call(ast.Name(name), parts):
            return _FUNCTIONS[name](*(_compute(part, roots) for part in parts))
        case ast.UnaryOp(_, part):
            return not _compute(part, roots)
        case ast.BoolOp(sign, parts):
            return (any if isinstance(sign, ast.Or) else all)(_compute(part, roots) for part in parts)
        case ast.BinOp(one, sign, other) | ast.Compare(one, [sign], [other]):
            values = _compute(one, roots), _compute(other, roots)
            # A text times a number would be a long text.
            if isinstance(node, ast.BinOp) and not {*map(type, values)} <= {int, float}:
                raise TypeError
            return _FUNCTIONS[type(sign)](*values)
