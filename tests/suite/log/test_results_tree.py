"""One walker: what is a result, what is not followed and why, the same for the checker, the score and the report."""

import gzip
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mlhpc.analysis.page.issues import Issue, list_issues
from mlhpc.analysis.study import read_study
from mlhpc.analysis.tables.ingest import read_tables
from mlhpc.suite.compliance.check import check
from mlhpc.suite.log.results_tree import LINK, SkippedPath, find_logs, find_results
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import our_run, our_runs, write


def package(root: Path, runs: int = 5) -> Path:
    """A package of ``runs`` cosmoflow logs."""
    made = root / "ACME"
    (made / "systems").mkdir(parents=True)
    (made / "systems" / "sys.json").write_text("{}")
    our_runs(made / "results" / "sys" / "strong" / "cosmoflow", runs)
    return made


def test_a_linked_log_is_a_run_for_nobody_and_named_by_all(tmp_path: Path) -> None:
    """It once was the fifth run of the report and no run of the score."""
    made = package(tmp_path)
    folder = made / "results" / "sys" / "strong" / "cosmoflow"
    (folder / "result_4.txt").rename(tmp_path / "elsewhere.txt")
    (folder / "result_4.txt").symlink_to(tmp_path / "elsewhere.txt")
    tree = find_results(made)
    assert [len(group.logs) for group in tree.groups] == [4]
    tables = read_tables([made], {})
    assert len(tables.runs) == 4
    assert list(tables.skipped) == [SkippedPath(folder / "result_4.txt", LINK)]
    assert Issue("problem", "ACME/results/sys/strong/cosmoflow/result_4.txt", f"not read: {LINK}") in list_issues(
        read_study([made], {})
    )
    assert any("result_4.txt" in finding.file + finding.message for finding in check([made]).findings)


def test_a_sample_log_among_the_code_is_no_result(tmp_path: Path) -> None:
    """It once was a result for the report and nothing for the checker."""
    made = package(tmp_path)
    sample = made / "benchmarks" / "cosmoflow" / "implementations" / "torch"
    write(sample / "result_0.txt", our_run())
    logs, skipped = find_logs([made])
    assert [log.trial for log in logs] == [0, 1, 2, 3, 4]
    assert [item.path for item in skipped] == [made / "benchmarks"]
    assert [len(group.logs) for group in find_results(made).groups] == [5]


def test_a_folder_that_happens_to_be_called_benchmarks_is_walked(tmp_path: Path) -> None:
    write(tmp_path / "benchmarks" / "mine" / "result_0.txt", our_run())
    assert [len(group.logs) for group in find_results(tmp_path).groups] == [1]


def test_a_linked_folder_is_not_entered_and_is_named(tmp_path: Path) -> None:
    made = package(tmp_path / "real")
    other = package(tmp_path / "other")
    (made / "results" / "linked").symlink_to(other / "results" / "sys")
    logs, skipped = find_logs([made])
    assert len(logs) == 5
    assert skipped == [SkippedPath(made / "results" / "linked", LINK)]


def test_the_name_of_a_system_is_no_round(tmp_path: Path) -> None:
    made = package(tmp_path / "hpc_results_v3.0")
    (made / "results" / "sys").rename(made / "results" / "v0.7")
    assert [group.round for group in find_results(made).groups] == ["v3.0"]
    (made / "results" / "v0.7").rename(made / "results" / "cluster_v1.0")
    assert {log.round for log in find_logs([made])[0]} == {"v3.0"}


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        ("sys/strong/cosmoflow", ("package", "sys", "strong", "cosmoflow")),
        ("sys/weak/deepcam", ("package", "sys", "weak", "deepcam")),
        ("sys/cosmoflow", ("package", "sys", "strong", "cosmoflow")),
        ("sys", ("package", "sys", "strong", None)),
    ],
)
def test_the_place_of_a_log_says_system_mode_and_benchmark(
    tmp_path: Path, below: str, expected: tuple[str | None, ...]
) -> None:
    write(tmp_path / "ACME" / "results" / below / "result_0.txt", our_run())
    ((log,), _) = find_logs([tmp_path])
    assert (log.kind, log.system, log.mode, log.benchmark) == expected


