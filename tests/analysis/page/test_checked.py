"""A log is read once for the report and its check, and the verdict is the checker's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlhpc.analysis.page.issues import (
    Issue,
    IssueGroup,
    build_findings_table,
    check_paths,
    group_findings,
    group_issues,
)
from mlhpc.analysis.tables.ingest import read_tables
from mlhpc.suite.card import Card
from mlhpc.suite.compliance.check import find_rulesets_of_logs
from mlhpc.suite.compliance.rules.base import Finding

Build = Callable[..., Any]


def damage(log: Path, how: str) -> None:
    text = log.read_text()
    if how == "cut":
        log.write_text(text[: len(text) // 2])
    elif how == "empty":
        log.write_text("")
    elif how == "no MLLOG":
        log.write_text("Traceback (most recent call last):\n")
    elif how == "binary":
        log.write_bytes(bytes(range(256)) * 50)
    elif how == "target missed":
        log.write_text(text.replace('"value": 0.1', '"value": 0.4'))
    elif how == "another benchmark":
        log.write_text(text.replace("cosmoflow", "deepcam"))
    elif how == "training":
        log.write_text(text.replace("cosmoflow", "bert"))
    elif how == "another ruleset":
        log.write_text(text.replace("mlhpc-1.0", "3.0.0"))


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    "how",
    ["", "cut", "empty", "no MLLOG", "binary", "target missed", "another benchmark", "training", "another ruleset"],
)
@pytest.mark.parametrize("kind", ["run folder", "package", "round", "files"])
def test_the_verdict_is_that_of_the_checker(
    tmp_path: Path, run_folder: Build, package: Build, cards: dict[str, Card], how: str, kind: str
) -> None:
    if kind == "run folder":
        paths = [run_folder(tmp_path, runs=3), run_folder(tmp_path, "again", runs=2)]
    elif kind == "package":
        paths = [package(tmp_path, runs=4), package(tmp_path, submitter="B", runs=2)]
    elif kind == "round":
        package(tmp_path / "hpc_results_v3.0", runs=4)
        paths = [tmp_path / "hpc_results_v3.0"]
    else:
        paths = sorted(run_folder(tmp_path, runs=2).glob("result_*.txt"))
    first = next(path for root in paths for path in ([root] if root.is_file() else sorted(root.rglob("result_0.txt"))))
    damage(first, how)
    judged = read_tables(paths, cards, judging=True).judged
    assert len(judged) > 1
    assert check_paths(paths, judged) == check_paths(paths)


@pytest.mark.parametrize("spelling", ["absolute", "relative", "by its parent", "link"])
def test_a_log_that_the_tables_read_is_not_read_again_however_its_folder_is_spelled(
    tmp_path: Path, run_folder: Build, cards: dict[str, Card], monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    folder = run_folder(tmp_path, runs=3)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    given = {
        "absolute": folder.resolve(),
        "relative": Path(folder.name),
        "by its parent": Path("..") / folder.parent.name / folder.name,
        "link": tmp_path / "link",
    }[spelling]
    judged = read_tables([given], cards, judging=True).judged

    def fail(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr("mlhpc.suite.compliance.check.check_log", fail)
    (checked,) = check_paths([given], judged)
    assert checked.verdict.logs == 3
    assert str(tmp_path) not in str(checked.as_dict())
    with pytest.raises(AssertionError, match="read again"):
        check_paths([given])


def test_pruned_logs_and_those_behind_a_link_are_judged_alike(
    tmp_path: Path, package: Build, cards: dict[str, Card]
) -> None:
    root = tmp_path / "hpc_results_v2.0"
    made = package(root, runs=4)
    folder = made / "results" / "sys1" / "strong" / "cosmoflow"
    pruned = made / "results" / "sys1" / "weak" / "cosmoflow" / "pruned_results"
    pruned.mkdir(parents=True)
    (folder / "result_3.txt").rename(pruned / "result_0.txt")
    (folder / "result_2.txt").rename(pruned.parent / "result_0.txt")
    (tmp_path / "link").symlink_to(root)
    for path in (root, tmp_path / "link"):
        judged = read_tables([path], cards, judging=True).judged
        assert check_paths([path], judged) == check_paths([path])
    assert len(find_rulesets_of_logs(root)) == 4
    assert set(find_rulesets_of_logs(root).values()) == {"2.0.0"}


def test_findings_stand_on_the_page_once_for_each_rule_and_result(tmp_path: Path, run_folder: Build) -> None:
    folder = run_folder(tmp_path, runs=1)
    (checked,) = check_paths([folder])
    logs = "runs/pytorch1.13/{}/result_0.txt"
    told = (
        Finding("b-rule", "warning", logs.format("one"), 3, "of line 3"),
        Finding("b-rule", "error", logs.format("one"), 1, "of line 1"),
        Finding("b-rule", "warning", logs.format("one").replace("0", "1"), None, "of the second log"),
        Finding("a-rule", "warning", logs.format("two"), 2, "of another result"),
        Finding("b-rule", "warning", "runs/pytorch1.13", None, "of a folder"),
    )
    given = replace(checked, verdict=replace(checked.verdict, findings=told))
    groups = [(first.severity, first.rule, first.message, count) for first, count in group_findings([given])]
    assert groups == [
        ("error", "b-rule", "of line 1", 1),
        ("warning", "a-rule", "of another result", 1),
        ("warning", "b-rule", "of a folder", 1),
        ("warning", "b-rule", "of line 3", 2),
    ]
    table = build_findings_table([given])
    assert table is not None
    last = dict(zip(table.columns, (cell.text for cell in table.rows[-1]), strict=True))
    assert (last["result"], last["findings"], last["the first"]) == ("runs/pytorch1.13/one", "2", "result_0.txt:3")


def test_equal_issues_of_several_results_are_one() -> None:
    given = [
        Issue("problem", "a", "3 of 5 runs never reached the target"),
        Issue("problem", "b", "1 of 10 runs never reached the target"),
        Issue("doubt", "a", "no run logs its seed"),
        Issue("doubt", "b", "never reached the target"),
    ]
    assert group_issues(given)[1].of_one == "a: no run logs its seed"
    assert group_issues(given[:1])[0].of_one == "a: 3 of 5 runs never reached the target"
    assert group_issues(given) == [
        IssueGroup("problem", "never reached the target", ("a: 3 of 5 runs", "b: 1 of 10 runs")),
        IssueGroup("doubt", "no run logs its seed", ("a",)),
        IssueGroup("doubt", "never reached the target", ("b",)),
    ]
