"""The event config_file: its form in a log, and in a package the file that it states (rules config-agrees, provenance-valid, statements-agree)."""

# ruff: noqa: E501  one case a line reads best as a table
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.compliance.check import check, check_log
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.package.build import write_package_manifest
from tests.fixtures.logs import Line, Mutation, chain, drop, edit, hpc_run, insert, our_run, write
from tests.fixtures.once import made_once
from tests.fixtures.package_mutations import state_again
from tests.fixtures.reproduction import beside, edit_json, forge, left_by_run, package_of

SHA = hashlib.sha256(b"settings").hexdigest()


def stated(name: Any = "config.yaml", **metadata: Any) -> Mutation:
    return chain(
        drop("config_file"), insert(Line("config_file", name, metadata={"sha256": SHA} | metadata), "run_config")
    )


WRONG_LOGS: dict[str, Mutation] = {
    "no sha256": chain(stated(), edit("config_file", meta={"sha256": ...})),
    "sha256 is null": stated(sha256=None),
    "sha256 is a number": stated(sha256=7),
    "sha256 is short": stated(sha256=SHA[:40]),
    "sha256 is long": stated(sha256=SHA + "0"),
    "sha256 has other letters": stated(sha256="g" + SHA[1:]),
    "sha256 of one digit": stated(sha256="0" * 64),
    "sha256 with a line end": stated(sha256=SHA[:63] + "\n"),
    "name is null": stated(None),
    "name is a number": stated(3),
    "name is empty": stated(""),
    "name climbs": stated("../../etc/passwd"),
    "name has a folder": stated("runs/config.yaml"),
    "name is absolute": stated("/etc/passwd"),
    "name is hidden": stated(".config.yaml"),
    "name has a line end": stated("config.yaml\n"),
    "name is huge": stated("a" * 300),
    "two files": chain(stated(), insert(Line("config_file", "other.yaml", metadata={"sha256": SHA}), "run_config")),
    "one file with two sha256": chain(stated(), insert(Line("config_file", "config.yaml", metadata={"sha256": SHA[::-1]}), "run_config")),
}  # fmt: skip
RIGHT_LOGS: dict[str, Mutation] = {
    "as a run writes it": stated(),
    "an older log": lambda lines: lines,
    "another plain name": stated("mine_2026-11.yml"),
    "a name in another language": stated("größe.yaml"),
    "more metadata": stated(source="x"),
    "twice the same": chain(
        stated(), insert(Line("config_file", "config.yaml", metadata={"sha256": SHA}), "run_config")
    ),
}


def found_in_log(folder: Path, lines: Any, rules: str = "mlhpc-1.0") -> list[str]:
    log = check_log(write(folder / "result_0.txt", lines), read_ruleset(rules))
    return [finding.rule for finding in log.findings if finding.rule.startswith(("config-", "eval-order"))]


@pytest.mark.parametrize("name", WRONG_LOGS)
def test_a_malformed_statement_of_the_file_is_found(name: str, tmp_path: Path) -> None:
    assert found_in_log(tmp_path, WRONG_LOGS[name](our_run())) != []


@pytest.mark.parametrize("name", RIGHT_LOGS)
def test_a_sound_or_absent_statement_is_none(name: str, tmp_path: Path) -> None:
    assert found_in_log(tmp_path, RIGHT_LOGS[name](our_run())) == []


@pytest.mark.parametrize("rules", ["0.7.0", "1.0.0", "2.0.0", "3.0.0"])
def test_published_rounds_are_not_judged_by_it(rules: str, tmp_path: Path) -> None:
    lines = insert(Line("config_file", "../x"), "run_start")(hpc_run())
    assert found_in_log(tmp_path, lines, rules) == []


def _make(folder: Path) -> None:
    package_of(left_by_run(folder / "run"), folder)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose logs state the file of settings."""
    return made_once(tmp_path_factory, "config_file", _make) / "ACME"


def _logs_say(old: str, new: str) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        for path in folder.parents[7].glob("results/*/*/*/result_*.txt"):
            path.write_text(path.read_text().replace(old, new))

    return apply


def _linked(folder: Path) -> None:
    (folder / "config.yaml").rename(folder / "moved.yaml")
    (folder / "config.yaml").symlink_to("moved.yaml")


def _fifo(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    os.mkfifo(folder / "config.yaml")


def _edit_config(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.yaml").write_bytes(change((folder / "config.yaml").read_bytes()))


def _origin(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "origin.json", lambda document: document.update(fields))


def _both(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [change(folder) for change in changes]


def _called_redacted(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Another file of settings, which origin.json calls redacted."""

    def change(folder: Path) -> None:
        content = (folder / "config.yaml").read_bytes()
        assert old in content
        (folder / "config.yaml").write_bytes(content.replace(old, new, 1))
        _origin(redacted={"config.yaml": hashlib.sha256(content).hexdigest()})(folder)

    return change


