"""Waiting until other programs leave the CPUs alone: what is waited for, for how long, and what is said."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from mlhpc.suite.errors import InputError
from mlhpc.suite.launch.quiet import measure_other_work, wait_for_quiet
from mlhpc.suite.log.other_work import OtherWork
from tests.fixtures.cli import mlhpc


def others(taken: float, cpus: int = 2) -> OtherWork:
    return OtherWork(0, cpus, taken, 0.0, 10.0)


def wait(found: list[OtherWork | None], limit_s: float = 60.0) -> list[str]:
    """Wait with looks of 10 s that find this, one after another; return what was told."""
    said: list[str] = []
    times: Iterator[float] = iter(range(0, 10_000, 10))
    looks = iter(found)
    wait_for_quiet(said.append, limit_s, lambda: next(looks), lambda: next(times))
    assert not list(looks), "no look too few"
    return said


def test_it_waits_until_a_look_finds_no_more_than_a_log_lets_pass() -> None:
    assert wait([others(0.05)]) == []
    assert wait([others(1.04), others(0.4), others(0.1)]) == [
        "other programs used 52 % of the CPUs (1 of 2): waiting for quiet, at most 50 s more",
        "other programs used 20 % of the CPUs (0.4 of 2): waiting for quiet, at most 40 s more",
    ]


@pytest.mark.parametrize(("taken", "cpus", "counts"), [(0.9, 128, False), (1.1, 128, True), (0.09, 2, False)])
def test_the_threshold_is_that_of_a_run(taken: float, cpus: int, counts: bool) -> None:
    assert bool(wait([others(taken, cpus), *([others(0.0)] if counts else [])])) is counts


def test_the_wait_ends_with_a_line_that_names_the_way_on() -> None:
    with pytest.raises(
        InputError, match=r"52 % of the CPUs .* after 60 s of waiting: end the other programs and continue with"
    ):
        wait([others(1.04)] * 6)


def test_a_machine_that_does_not_tell_is_not_waited_for() -> None:
    (line,) = wait([None])
    assert line == "this machine does not show what other programs use of its CPUs: not waiting"


def test_a_busy_process_is_measured() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as busy:
        try:
            found = measure_other_work(1.0)
        finally:
            busy.kill()
    assert 0.0 <= found.share <= 1.1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--wait-minutes", "5"), "--wait-minutes belongs to --wait-for-quiet"),
        (("--wait-for-quiet", "--wait-minutes", "nan"), "--wait-minutes: nan is not a finite number"),
    ],
)
def test_options_without_their_meaning_are_refused(words: tuple[str, ...], expected: str) -> None:
    done = mlhpc("run", "cosmoflow", "--size", "smoke", *words)
    assert done.returncode == 2
    assert expected in done.stderr