def test_pruned_and_resumed_logs_are_told_apart(tmp_path: Path) -> None:
    made = package(tmp_path, runs=2)
    folder = made / "results" / "sys" / "strong" / "cosmoflow"
    write(folder / "pruned_results" / "result_7.txt", our_run())
    run = tmp_path / "run1"
    write(run / "result_0.txt", our_run())
    write(run / "resumed_0_1.txt", our_run())
    (run / "run.json").write_text("{}")
    logs, _ = find_logs([tmp_path])
    assert [(log.trial, log.pruned) for log in logs if log.kind == "package"] == [(7, True), (0, False), (1, False)]
    assert [log.resumed for log in logs if log.kind == "run"] == [False, True]


def _folder(path: Path) -> None:
    path.mkdir()


def _packed(path: Path) -> None:
    path.with_suffix(".txt.gz").write_bytes(gzip.compress(b":::MLLOG {}"))


def _renamed(path: Path) -> None:
    path.with_name("log.out").write_text(":::MLLOG {}")


LOADGEN = ':::MLLOG {"key": "loadgen_version", "value": "5.0", "time_ms": 0.003, "namespace": "mlperf::logging"}\n'


@pytest.mark.parametrize("name", ["mlperf_log_detail.txt", "mlperf_log_summary.txt"])
@pytest.mark.parametrize("folder", ["h100/llama2-70b/Offline/performance/run_1", "h100/bert/Server", "h100", "."])
def test_a_round_of_inference_is_named_and_nobody_is_told_to_rename_its_logs(
    tmp_path: Path, name: str, folder: str
) -> None:
    round_ = tmp_path / "inference_results_v5.0"
    log = round_ / "closed/ACME/results" / folder / name
    log.parent.mkdir(parents=True)
    log.write_text(LOADGEN)
    for command in ("check", "score", "report"):
        done = mlhpc(command, round_)
        text = done.stdout + done.stderr
        assert "a round of MLPerf Inference (LoadGen logs: closed/ACME/results/" in text
        assert (done.returncode, "this suite has no rules for it" in text) == (1 if command == "check" else 2, True)
        assert not re.search("result_|not named|rename|results-empty|nothing-checked", text)
    # Beside logs of training it is no round of its own.
    write(round_ / "closed/ACME/results/h100/strong/cosmoflow/result_0.txt", our_run())
    assert "MLPerf Inference" not in mlhpc("check", round_).stdout


def test_a_single_log_of_loadgen_is_told_by_its_content_too(tmp_path: Path) -> None:
    for name in ("mlperf_log_detail.txt", "result_0.txt"):
        (tmp_path / name).write_text(LOADGEN)
        done = mlhpc("score", tmp_path / name)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{name}: of MLPerf Inference (a log of LoadGen): this suite has no rules for it" in done.stderr
        assert "log of a run" not in done.stderr


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_folder, "result_0.txt is no file"),
        (os.mkfifo, "result_0.txt is no file"),
        *(
            (partial(Path.symlink_to, target=target), "result_0.txt is a symbolic link: not followed")
            for target in ("/etc/shadow", "/dev/zero", "nowhere", "result_0.txt", ".", __file__)
        ),
        (_packed, "result_0.txt.gz is compressed: unpack it"),
        (_renamed, "log.out holds MLLOG events but is not named result_<n>.txt"),
    ],
)
def test_what_nearly_is_a_log_is_named_where_none_is_found(
    make: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    make(tmp_path / "result_0.txt")
    for command in ("check", "score"):
        done = mlhpc(command, tmp_path)
        assert said in done.stdout + done.stderr
