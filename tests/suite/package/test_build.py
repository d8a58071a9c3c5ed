"""Packages: the exact tree, logs byte for byte, a manifest over everything, nothing overwritten, nothing mixed."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from mlhpc.suite import VERSION
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.package_files import check_manifest, compute_sha256
from mlhpc.suite.compliance.rules.package_rules import SYSTEM_FIELDS
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.results_tree import CRATE
from mlhpc.suite.machine.facts import Cpu
from mlhpc.suite.machine.system import System
from mlhpc.suite.package.build import build_package
from mlhpc.suite.package.results import read_run
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import START_MS, drop, edit, our_run, write
from tests.fixtures.package_mutations import PackageCase, example, package_cases
from tests.fixtures.runs import node, run_folder


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_tree_of_a_package(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "runs" / "a")
    (run / "job.sbatch").write_text("#!/bin/bash\n")
    (run / "job.json").write_text(
        '{"version": 1, "kind": "lsf", "command": "bsub <", "job_ids": ["7"], "submitted": "x"}'
    )
    write(run / "resumed_1_1.txt", our_run())
    write(run / "failed_2_1.txt", our_run()[:5])
    write(run / "failed_2_2.txt", our_run(values=(0.9,)))
    built = build_package([run], system="bed", out=tmp_path / "submissions" / "ACME")
    assert built.folder == tmp_path / "submissions" / "ACME"
    code = f"benchmarks/cosmoflow/implementations/mlhpc-{VERSION}/bed_1x2_smoke/strong"
    inside = ("run.json", "config.yaml", "facts/node1.json", "origin.json", "job.sbatch", "job.json", "resumed_1_1.txt")
    inside += ("failed_2_1.txt", "failed_2_2.txt", "sources.json", "environment.json")
    assert tree(built.folder) - {"ro-crate-metadata.json"} == {  # which a wing writes
        "manifest.sha256",
        "systems/bed_1x2_smoke.json",
        *(f"results/bed_1x2_smoke/strong/cosmoflow/result_{n}.txt" for n in range(5)),
        *(f"{code}/{name}" for name in ("README.md", "result.json", "setup.sh", "init_datasets.sh", "run_and_time.sh")),
        *(f"{code}/provenance/run_0/{name}" for name in inside),
    }
    for n in range(5):
        log = built.folder / "results/bed_1x2_smoke/strong/cosmoflow" / f"result_{n}.txt"
        assert log.read_bytes() == (run / f"result_{n}.txt").read_bytes()
    assert "bsub < provenance/run_0/job.sbatch" in (built.folder / code / "run_and_time.sh").read_text()
    assert "resumed_1_1.txt" in (built.folder / code / "README.md").read_text()
    readme = (built.folder / code / "README.md").read_text()
    assert "`failed_2_1.txt`: an attempt that never began" in readme
    assert "`failed_2_2.txt`: a run that began, failed and was replaced" in readme
    assert any("continuation" in note for note in built.notes)
    assert [note for note in built.notes if "replaced" in note] == [
        f"{run}/failed_2_2.txt: began and failed, and was replaced: shown in the package"
    ]
    assert list((tmp_path / "submissions").iterdir()) == [built.folder]


def test_a_package_is_compliant_and_unchanged(tmp_path: Path) -> None:
    built = build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "out" / "ACME")
    verdict = check([built.folder])
    assert verdict.compliant, verdict.findings
    assert not list(check_manifest(built.folder))


def test_the_system_description_is_complete(tmp_path: Path) -> None:
    stated = System(cooling="liquid", networking_topology="fat tree")
    built = build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "out" / "ACME", stated=stated)
    fields = json.loads((built.folder / "systems" / "bed_1x2_smoke.json").read_text())
    assert set(fields) == set(SYSTEM_FIELDS)
    assert (fields["submitter"], fields["division"], fields["status"]) == ("ACME", "closed", "research")
    assert (fields["number_of_nodes"], fields["accelerators_per_node"]) == ("1", "0")
    assert (fields["host_processor_model_name"], fields["cooling"]) == ("Model T", "liquid")
    assert fields["system_name"] == "bed"
    assert fields["host_networking"] == "unknown"


@pytest.mark.parametrize("damage", ["change", "add", "remove", "cut the manifest"])
def test_the_manifest_finds_every_change(tmp_path: Path, damage: str) -> None:
    folder = build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "out" / "ACME").folder
    log = folder / "results/bed_1x2_smoke/strong/cosmoflow/result_2.txt"
    readme = next(folder.rglob("README.md"))
    if damage == "change":
        readme.write_text(readme.read_text() + " ")
    elif damage == "add":
        (folder / "systems" / "notes.txt").write_text("hello")
    elif damage == "remove":
        log.unlink()
    else:
        (folder / "manifest.sha256").write_text("nonsense\n")
    assert list(check_manifest(folder))
    assert "manifest-changed" in {finding.rule for finding in check([folder]).findings if finding.severity == "error"}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a")
    folder = build_package([run], system="bed", out=tmp_path / "out" / "ACME").folder
    before = {path: compute_sha256(path) for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="exists already, and results are never overwritten"):
        build_package([run], system="bed", out=tmp_path / "out" / "ACME")
    assert {path: compute_sha256(path) for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ACME"]


STEPS = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "shutil.copyfile"}


def build_and_die(step: int, build: Callable[[], object]) -> list[int]:
    """Build in a fork that kills itself with SIGKILL before a change of a file, counted from 1.

    Without a kill: the number of the last rename, and the number of changes.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        seen, last = [0], [0]

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if event in STEPS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE):
                seen[0] += 1
                last[0] = seen[0] if event == "os.rename" else last[0]
                if seen[0] == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        with suppress(BaseException):
            build()
            os.write(writer, f"{last[0]} {seen[0]}".encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as end:
        counts = [int(word) for word in end.read().split()]
    assert os.WIFSIGNALED(status) == (not counts) == (step > 0), (step, status)
    return counts


@pytest.mark.parametrize("grows", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_build_that_was_killed_at_any_step_is_done_by_the_same_command(tmp_path: Path, grows: bool) -> None:
    runs = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", ranks=4)]
    old = build_package(runs[:1], system="bed", out=tmp_path / "old" / "ACME").folder

    def begin(folder: Path) -> Path:
        if grows:
            shutil.copytree(old, folder / "ACME")
        return folder / "ACME"

    def build(package: Path) -> object:
        return build_package(runs[grows:], system="bed", out=package)

    first = begin(tmp_path / "whole")
    placed, count = build_and_die(0, lambda: build(first))
    assert count > 50
    expected, aside = tree(first), 0
    steps = sorted({*random.Random(7).sample(range(1, count), 3), placed - 1, placed, placed + 1, count})
    for step in steps:
        package = begin(tmp_path / str(step))
        build_and_die(step, lambda package=package: build(package))
        before = tree(package) if package.exists() else set()
        aside += grows and not before
        assert not before or not list(check_manifest(package)), step  # what is there is whole
        if before == expected:
            with pytest.raises(InputError, match="exists already, and results are never overwritten"):
                build(package)
        else:
            build(package)
        assert (tree(package), list(check_manifest(package))) == (expected, []), step
        assert [path.name for path in package.parent.iterdir()] == ["ACME"], step
    assert aside == grows, "the kill before the last rename fell between the two"


def test_what_a_living_build_uses_is_not_touched(tmp_path: Path) -> None:
    run, package = run_folder(tmp_path / "a"), tmp_path / "out" / "ACME"
    remains = package.parent / ".ACME-0123456789abcdef"
    others = [package.parent / name for name in (".ACME-notes", ".ACME-0123456789abcdef0", ".ACMES-0123456789abcdef")]
    for folder in (remains, *others):
        (folder / "results").mkdir(parents=True)
    with create_lock(package.parent / ".ACME.lock", "x"), pytest.raises(InputError, match="is in use by process"):
        build_package([run], system="bed", out=package)
    assert remains.is_dir()
    build_package([run], system="bed", out=package)
    assert sorted(package.parent.iterdir()) == sorted([package, *others])


def test_a_package_that_cannot_take_its_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "out" / "ACME").folder
    before, rename = tree(package), Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.parent.name.startswith(".ACME-") and path.name == "ACME":
            raise OSError(errno.EIO, "broken", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="broken|Input") as failed:
        build_package([run_folder(tmp_path / "b", ranks=4)], system="bed", out=package)
    assert failed.value.filename == str(package)
    assert (tree(package), list(package.parent.iterdir())) == (before, [package])


@pytest.mark.parametrize("submitter", ["ACME", "before"])
def test_a_package_behind_a_link_grows_where_it_lies(tmp_path: Path, submitter: str) -> None:
    link, disk = tmp_path / "out" / submitter, tmp_path / "disk"
    disk.mkdir()
    link.parent.mkdir()
    link.symlink_to(disk / "p1")
    runs = [run_folder(tmp_path / "a", org=submitter), run_folder(tmp_path / "b", ranks=4, org=submitter)]
    for run in runs:
        build_package([run], system="bed", out=link)
    assert (link.is_symlink(), list(disk.iterdir()), list(check_manifest(link))) == (True, [disk / "p1"], [])
    assert len(list((link / "results").iterdir())) == 2
    if (link / CRATE).exists():  # a wing writes it
        assert submitter in (link / CRATE).read_text()
        assert "p1" not in (link / CRATE).read_text()


@pytest.mark.parametrize("inside", [".", "systems"])
def test_who_stands_in_a_package_is_told_to_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    package = build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "out" / "ACME").folder
    monkeypatch.chdir(package / inside)
    other = run_folder(tmp_path / "b", ranks=4)
    with pytest.raises(InputError, match="the working directory lies in it"):
        build_package([other], system="bed", out=package)
    monkeypatch.chdir(package.parent)
    assert not list(check_manifest(build_package([other], system="bed", out=Path("ACME")).folder))


