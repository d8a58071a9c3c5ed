"""Reads YAML and JSON documents into `msgspec.Struct`, and writes them as plain data.

A mistake in a document is an InputError of one line. It names the file, the key with its line (YAML), the value and
what was expected. The annotations of a Struct state what a document may hold: ``width: Annotated[int, Meta(ge=1)] =
32``.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml

from mlhpc.suite import LARGEST_NUMBER, VERSION
from mlhpc.suite.errors import InputError, explain_near_names
from mlhpc.suite.files import (
    DuplicateKeyError,
    convert_to_path,
    explain_long_number,
    open_regular_file,
    read_json,
    render_bytes,
    render_repr,
)
from mlhpc.suite.meanings import find_same_meaning

Data = TypeVar("Data")
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Fields = Mapping[str, Any]  # of a JSON or YAML object
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # of things that one process counts or holds
FOLDER_NAME = r"[A-Za-z0-9][\w.+-]{0,99}"
FolderName = Annotated[  # of a workload, size or version: paths are made of it, which must not lead elsewhere
    str,
    msgspec.Meta(pattern=rf"\A{FOLDER_NAME}\Z", description="letters, digits and _ . + - (it becomes a part of paths)"),
]
WHOLE_BITS = 64  # of a whole number in a document, without its sign
LARGEST_YAML = 2**22  # bytes
_LARGEST_JSON = 256 * 2**20  # bytes: facts of a machine, a manifest of a data set with a line per shard
# The fast loader calls itself for each level, and ends the process where 2**15 are nested.
_MOST_OPENINGS = 2**13
_MOST_NESTED = 500  # brackets: for each token the slow loader looks at all that are open
_MOST_VALUES = 10**6  # an alias counts as all values that it stands for: a message may show them
_POWER = re.compile(
    r"[-+]?[0-9]{1,17}(\.[0-9]{0,17})?[eE][-+]?[0-9]{1,2}"
)  # 1e-3 is a number, but YAML 1.1 takes it for text

_ONLY_YAML_1_1 = re.compile(r"(:int|loat) ([-+]?0[0-9_]+|.*[_:].*)")


class BadNumberError(msgspec.ValidationError):
    """Raised for a number that no document may hold. ``key`` is the path to it."""

    def __init__(self, key: tuple[str, ...], number: float) -> None:
        wanted = f"at most {WHOLE_BITS} bits" if isinstance(number, int) else "a finite number"
        if isinstance(number, float) and math.isfinite(number):
            wanted = f"a number up to {LARGEST_NUMBER:g}"
        super().__init__(f"expected {wanted}")
        self.key, self.number = key, number


def convert(data: Any, kind: type[Data]) -> Data:
    """Make a Struct, or any other annotated type, from plain data. msgspec.ValidationError if they do not fit.

    Every number must be finite and at most `LARGEST_NUMBER`; an integer has at most `WHOLE_BITS` bits. The limits of a
    type would accept others: infinity is above zero, and Python's integers have any length.
    """
    _check_numbers(data)
    # JSON has only texts as keys, while a type may have numbers.
    return msgspec.convert(data, kind, dec_hook=_as_path, str_keys=True)


def _check_numbers(data: Any) -> None:
    """Raise BadNumberError for a number that is not finite, or too large. Not recursive: data may be deep."""
    left: list[tuple[tuple[str, ...], Any]] = [((), data)]
    while left:
        key, value = left.pop()
        if isinstance(value, float):
            if not abs(value) <= LARGEST_NUMBER:  # NaN is not either
                raise BadNumberError(key, value)
        elif isinstance(value, int):
            if value.bit_length() > WHOLE_BITS:
                raise BadNumberError(key, value)
        elif isinstance(value, dict):
            left += [((*key, str(each)), item) for each, item in value.items() if not isinstance(item, str)]
        elif isinstance(value, list | tuple):
            left += [((*key, str(at)), item) for at, item in enumerate(value) if not isinstance(item, str)]


def _as_path(kind: type, value: Any) -> Any:
    if kind is not Path:
        raise NotImplementedError(f"documents hold no {kind.__name__}")
    if not isinstance(value, str | Path):
        raise ValueError(f"expected a path, got `{type(value).__name__}`")
    return convert_to_path(value)


def convert_to_plain_data(value: Any, *, without_none: bool = False) -> Any:
    """Convert a Struct to plain data for JSON or YAML. ``without_none`` omits keys of None.

    A surrogate, as in the name of a file that is no UTF-8, becomes a question mark: no reader of ours takes it.
    """
    return _plain(msgspec.to_builtins(value, enc_hook=_as_plain), without_none)


_ABSENT = object()


def list_differing_keys(one: Any, other: Any, sides: tuple[str, str], name: str = "") -> Iterator[str]:
    """Yield each value that differs, by its key: ``hyperparameters.learning_rate: checkpoint 0.006, config 0.007``.

    ``sides`` names the two documents.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**one, **other}:
            inner = f"{name}.{key}".removeprefix("config.").lstrip(".")
            yield from list_differing_keys(one.get(key, _ABSENT), other.get(key, _ABSENT), sides, inner)
    elif one != other:
        found, given = ("none" if each is _ABSENT else render_repr(each, longest=40) for each in (one, other))
        yield f"{name}: {sides[0]} {found}, {sides[1]} {given}"


