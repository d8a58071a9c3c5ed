"""What this user may not read is named by each command that would otherwise leave it out in silence."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlhpc.suite.commands.status import read_rows
from tests.fixtures.logs import our_run, write

CAPABILITIES = "-dac_override,-dac_read_search"  # with which root reads everything
COMMANDS = {
    "score": 1, "report -o {out} --quiet": 0, "history add --any -o {out}": 1, "compare {own}": None,
}  # fmt: skip


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlhpc", *words]  # a fork of a warm process would have its capabilities
    if os.geteuid() == 0:
        command = ["setpriv", f"--bounding-set={CAPABILITIES}", f"--inh-caps={CAPABILITIES}", *command]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root reads everything without setpriv")
@pytest.mark.parametrize("closed", ["B", "A/result_0.txt"])
@pytest.mark.parametrize("words", COMMANDS)
def test_what_may_not_be_read_is_named(words: str, closed: str, tmp_path: Path) -> None:
    for name in "AB":
        for trial in range(2):
            write(tmp_path / "runs" / name / f"result_{trial}.txt", our_run())
    path = tmp_path / "runs" / closed
    path.chmod(0)
    places = {"out": tmp_path / "out", "own": tmp_path / "runs"}
    done = call(*(word.format(**places) for word in words.split()), str(tmp_path / "runs"))
    path.chmod(0o755)
    assert str(path) in done.stdout + done.stderr, done
    expected = 2 if words.startswith("history") and closed != "B" else COMMANDS[words]  # nothing of it can be added
    assert expected in (done.returncode, None), done


def test_a_folder_that_may_not_be_read_is_a_row_of_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")
    (row,) = read_rows([tmp_path])
    assert (row.run, row.state, row.note) == (str(tmp_path / "closed"), "unreadable", "Permission denied")
