"""What code and environment a run is made of: the same for the same files, another for any change, bounded."""

import subprocess
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path

import pytest

from mlhpc.suite.log.origin import sources
from mlhpc.suite.log.origin.sources import (
    compute_record_digest,
    compute_suite_digests,
    read_environment,
    read_git_state,
)
from mlhpc.suite.plugins import read_name_and_version


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_the_uncommitted_changes_are_kept(checkout: Path) -> None:
    clean = read_git_state(checkout)
    assert (clean.diff, clean.logged()) == ("", {"commit": clean.commit, "dirty": False})
    (checkout / "code.py").write_text("two\n")
    dirty = read_git_state(checkout)
    assert "-one\n+two" in dirty.diff
    assert dirty.logged() == {"commit": clean.commit, "dirty": True, "diff_sha256": dirty.diff_sha256}
    (checkout / "code.py").write_text("three\n")
    assert read_git_state(checkout) != dirty


def test_no_program_that_a_checkout_names_is_run(checkout: Path) -> None:
    """A checkout may tell git to show changes with a program of its own."""
    ran = checkout / "RAN"
    (checkout / ".gitattributes").write_text("*.py diff=mine\n")
    git(checkout, "config", "diff.mine.textconv", f"touch {ran} #")
    git(checkout, "config", "diff.external", f"touch {ran} #")
    git(checkout, "config", "core.fsmonitor", f"touch {ran} #")
    (checkout / "code.py").write_text("two\n")
    assert read_git_state(checkout) is not None
    assert not ran.exists()


def test_a_hook_of_another_repository_changes_nothing(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git tells its hooks by GIT_DIR and its like which repository they are of."""
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "x")
    found, ran = read_git_state(checkout), other / "RAN"
    settings = {
        "GIT_DIR": other / ".git", "GIT_WORK_TREE": other, "GIT_INDEX_FILE": other / "index",
        "GIT_CONFIG_COUNT": 1, "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": f"touch {ran} #",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    assert read_git_state(checkout) == found
    assert not ran.exists()


def test_long_changes_are_cut_and_their_digest_is_of_all(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DIFF_BYTES", 30)
    found = []
    for text in ("x" * 5000, "x" * 5000 + "y"):
        (checkout / "code.py").write_text(text + "\n")
        found.append(read_git_state(checkout))
    one, other = found
    assert one.diff[:30] == other.diff[:30]
    assert "[the first 30 of " in one.diff
    assert one.diff_sha256 != other.diff_sha256


def test_outside_of_a_checkout_there_is_no_state(tmp_path: Path) -> None:
    assert read_git_state(tmp_path / "none") is None


def test_the_digest_of_the_suite_changes_with_any_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name, text in (("a.py", "1"), ("inner/b.yaml", "2"), ("notes.txt", "3")):
        (tmp_path / name).write_text(text)
    first = compute_suite_digests({"suite": tmp_path})
    assert list(first["files"]) == ["suite/a.py", "suite/inner/b.yaml"]
    (tmp_path / "inner" / "b.yaml").write_text("4")
    assert compute_suite_digests({"suite": tmp_path})["sha256"] != first["sha256"]
    found = compute_suite_digests()["files"]
    assert "suite/log/origin/sources.py" in found
    assert "workloads/openfold/start.npz" in found


WHEEL = (
    "a/__init__.py,sha256=AAA,1\na-1.dist-info/METADATA,sha256=BBB,2\n"
    "a-1.data/scripts/run,sha256=CCC,3\na-1.dist-info/RECORD,,\n"
)
INSTALLED = (
    "../../../bin/run,sha256=DDD,4\r\na-1.dist-info/INSTALLER,sha256=EEE,4\r\na-1.dist-info/METADATA,sha256=BBB,2\r\n"
    "a-1.dist-info/RECORD,,\r\na-1.dist-info/REQUESTED,sha256=FFF,0\r\na-1.dist-info/direct_url.json,sha256=GGG,9\r\n"
    "a/__init__.py,sha256=AAA,1\r\na/__pycache__/__init__.cpython-311.pyc,,\r\n"
)


def test_a_wheel_and_what_was_installed_from_it_have_one_digest() -> None:
    assert compute_record_digest(WHEEL) == compute_record_digest(INSTALLED)
    assert compute_record_digest(WHEEL) != compute_record_digest(WHEEL.replace("AAA", "AAB"))
    assert compute_record_digest(WHEEL) != compute_record_digest(WHEEL.replace("a/__init__", "a/other"))
    assert compute_record_digest("") is None
    assert compute_record_digest("a.py,,\n") is None


def installed(root: Path, name: str, version: str, **files: str) -> Distribution:
    folder = root / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        (folder / file.replace("_json", ".json")).write_text(text)
    return PathDistribution(folder)


def test_names_and_versions_are_those_that_importlib_reads(tmp_path: Path) -> None:
    told = tmp_path / "told-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: told\nVersion:  1.0\n\nName: a description\n")
    (tmp_path / "old-2.egg-info").write_text("Name: old\nVersion: 2\n")
    (tmp_path / "empty-3.dist-info").mkdir()
    found = [PathDistribution(path) for path in (told, tmp_path / "old-2.egg-info", tmp_path / "empty-3.dist-info")]
    assert [read_name_and_version(each) for each in found] == [("told", "1.0"), ("old", "2"), ("", "")]
    for each in (*found[:2], *distributions()):
        assert read_name_and_version(each) == (each.metadata["Name"], each.metadata["Version"])


def test_an_environment_is_read_whatever_its_notes_say(tmp_path: Path) -> None:
    address = '{"url": "file:///x.whl", "archive_info": {"hashes": {"sha256": "' + "a" * 64 + '"}}}'
    found = read_environment(
        [
            installed(tmp_path, "Plain.Name", "1.0", RECORD=WHEEL, WHEEL="Tag: py3-none-any\n"),
            installed(tmp_path, "from-file", "2.0", RECORD=WHEEL, direct_url_json=address),
            installed(tmp_path, "editable", "3.0", RECORD=WHEEL, direct_url_json='{"dir_info": {"editable": true}}'),
            installed(tmp_path, "damaged", "4.0", RECORD=WHEEL, direct_url_json="[1"),
            installed(tmp_path, "strange", "5.0", direct_url_json='{"archive_info": {"hashes": 5}}'),
            installed(tmp_path / "later", "plain-name", "9.0"),
            installed(tmp_path, "bad", "1 --index-url x"),
        ]
    ).by_name()
    assert set(found) == {"plain-name", "from-file", "editable", "damaged", "strange"}
    assert (found["plain-name"].version, found["plain-name"].tags) == ("1.0", ("py3-none-any",))
    assert (found["from-file"].source, found["from-file"].wheel_sha256) == ("file", "a" * 64)
    assert (found["editable"].source, found["editable"].record_sha256) == ("editable", None)
    assert found["damaged"].record_sha256 == compute_record_digest(WHEEL)
    assert found["strange"].record_sha256 is None
