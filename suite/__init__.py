"""The harness: runs any workload, logs it, packages it, judges it. It knows no workload by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform, overload

VERSION = "1.0.0.dev0"
RULESET = "mlhpc-1.0"
REDACTED = "REDACTED"  # stands in a package for words that are nobody's business
LAUNCH = "MLHPC_LAUNCH"  # environment variable: the token of the `mlhpc run` that started this process

_Class = TypeVar("_Class", bound=type)


@overload
def frozen(cls: _Class) -> _Class: ...
@overload
def frozen(*, kw_only: bool) -> Callable[[_Class], _Class]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: Any = None, *, kw_only: bool = False) -> Any:
    """Make a class what ``dataclass(frozen=True)`` makes it, in a tenth of the time, for those that commands import.

    The decorator of Python writes and compiles six functions for each class: for the sixty of `mlhpc check` that took longer
    than what the command does. Here the classes share them. A class below one of these is one of these.
    """
    if cls is None:
        return lambda each: frozen(each, kw_only=kw_only)  # type: ignore[call-overload]
    made = dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    made.__init__ = _initialiser(made)
    for function in (__repr__, __eq__, __hash__, __setattr__, __delattr__):
        if function.__name__ not in cls.__dict__ or (function is __hash__ and cls.__dict__["__hash__"] is None):
            setattr(made, function.__name__, function)
    return made


def _initialiser(cls: Any) -> Callable[..., None]:
    each = fields(cls)
    known = {item.name for item in each}
    positional = [item.name for item in each if not item.kw_only]
    defaults = {item.name: item.default for item in each if item.default is not MISSING}
    factories = {item.name: item.default_factory for item in each if item.default_factory is not MISSING}
    finish = getattr(cls, "__post_init__", None)

    def __init__(self: Any, *args: Any, **given: Any) -> None:
        if args:
            named = dict(zip(positional, args, strict=False))
            if len(named) < len(args) or not named.keys().isdisjoint(given):
                raise TypeError(f"{cls.__qualname__}() takes {len(positional)} positional arguments, each once")
            given = named | given
        if given.keys() != known:
            made = {name: make() for name, make in factories.items() if name not in given}
            given = defaults | made | given
            if given.keys() != known:
                wrong = ", ".join(sorted(map(repr, given.keys() ^ known)))
                raise TypeError(f"{cls.__qualname__}() got an unexpected argument or lacks one: {wrong}")
        self.__dict__.update(given)
        if finish is not None:
            finish(self)

    return __init__


def _values(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, item.name) for item in fields(self) if item.compare])


def __repr__(self: Any) -> str:
    shown = (f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def __eq__(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def __hash__(self: Any) -> int:
    return hash(_values(self))


def __setattr__(self: Any, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
