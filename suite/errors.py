"""Whose an error is: the user's, or ours."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

DEFECT = 70  # exit code, EX_SOFTWARE of sysexits.h: an error of mlhpc itself, never of its user
DEBUG = "MLHPC_DEBUG"  # environment variable: show the traceback of a defect instead of writing it to a file


class InputError(ValueError):
    """A file, a value or a setting from outside is at fault: one line that says where, what was found and what was expected.

    `suite.cli` prints it and ends with exit code 2. Every other exception, a ValueError of Python, NumPy or PyTorch among
    them, is a defect of mlhpc itself (exit code 70): code that reads what a user wrote turns such errors into this class
    where it knows the place.
    """


def find_near(name: str, known: Iterable[str]) -> str | None:
    """The nearest of the known names, whatever its case; None if none is near."""
    import difflib

    each = {item.lower(): item for item in known}
    near = difflib.get_close_matches(name.lower(), each, 1)
    return each[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The clause of a message that names what is near of the known names: those that contain it, else the nearest.

    Empty if none is near, or if more than three contain it and none is nearest.
    """
    names = list(known)
    holding = [each for each in names if len(name) >= 4 and _letters(name) in _letters(each)]
    same = [each for each in holding if _letters(each) == _letters(name)]
    near = same or holding if 0 < len(holding) <= 3 else [each for each in (find_near(name, names),) if each]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def unknown(kind: str, name: str, known: Iterable[str], more: str = "") -> str:
    """The message about a name that does not exist: the nearest one and all that do. ``more``: what else would do."""
    names = list(known)
    near = did_you_mean(name, names)
    kinds = f"{kind.removesuffix('is')}es" if kind.endswith("is") else f"{kind}s"
    return f"unknown {kind} {name!r}{near or ';'} {kinds}: {', '.join(names) or 'none'}" + (f"; {more}" if more else "")


def unknown_key(model: type, key: str) -> str:
    """The end of a message about an unknown key: the nearest one, in a section of the model too, and the keys it has.

    The model is a dataclass or one of pydantic.
    """
    known = sorted(_keys(model))
    inside = [path for path in _key_paths(model) if path.rpartition(".")[2] == key]
    near = f"; did you mean {inside[0]!r}?" if inside else did_you_mean(key, known)
    return f"unknown key {key!r}{near or ';'} valid keys: {', '.join(known)}"


def section_of(model: type, key: Sequence[str]) -> type | None:
    """The model of the section at a key path, through mappings and lists; None where there is none."""
    kind: Any = model
    for part in key:
        inner = [each for each in get_args(kind) if each is not NoneType]
        kind = _keys(kind).get(part) if _section(kind) else inner[-1] if inner else None
        while get_origin(kind) in (Union, UnionType):
            kind = next(each for each in get_args(kind) if each is not NoneType)
    return _section(kind)


def _key_paths(model: type) -> Iterator[str]:
    """The dotted names of the keys in the sections of a model."""
    for name, kind in _keys(model).items():
        if (section := _section(kind)) is not None:
            yield from (f"{name}.{key}" for key in _keys(section))
            yield from (f"{name}.{path}" for path in _key_paths(section))


def _keys(model: Any) -> Mapping[str, Any]:
    """The keys of a model, each with its type."""
    if is_dataclass(model):
        hints = get_type_hints(model)
        return {item.name: hints[item.name] for item in fields(model)}
    return {name: field.annotation for name, field in model.model_fields.items()}


def _section(kind: Any) -> type | None:
    """A type that has keys of its own, or None."""
    return kind if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "model_fields")) else None


def stated_key(key: Sequence[object], data: object) -> tuple[str, ...]:
    """A key path of pydantic as a file states it: pydantic also names which of several kinds of value it tried.

    Of what is not in ``data`` only a last part is kept, and only if it could be: a key that is missing.
    """
    path = []
    for number, part in enumerate(key):
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            data = data[part]  # type: ignore[call-overload]
        elif not (isinstance(data, Mapping) and number == len(key) - 1):
            continue
        path.append(str(part))
    return tuple(path)


def keep_traceback(to: str = "") -> str:
    """Write the traceback of the exception being handled, and what a maintainer needs beside it, to a new file.

    Returns a phrase that says where it is, and ``to`` whom it goes. The file is in the folder for temporary files (TMPDIR).
    """
    import tempfile
    import time
    import traceback

    from suite import VERSION

    lines = (f"mlhpc {VERSION}, Python {sys.version.split()[0]}", f"command: {sys.argv}", traceback.format_exc())
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"mlhpc-defect-{time.strftime('%Y%m%d-%H%M%S')}-", suffix=".txt", delete=False
        ) as file:
            file.write("\n".join(lines))
    except OSError as error:
        return f"the traceback cannot be kept: {error.strerror}; {DEBUG}=1 shows it"
    return f"please report it{to} with {file.name}"