@pytest.mark.parametrize("inside", ["results/x", "notes.txt"])
def test_a_folder_that_is_no_package_is_never_added_to(tmp_path: Path, inside: str) -> None:
    package = tmp_path / "out" / "ACME"
    (package / inside).parent.mkdir(parents=True)
    (package / inside).write_text("mine")
    with pytest.raises(InputError, match=r"a package without manifest.sha256 is not whole .* move it away"):
        build_package([run_folder(tmp_path / "a")], system="bed", out=package)
    assert (package / inside).read_text() == "mine"
    shutil.move(package, tmp_path / "away")
    package.mkdir()  # an empty folder is as good as none
    assert not list(check_manifest(build_package([tmp_path / "a"], system="bed", out=package).folder))


def test_a_package_grows_by_results_of_other_sizes_and_shapes(tmp_path: Path) -> None:
    smoke = run_folder(tmp_path / "a")
    four = run_folder(tmp_path / "b", ranks=4)
    folder = build_package([smoke, four], system="bed", out=tmp_path / "out" / "ACME").folder
    build_package([run_folder(tmp_path / "c", seed=3)], system="other", out=tmp_path / "out" / "ACME")
    assert {path.name for path in (folder / "results").iterdir()} == {
        "bed_1x2_smoke",
        "bed_1x4_smoke",
        "other_1x2_smoke",
    }
    assert not list(check_manifest(folder))


