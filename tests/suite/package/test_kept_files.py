"""A file that a package keeps of a run is read and valid, or named: by `mlhpc package`, and by the check of run and package."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlhpc import suite
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.forensics.provenance_rules import _check_sizes
from mlhpc.suite.compliance.kept_files import TEMPLATE_COMMENT, TEMPLATE_END, KeptFolder
from mlhpc.suite.data.manifest import Manifest
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.run_folder import JobInfo
from mlhpc.suite.machine.facts import Sample, render_samples
from mlhpc.suite.package.build import build_package
from tests.fixtures.logs import edit, our_run, write
from tests.fixtures.once import made_once
from tests.fixtures.reproduction import beside, forge, left_by_run, package_of
from tests.fixtures.runs import state_job

SCRIPT = """#!/bin/bash
# Read it, edit it, sbatch it. Change settings without editing:
srun true
exit "$status"
"""


VERDICT = '{"nodes": {"node1": {"word": "good"}}}'


def full_run(root: Path) -> Path:
    """A run folder that has every file of the table but those of an own loop."""
    left_by_run(root, diff="diff --git a/x b/x\n+one line\n")
    (root / "job.sbatch").write_text(SCRIPT)
    (root / "job.json").write_text(
        json.dumps(convert_to_plain_data(JobInfo(job_ids=("7",), submitted="2026-11-20T14:00:00Z")))
    )
    look = root / "preflight" / "7" / "1"
    look.mkdir(parents=True)
    (look / "node1.jsonl").write_text(render_samples([Sample(node="node1", metric="m", better="more", values=(1.0,))]))
    (look.parent / "verdict.json").write_text(VERDICT)
    state_job(root, VERDICT)
    write(root / "resumed_9_1.txt", our_run())
    write(root / "failed_2_1.txt", our_run()[:5])
    (root / "code").mkdir()
    (root / "code" / "train.py").write_text("print('hello')\n")
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "kept_files", lambda folder: full_run(folder / "run"))


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole / "run", tmp_path / "run")


def half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def self_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def changed_file(path: Path) -> None:
    """Another digest of one file: the digest of the list contradicts it."""
    path.write_text(path.read_text().replace("a" * 64, "e" * 64))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "half of environment.json": ("environment.json", half), "half of sources.json": ("sources.json", half),
    "half of config.yaml": ("config.yaml", half), "half of job.json": ("job.json", half),
    "half of job.sbatch": ("job.sbatch", half), "half of changes.diff": ("changes.diff", half),
    "half of the facts": ("facts/node1.json", half), "half of a verdict": ("preflight/7/verdict.json", half),
    "half of the samples": ("preflight/7/1/node1.jsonl", half),
    "an empty environment.json": ("environment.json", lambda path: path.write_text("")),
    "a list": ("sources.json", lambda path: path.write_text("[]")),
    "a digest of the sources that was changed": ("sources.json", changed_file),
    "zeros": ("job.sbatch", lambda path: path.write_bytes(bytes(500))),
    "UTF-16": ("job.sbatch", lambda path: path.write_text(SCRIPT, encoding="utf-16")),
    "zeros in the code": ("code/train.py", lambda path: path.write_bytes(bytes(500))),
    "types": ("job.json", lambda path: path.write_text('{"version": 1, "job_ids": 7, "submitted": "x"}')),
    "another version": ("environment.json", lambda path: path.write_text('{"version": 2}')),
    "a FIFO": ("environment.json", fifo), "a link to itself": ("sources.json", self_link),
    "a folder": ("environment.json", folder),
    "a log with a broken line in the middle": (
        "resumed_9_1.txt", lambda path: path.write_text(path.read_text().replace('"time_ms"', '"time', 1)),
    ),
    "a log without an event": ("failed_2_1.txt", lambda path: path.write_bytes(os.urandom(3000))),
}  # fmt: skip


def test_the_table_has_every_file_that_a_run_leaves(run: Path) -> None:
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    kept = set(KeptFolder(run, packaged=False).files)
    assert names - kept == {*(f"result_{n}.txt" for n in range(5)), "output/trial_0.log"}
    assert list(KeptFolder(run, packaged=False).list_problems()) == []
    assert "provenance-valid" not in {finding.rule for finding in check([run]).findings}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_by_the_package_and_by_the_check(run: Path, tmp_path: Path, name: str) -> None:
    file, damage = DAMAGES[name]
    damage(run / file)
    out = tmp_path / "out" / "ACME"
    with pytest.raises(InputError, match=Path(file).name):
        build_package([run], system="bed", out=out)
    assert not out.exists()
    found = [finding for finding in check([run]).findings if finding.rule == "provenance-valid"]
    assert {(Path(each.file).name, each.severity) for each in found} == {(Path(file).name, "error")}


def test_each_remedy_for_a_damaged_file_works(run: Path, tmp_path: Path) -> None:
    """Each file that a package keeps is damaged, and what the message says is done."""
    copy, needed, out = shutil.copytree(run, tmp_path / "copy"), [], tmp_path / "out" / "ACME"

    def build() -> str:
        try:
            build_package([run], system="bed", out=out)
        except InputError as error:
            return str(error)
        shutil.rmtree(out)
        return ""

    for name in KeptFolder(run, packaged=False).files:
        (run / name).write_bytes(b"\xff\x00")
        said = build()
        assert str(run / name) in said, said
        (run / name).unlink()
        without = build()
        if "move it away to package without it" in said:
            assert without == "", name
        else:
            assert without, name
            assert "move it away" not in said + without
            needed.append(name)
        shutil.copyfile(copy / name, run / name)
    assert build() == ""
    assert needed == ["run.json", "config.yaml", "changes.diff", "facts/node1.json"]
    (run / "config.yaml").unlink()
    assert "config.yaml: there is no such file; restore it from a copy of the run folder" in build()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["environment.json", "sources.json", "changes.diff", "job.json", "origin.json"])
def test_a_file_that_was_damaged_in_a_package_is_found_under_a_new_manifest(
    run: Path, tmp_path: Path, name: str
) -> None:
    package = package_of(run, tmp_path / "out")
    assert check([package]).compliant
    forge(package, lambda kept: half(kept / name))
    assert "provenance-valid" in {finding.rule for finding in check([package]).counted("error")}


def manifest(seed: int = 1) -> Manifest:
    return Manifest(workload="cosmoflow", size="smoke", seed=seed, generator={}, splits={})


@pytest.mark.parametrize(("seed", "sound"), [(1, True), (2, False)])
def test_the_manifest_of_the_data_is_that_of_the_logs(tmp_path: Path, seed: int, sound: bool) -> None:
    run = left_by_run(tmp_path / "run")
    for path in sorted(run.glob("result_*.txt")):
        number = int(path.stem[-1])
        lines = our_run(seed=number + 1, trial=number, epoch_s=2.0 + number / 10)
        write(path, edit("data_manifest", value=manifest().sha256)(lines))
    (run / "data.json").write_text(manifest(seed).text())
    assert ("provenance-valid" not in {finding.rule for finding in check([run]).findings}) == sound
    half(run / "data.json")
    with pytest.raises(InputError, match=r"data\.json: expected JSON"):
        build_package([run], system="bed", out=tmp_path / "out" / "ACME")


@pytest.mark.parametrize(
    ("stated", "packaged", "kept", "sound"),
    [(None, True, False, False), ("ab" * 32, True, False, True), (None, False, False, True), (None, True, True, True)],
)
def test_a_package_has_the_manifest_of_data_that_the_card_does_not_name(
    tmp_path: Path, stated: str | None, packaged: bool, kept: bool, sound: bool
) -> None:
    if kept:
        (tmp_path / "data.json").write_text(manifest().text())
    result: Any = SimpleNamespace(benchmark=SimpleNamespace(card=SimpleNamespace(data_sha256=stated)))
    run: Any = SimpleNamespace(data_manifest="cd" * 32, loop=None, sizes={}, threads_per_rank=None, path=tmp_path)
    assert (list(_check_sizes(result, run, KeptFolder(tmp_path, packaged=packaged))) == []) == sound


@pytest.mark.parametrize("name", ["environment.json", "sources.json"])
def test_a_file_that_became_another_valid_one_after_the_run_is_found(run: Path, tmp_path: Path, name: str) -> None:
    """Its logs state its sha256."""
    package = package_of(run, tmp_path / "whole")
    assert check([package]).compliant
    content = json.loads((run / name).read_text())
    for kept in (run, beside(package)):  # another value, or only other white space: it is not the file of the run
        (kept / name).write_text(json.dumps(content, indent=7))
    forge(package, lambda kept: None)
    for place in (run, package):
        [found] = [each for each in check([place]).findings if each.rule == "provenance-valid"]
        assert (Path(found.file).name, found.severity) == (name, "error")
        assert "the logs say" in found.message
    with pytest.raises(InputError, match=rf"{name}: its sha256 is .*, the logs say"):
        build_package([run], system="bed", out=tmp_path / "out" / "ACME")
    (run / name).unlink()  # what is moved away is a note, and an error of the checker
    built = build_package([run], system="bed", out=tmp_path / "out" / "ACME")
    assert "provenance-valid" in {finding.rule for finding in check([built.folder]).counted("error")}


def test_what_is_redacted_has_another_sha256_and_is_valid(run: Path, tmp_path: Path) -> None:
    (run / "job.sbatch").write_text(SCRIPT.replace("srun true", "export HF_TOKEN=abcdefgh1234\nsrun true"))
    package = package_of(run, tmp_path / "out")
    assert json.loads((beside(package) / "origin.json").read_text())["redacted"].keys() == {"job.sbatch"}
    assert check([package]).compliant


def test_a_missing_file_is_a_note(run: Path, tmp_path: Path) -> None:
    (run / "environment.json").unlink()
    notes = build_package([run], system="bed", out=tmp_path / "out" / "ACME").notes
    assert [note for note in notes if "environment.json, data.json" in note]


def test_a_log_that_a_kill_cut_is_no_damage(run: Path) -> None:
    half(run / "resumed_9_1.txt")
    (run / "failed_2_1.txt").write_text("")
    assert list(KeptFolder(run, packaged=False).list_problems()) == []


def test_the_end_of_a_script_is_that_of_the_template() -> None:
    template = (Path(suite.__file__).parent / "launch/templates/job.sh").read_text()
    assert TEMPLATE_COMMENT in template
    assert template.endswith(TEMPLATE_END)
