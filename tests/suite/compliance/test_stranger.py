"""A stranger's package is harmless: time grows with its size and no faster, nothing in it is run, printed raw or waited for."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.forensics.copy_rules import RunIndex, build_series
from mlhpc.suite.compliance.rules.package_rules import is_same_submitter
from mlhpc.suite.files import encode_csv_cell, print_line, render_printable
from mlhpc.suite.log.record import MetricValue, RunRecord
from mlhpc.suite.log.results_tree import find_results
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Line, hpc_run, insert, our_run, write
from tests.fixtures.package_mutations import example
from tests.fixtures.runs import describe

START_MS = 1_600_000_000_000


def event(key: str, time_ms: int, value: object = None, **metadata: object) -> str:
    return f":::MLLOG {json.dumps({'key': key, 'value': value, 'time_ms': START_MS + time_ms, 'metadata': metadata})}\n"


def in_a_run(middle: list[str]) -> str:
    """A CosmoFlow log around some lines."""
    lines = [line.encode(number).decode() for number, line in enumerate(hpc_run("cosmoflow", epochs=2))]
    return "".join([*lines[:-1], *middle, lines[-1]])


def overlapping(n: int) -> str:
    """Epochs and evaluations that all run at the same time."""
    opened = [event("epoch_start", i, epoch_num=i) + event("eval_start", i, epoch_num=i) for i in range(n)]
    closed = [event("eval_stop", n + i, epoch_num=i) + event("epoch_stop", n + i, epoch_num=i) for i in range(n)]
    return in_a_run([*opened, *closed])


def unnumbered(n: int) -> str:
    """Epochs that are closed by stops of other numbers, oldest first."""
    return in_a_run(
        [event("epoch_start", i, epoch_num=i) for i in range(n)] + [event("epoch_stop", n, epoch_num=-1)] * n
    )


def separate(n: int) -> str:
    """Many short epochs, an evaluation in each."""
    parts = []
    for i in range(n):
        at = 10 * i
        parts += [event("epoch_start", at, epoch_num=i), event("eval_start", at + 1, epoch_num=i)]
        parts += [event("eval_error", at + 2, 0.5, epoch_num=i), event("eval_stop", at + 3, epoch_num=i)]
        parts += [event("epoch_stop", at + 4, epoch_num=i)]
    return in_a_run(parts)


ATTACKS: dict[str, tuple[Callable[[int], str], int]] = {
    "bare tokens on one line": (lambda n: ":::MLLOG " * n, 8000),
    "bare tokens on lines": (lambda n: ":::MLLOG\n" * n, 8000),
    "broken objects on one line": (lambda n: ':::MLLOG {"a": x' * n, 8000),
    "objects that never end": (lambda n: ':::MLLOG {"a": [" ' * n, 6000),
    "texts that never end": (lambda n: ':::MLLOG ["a", "' * n, 6000),
    "lists in lists": (lambda n: ":::MLLOG " + "[" * 10 * n, 8000),
    "one key, the last, twice": (
        lambda n: ":::MLLOG {" + ", ".join(f'"k{i}": 1' for i in range(n)) + f', "k{n - 1}": 1}}\n', 8000),
    "many keys twice": (lambda n: event("seed", 0, 1) + "".join(event(f"k{i}", 0, i) * 2 for i in range(n)), 1000),
    "overlapping epochs": (overlapping, 500),
    "epochs closed by other numbers": (unnumbered, 1000),
    "separate epochs": (separate, 500),
    "run_start again and again": (lambda n: in_a_run([event("run_start", i) for i in range(n)]), 1500),
    "step phases": (lambda n: in_a_run([event("step_phases", i, {"step": 1.0}, epoch_num=i) for i in range(n)]), 1500),
    "evaluations without epochs": (lambda n: in_a_run([event("eval_error", i, i + 1.0, epoch_num=i) for i in range(n)]),
        1500),
    "spaces": (lambda n: ":::MLLOG " + " " * 10 * n, 20_000),
    "half a step event": (lambda n: ':::MLLOG {"namespace": "", "time_ms": 16' * n, 6000),
}  # fmt: skip


def cpu_s(path: Path, rules: str) -> float:
    begin = time.process_time()
    check([path], rules)
    return time.process_time() - begin


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("rules", [pytest.param("3.0.0", marks=pytest.mark.long), "mlhpc-1.0"])
def test_time_grows_with_the_size_of_a_log(tmp_path: Path, name: str, rules: str) -> None:
    """16 times the input may take 64 times as long; what is quadratic takes 256 (CPU time)."""
    make, size = ATTACKS[name]
    small, large = tmp_path / "result_0.txt", tmp_path / "result_1.txt"
    small.write_text(make(size // 2))
    large.write_text(make(8 * size))
    cpu_s(small, rules)
    for _ in range(3):  # a disturbed measurement may be repeated, an algorithm stays what it is
        once = min(cpu_s(small, rules) for _ in range(2))
        ratio = cpu_s(large, rules) / max(once, 0.0025)
        if ratio < 64.0:
            return
    raise AssertionError(f"{name}: 16 times the input takes {ratio:.1f} times as long as {once:.3f} s")


def test_folders_deeper_than_pythons_stack_are_walked(tmp_path: Path) -> None:
    depth = 1100  # Python stops at 1,000 calls
    with contextlib.chdir(tmp_path):
        for _ in range(depth):
            Path("a").mkdir()
            os.chdir("a")
        log = write(Path("result_0.txt"), hpc_run("cosmoflow"))
        try:
            assert check([tmp_path], "3.0.0").logs == 1
        finally:  # shutil.rmtree, and so pytest, cannot remove such a tree
            log.unlink()
            for _ in range(depth):
                os.chdir("..")
                Path("a").rmdir()


Spoil = Callable[[Path], object]


def spoil_system(package: Path) -> Path:
    return min((package / "systems").glob("*.json"))


ENTRIES: dict[str, tuple[Spoil, str | None]] = {
    "a link in systems/ out of the package": (
        lambda p: (p / "systems" / "extra.json").symlink_to("/etc/hostname"), "link-outside",
    ),
    "a link in implementations/ out of the package": (
        lambda p: (p / "benchmarks" / "cosmoflow" / "implementations" / "x").symlink_to("../../../../../.."), "link-outside",
    ),
    "a link at the top": (lambda p: (p / "secrets").symlink_to("/etc"), "link-outside"),
    "a link to nothing": (lambda p: (p / "benchmarks" / "gone").symlink_to("nowhere"), "link-outside"),
    "a link to itself": (lambda p: (p / "benchmarks" / "loop").symlink_to("loop"), "link-outside"),
    "a link to the folder above": (lambda p: (p / "benchmarks" / "up").symlink_to(".."), None),
    "a link inside the code": (
        lambda p: (p / "benchmarks" / "cosmoflow" / "implementations" / "x").symlink_to("."), None,
    ),
    "a folder of results that is a link": (
        lambda p: (p / "results" / "other").symlink_to(min((p / "results").iterdir()).name), "result-link",
    ),
    "a FIFO in systems/": (lambda p: os.mkfifo(p / "systems" / "x.json"), "special-file"),
    "a FIFO among the results": (
        lambda p: os.mkfifo(next(p.glob("results/*/strong/*")) / "result_9.txt"), "special-file",
    ),
    "a FIFO in implementations/": (
        lambda p: os.mkfifo(p / "benchmarks" / "cosmoflow" / "implementations" / "x.py"), "special-file",
    ),
    "a FIFO as the manifest": (
        lambda p: ((p / "manifest.sha256").unlink(), os.mkfifo(p / "manifest.sha256")), "special-file",
    ),
    "a sparse log": (
        lambda p: os.truncate(next(p.glob("results/*/strong/*/result_0.txt")), 40 * 2**30), "log-empty",
    ),
    "a sparse system file": (lambda p: os.truncate(spoil_system(p), 40 * 2**30), "system-valid"),
    "a sparse file of code": (
        lambda p: os.truncate(next(p.glob("benchmarks/*/implementations/**/*.yaml")), 40 * 2**30), "manifest-changed",
    ),
    "a sparse manifest": (lambda p: os.truncate(p / "manifest.sha256", 40 * 2**30), "manifest-changed"),
    "a system file nested deeply": (lambda p: spoil_system(p).write_text("[" * 10**6), "system-valid"),
    "untouched": (lambda p: None, None),
}  # fmt: skip


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", ENTRIES)
def test_links_special_files_and_sparse_files_are_findings(tmp_path: Path, name: str) -> None:
    spoil, rule = ENTRIES[name]
    package = example(tmp_path)
    spoil(package)
    errors = {finding.rule for finding in check([package]).findings if finding.severity == "error"}
    if rule is None:
        assert errors <= {"manifest-changed"}  # the link is not in the manifest
    else:
        assert rule in errors


def test_a_link_to_a_folder_is_told(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a" / "result_0.txt", hpc_run("cosmoflow"))
    (tmp_path / "runs" / "b").symlink_to(tmp_path / "runs" / "a")
    findings = check([tmp_path / "runs"], "3.0.0").findings
    assert [(f.severity, Path(f.file).name) for f in findings if f.rule == "link-unfollowed"] == [("warning", "b")]


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 40 * 2**30)


WRONG: dict[str, Spoil] = {
    "a FIFO": os.mkfifo,
    "deep lists": lambda path: path.write_text("[" * 10**5),
    "deep mappings": lambda path: path.write_text('{"a":' * 10**5),
    "null": lambda path: path.write_text("null"),
    "nothing": lambda path: path.write_text(""),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "sparse": sparse,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a long number": lambda path: path.write_text('{"version": 1, "a": ' + "9" * 5000 + "}"),
    "a long code": lambda path: path.write_text("9" * 5000),
    "other types": lambda path: path.write_text(
        '{"version": 1, "workload": {}, "size": [], "command": 3, "runs": "x", "mode": null, "created": [], "ranks": {}}'
    ),
}


class Hang(BaseException):
    """A command did not end; no OSError, which commands may handle."""


@pytest.mark.drawn(24)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "where", ["run.json", "config.yaml", "job.json", "facts/n.json", "exit/trial_0", "exit/7", "result_0.txt"]
)
def test_no_file_of_a_run_folder_is_a_defect_or_a_hang(tmp_path: Path, where: str, wrong: str) -> None:
    root = tmp_path / "run"
    for number in range(2):
        write(root / f"result_{number}.txt", our_run(seed=number + 1))
    describe(root, count=2)
    target = root / where
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)
    WRONG[wrong](target)

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for words in (["check", root], ["score", root], ["status", root],
                      ["package", root, "--system", "bed", "--submitter", "A", "-o", tmp_path / "out"]):  # fmt: skip
            signal.alarm(30)
            result = mlhpc(*words)
            assert result.returncode in (0, 1, 2), result.stderr
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def count_calls(action: Callable[[], object]) -> int:
    """Calls of functions, Python's own too: unlike a time, two measurements on any machine give one number."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_work_grows_with_the_number_of_files_and_packages(tmp_path: Path) -> None:
    def files(root: Path, count: int) -> Path:
        root.mkdir()
        for number in range(count):
            (root / f"result_{number}.txt").touch()
            (root / f"other_{number}").touch()
        return root

    def packages(root: Path, count: int) -> Path:
        for number in range(count):
            for name in ("systems", "results/s/strong/cosmoflow"):
                (root / str(number) / name).mkdir(parents=True)
            (root / str(number) / "results/s/strong/cosmoflow/result_0.txt").touch()
        return root

    for make, size, read in ((files, 100, find_results), (packages, 20, lambda path: check([path], "3.0.0"))):
        small, large = make(tmp_path / f"{size}", size), make(tmp_path / f"{4 * size}", 4 * size)
        read(small)  # what is made once, is made here
        once, four_times = count_calls(lambda: read(small)), count_calls(lambda: read(large))  # noqa: B023
        print(once, four_times)
        assert four_times < 4.5 * once, make.__name__


EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil"


@pytest.mark.parametrize("command", [["check"], ["check", "--format", "junit"], ["score", "--explain"]])
def test_commands_print_no_terminal_escape_of_a_log_or_a_folder(tmp_path: Path, command: list[str]) -> None:
    lines = insert(Line(f"key{EVIL}", EVIL), "init_stop")(hpc_run("cosmoflow"))
    lines = [Line(line.key, EVIL, line.time_ms) if line.key.startswith("submission_") else line for line in lines]
    folder = tmp_path / f"a{EVIL}\n\rcompliant: all"
    write(folder / "result_0.txt", lines)
    (folder / f"result_{EVIL}.txt").write_text(f":::MLLOG {{{EVIL}\n")
    output = mlhpc(*command, folder).stdout
    assert "evil" in output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", output)
    assert not [line for line in output.splitlines() if line.startswith("compliant: all")]


@pytest.mark.parametrize("command", ["compare", "status", "report", "package", "workload", "check", "score"])
def test_error_lines_hold_no_terminal_escape(tmp_path: Path, command: str) -> None:
    folder = tmp_path / f"a{EVIL}"
    folder.mkdir()
    arguments = {"compare": [folder, folder], "workload": ["rcp", "record", folder], "report": [folder, "-o", tmp_path / "r"],
                 "package": [folder, "--system", "x", "--submitter", "y", "-o", tmp_path / "p"]}  # fmt: skip
    result = mlhpc(command, *arguments.get(command, [folder]))
    output = result.stdout + result.stderr
    assert output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", output)


