"""What becomes of a trial when its run folder is continued, for every state a former attempt can leave."""

from pathlib import Path

import pytest

from mlhpc.suite.log.run_folder import (
    ResumeDecision,
    RunFolder,
    has_run_start,
    list_replaced_runs,
    plan_and_prepare_resume,
    plan_resume,
)
from tests.fixtures.logs import drop, our_run, write

FINISHED = our_run()
MISSED = our_run(values=(0.9, 0.9))
KILLED = drop("run_stop")(MISSED)
NEVER_BEGAN = MISSED[:12]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "checkpoint").mkdir()
    return RunFolder(tmp_path)


@pytest.mark.parametrize(
    ("log", "checkpoint", "replace", "code", "resume", "left"),
    [
        (None, False, False, None, False, []),
        (None, True, False, None, True, []),
        (FINISHED, False, False, 0, False, ["result_0.txt"]),
        (FINISHED, True, True, 0, False, ["result_0.txt"]),  # a checkpoint of before its end, not removed in time
        (MISSED, False, False, 1, False, ["result_0.txt"]),
        (MISSED, False, True, None, False, ["failed_0_1.txt"]),
        (KILLED, False, False, 1, False, ["result_0.txt"]),
        (KILLED, False, True, None, False, ["failed_0_1.txt"]),
        (KILLED, True, True, None, True, ["result_0.txt"]),
        (NEVER_BEGAN, False, False, None, False, ["failed_0_1.txt"]),
        (NEVER_BEGAN, True, False, None, True, ["failed_0_1.txt"]),
        ([], False, False, None, False, ["failed_0_1.txt"]),
    ],
)
def test_the_way_on(
    folder: RunFolder, log: list[object] | None, checkpoint: bool, replace: bool, code: int | None, resume: bool,
    left: list[str],
) -> None:  # fmt: skip
    if log is not None:
        write(folder.result(0), log)  # type: ignore[arg-type]
    if checkpoint:
        folder.checkpoint(0).touch()
    before = folder.result(0).read_bytes() if log is not None else b""
    assert plan_resume(folder, 0, replace_failed=replace).code == code
    way = plan_and_prepare_resume(folder, 0, replace_failed=replace)
    assert (way.code, way.resume) == (code, resume)
    assert [path.name for path in sorted(folder.root.glob("*.txt"))] == left
    assert all((folder.root / name).read_bytes() == before for name in left)  # kept as it was
    assert bool(way.text) == bool((left and left != ["result_0.txt"]) or code is not None)


def test_the_last_continuation_speaks_and_what_never_began_of_it_goes_aside(folder: RunFolder) -> None:
    write(folder.result(0), KILLED)
    write(folder.root / "resumed_0_1.txt", FINISHED)
    write(folder.root / "resumed_0_2.txt", NEVER_BEGAN)  # somebody resumed a finished trial
    assert plan_resume(folder, 0) == ResumeDecision(code=0, text="finished already, left as it is (resumed_0_1.txt)")
    write(folder.root / "resumed_0_1.txt", KILLED)
    folder.checkpoint(0).touch()
    assert plan_and_prepare_resume(folder, 0).resume
    assert [path.name for path in folder.resumed(0)] == ["resumed_0_1.txt"]


@pytest.mark.parametrize(
    ("log", "replace", "code", "left"),
    [
        (None, False, None, []),
        (FINISHED, False, 0, ["result_0.txt"]),
        (MISSED, False, 1, ["result_0.txt"]),
        (KILLED, False, 1, ["result_0.txt"]),
        (KILLED, True, None, ["failed_0_1.txt"]),
        (NEVER_BEGAN, False, None, ["failed_0_1.txt"]),
    ],
)
def test_a_damaged_checkpoint_is_none_and_goes_aside_whole_once_the_trial_runs_again(
    folder: RunFolder, log: list[object] | None, replace: bool, code: int | None, left: list[str]
) -> None:
    files = [folder.checkpoint(0), folder.checkpoint(0).with_name("trial_0.0123abcd")]
    others = [folder.checkpoint(10), folder.checkpoint(0).with_name("trial_10.0123abcd")]
    for path in (*files, *others):
        path.touch()
    if log is not None:
        write(folder.result(0), log)  # type: ignore[arg-type]
    for attempt in (1, 2):
        way = plan_and_prepare_resume(folder, 0, replace_failed=replace, damage="trial_0.pt: damaged")
        assert (way.code, way.resume) == (code, False)
        assert ("trial_0.pt: damaged" in way.text) == (code != 0)
        kept = folder.root / "checkpoint" / f"failed_0_{attempt}"
        assert kept.exists() == (code is None)
        assert all((kept / path.name).exists() != path.exists() for path in files)
        for path in files:
            path.touch()
    assert [path.name for path in sorted(folder.root.glob("*.txt"))] == left
    assert all(path.exists() for path in others)


def test_failed_logs_never_replace_each_other_and_replaced_runs_are_known(folder: RunFolder) -> None:
    for log, replace in ((NEVER_BEGAN, False), (KILLED, True), (MISSED, True)):
        write(folder.result(0), log)
        plan_and_prepare_resume(folder, 0, replace_failed=replace)
    assert [path.name for path in folder.failed(0)] == ["failed_0_1.txt", "failed_0_2.txt", "failed_0_3.txt"]
    assert [path.name for path in list_replaced_runs(folder, 0)] == ["failed_0_2.txt", "failed_0_3.txt"]
    assert list_replaced_runs(folder, 1) == []


def test_a_log_cut_at_any_byte_has_begun_or_not_and_never_fails(folder: RunFolder) -> None:
    write(folder.result(0), KILLED)
    whole = folder.result(0).read_bytes()
    start = whole.index(b'"run_start"')
    end_of_start = whole.index(b"\n", start)
    for end in range(0, len(whole), 101):
        folder.result(0).write_bytes(whole[:end])
        assert has_run_start(folder.result(0)) == (end >= end_of_start)
