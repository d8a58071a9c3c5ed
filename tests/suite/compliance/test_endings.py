"""Every way in which a run of our harness can end: with one of five such runs a result is compliant, alone the run is not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from mlhpc.suite.compliance import ruleset as rulesets
from mlhpc.suite.compliance.check import Verdict, check
from mlhpc.suite.log.reader import read_events
from tests.fixtures.warm import warm_python

TOY = Path(__file__).resolve().parents[1] / "training"
RUNS = 5
GOOD = tuple(f"good{seed}" for seed in range(RUNS))
EVENTS = pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])  # `make test`: every fifth event
SHORT = ("max_epochs=2",)  # the target is reached in the fifth
# Each is one trial of the toy workload on the real harness; exit codes are those of docs/architecture.md.
ENDINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    **dict.fromkeys(GOOD, (0, ())),
    "missed": (1, SHORT),
    "diverged in training": (1, (*SHORT, "window_steps=1", "TOY_FAULT=nan:loop:1")),
    "diverged at the first evaluation": (1, (*SHORT, "TOY_NO_VALUE=1")),
    "diverged at a later evaluation": (1, (*SHORT, "TOY_NO_VALUE=2")),
    "stopped in training": (3, (*SHORT, "TOY_FAULT=term:loop:1")),
    "stopped in an evaluation": (3, (*SHORT, "TOY_FAULT=term:evaluation:1")),
    "an error in training": (1, (*SHORT, "TOY_FAULT=raise:loop:20")),
    "an error at the end of a window": (1, (*SHORT, "TOY_FAULT=raise:window:3")),
    "an error in an evaluation": (1, (*SHORT, "TOY_FAULT=raise:evaluation:2")),
    "an error in the first step": (1, (*SHORT, "TOY_FAULT=raise:loop:1")),
    "an error in building the model": (1, (*SHORT, "TOY_FAULT=raise:model:1")),
    "an error in building the optimizer": (1, (*SHORT, "TOY_FAULT=raise:optimizer:1")),
    "missed, staged": (1, (*SHORT, "staging.directory=LOCAL/{node}")),
    "missed, staged beside the run": (1, (*SHORT, "staging.directory=LOCAL/over{node}", "staging.overlap=true")),
    "missed, not measured": (1, (*SHORT, "instrumentation=false")),
    "missed, with checkpoints": (1, (*SHORT, "checkpoint.interval_s=0.01")),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The log of every ending, from one process that runs them one after another."""
    folder = tmp_path_factory.mktemp("endings")
    words: list[str] = []
    for seed, (name, (_, options)) in enumerate(ENDINGS.items()):
        given = [option.replace("LOCAL", f"{folder}/local") for option in options]
        words += ["--", str(folder / name), "0", str(seed + 1), "submission.org=ACME", *given]
    data = folder / "data"
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(TOY)!r}); import toy; toy.generate(pathlib.Path({str(data)!r}))"
    )
    subprocess.run([*warm_python(), "-c", program], check=True, timeout=300)
    done = subprocess.run(
        [*warm_python(), str(TOY / "toy.py"), str(data), *words[1:]],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    codes = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == [code for code, _ in ENDINGS.values()], done.stdout + done.stderr
    logs = {name: folder / name / "result_0.txt" for name in ENDINGS}
    return {name: path.read_bytes() for name, path in logs.items() if path.exists()}


@pytest.fixture
def toy_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The checker knows the toy's card, under which five runs are a result."""
    sys.path.insert(0, str(TOY))
    try:
        import toy
    finally:
        sys.path.remove(str(TOY))
    card = toy.toy_card()
    five = structs.replace(card, sizes={"smoke": structs.replace(card.sizes["smoke"], required_runs=RUNS)})
    monkeypatch.setattr(toy, "toy_card", lambda: five)
    monkeypatch.setattr(rulesets, "_load_descriptors", lambda cards: {"toy": toy.DESCRIPTOR})
    rulesets._find_card_benchmark.cache_clear()
    yield
    rulesets._find_card_benchmark.cache_clear()


def errors(verdict: Verdict) -> list[tuple[str, str]]:
    return [(finding.rule, finding.message) for finding in verdict.findings if finding.severity == "error"]


def result_with(folder: Path, ended: dict[str, bytes], log: bytes, *, place: int = 0) -> Path:
    """Five runs of which one is this."""
    folder.mkdir(exist_ok=True)
    for index, name in enumerate(GOOD):
        (folder / f"result_{index}.txt").write_bytes(log if index == place else ended[name])
    return folder


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("toy_card")
def test_runs_that_reach_the_target_are_a_result(tmp_path: Path, ended: dict[str, bytes]) -> None:
    verdict = check([result_with(tmp_path, ended, ended[GOOD[0]])])
    assert verdict.rulesets == ("mlhpc-1.0",)
    assert not errors(verdict)


@pytest.mark.drawn(6)
@pytest.mark.usefixtures("toy_card")
@pytest.mark.parametrize("name", [name for name in ENDINGS if name not in GOOD])
def test_one_run_of_five_may_end_in_any_way(tmp_path: Path, ended: dict[str, bytes], name: str) -> None:
    if name not in ended:
        pytest.fail(f"{name}: left no log")
    for place in (0, RUNS - 1):
        verdict = check([result_with(tmp_path / str(place), ended, ended[name], place=place)])
        assert not errors(verdict)
        assert "run-failed" in {finding.rule for finding in verdict.findings}
    assert errors(check([tmp_path / "0" / "result_0.txt"]))
    # Two of them are one too many.
    (tmp_path / "0" / "result_3.txt").write_bytes(ended[name].replace(b'"value": 5', b'"value": 6'))
    assert "runs-failed" in {rule for rule, _ in errors(check([tmp_path / "0"]))}


@pytest.mark.usefixtures("toy_card")
@pytest.mark.parametrize(
    "name",
    [
        GOOD[0],
        pytest.param("diverged at a later evaluation", marks=pytest.mark.long),
        pytest.param("stopped in training", marks=pytest.mark.long),
        "missed, staged beside the run",
    ],
)
@EVENTS
def test_one_run_of_five_may_be_killed_at_every_event(
    tmp_path: Path, ended: dict[str, bytes], name: str, step: int
) -> None:
    """After each event of a log, and in the middle of the next line."""
    lines = ended[name].splitlines(keepends=True)
    assert len(lines) > 30
    for count in range(1, len(lines), step):
        whole = b"".join(lines[:count])
        for log in (whole, whole + lines[count][: len(lines[count]) // 2]):
            found = errors(check([result_with(tmp_path, ended, log)]))
            assert not found, (count, lines[count - 1], found)


@pytest.mark.usefixtures("toy_card")
@EVENTS
@pytest.mark.parametrize("more", [{}, {"first_block": 0}], ids=["the watchdog", "an error"])
def test_one_run_of_five_may_be_ended_at_every_event(
    tmp_path: Path, ended: dict[str, bytes], more: dict[str, int], step: int
) -> None:
    """By what writes run_stop itself: the watchdog, and an error anywhere in the run."""
    lines = ended[GOOD[0]].splitlines(keepends=True)
    # The harness writes no second run_stop
    begin, end = (
        next(i for i, line in enumerate(lines) if b'"key": "run_' + key in line) for key in (b"start", b"stop")
    )
    for count in range(begin + 1, end, step):
        last = json.loads(lines[count - 1].removeprefix(b":::MLLOG "))
        metadata = {"status": "aborted", "reason": "x", **more}
        stop = {"time_ms": last["time_ms"] + 1, "event_type": "INTERVAL_END", "key": "run_stop", "value": None}
        stop = last | stop | {"metadata": metadata}
        log = b"".join([*lines[:count], b":::MLLOG ", json.dumps(stop).encode(), b"\n"])
        found = errors(check([result_with(tmp_path, ended, log)]))
        assert not found, (count, lines[count - 1], found)


@pytest.mark.usefixtures("toy_card")
@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (b'"opt_name", "value": "sgd"', b'"opt_name", "value": ""', "run-drift"),
        (b'"train_samples", "value": 128', b'"train_samples", "value": 64', "key-value"),
        (b'"model_parameters", "value": 36', b'"model_parameters", "value": 35', "key-value"),
        (b'"submission_division", "value": "closed"', b'"submission_division", "value": "shut"', "key-value"),
        (b'"benchmark_size", "value": "smoke"', b'"benchmark_size", "value": "mini"', "benchmark-known"),
        (b'"key": "global_batch_size"', b'"key": "global_batch_sise"', "key-missing"),
        (b'"key": "seed"', b'"key": "sead"', "seed-missing"),
        (b'"key": "init_stop"', b'"key": "init_stopp"', "key-missing"),
        (b'"status": "aborted"', b'"status": "success"', "status-true"),
        (b'"key": "cache_state"', b'"key": "cache_state"}', "event-valid"),
    ],
)
def test_a_failed_run_is_forgiven_what_follows_from_its_end_only(
    tmp_path: Path, ended: dict[str, bytes], old: bytes, new: bytes, rule: str | None
) -> None:
    log = ended["stopped in training"]
    assert old in log
    found = {name for name, _ in errors(check([result_with(tmp_path, ended, log.replace(old, new, 1))]))}
    assert (rule in found) if rule else not found


@pytest.mark.usefixtures("toy_card")
def test_an_empty_log_is_no_run(tmp_path: Path, ended: dict[str, bytes]) -> None:
    assert {rule for rule, _ in errors(check([result_with(tmp_path, ended, b"")]))} == {"log-empty"}


def test_the_logs_are_those_of_the_harness(ended: dict[str, bytes], tmp_path: Path) -> None:
    """Each ending left the reason that it is named after."""
    reasons = {}
    for name, data in ended.items():
        path = tmp_path / "log"
        path.write_bytes(data)
        stop = read_events(path).first("run_stop")
        reasons[name] = stop.metadata["reason"] if stop is not None else "none"
    assert "diverged: val MAE is nan after epoch 2" in reasons["diverged at a later evaluation"]
    assert "the loss is not finite" in reasons["diverged in training"]
    assert "stopped by SIGTERM" in reasons["stopped in training"]
    assert "RuntimeError: a fault" in reasons["an error in an evaluation"]
    assert "not reached in 2 epochs" in reasons["missed"]
