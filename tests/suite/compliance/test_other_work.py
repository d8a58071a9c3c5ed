"""A run beside other work is a note, and no error: seven logs in which it must be found, ten in which it must not."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.commands.status import JobStatus, judge_trial
from mlhpc.suite.compliance.check import check_log
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.launch.local import AttemptState
from mlhpc.suite.log.other_work import render_busy_warning
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import SHORT, Line, Lines, drop, insert, our_run, write

RUN_S = 6.5  # of our_run: staging and three epochs of 2 s


def node(number: int = 0, cpus: int = 2, other_s: Any = 0.0, stolen_s: Any = 0.0, own_s: Any = 9.0) -> dict[str, Any]:
    times = {"own_s": own_s, "other_s": other_s, "stolen_s": stolen_s, "pressure_s": 0.1}
    return {"node": number, "cpus": cpus, **times, "source": "proc_stat"}


def told(*nodes: Any, seconds: Any = RUN_S, count: int | None = None, **about: Any) -> Line:
    metadata = {"seconds": seconds, "nodes": len(nodes) if count is None else count, "absent": {}} | about
    return Line("other_work", list(nodes), metadata=metadata)


def log(event: Line | None, **options: Any) -> Lines:
    lines = our_run(values=SHORT, **options)
    return lines if event is None else insert(event, "run_stop")(lines)


def notes(path: Path, lines: Lines, rules: str = "mlhpc-1.0", errors: tuple[str, ...] = ()) -> list[str]:
    findings = check_log(write(path / "result_0.txt", lines), read_ruleset(rules)).findings
    found = {each.rule for each in findings if each.severity == "error"} - {
        "samples-agree"
    }  # 200 ranks share no batch of 16
    assert rules != "mlhpc-1.0" or found == {*errors}
    return [f"{each.severity}: {each.message}" for each in findings if each.rule == "other-work"]


FOUND = {
    "half of two CPUs": (told(node(other_s=6.5, own_s=6.0)), "other programs used 50 % of the CPUs (1 of 2)"),
    "just above 5 %": (told(node(other_s=0.67)), "used 5.2 % of the CPUs (0.1 of 2)"),
    "the hypervisor": (told(node(stolen_s=2.0)), "used 15 % of the CPUs (0.31 of 2, 0.31 by the hypervisor)"),
    "others and the hypervisor together": (told(node(other_s=0.4, stolen_s=0.4)), "used 6.2 % of the CPUs"),
    "the worst of three nodes": (
        told(node(0), node(1, other_s=3.0), node(2, other_s=0.1)), "node 1: other programs used 23 % of the CPUs"
    ),
    "one busy process on 128 CPUs": (
        told(node(cpus=128, other_s=7.0, own_s=700.0)), "used 0.84 % of the CPUs (1.1 of 128)"
    ),
    "one of 64 nodes that are listed of 200": (
        told(*(node(number, other_s=3.0 * (number == 99)) for number in range(40, 104)), count=200), "node 99: "
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_run_beside_other_work_is_noted(name: str, tmp_path: Path) -> None:
    event, text = FOUND[name]
    lines = log(event, nodes=event.metadata["nodes"], ranks=200)  # type: ignore[index]
    (note,) = notes(tmp_path, lines)
    assert note.startswith("info: ")
    assert text in note


@pytest.mark.parametrize(
    "event",
    [
        told(node(other_s=1.2), seconds=2 * RUN_S),
        told(node(other_s=90.0)),
        told(node(other_s="none")),
        told(seconds=-1.0),
        told(count=2),
        told(node(0), node(0)),
        told(node(0), node(2)),
        told(node(cpus=0)),
        told(node(other_s=-3.0)),
        told(node(other_s=float("nan"))),
        told(node(), count=2, absent={"why": "many"}),
        told("node 0"),
        Line("other_work", "nothing", metadata={"seconds": RUN_S, "nodes": 1}),
        Line("other_work", 0.0),
    ],
)
def test_what_is_no_measurement_is_an_error(event: Line, tmp_path: Path) -> None:
    assert notes(tmp_path, log(event), errors=("sums-agree",)) == []


NOT_FOUND: dict[str, Lines] = {
    "nothing": log(told(node())),
    "just below 5 %": log(told(node(other_s=0.64))),
    "2 % and 2 % stolen": log(told(node(other_s=0.26, stolen_s=0.26))),
    "nine tenths of one of 128 CPUs": log(told(node(cpus=128, other_s=5.8, own_s=700.0))),
    "ranks that waited for each other's CPU": log(told(node(own_s=13.0) | {"pressure_s": 6.4})),
    "a machine that does not tell": log(told(count=1, absent={"neither /proc/stat nor a control group": 1})),
    "some of many nodes": log(told(*map(node, range(64)), count=200), nodes=200, ranks=200),
    "no such event, as in logs of earlier releases": log(None),
    "instances that run at once": log(told(node(other_s=6.0)), mode="weak"),
    "half a second in ticks": log(told(node(cpus=1, other_s=0.45, own_s=6.0))),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_a_run_on_its_own_is_not_noted(name: str, tmp_path: Path) -> None:
    assert notes(tmp_path, NOT_FOUND[name]) == []


def test_logs_of_other_suites_are_not_asked(tmp_path: Path) -> None:
    assert notes(tmp_path, log(told(node(other_s=6.5))), "3.0.0") == []


def test_what_comes_after_the_run_does_not_count(tmp_path: Path) -> None:
    lines = [*drop("other_work")(log(None)), told(node(other_s=6.5))]
    path = write(tmp_path / "result_0.txt", lines)
    assert summarise_log(read_events(path)).company is None


def test_status_and_the_last_line_of_a_run_say_it(tmp_path: Path) -> None:
    for trial, other_s in enumerate((0.1, 3.0, 1.0)):
        write(tmp_path / f"result_{trial}.txt", log(told(node(other_s=other_s)), trial=trial))
    folder = RunFolder(tmp_path)
    warning = render_busy_warning([summarise_log(read_events(path)).company for path in folder.results()])
    assert warning.startswith("warning: other programs used up to 23 % of the CPUs during 2 of 3 runs; ")
    record = summarise_log(read_events(folder.result(1)))
    said = judge_trial(record, JobStatus(), 0.0, resumable=False, sign=AttemptState())
    assert said == ("finished", "other programs used 23 % of the CPUs (0.46 of 2)")
    quiet = summarise_log(read_events(folder.result(0)))
    assert judge_trial(quiet, JobStatus(), 0.0, resumable=False, sign=AttemptState()) == ("finished", "")


def runs(folder: Path, *others_s: float) -> Path:
    for trial, other_s in enumerate(others_s):
        write(folder / f"result_{trial}.txt", log(told(node(other_s=other_s, own_s=1.0)), trial=trial))
    return folder


@pytest.mark.parametrize(
    ("others_s", "expected"),
    [
        ((0.1, 3.0, 1.0, 0.1, 0.1), "warning: other programs used up to 23 % of the CPUs during 2 of 5 runs; "),
        ((0.1, 0.1, 6.7, 0.1, 0.1), "warning: other programs used 52 % of the CPUs during 1 of 5 runs; "),
        ((13.0,), "warning: other programs used 100 % of the CPUs during the run; "),
        ((0.1, 0.2, 0.3, 0.4, 0.5), None),
    ],
)
def test_score_and_compare_warn_of_a_busy_machine(
    tmp_path: Path, others_s: tuple[float, ...], expected: str | None
) -> None:
    busy, quiet = runs(tmp_path / "busy", *others_s), runs(tmp_path / "quiet", *([0.1] * 5))
    scored = [line.strip() for line in mlhpc("score", busy).stdout.splitlines()]
    compared = mlhpc("compare", quiet, busy, "--any").stdout.splitlines()
    data = json.loads(mlhpc("compare", quiet, busy, "--any", "--format", "json").stdout)
    if expected is None:
        assert not [line for line in (*scored, *compared) if "other programs" in line]
        assert data["comparisons"][0]["busy"] == []
    else:
        assert [line for line in scored if line.startswith(expected)]
        assert [line for line in compared if line.startswith(f"  B, {busy}: {expected}")]
        assert len(data["comparisons"][0]["busy"]) == 1