def render_json(value: Any) -> str:
    """Render a Struct as one line of JSON, without a line end."""
    return msgspec.json.encode(value, enc_hook=_as_plain).decode()


def _as_plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a number of NumPy
        return value.item()
    raise TypeError(f"documents hold no {type(value).__name__}")


def _plain(value: Any, without_none: bool) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not (without_none and item is None)}
        return {_plain(key, without_none): _plain(item, without_none) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, without_none) for item in value]
    return value


def read_json_document(path: Path, kind: type[Data], what: str, version: int, *, largest: int = _LARGEST_JSON) -> Data:
    """Read a JSON document. InputError names the file and what was expected (``what``, such as "facts")."""
    try:
        data = read_json(path, largest)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except DuplicateKeyError as error:
        raise InputError(f"{path}: has the key {str(error)!r} twice") from None
    except ValueError as error:
        raise InputError(f"{path}: expected JSON: {error}") from None
    if not isinstance(data, dict) or data.get("version") != version:
        actual = repr(data.get("version")) if isinstance(data, dict) else type(data).__name__
        own = data.get("version") if isinstance(data, dict) else None
        told = explain_writer(path, data, newer=isinstance(own, int) and own > version)
        raise InputError(f"{path}: {told}expected {what} of version {version}, found {actual}")
    return YamlSource(path, data, {}).convert(kind)


def explain_writer(path: Path, data: Any, *, newer: bool = False) -> str:
    """Return the words that a newer version of this suite wrote a document that cannot be read. "" if none did.

    The document names its writer, or the run.json of its folder does. ``newer``: its own version shows that.
    """
    found = data.get("suite_version") if isinstance(data, dict) else None
    if found is None and path.name != _RUN:
        with suppress(OSError, ValueError):
            beside = read_json(path.with_name(_RUN), _LARGEST_JSON)
            found = beside.get("suite_version") if isinstance(beside, dict) else None
    if isinstance(found, str) and re.fullmatch(FOLDER_NAME, found) and _order_version(found) > _order_version(VERSION):
        return f"written by mlhpc {found}, this is {VERSION}: update mlhpc; "
    return f"written by a newer mlhpc than this, {VERSION}: update mlhpc; " if newer else ""


_RUN = "run.json"  # of a run folder (mlhpc.suite.log.run_folder)


def _order_version(text: str) -> tuple[tuple[int, ...], bool]:
    """Return what orders versions: the numbers of the release, and whether it is one."""
    release = re.match(r"\d{1,6}(?:\.\d{1,6})*", text)
    numbers = tuple(map(int, release[0].split("."))) if release else ()
    return numbers, release is not None and release[0] == text


