"""Cards and rulesets are plain classes: what is made without pydantic is what pydantic makes, refused what it refuses."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from suite import fitted
from suite.card import Card, ReferencePoints
from suite.compliance import ruleset as rulesets
from suite.compliance.ruleset import RulesetData, ruleset_names
from suite.files import compiled, compiled_path, source_digest

ROOT = Path(__file__).resolve().parents[2]


def documents() -> list[tuple[type[Any], Any]]:
    cards = [(Card, yaml.safe_load(path.read_text())) for path in sorted(ROOT.glob("workloads/*/card.yaml"))]
    points = [(ReferencePoints, json.loads(path.read_text())) for path in sorted(ROOT.glob("workloads/*/rcp/*.json"))]
    rules = [(RulesetData, rulesets._merged(name)) for name in ruleset_names()]
    assert min(map(len, (cards, points, rules))) > 5
    return [*cards, *points, *rules]


def test_every_card_point_and_ruleset_is_what_pydantic_makes_of_it() -> None:
    for kind, data in documents():
        made = fitted(kind, data)
        assert made == TypeAdapter(kind).validate_python(data)
        assert made.__dict__.keys() == set(asdict(made))


WRONG = (
    "",
    "3",
    "text",
    0,
    -1,
    2.5,
    True,
    None,
    [],
    ["a"],
    {},
    {"a": 1},
    float("nan"),
    10**400,
    "x" * 64,
    "a" * 64 + "\n",
)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def outcome(make: Callable[[Any], object], data: Any) -> str:
    """What is made of data, or what is wrong with them."""
    try:
        return repr(make(data))
    except ValidationError as error:
        return repr(error.errors(include_url=False))


def test_wrong_values_are_refused_with_the_words_of_pydantic_and_no_other_value_is_let_through() -> None:
    """One place of a document is wrong, lacks its key, or has a further key: 200 times."""
    random.seed(19)
    refused = 0
    everything = documents()
    adapters = {kind: TypeAdapter(kind) for kind, _ in everything}
    for number in range(200):
        kind, data = everything[number % len(everything)]
        data = copy.deepcopy(data)
        *way, last = random.choice(list(places(data)))
        inner = data
        for key in way:
            inner = inner[key]
        if number % 5 == 0 and isinstance(inner, dict):
            del inner[last]
        elif number % 5 == 1 and isinstance(inner, dict):
            inner["surplus"] = random.choice(WRONG)
        else:
            inner[last] = random.choice(WRONG)
        said = [outcome(make, data) for make in (partial(fitted, kind), adapters[kind].validate_python)]
        refused += said[0].startswith("[")
        assert said[0] == said[1]
    assert 60 < refused < 200


def test_the_compiled_files_are_those_of_the_yaml_files() -> None:
    code = "import json; from write_compiled import compiled_files; print(json.dumps([[str(a), b] for a, b in compiled_files()]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "docs", check=True)
    expected = {Path(path): text for path, text in json.loads(done.stdout)}
    there = {*ROOT.glob("suite/**/*.yaml.json"), *ROOT.glob("workloads/**/*.yaml.json")}
    assert there == set(expected)
    for path, text in expected.items():
        assert path.read_text() == text, "run: python docs/write_compiled.py"
        source = path.with_suffix("")
        assert json.loads(json.dumps(yaml.safe_load(source.read_text()))) == compiled(source)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        '{"data": 1}',
        '{"source": "0 00000000", "data": 1}',
        '{"source": null, "data": 1}',
        "\x00",
        "1" * 9,
    ],
)
def test_a_compiled_file_that_is_not_of_this_yaml_file_is_not_used(tmp_path: Path, content: str | None) -> None:
    (path := tmp_path / "card.yaml").write_text("threshold: 0.125\n")
    if content is not None:
        compiled_path(path).write_text(content)
    assert compiled(path) is None
    compiled_path(path).write_text(json.dumps({"source": source_digest(path.read_bytes()), "data": [7]}))
    assert compiled(path) == [7]


def test_every_single_changed_byte_makes_a_compiled_file_stale() -> None:
    text = (ROOT / "workloads/cosmoflow/card.yaml").read_bytes()
    changes = [(at, bit) for at in range(0, len(text), 7) for bit in (1, 16)]
    digests = {source_digest(text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :]) for at, bit in changes}
    assert source_digest(text) not in digests
    assert len(digests) == len(changes)