@pytest.mark.parametrize("name", ["systems/bed_1x2_smoke.json", "manifest.sha256"])
def test_a_damaged_package_does_not_grow(tmp_path: Path, name: str) -> None:
    """A new manifest over all files would call the damaged ones whole."""
    folder = build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "out" / "ACME").folder
    (folder / name).write_text("{}")
    with pytest.raises(InputError, match="nothing can be added to a changed package"):
        build_package([run_folder(tmp_path / "b", ranks=4)], system="bed", out=folder)
    assert (folder / name).read_text() == "{}"


def test_runs_of_several_folders_make_one_result(tmp_path: Path) -> None:
    first = run_folder(tmp_path / "a", count=3)
    second = run_folder(tmp_path / "b", count=2)
    for n in range(2):
        write(
            second / f"result_{n}.txt",
            our_run(
                seed=500 + n,
                trial=n,
                start_ms=1_790_005_000_000 + n * 100_000,
                epoch_s=2.7 + n,
                values=(0.43 + n / 100, 0.42 - n / 100, 0.4 + n / 200, 0.39, 0.35),
            ),
        )
    built = build_package([first, second], system="bed", out=tmp_path / "out" / "ACME")
    assert check([built.folder]).compliant
    assert [len(result.scored) for result in built.results] == [5]


def test_of_more_runs_the_others_are_kept_as_provenance(tmp_path: Path) -> None:
    built = build_package([run_folder(tmp_path / "a", count=7)], system="bed", out=tmp_path / "out" / "ACME")
    result = built.results[0]
    assert (len(result.scored), len(result.left_out)) == (5, 2)
    kept = {path.name for path in (built.folder / result.implementation / "provenance" / "run_0").glob("result_*")}
    assert kept == {record.path.name for record, _ in result.left_out if record.path}
    assert check([built.folder]).compliant