@dataclass(frozen=True)
class YamlSource:
    """The data of a YAML mapping, the line of every key path in it, and the sha256 of the bytes that were read."""

    path: Path
    data: dict[str, Any]
    lines: dict[tuple[str, ...], int]
    sha256: str = ""

    @staticmethod
    def read(path: Path) -> YamlSource:
        """Read a file with a mapping. InputError if it is missing, not YAML or not a mapping, or repeats a key."""
        try:
            with open_regular_file(path, sys.maxsize, given=True) as file:
                # One byte above the limit shows that the file is too large.
                text = file.read(LARGEST_YAML + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8 text"
            raise InputError(f"{path}: cannot be read: {reason}") from None
        if len(text) > LARGEST_YAML:
            raise InputError(
                f"{path}: is larger than {render_bytes(LARGEST_YAML)}, the most that is read from a YAML file"
            )
        try:
            lines, data = _load(path, text)
        except InputError:
            raise
        except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark else str(path)
            # Some have several lines
            problem = " ".join(str(getattr(error, "problem", None) or explain_long_number(error)).split())
            line = text.splitlines()[mark.line : mark.line + 1] if mark else []
            raise InputError(f"{where}: not valid YAML: {problem}{_explain_syntax(problem, ''.join(line))}") from None
        if not isinstance(data, dict):
            found = "nothing" if data is None else type(data).__name__
            raise InputError(f"{path}: expected a mapping, found {found}; write lines KEY: VALUE")
        return YamlSource(path, data, lines, hashlib.sha256(text.encode()).hexdigest())

    def convert(self, kind: type[Data]) -> Data:
        """Make a Struct of the data. InputError names file, line, key, value and what was expected."""
        try:
            return convert(self.data, kind)
        except msgspec.ValidationError as error:
            mistake = find_mistake(self.data, kind, error)
            told = explain_writer(self.path, self.data)
            raise InputError(f"{self.where(*mistake.key)}: {told}{mistake.text}") from None

    def where(self, *key: str) -> str:
        """Return ``file:line`` of a key path or of its nearest parent. Without a known line, return the file."""
        nearest = (key[:end] for end in range(len(key), 0, -1) if key[:end] in self.lines)
        return next((f"{self.path}:{self.lines[place]}" for place in nearest), str(self.path))


def _explain_syntax(problem: str, line: str) -> str:
    """Return what to do about a mistake of YAML's grammar, by the parser's words and the line. "" if unknown."""
    if "\t" in problem or "\\t" in problem or line.startswith("\t"):
        return "; indent with spaces, not with tabs"
    if found := re.search(r"found character '(.)'", problem):
        return f"; put quotes around a text that begins with {found[1]}"
    if "mapping values" in problem:
        return "; keys of one level begin in one column, and a text with ': ' in it needs quotes"
    if "expected ':'" in problem:
        return "; write KEY: VALUE in each line"
    if "end of stream" in problem:
        return "; a quote or a bracket is open at the end"
    if "expected ',' or" in problem:
        return "; a bracket above is not closed, or a comma is missing"
    if "<block end>" in problem or "block mapping" in problem:
        return "; keys of one level begin in one column, items of a list with '- '"
    if "alias" in problem:
        return "; put quotes around a text that begins with *"
    if "digits" in problem:
        return ""
    return "; put quotes around a text with special characters"


def parse_yaml(text: str) -> Any:
    """Parse a YAML text. Invalid text raises yaml.YAMLError, or Python's error for a value with a wrong tag."""
    return _load(None, text)[1]


def _load(path: Path | None, text: str) -> tuple[dict[tuple[str, ...], int], Any]:
    """Return the lines of the keys of a YAML text, and its data.

    If the fast loader finds a mistake, the slow one reads again: its message says more.
    """
    if _count_nested_brackets(text) > _MOST_NESTED:
        raise yaml.YAMLError(f"more than {_MOST_NESTED} brackets are open at once")
    # no level is opened without one of these, or a longer indentation
    openings = sum(text.count(mark) for mark in "[{-?")
    # PyYAML is without the fast loader where it was built without libyaml.
    if hasattr(yaml, "CSafeLoader") and openings < _MOST_OPENINGS:
        with suppress(yaml.YAMLError):
            return _construct(path, yaml.CSafeLoader(text))
    return _construct(path, yaml.SafeLoader(text))


def _count_nested_brackets(text: str) -> int:
    """Return how many brackets are open at once at most, those in comments and quoted texts included."""
    steps = (1 if mark in "[{" else -1 for mark in re.findall(r"[][{}]", text))
    return max(accumulate(steps), default=0)


def _construct(path: Path | None, loader: yaml.SafeLoader | yaml.CSafeLoader) -> tuple[dict[tuple[str, ...], int], Any]:
    lines: dict[tuple[str, ...], int] = {}
    try:
        node = loader.get_single_node()
        if node is None:
            return lines, None
        _collect(node, (), lines, path, {})  # before the data are made, which puts merged keys into the node
        return lines, loader.construct_document(node)
    finally:
        loader.dispose()


def _collect(
    node: yaml.Node,
    prefix: tuple[str, ...] | None,
    lines: dict[tuple[str, ...], int],
    path: Path | None,
    sizes: dict[int, int],
) -> int:
    """Add the line of each key's first node below ``prefix`` (None: in a list). Returns the number of values.

    InputError for a repeated key, since PyYAML silently keeps the last. InputError for aliases that contain themselves,
    or too much.
    """
    known = sizes.get(id(node))  # an alias is the node itself once more
    if known == 0:
        raise InputError(
            f"{path}:{node.start_mark.line + 1}: a value contains itself by an alias (*name); write the value out"
        )
    if known is not None:
        return known
    size = 1
    sizes[id(node)] = 0  # until its values are counted
    if isinstance(node, yaml.ScalarNode):
        # An unquoted 1e-3 becomes a number, as in YAML 1.2. What only YAML 1.1 takes for one stays as it was written:
        # 0_006 and 010 are octal there, and 1:30:00 counts in sixties.
        if not node.style and _ONLY_YAML_1_1.fullmatch(f"{node.tag[-4:]} {node.value}"):
            node.tag = "tag:yaml.org,2002:str"
        if not node.style and node.tag == "tag:yaml.org,2002:str" and _POWER.fullmatch(node.value):
            node.tag = "tag:yaml.org,2002:float"
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = _add_line(key, prefix, lines, path)
            size += _collect(value, here, lines, path, sizes)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            size += _collect(item, None, lines, path, sizes)
    if size > _MOST_VALUES:
        raise InputError(
            f"{path}:{node.start_mark.line + 1}: a value has more than {_MOST_VALUES} values "
            "with its aliases expanded; use fewer aliases"
        )
    sizes[id(node)] = size
    return size


def _add_line(
    key: yaml.Node, prefix: tuple[str, ...] | None, lines: dict[tuple[str, ...], int], path: Path | None
) -> tuple[str, ...] | None:
    """Add the line of a key and return its path. None in a list: its items have no names."""
    if prefix is None:
        return None
    here = (*prefix, str(key.value))
    if here in lines and key.value != "<<":  # a merge key may be repeated
        raise InputError(f"{path}:{key.start_mark.line + 1}: key {key.value!r} is given twice; remove one of the two")
    lines[here] = key.start_mark.line + 1
    return here


@dataclass(frozen=True)
class Mistake:
    """Where a document is wrong, and one line that says how."""

    key: tuple[str, ...]
    text: str


# A message of msgspec: what is wrong, and where. The place may be a key: "Expected `int` - at `key` in `$.points`".
_MESSAGE = re.compile(r"(?s)(.*?)(?: - at (`key` in )?`\$(.*)`)?")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_KEY_OF_ERROR = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`")


def find_mistake(data: Any, kind: Any, error: msgspec.ValidationError) -> Mistake:
    """Find the place in a document that an error of `convert` is about.

    msgspec writes it as ``$.sizes[...].runs``, without the name of a mapping's key. So data and types are followed
    along it.
    """
    if isinstance(error, BadNumberError):
        name = f"{'.'.join(error.key)} = " if error.key else ""
        return Mistake(error.key, f"{name}{render_repr(error.number, longest=80)}: {error}")
    # msgspec's errors have no attributes for place and cause, only their text.
    match = _MESSAGE.fullmatch(str(error))
    assert match is not None
    whole = kind
    text, is_of_key, place = match[1], match[2], match[3] or ""
    key, data, kind = _find_by_path(place, data, kind)
    field = _KEY_OF_ERROR.fullmatch(text)
    if field is not None:
        struct = next(each for each in _list_union_types(kind) if _is_struct(each))
        if "unknown" in text:
            return Mistake((*key, field[1]), explain_unknown_key(struct, field[1], whole, key))
        return Mistake(key, _explain_missing_keys(struct, data, key))
    if isinstance(data, dict) and not text.startswith("Expected"):  # a rule across fields: its text names them
        return Mistake(key, f"{'.'.join(key)}: {text}" if key else text)
    text = _explain_expected(text, kind)
    if is_of_key:
        wrong = _find_wrong_key(data, kind)
        shown = wrong if wrong.isprintable() else render_repr(wrong, longest=80)
        return Mistake((*key, wrong), f"{'.'.join((*key, shown))}: {text} as the key")
    name = f"{'.'.join(key)} = " if key else ""
    if "expected str" in text and (words := _list_choices(kind)):
        text = f"expected one of {words.strip(' ()')}"
    shown = str(data) if isinstance(data, date) else render_repr(data, longest=80)
    return Mistake(key, f"{name}{shown}: {text}{_explain_form(data, text)}")


def _explain_form(data: Any, text: str) -> str:
    """Return how a value is written in YAML that was written as another type. "" if it is no matter of writing."""
    if isinstance(data, str) and "expected a list" in text:
        return f"; write [{data}]" if re.fullmatch(r"[\w./+=-]+", data) else "; write a list: [ONE, TWO]"
    if isinstance(data, str) and re.search(r"expected (int|float)", text) and re.match(r"[-+.]?\d", data):
        return "; write it without quotes" if data.isdecimal() else "; write a number without unit or words"
    if isinstance(data, bool) and "expected str" in text:
        return "; on, off, yes and no are true and false in YAML: put a text in quotes"
    if isinstance(data, int | float | date) and "expected str" in text:
        return f'; put it in quotes: "{data}"'
    return ""


def _find_by_path(place: str, data: Any, kind: Any) -> tuple[tuple[str, ...], Any, Any]:
    """Follow a place of msgspec. Returns the keys to it, the data there and their type."""
    key: list[str] = []
    for name, index in _STEP.findall(place):
        part: Any = name or index
        if index == "...":
            part = next((each for each in data if not _fits(data[each], _find_part_type(kind, each))), None)
            if part is None:  # all of a type that this function does not know
                break
        elif index:
            part = int(index)
        kind, data = _find_part_type(kind, part), data[part]
        key.append(str(part))
    return tuple(key), data, kind


def _explain_missing_keys(struct: type[msgspec.Struct], data: Any, key: tuple[str, ...]) -> str:
    """Name all missing keys, with the words that each may be; msgspec names only the first."""
    missing = [each for each in msgspec.structs.fields(struct) if each.required and each.encode_name not in data]
    named = [repr(".".join((*key, each.encode_name))) + _list_choices(each.type) for each in missing]
    return f"missing key{'s' if len(missing) > 1 else ''} {', '.join(named)}"


def _list_choices(kind: Any) -> str:
    """Return the words that a value may be, in brackets. "" if it may be any."""
    words = [
        str(each) for choice in _list_union_types(kind) if get_origin(choice) is Literal for each in get_args(choice)
    ]
    return f" ({', '.join(words)})" if words else ""


def _find_wrong_key(data: Any, kind: Any) -> str:
    """Find the first key of a mapping with a wrong type."""
    of = next((get_args(each)[0] for each in _list_union_types(kind) if get_origin(each) in (dict, Mapping)), str)
    return str(next(each for each in data if not _fits({each: None}, GenericAlias(dict, (of, Any)))))


def _explain_expected(text: str, kind: Any) -> str:
    """Translate msgspec's expectation for a person who knows YAML and not Python."""
    if text.startswith("Invalid enum value"):
        options = [
            each for choice in _list_union_types(kind) if get_origin(choice) is Literal for each in get_args(choice)
        ]
        text = f"expected one of {', '.join(map(repr, options))}"
    if "matching regex" in text and (described := _description(kind)):
        text = f"expected {described}"
    text = re.sub("`([^`]*)`", lambda words: words[1].replace("object", "a mapping").replace("array", "a list"), text)
    return f"{text[:1].lower()}{text[1:]}" if text.startswith("Expected") else text


def _fits(data: Any, kind: Any) -> bool:
    try:
        convert(data, kind)
    except msgspec.ValidationError:
        return False
    return True


def _list_union_types(kind: Any) -> Iterator[Any]:
    """Yield the types that a value may have: each of a union, without the limits of Annotated."""
    if get_origin(kind) is Annotated:
        yield from _list_union_types(get_args(kind)[0])
    elif get_args(kind) and get_origin(kind) not in (list, tuple, dict, Mapping, Literal) and not _is_struct(kind):
        for each in get_args(kind):
            yield from _list_union_types(each)
    else:
        yield kind


def _description(kind: Any) -> str | None:
    """Return the annotation's own words for what a text must be."""
    if get_origin(kind) is Annotated:
        return next((each.description for each in kind.__metadata__ if isinstance(each, msgspec.Meta)), None)
    return next((found for each in get_args(kind) if (found := _description(each))), None)


def _find_part_type(kind: Any, part: Any) -> Any:
    """Return the type of a field, of a mapping's key or of a list's item. Any if there is no such part."""
    for choice in _list_union_types(kind):
        origin, args = get_origin(choice), get_args(choice)
        if _is_struct(choice):
            for field in msgspec.structs.fields(choice):
                if field.encode_name == part:
                    return field.type
        elif origin in (dict, Mapping):
            return args[1]
        elif origin is tuple and args[-1:] != (...,) and isinstance(part, int):
            return args[part]
        elif origin in (list, tuple):
            return args[0]
    return Any


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def explain_unknown_key(kind: type[msgspec.Struct], key: str, whole: Any = None, section: tuple[str, ...] = ()) -> str:
    """Describe an unknown key: the nearest known key, in a section below too, and all keys.

    ``whole`` is the type of the document, if ``kind`` is that of a ``section``: the key may belong outside of it.
    """
    known = sorted(field.encode_name for field in msgspec.structs.fields(kind))
    same = find_same_meaning(key, (*known, *list_key_paths(kind)))
    outer = [field.encode_name for field in msgspec.structs.fields(whole)] if section and _is_struct(whole) else []
    if same is None and key in outer:
        return f"unknown key {key!r}; it is no part of {'.'.join(section)}: write {key} alone"
    near = f"; did you mean {same!r}?" if same else explain_near_names(key, known)
    return f"unknown key {key!r}{near or ';'} valid keys: {', '.join(known)}"


def list_key_paths(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield the dotted names of the keys in the sections of a Struct."""
    for field in msgspec.structs.fields(kind):
        if _is_struct(field.type):
            for inner in msgspec.structs.fields(field.type):
                yield f"{field.encode_name}.{inner.encode_name}"
            yield from (f"{field.encode_name}.{path}" for path in list_key_paths(field.type))