def test_what_a_terminal_acts_on_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a\tb\n\x1b[31mc\r\x9d\ud800é")
    assert capsys.readouterr().out == "a\tb\n?[31mc???é\n"
    assert render_printable("a\nb") == "a?b"


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3", "'-2+3"),
        ("@SUM(1)", "'@SUM(1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'?=1"),
        ("\n=1", "'\n=1"),
        ("\uff1d1", "'\uff1d1"),
        ("=", "'="),
        ("-", "'-"),
        ("-1.5e-3", "-1.5e-3"),
        ("+7", "+7"),
        ("\t1", "'\t1"),
        ("", ""),
        ("a=b", "a=b"),
        ("cosmoflow", "cosmoflow"),
        ("a\x1b[31m\u202eb", "a?[31m?b"),
        (-1.5, -1.5),
        (None, None),
        (True, True),
    ],
)
def test_cells_that_a_spreadsheet_would_run_are_made_text(value: object, cell: object) -> None:
    assert encode_csv_cell(value) == cell


# Limits: one finding says what was left out, and one submitter never stops the others


def make_deeper_than_path_max(folder: Path) -> None:
    """A log whose path is longer than the system takes."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        for _ in range(30):
            Path("d" * 200).mkdir()
            os.chdir("d" * 200)
        Path("result_0.txt").write_text("x")


def remove_deep(folder: Path) -> None:
    """Remove such a tree, which shutil.rmtree and so pytest cannot."""
    depth = 0
    with contextlib.chdir(folder):
        while Path("d" * 200).is_dir():
            os.chdir("d" * 200)
            depth += 1
        Path("result_0.txt").unlink()
        for _ in range(depth):
            os.chdir("..")
            Path("d" * 200).rmdir()


@pytest.mark.parametrize("place", ["results", "systems", "benchmarks", "results/big/strong/cosmoflow"])
def test_a_path_that_is_too_long_stops_no_other_submitter(tmp_path: Path, place: str) -> None:
    (tmp_path / "round").mkdir()
    good = example(tmp_path / "made").rename(tmp_path / "round" / "ACME")
    bad = tmp_path / "round" / "Deep"
    for name in ("results", "systems"):
        (bad / name).mkdir(parents=True, exist_ok=True)
    make_deeper_than_path_max(bad / place / "deep")
    try:
        verdict = check([tmp_path / "round"])
        assert {result.group.package for result in verdict.results if result.valid} == {good}
        named = {Path(item.file) for item in verdict.findings if item.severity == "error"}
        assert all(bad == path or bad in path.parents for path in named), named
        assert place == "benchmarks" or any(item.rule == "folder-unread" for item in verdict.findings)
    finally:
        remove_deep(bad / place / "deep")


@pytest.mark.parametrize(("count", "listed"), [(99, 99), (100, 100), (101, 101), (5000, 101)])
def test_a_manifest_of_many_names_is_a_hundred_findings_and_one(tmp_path: Path, count: int, listed: int) -> None:
    package = example(tmp_path)
    with (package / "manifest.sha256").open("a") as file:
        file.writelines(f"{'0' * 64}  gone/{number}\n" for number in range(count))
    found = [item for item in check([package]).findings if item.rule == "manifest-changed"]
    assert len(found) == listed
    assert (found[-1].message == f"... and {count - 100:,} more") == (count > 100)


def test_a_log_with_many_mistakes_of_one_kind_is_a_hundred_findings_and_one(tmp_path: Path) -> None:
    parts = [event("epoch_start", 10**6 + i, epoch_num=i) + event("epoch_stop", i, epoch_num=i) for i in range(3, 400)]
    path = tmp_path / "result_0.txt"
    path.write_text(in_a_run([f"{key}\n" for part in parts for key in part.splitlines()]))
    rules = [item.rule for item in check([path], "3.0.0").findings]
    assert max(rules.count(rule) for rule in rules) <= 101


@pytest.mark.parametrize(
    ("name", "other", "same"),
    [
        (" ".join(f"a{n}" for n in range(2000)), "/".join(f"b{n}" for n in range(3000)), False),
        ("/".join(["ab"] * 3000), "+".join(["ba"] * 3000), False),
        ("/".join(["ab c"] * 2000), "+".join(["x", *["ab"] * 2000]), True),
        ("ab " * 4000, "ab " * 4000 + "x", True),
        ("+" * 8000, "/" * 8000, False),
    ],
)
def test_names_of_submitters_may_be_long(name: str, other: str, same: bool) -> None:
    """46 s and 3.6 GB once."""
    assert is_same_submitter(name, other) is same


@pytest.mark.parametrize("value", [lambda n: 0.5 + n % 7 / 10, lambda n: 0.5 + n * 7919 % 10007 / 1e5, lambda n: 0.5])
def test_the_search_for_copies_compares_few_pairs_of_runs(value: Callable[[int], float]) -> None:
    evals = tuple(MetricValue(n + 1.0, value(n), 10.0 * n + n % 3, n) for n in range(20_000))
    curves = build_series(RunRecord(evals=evals))
    seen: RunIndex[int] = RunIndex()
    for owner in range(5):
        seen.add(owner, curves)
    assert max(len(series.numbers) for series in curves) <= 1000
    assert sum(1 for _ in seen.candidates(curves)) <= 200
