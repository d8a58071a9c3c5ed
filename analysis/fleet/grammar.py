"""The criteria of SuperBench rule files, ``lambda x: x < -0.05``: read by a small grammar, never run as code.

Allowed are numbers, True and False, the argument, ``label["rule"]`` and its ``.values()``, arithmetic, comparisons,
and, or, not, ``a if b else c``, and calls of `FUNCTIONS`. All else is an InputError that names it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from suite.errors import InputError

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "min": min, "max": max, "sum": sum, "len": len, "abs": abs, "bool": bool, "round": round,
}  # fmt: skip
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_SIGNS: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
LONGEST = 500  # characters of a criterion
MOST_NODES = 200  # of its syntax tree


class Criteria:
    """A criterion of a rule file: called with the argument it says whether the rule is violated."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self._where = text, where
        if not isinstance(text, str) or len(text) > LONGEST:
            raise self._error(f"{text!r:.60}", "expected a text such as 'lambda x: x > 0.05'")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._error(repr(text), "expected 'lambda x: ...', a comparison") from None
        given = tree.args if isinstance(tree, ast.Lambda) else None
        plain = given is not None and len(given.args) == 1 and not (given.vararg or given.kwarg or given.kwonlyargs)
        if not isinstance(tree, ast.Lambda) or not plain or tree.args.defaults or tree.args.posonlyargs:
            raise self._error(repr(text), "expected 'lambda x: ...' with one argument")
        self._body, self._argument = tree.body, tree.args.args[0].arg
        if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
            raise self._error(repr(text), f"longer than {MOST_NODES} symbols")
        self._check(self._body)

    def __call__(self, value: object) -> bool:
        """Whether the rule is violated. InputError if the criterion does not fit the value or is no yes or no."""
        try:
            result = self._value(self._body, value)
        except (TypeError, KeyError, ValueError, ZeroDivisionError, OverflowError, AttributeError) as error:
            raise self._error(repr(self.text), f"{type(error).__name__} {error}") from None
        if not isinstance(result, bool):
            raise self._error(
                repr(self.text), f"gives {result!r:.40}; expected a comparison, which gives True or False"
            )
        return result

    def _check(self, node: ast.AST) -> None:
        """InputError for what is not in the grammar."""
        allowed = False
        match node:
            case ast.Constant(value=bool() | int() | float()):
                allowed = True
            case ast.Name(id=name):
                allowed = name == self._argument
            case ast.UnaryOp(op=sign, operand=inner):
                allowed = type(sign) in _SIGNS
                self._check(inner)
            case ast.BinOp(left=left, op=arithmetic, right=right):
                allowed = type(arithmetic) in _ARITHMETIC
                self._check_all(left, right)
            case ast.Compare(left=left, ops=comparisons, comparators=others):
                allowed = all(type(each) in _COMPARISONS for each in comparisons)
                self._check_all(left, *others)
            case ast.BoolOp(values=parts):
                allowed = True
                self._check_all(*parts)
            case ast.IfExp(test=test, body=body, orelse=other):
                allowed = True
                self._check_all(test, body, other)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str())):
                allowed = name == self._argument
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                allowed = name in FUNCTIONS
                self._check_all(*arguments)
            case ast.Call(func=ast.Attribute(value=inner, attr="values"), args=[], keywords=[]):
                allowed = True
                self._check(inner)
        if not allowed:
            raise self._error(repr(self.text), f"{ast.unparse(node)[:40]!r} is not allowed in a rule file")

    def _check_all(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self._check(node)

    def _value(self, node: ast.AST, given: object) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name():
                return given
            case ast.UnaryOp(op=sign, operand=inner):
                return _SIGNS[type(sign)](self._value(inner, given))
            case ast.BinOp(left=left, op=arithmetic, right=right):
                return _ARITHMETIC[type(arithmetic)](self._value(left, given), self._value(right, given))
            case ast.Compare(left=left, ops=comparisons, comparators=others):
                values = [self._value(each, given) for each in (left, *others)]
                steps = zip(comparisons, values, values[1:], strict=False)
                return all(_COMPARISONS[type(each)](a, b) for each, a, b in steps)
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(self._value(part, given) for part in parts)
            case ast.BoolOp(values=parts):
                return any(self._value(part, given) for part in parts)
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._value(body if self._value(test, given) else other, given)
            case ast.Subscript(slice=ast.Constant(value=key)):
                if not isinstance(given, Mapping):
                    raise TypeError(f"{self._argument}[{key!r}] where a number is given")
                return given[key]
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return FUNCTIONS[name](*(self._value(each, given) for each in arguments))
            case ast.Call(func=ast.Attribute(value=inner)):
                return list(self._value(inner, given).values())
        raise AssertionError(ast.dump(node))

    def _error(self, found: str, expected: str) -> InputError:
        return InputError(f"{self._where}: criteria {found}: {expected}")