WRONG_PACKAGES: dict[str, Callable[[Path], object]] = {
    "the file is gone": lambda folder: (folder / "config.yaml").unlink(),
    "one byte more": _edit_config(lambda content: content + b" "),
    "one value changed": _edit_config(lambda content: content.replace(b"16", b"32", 1)),
    "an empty file": _edit_config(lambda _: b""),
    "another line end": _edit_config(lambda content: content.replace(b"\n", b"\r\n", 1)),
    "a link": _linked,
    "a FIFO": _fifo,
    "a folder": lambda folder: ((folder / "config.yaml").unlink(), (folder / "config.yaml").mkdir()),
    "larger than any": _edit_config(lambda content: content + b" " * (read_limits().json + 1)),
    "logs of another file": _logs_say('"value": "config.yaml"', '"value": "other.yaml"'),
    "logs of no file": _logs_say('"key": "config_file"', '"key": "some_other_key"'),
    "another file called redacted": _both(_edit_config(lambda content: content + b" "), _origin(redacted={"run.json": SHA})),
    "redacted is no mapping": _origin(redacted="config.yaml"),
    "called redacted, and nothing is": _called_redacted(b"\n", b"\r\n"),
    "called redacted, a number changed": _called_redacted(b"max_epochs: 64", b"max_epochs: 32  # REDACTED"),
    "called redacted, a switch changed": _called_redacted(b"instrumentation: false", b"instrumentation: true  # REDACTED"),
    "called redacted, a number in words": _called_redacted(b"max_epochs: 64", b"max_epochs: REDACTED"),
    "called redacted, a choice in words": _called_redacted(b"precision: float32", b"precision: REDACTED"),
    "called redacted, a word changed": _called_redacted(b"division: closed", b"division: open  # REDACTED"),
    "called redacted, a setting gone": _called_redacted(b"max_epochs: 64\n", b"# REDACTED\n"),
    "called redacted, a section for a word": _called_redacted(b"size: smoke", b"size: {smoke: REDACTED}"),
    "called redacted, another platform": _called_redacted(b"platform: test bed", b"platform: REDACTED rack"),
    "origin.json gone": lambda folder: (folder / "origin.json").unlink(),
    "a file beside it": lambda folder: (folder / "config.yaml.orig").write_text("x"),
}  # fmt: skip
RIGHT_PACKAGES: dict[str, Callable[[Path], object]] = {
    "as it was built": lambda folder: None,
    "redacted, a word": _called_redacted(b"platform: test bed", b"platform: test REDACTED"),
    "redacted, a host": _called_redacted(b"platform: test bed", b"platform: node1"),
    "redacted, a comment": _called_redacted(b"max_epochs: 64", b"max_epochs: 64  # REDACTED"),
    "a permission bit": lambda folder: (folder / "config.yaml").chmod(0o600),
    "a time of change": lambda folder: os.utime(folder / "config.yaml", (0, 0)),
}  # fmt: skip


def errors_of_package(stage: Path, tmp_path: Path, damage: Callable[[Path], object]) -> list[str]:
    package = Path(shutil.copytree(stage, tmp_path / "ACME"))
    if damage is _fifo:
        damage(beside(package))
    else:
        forge(package, damage)
        state_again(package)
        write_package_manifest(package)
    return [finding.message for finding in check([package]).counted("error")]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", WRONG_PACKAGES)
def test_a_package_without_the_file_that_its_logs_state_is_found(name: str, stage: Path, tmp_path: Path) -> None:
    assert errors_of_package(stage, tmp_path, WRONG_PACKAGES[name])


@pytest.mark.parametrize("name", RIGHT_PACKAGES)
def test_a_package_with_the_file_is_sound(name: str, stage: Path, tmp_path: Path) -> None:
    assert not errors_of_package(stage, tmp_path, RIGHT_PACKAGES[name])
