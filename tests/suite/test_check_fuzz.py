"""Fuzzing: damaged logs of every kind are read, judged and scored without a crash. The whole takes minutes: -m long."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from suite.compliance.check import check, judge_log
from suite.compliance.ruleset import ruleset, ruleset_names
from suite.mllog import read_events
from suite.record import summarise
from suite.scoring import throughput, time_to_train
from tests.fixtures.logs import hpc_run, our_run

BASES = [
    b"".join(line.encode(number) for number, line in enumerate(lines))
    for lines in (
        our_run(),
        our_run("mini", values=(0.3, 0.25)),
        *(hpc_run(name, epochs=4) for name in ("cosmoflow", "deepcam", "oc20", "openfold")),
    )
]
VALUES = (
    *(b"null", b"true", b"-1", b"0", b"1.5", b"1e308", b"-1e308", b"1e400", b"NaN", b"Infinity", b"9" * 400, b"9" * 30),
    *(b'"x"', b'""', b'"\\ud800"', b'"1"', b'"open"', b'"closed"', b'"cosmoflow"', b'"deepcam"', b'"../../x"'),
    *(b"[]", b"{}", b"[[1]]", b'{"a": 1}', b"[1, null]"),
)


def damaged(chance: random.Random) -> bytes:
    """One to six mutations: bytes, JSON values, order of lines, repeated and missing lines."""
    data = bytearray(chance.choice(BASES))
    for _ in range(chance.randint(1, 6)):
        kind = chance.random()
        lines = bytes(data).split(b"\n")
        if kind < 0.3:
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
        elif kind < 0.8:
            places = list(re.finditer(rb'": ("[^"]*"|[-\d.]+|null|true)', data))
            if places:
                place = chance.choice(places)
                data[place.start(1) : place.end(1)] = chance.choice(VALUES)
        elif kind < 0.87:
            chance.shuffle(lines)
            data = bytearray(b"\n".join(lines))
        elif kind < 0.94:
            lines.insert(chance.randrange(len(lines)), chance.choice(lines))
            data = bytearray(b"\n".join(lines))
        else:
            del lines[chance.randrange(len(lines))]
            data = bytearray(b"\n".join(lines))
    return bytes(data)


@pytest.mark.parametrize(
    "inputs", [1000, pytest.param(200_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])], ids=["slice", "whole"]
)
def test_no_damage_crashes_the_checker(tmp_path: Path, inputs: int) -> None:
    chance = random.Random(inputs)
    folder = tmp_path / "runs"
    folder.mkdir()
    target = ruleset("3.0.0").benchmark("cosmoflow", None)
    assert target is not None
    for number in range(inputs):
        path = folder / f"result_{number % 5}.txt"
        path.write_bytes(damaged(chance))
        try:
            judge_log(read_events(path), ruleset(chance.choice(ruleset_names())), str(path))
            if number % 10 == 9:
                check([folder], chance.choice([None, *ruleset_names()]))
                records = [summarise(read_events(item)) for item in folder.iterdir()]
                time_to_train(records, target)
                throughput(records, target)
        except Exception as error:
            raise AssertionError(f"input {number} of seed {inputs} (kept in {folder}): {error!r}") from error