def test_a_run_that_is_not_scored_is_judged_too(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", count=7)
    built = build_package([run], system="bed", out=tmp_path / "out" / "ACME")
    (path, _) = sorted((built.folder / built.results[0].implementation).glob("provenance/run_0/result_*.txt"))
    last = path.read_text().splitlines()[-1]
    later = re.sub(r'"time_ms": (\d+)', lambda found: f'"time_ms": {int(found[1]) - 1500}', last)
    path.write_text(path.read_text().replace(last, later))  # so that others have the median score
    assert {finding.rule for finding in check([built.folder]).counted("error") if finding.file == str(path)} >= {
        "clock-order"
    }


def test_instances_make_a_throughput_result(tmp_path: Path) -> None:
    built = build_package([run_folder(tmp_path / "a", mode="weak")], system="bed", out=tmp_path / "out" / "ACME")
    assert (built.folder / "results/bed_5x1x2_smoke/weak/cosmoflow/result_4.txt").is_file()
    assert "weak-without-strong" in {finding.rule for finding in check([built.folder]).findings}


def test_instances_that_do_not_converge_or_repeat_a_seed_are_pruned(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", mode="weak", count=7)
    write(
        run / "result_2.txt", our_run(values=(0.5, 0.45), seed=900, start_ms=START_MS + 200_000, mode="weak", trial=2)
    )
    repeated = our_run(values=(0.41, 0.34), seed=100, start_ms=START_MS + 500_000, mode="weak", trial=5)
    write(run / "result_5.txt", repeated)
    built = build_package([run], system="bed", out=tmp_path / "out" / "ACME")
    place = built.folder / "results/bed_7x1x2_smoke/weak/cosmoflow"
    assert [path.name for path in sorted(place.glob("result_*"))] == [f"result_{n}.txt" for n in range(5)]
    assert (place / "pruned_results/result_5.txt").read_bytes() == (run / "result_2.txt").read_bytes()
    assert (place / "pruned_results/result_6.txt").read_bytes() == (run / "result_5.txt").read_bytes()
    assert any("pruned: status is 'aborted'" in note for note in built.notes)
    assert any("pruned: seed 100 is repeated" in note for note in built.notes)
    found = {finding.rule for finding in check([built.folder]).findings if finding.severity == "error"}
    assert found == {"weak-without-strong"}


def test_instances_are_not_pruned_below_the_required_number(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", mode="weak")
    write(
        run / "result_2.txt", our_run(values=(0.5, 0.45), seed=900, start_ms=START_MS + 200_000, mode="weak", trial=2)
    )
    built = build_package([run], system="bed", out=tmp_path / "out" / "ACME")
    assert [len(result.scored) for result in built.results] == [5]
    assert not list(built.folder.rglob("pruned_results"))


def test_a_run_that_failed_silently_is_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a")
    out = tmp_path / "out" / "ACME"
    write(run / "result_1.txt", drop("run_stop")(our_run(seed=300, start_ms=START_MS + 5)))
    with pytest.raises(InputError, match=r"result_1.txt: the log has no run_stop, so the run was cut off"):
        build_package([run], system="bed", out=out)
    built = build_package([run], system="bed", out=out, count_failed=True)
    assert "run-failed" in {finding.rule for finding in check([built.folder]).findings}
    write(run / "result_1.txt", edit("run_stop", meta={"status": "success"})(our_run(values=(0.5,), seed=301)))
    with pytest.raises(InputError, match=r"result_1.txt: status is 'success', but: target never reached"):
        build_package([run], system="other", out=out, count_failed=True)


def test_what_nobody_knows_of_a_system_is_a_warning_that_names_it(tmp_path: Path) -> None:
    stated = System(cooling="liquid")
    built = build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "out" / "ACME", stated=stated)
    (warning,) = (each for each in built.warnings if "ro-crate" not in each)  # which a wing writes
    assert "host_networking_topology" in warning
    assert "cooling" not in warning
    assert re.search(r"state them in the system file \(description: .*\bnetworking_topology", warning), warning
    (blank,) = (finding for finding in check([built.folder]).findings if finding.rule == "system-blank")
    assert "host_networking_topology" in blank.message


def test_an_organisation_that_is_not_the_logs_is_refused_in_one_line(tmp_path: Path) -> None:
    """It was packaged, and only the checker found that no reviewer would take it."""
    run, package = run_folder(tmp_path / "a"), tmp_path / "out" / "Other"
    done = mlhpc("package", run, "--system", "bed", "--submitter", "Other", "-o", package)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert (
        "result_0.txt: the log names the submitter 'ACME' (submission_org), the package 'Other'; "
        "give --submitter 'ACME', or repeat the training with " in line
    )
    assert not package.parent.exists()


def test_a_late_submitter_is_marked_where_the_checker_and_a_reviewer_see_it(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", org="unknown")
    built = build_package([run], system="bed", out=tmp_path / "out" / "ACME", submitter="ACME")
    assert any("marks 'ACME' as stated late" in note for note in built.notes)
    found = {item.rule: item for item in check([built.folder]).findings}
    assert (found["submitter-late"].severity, found["submitter-late"].message) == (
        "warning",
        "5 of 5 logs name no submitter; the package states 'ACME' late",
    )
    assert check([built.folder]).compliant, found
    (code,) = built.folder.glob("benchmarks/cosmoflow/implementations/*/bed_1x2_smoke/strong")
    assert "ACME was stated late, when this package was built" in (code / "README.md").read_text()
    assert json.loads((code / "provenance/run_0/origin.json").read_text())["late_submitter"] == "ACME"
    for n in range(5):
        log = built.folder / "results/bed_1x2_smoke/strong/cosmoflow" / f"result_{n}.txt"
        assert log.read_bytes() == (run / f"result_{n}.txt").read_bytes()


def test_a_log_without_a_submitter_and_without_a_late_statement_breaks_the_rule(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", org="unknown")
    built = build_package([run], system="bed", out=tmp_path / "out" / "ACME", submitter="ACME")
    (origin,) = built.folder.rglob("origin.json")
    for late in (None, "Other", 7):
        document = json.loads(origin.read_text()) | {"late_submitter": late}
        origin.write_text(json.dumps(document))
        assert "submitter-agrees" in {item.rule for item in check([built.folder]).findings}, late


def test_some_logs_may_name_the_submitter_that_others_get_late(tmp_path: Path) -> None:
    first, second = run_folder(tmp_path / "a", count=3), run_folder(tmp_path / "b", count=2, org="unknown")
    built = build_package([first, second], system="bed", out=tmp_path / "out" / "ACME")
    rules = {item.rule for item in check([built.folder]).findings}
    assert "submitter-late" in rules
    assert not rules & {"submitter-agrees", "org-drift"}


def test_nobody_is_no_submitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "a", org="unknown")
    for submitter in (None, "unknown"):
        with pytest.raises(InputError, match="give --submitter ORG|names nobody"):
            build_package([run], system="bed", out=tmp_path / "out" / "unknown", submitter=submitter)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("MLHPC_ORG", "MINE")
    assert build_package([run], system="bed", out=tmp_path / "out" / "MINE").folder.name == "MINE"
    named = run_folder(tmp_path / "b")
    assert build_package([named], system="bed", out=tmp_path / "out" / "ACME").folder.name == "ACME"


def test_one_log_of_another_organisation_is_enough_to_refuse(tmp_path: Path) -> None:
    first, second = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", org="Other")
    wanted = r"b/result_0.txt: the log names the submitter 'Other' \(submission_org\), the package 'ACME'"
    with pytest.raises(InputError, match=wanted):
        build_package([first, second], system="bed", out=tmp_path / "out" / "ACME", submitter="ACME")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system": "../x"}, r"--system '../x': expected letters"),
        ({"submitter": "a/b"}, r"--submitter 'a/b': expected letters"),
        ({"submitter": ".hidden"}, r"--submitter '.hidden': expected letters"),
    ],
)
def test_names_that_are_no_folders_are_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    run = run_folder(tmp_path / "a")
    with pytest.raises(InputError, match=message):
        build_package([run], **({"system": "bed", "out": tmp_path / "out" / "ACME"} | options))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_the_folder_has_the_name_of_the_submitter(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a package's folder has the name of its submitter; expected -o .*Other/ACME"):
        build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "Other")
    assert not (tmp_path / "Other").exists()


@pytest.mark.parametrize("below", [".", "ACME2", "results/bed"])
def test_a_package_is_never_sent_into_the_package_of_another_submitter(tmp_path: Path, below: str) -> None:
    run = run_folder(tmp_path / "a")
    write(tmp_path / "all" / "Other" / "manifest.sha256", [])
    with pytest.raises(InputError, match="is the package of Other; expected -o (.*)") as caught:
        build_package([run], system="bed", submitter="ACME", out=tmp_path / "all" / "Other" / below)
    assert str(caught.value).endswith(f"expected -o {tmp_path / 'all' / 'ACME'}")


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    first, second = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")

    info = json.loads((second / "run.json").read_text())
    (second / "run.json").write_text(json.dumps(info | {"git": {"commit": "fff", "dirty": False}}))
    with pytest.raises(InputError, match=r"git is .*fff.* package them with separate commands"):
        build_package([first, second], system="bed", out=tmp_path / "out" / "ACME")

    (second / "run.json").write_text(json.dumps(info))
    other = node(cpu=replace_model(node().cpu, "Model A"))
    (second / "facts" / "node1.json").write_text(msgspec.json.encode(other).decode())
    with pytest.raises(InputError, match=r"made on different systems: .*Model A"):
        build_package([first, second], system="bed", out=tmp_path / "out" / "ACME")
    assert not (tmp_path / "out").exists()


def replace_model(cpu: Cpu, model: str) -> Cpu:
    return structs.replace(cpu, model=model)


def test_a_log_of_another_size_is_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a")
    write(run / "result_0.txt", drop("config_file")(our_run("mini", values=(0.25,))))
    with pytest.raises(InputError, match="a log of cosmoflow mini in a run of cosmoflow smoke"):
        build_package([run], system="bed", out=tmp_path / "out" / "ACME")


def test_a_run_without_logs_or_scale_is_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", count=1)
    write(run / "result_0.txt", drop("number_of_nodes")(our_run()))
    with pytest.raises(InputError, match="no log states number_of_nodes"):
        build_package([run], system="bed", out=tmp_path / "out" / "ACME")
    (run / "result_0.txt").unlink()
    with pytest.raises(InputError, match="so there is no run to package"):
        read_run(run)
    with pytest.raises(InputError, match="not a run folder"):
        read_run(tmp_path)


def test_an_aborted_run_is_packaged_and_counts_as_the_one_that_may_fail(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a")
    write(
        run / "result_1.txt",
        edit("run_stop", meta={"status": "aborted"})(
            our_run(values=(0.5,), seed=101, trial=1, start_ms=START_MS + 100_005)
        ),
    )
    built = build_package([run], system="bed", out=tmp_path / "out" / "ACME")
    verdict = check([built.folder])
    assert verdict.compliant
    assert "run-failed" in {finding.rule for finding in verdict.findings}


def test_package_command(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a")

    done = mlhpc("package", run, "--system", "bed", "-o", tmp_path / "out" / "ACME")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()[-1] == f"{tmp_path}/out/ACME: package complete; next: mlhpc check {tmp_path}/out/ACME"
    )
    assert mlhpc("package", run, "--system", "bed", "-o", tmp_path / "out" / "ACME").returncode == 2
    assert mlhpc("package", run).returncode == 2
    assert mlhpc("package", "--verify", tmp_path / "out" / "ACME").returncode == 0
    (tmp_path / "out/ACME/systems/bed_1x2_smoke.json").write_text("{}")
    changed = mlhpc("package", "--verify", tmp_path / "out" / "ACME")
    assert changed.returncode == 1
    assert "differs from its sha256 in the manifest" in changed.stdout


def test_scripts_are_valid_bash(tmp_path: Path) -> None:
    folder = build_package([run_folder(tmp_path / "a")], system="bed", out=tmp_path / "out" / "ACME").folder
    for script in folder.rglob("*.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example(tmp_path_factory.mktemp("whole"))


@pytest.mark.drawn(24)
@pytest.mark.parametrize("case", package_cases(), ids=lambda case: case.name)
def test_mutations_of_a_package(tmp_path: Path, whole: Path, case: PackageCase) -> None:
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    case.apply(folder)
    before = {path: compute_sha256(path) for path in tmp_path.rglob("*") if path.is_file()}
    found = [finding.rule for finding in check([folder]).findings if finding.severity == "error"]
    assert case.rule in found if case.rule else not found, found
    assert {path: compute_sha256(path) for path in tmp_path.rglob("*") if path.is_file()} == before
