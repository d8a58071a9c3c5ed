"""Fuzzing: damaged logs of every kind are read, judged and scored without a crash. The whole takes minutes: -m long."""

import json
import os
import random
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlhpc.suite.compliance.check import check, judge_log
from mlhpc.suite.compliance.ruleset import list_rulesets, read_ruleset
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.score import compute_throughput, compute_time_to_train
from tests.fixtures.logs import Line, chain, edit, hpc_run, insert, our_run

MEASURED = insert(
    Line("rank_stats", {"step_s": {"min": 1.0, "median": 1.5, "max": 2.0, "min_rank": 1, "max_rank": 0, "values": [2.0, 1.0]}},
         metadata={"epoch_num": 2, "steps": 200}),
    "run_stop",
)  # fmt: skip
STATED = edit(
    "run_config",
    value={"workload": "cosmoflow", "size": "smoke", "global_batch_size": 16, "max_epochs": 9, "precision": "float32",
           "submission": {"org": "ACME"}, "hyperparameters": {"dropout": 0.0}},
)  # fmt: skip
DROPPED = edit("cache_state", value="dropped", meta={"state": "dropped", "command": "drop", "exit_codes": [0]})
WORK = insert(Line("work_per_sample", {"model_flops": 1e7}), "init_stop")
BASES = [
    b"".join(line.encode(number) for number, line in enumerate(lines))
    for lines in (
        our_run(),
        chain(MEASURED, STATED, DROPPED, WORK)(our_run()),
        our_run("mini", values=(0.3, 0.25)),
        *(hpc_run(name, epochs=4) for name in ("cosmoflow", "deepcam", "oc20", "openfold")),
    )
]
VALUES = (
    *(b"null", b"true", b"-1", b"0", b"1.5", b"1e308", b"-1e308", b"1e400", b"NaN", b"Infinity", b"9" * 400, b"9" * 30),
    *(b'"x"', b'""', b'"\\ud800"', b'"1"', b'"open"', b'"closed"', b'"cosmoflow"', b'"deepcam"', b'"../../x"'),
    *(b"[]", b"{}", b"[[1]]", b'{"a": 1}', b"[1, null]"),
)


def damage(whole: bytes, chance: random.Random) -> bytes:
    """One to six mutations: bytes, JSON values, order of lines, repeated and missing lines."""
    data = bytearray(whole)
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
    "inputs",
    [
        300,
        pytest.param(
            int(os.environ.get("MLHPC_FUZZ_INPUTS", 500_000)), marks=[pytest.mark.long, pytest.mark.timeout(7200)]
        ),
    ],
    ids=["slice", "whole"],
)
def test_no_damage_crashes_the_checker(tmp_path: Path, inputs: int) -> None:
    """No input raises, takes more than 10 s of CPU, or makes this process grow."""
    chance = random.Random(inputs)
    folder = tmp_path / "runs"
    folder.mkdir()
    target = read_ruleset("3.0.0").benchmark("cosmoflow", None)
    assert target is not None
    settled_kib = 0
    for number in range(inputs):
        path = folder / f"result_{number % 5}.txt"
        path.write_bytes(damage(chance.choice(BASES), chance))
        if number == inputs // 5:  # every ruleset is read and every cache filled
            settled_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_PROF, HANGS_S)
        try:
            judge_log(read_events(path, steps=False), read_ruleset(chance.choice(list_rulesets())), str(path))
            if number % 10 == 9:
                check([folder], chance.choice([None, *list_rulesets()]))
                records = [summarise_log(read_events(item)) for item in folder.iterdir()]
                compute_time_to_train(records, target)
                compute_throughput(records, target)
        except Exception as error:
            raise AssertionError(f"input {number} of seed {inputs} (kept in {folder}): {error!r}") from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - settled_kib
    assert grown_kib < GROWTH_KIB, f"{inputs} inputs: {grown_kib} KiB more than after a fifth of them"


HANGS_S = 10
GROWTH_KIB = 32 * 1024


@pytest.fixture(autouse=True)
def hang() -> Iterator[None]:
    """Turn the alarm into an error at the place that hangs."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"no verdict after {HANGS_S} s of CPU")

    before = signal.signal(signal.SIGPROF, stop)
    yield
    signal.signal(signal.SIGPROF, before)


def with_steps(steps: int) -> bytes:
    """A DeepCAM log that, as the reference does, logs loss, accuracy and learning rate of every step."""
    lines = []
    for line in hpc_run("deepcam", epochs=3):
        if line.key == "eval_start":
            for step in range(steps):
                for key, value in (("learning_rate", 1e-05), ("train_accuracy", 0.5), ("train_loss", -1.25)):
                    meta = {"file": "trainer.py", "lineno": 9, "epoch_num": 1, "step_num": step}
                    record = {"namespace": "", "time_ms": int(line.time_ms), "event_type": "POINT_IN_TIME", "key": key}
                    lines.append(f":::MLLOG {json.dumps(record | {'value': value, 'metadata': meta})}\n".encode())
        lines.append(line.encode(1))
    return b"".join(lines)


def test_steps_are_left_out_without_a_change_of_the_verdict(tmp_path: Path) -> None:
    """Whatever happens to the lines of steps, what is found is what is found if all events are kept."""
    path = tmp_path / "result_0.txt"
    path.write_bytes(with_steps(20))
    assert read_events(path, steps=False).skipped == 3 * (60 - 2)
    whole, chance = with_steps(4), random.Random(1)
    for _ in range(300):
        path.write_bytes(damage(whole, chance))
        everything, judged = (
            [(item.rule, item.line, item.message) for item in judge_log(log, read_ruleset("3.0.0"), "x").findings]
            for log in (read_events(path), read_events(path, steps=False))
        )
        assert judged == everything
