"""The harness: runs any workload, logs it, packages it, judges it. It knows no workload by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

VERSION = "1.0.0.dev0"
RULESET = "mlhpc-1.0"
REDACTED = "REDACTED"  # stands in a package for words that are nobody's business
LAUNCH = "MLHPC_LAUNCH"  # environment variable: the token of the `mlhpc run` that started this process

Data = TypeVar("Data")


def fitted(kind: type[Data], data: Any) -> Data:
    """Make a dataclass of plain data by its annotations. pydantic.ValidationError, a ValueError, if they do not fit.

    What fits exactly is made here; anything else is left to pydantic, which converts more and says what is wrong, slowly.
    """
    try:
        return cast("Data", _maker(cast("Any", kind))(data))
    except (TypeError, ValueError, LookupError, OverflowError):
        from pydantic import TypeAdapter

        return TypeAdapter(kind).validate_python(data)


FORBID = {"extra": "forbid"}  # the configuration of a dataclass, for pydantic


class Bound:
    """What a value in a dataclass must keep beside its type, as in pydantic.

    ``ge``, ``gt``, ``le``, ``lt``, ``multiple_of`` of a number, ``pattern`` of a text, ``min_length`` of a text or a tuple.
    """

    def __init__(self, **limits: Any) -> None:
        self._limits = limits

    def kept(self, value: Any) -> bool:
        """True if a value, which is None or of the right type, keeps it."""
        return value is None or all(_BOUNDS[name](value, limit) for name, limit in self._limits.items())

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        schema = handler(source)
        inner = schema["schema"] if schema["type"] == "nullable" else schema
        inner.update(self._limits)
        return _no_truth_value(schema) if inner["type"] in ("int", "float") else schema


def _no_truth_value(schema: Any) -> Any:
    """The schema of a number that refuses true and false, which pydantic takes for 1 and 0."""
    from pydantic_core import PydanticCustomError, core_schema

    def refuse(value: Any) -> Any:
        if isinstance(value, bool):
            raise PydanticCustomError("number_type", "expected a number, not true or false")
        return value

    return core_schema.no_info_before_validator_function(refuse, schema)


_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": lambda value, limit: value >= limit,
    "gt": lambda value, limit: value > limit,
    "le": lambda value, limit: value <= limit,
    "lt": lambda value, limit: value < limit,
    "multiple_of": lambda value, limit: value % limit == 0,
    "min_length": lambda value, limit: len(value) >= limit,
    "pattern": lambda value, limit: re.search(limit, value) is not None and not value.endswith("\n"),
}


class Checked:
    """A function that a value in a dataclass must pass: ValueError, best an InputError, says what is wrong with it."""

    def __init__(self, check: Callable[[Any], object]) -> None:
        self._check = check

    def kept(self, value: Any) -> bool:
        """True, or the ValueError of the function."""
        self._check(value)
        return True

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        def same(value: Any) -> Any:
            self._check(value)
            return value

        return core_schema.no_info_after_validator_function(same, handler(source))


def _made(kind: Callable[..., Any], data: Any) -> Any:
    """Make a dataclass, or the dataclasses in it, of a mapping. TypeError or LookupError if it does not fit."""
    if isinstance(data, cast("type", kind)):
        return data
    if type(data) is not dict:
        raise TypeError
    hints = _hints(kind)
    return getattr(kind, "of_fitting", kind)(**{name: _maker(hints[name])(value) for name, value in data.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass's fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in fields(kind)}


_POWER = r"[+-]?[0-9]{1,17}(\.[0-9]{0,17})?[eE][+-]?[0-9]{1,2}"  # a number that YAML takes for text: 1e-3, 1.0e10


@cache
def _maker(hint: Any) -> Callable[[Any], Any]:
    """The function that makes what an annotation asks of plain data of JSON or YAML, or raises as `_made`."""
    origin, inner = get_origin(hint), get_args(hint)
    kinds = [each for each in inner if each is not NoneType]

    def make(value: Any) -> Any:
        if hint is Any or (value is None and NoneType in inner):
            return value
        if origin in (Union, UnionType):
            return _maker(kinds[0])(value) if len(kinds) == 1 else _one_of(kinds, value)
        if origin is Annotated:
            made = _maker(inner[0])(value)
            if all(
                isinstance(each, str) or (isinstance(each, Bound | Checked) and each.kept(made)) for each in inner[1:]
            ):
                return made
        if origin is Literal and any(type(value) is type(choice) and value == choice for choice in inner):
            return value
        if origin is tuple and type(value) in (list, tuple):
            if inner[-1:] == (...,):
                return tuple(map(_maker(inner[0]), value))
            return tuple([_maker(each)(item) for each, item in zip(inner, value, strict=True)])
        if origin in (dict, Mapping) and type(value) is dict:
            key, whole = _maker(inner[0]), inner[0] is int  # which in JSON is text
            keys = [int(name) if whole and isinstance(name, str) and name.isdecimal() else key(name) for name in value]
            return dict(zip(keys, map(_maker(inner[1]), value.values()), strict=True))
        if hint is float and (type(value) is int or (type(value) is str and re.fullmatch(_POWER, value))):
            return float(value)
        if hint is Path:
            return value if isinstance(value, Path) else Path(_maker(str)(value))
        if type(value) is hint and (hint is not str or value.isascii() or value.encode()):  # not a surrogate
            return value
        raise TypeError

    return partial(_made, cast("Any", hint)) if is_dataclass(hint) else make


def _one_of(kinds: list[Any], value: Any) -> Any:
    """The value, if it is exactly what one of the annotations asks. TypeError otherwise."""
    for kind in kinds:
        with suppress(TypeError, ValueError, LookupError, OverflowError):
            if _maker(kind)(value) is value:
                return value
    raise TypeError
