"""The command line as a person meets it: names are answered, mistakes are one line with exit code 2, starts are light."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from itertools import chain
from pathlib import Path
from unittest import mock

import click
import pytest

from mlhpc.suite.cli.commands import SECTIONS
from mlhpc.suite.cli.group import OTHER
from mlhpc.suite.cli.main import group
from mlhpc.suite.errors import InputError, explain_variable
from tests.fixtures.cli import mlhpc
from tests.fixtures.wings import MISSING_COMMANDS, needs_axes

COMMANDS = [command.name for command in chain(*SECTIONS.values())]
HERE = [name for name in COMMANDS if name not in MISSING_COMMANDS]
ENTRIES = [command.entry for command in chain(*SECTIONS.values())]

FIRST_PAGE = """
import sys
from mlhpc.suite.cli.main import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def test_help_lists_every_command_once_under_a_heading_and_loads_none() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_PAGE, "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    places = [done.stdout.index(f"{heading}:") for heading in SECTIONS]
    assert places == sorted(places)
    assert OTHER not in done.stdout
    listed = [line.split()[0] for line in done.stdout[places[0] :].splitlines() if re.match(r"  [a-z]", line)]
    assert listed == COMMANDS
    assert listed[:5] == ["demo", "doctor", "workload", "data", "run"]
    assert "Examples:" in done.stdout
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "numpy", "pandas", "altair", *(entry.split(":")[0] for entry in ENTRIES)}


@pytest.mark.parametrize("command", HERE)
def test_the_first_page_says_of_a_command_what_its_own_help_says_first(command: str) -> None:
    loaded = group.get_command(click.Context(group), command)
    assert loaded is not None
    first = " ".join((loaded.help or "").partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    (summary,) = (each.summary for each in chain(*SECTIONS.values()) if each.name == command)
    assert summary == first


def test_a_command_of_a_missing_wing_is_named_and_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plugins", "cli.group"):
        monkeypatch.setattr(f"mlhpc.suite.{module}.list_missing_wings", lambda: ["fleet"])
    assert "preflight" not in group.list_commands(click.Context(group))
    assert "(the wing 'fleet' is not installed)" in mlhpc("--help").stdout
    for words in (["preflight", "judge", "."], ["preflight", "--help"]):
        done = mlhpc(*words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
        assert "command 'preflight': the wing 'fleet' is not installed here" in done.stderr


@pytest.mark.parametrize("command", HERE)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = mlhpc(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"mlhpc {command}" in done.stdout.partition("xample")[2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["chek"], "unknown command 'chek'; did you mean 'check'? commands: demo, doctor,"),
        (["run", "cosmo"], "unknown workload 'cosmo'; did you mean 'cosmoflow'? workloads: cosmoflow"),
        (["run", "cosmoflow", "--size", "tiny"], "unknown size 'tiny'; did you mean 'smoke'? sizes: "),
        (["run", "cosmoflow", "--set", "nodez=3"], "--set nodez: unknown key 'nodez'; valid keys:"),
        (["run", "cosmoflow", "--resume"], "--resume needs --output RUN"),
        (["run", "cosmoflow", "--ranks", "0"], "mlhpc: --ranks: 0 is not in the range x>=1"),
        (["ceilings", "--ranks", "9999999"], "mlhpc: --ranks: 9999999: this machine has"),
        (["run", "cosmoflow", "--ranks", "two"], "mlhpc: --ranks 'two': expected a whole number"),
        (["compare", ".", ".", "--tolerance", "much"], "mlhpc: --tolerance 'much': expected a number"),
        (
            ["run", "cosmoflow", "on two ranks"],
            "mlhpc: unexpected argument 'on two ranks'; mlhpc help run says what it takes",
        ),
        (["check", "/no/such/path"], "mlhpc: /no/such/path: does not exist; mlhpc help check says what is expected"),
        (["score", "/no/such/path"], "/no/such/path"),
        (["history", "add", "/no/such/path"], "mlhpc: /no/such/path: does not exist; mlhpc help history add says"),
        (["compare", "/no/such/path", "."], "/no/such/path"),
        (["data", "verify", "/no/such/path"], "/no/such/path"),
        (["report", "/no/such/path", "-o", "never.html"], "/no/such/path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_on_stderr_with_exit_code_2(arguments: list[str], expected: str, tmp_path: Path) -> None:
    done = mlhpc(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_run_without_data_says_how_to_make_them(tmp_path: Path) -> None:
    done = mlhpc("run", "cosmoflow", "--size", "smoke", "-o", str(tmp_path / "run"), cwd=tmp_path)
    assert done.returncode == 2
    assert "make it with: mlhpc data generate cosmoflow --size smoke" in done.stdout + done.stderr


def test_an_existing_run_folder_is_refused(tmp_path: Path) -> None:
    (notes := tmp_path / "run" / "notes.txt").parent.mkdir()
    notes.write_text("mine")
    done = mlhpc("run", "cosmoflow", "--size", "smoke", "-o", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "run: exists already" in done.stderr
    assert list((tmp_path / "run").iterdir()) == [notes]


def test_shell_completion_knows_the_commands() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("mlhpc"))],
        env=os.environ | {"_MLHPC_COMPLETE": "bash_complete", "COMP_WORDS": "mlhpc sc", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "score" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a.yaml:3: size is 'x'"), 2),
        (OSError(28, "No space left on device", "/runs/a"), 1),
        (ValueError("operands could not be broadcast together"), 70),
        (KeyError("tau_s"), 70),
        (AssertionError(), 70),
        (json.JSONDecodeError("Expecting value", "", 0), 70),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 70),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_defect_of_ours_is_not_the_users_mistake(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("mlhpc.suite.commands.score.check", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = mlhpc("score", tmp_path)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert ("a defect of mlhpc itself" in done.stderr) == (code == 70)
    kept = list(tmp_path.glob("mlhpc-defect-*.txt"))
    assert len(kept) == (code == 70)
    if kept:
        assert str(kept[0]) in done.stderr
        assert "Traceback" in kept[0].read_text()


def test_a_missing_argument_or_option_is_named_with_what_it_is() -> None:
    workloads = "cosmoflow, deepcam, moe_lm, open_catalyst, openfold, swinv2_moe"
    assert mlhpc("run").stderr == f"mlhpc: WORKLOAD is missing: {workloads}; mlhpc help run says what it can be\n"
    said = mlhpc("submit", "cosmoflow", "--size", "smoke", "--nodes", "1").stderr
    assert said.startswith("mlhpc: --system is missing (system to run on: ")
    assert said.endswith("; mlhpc help submit has all\n")


@needs_axes
def test_a_variable_that_a_library_refuses_is_named_and_no_defect() -> None:
    command = [sys.executable, "-m", "mlhpc", "plan", "moe_lm", "--size", "smoke"]  # torch reads it when it is imported
    environment = os.environ | {"TORCH_LOGS": "nonsense"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("TORCH_LOGS of this shell is 'nonsense'; without it: env -u TORCH_LOGS mlhpc …\n")
    said = "The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL."  # of torch, which does not repeat it
    assert "env -u TORCH_DISTRIBUTED_DEBUG mlhpc" in explain_variable(said, {"TORCH_DISTRIBUTED_DEBUG": "x"})
    assert explain_variable("MY_TORCH_LOGS_TOO", {"TORCH_LOGS": "nonsense"}) == ""
    assert explain_variable("some error", {"TORCH_LOGS": "nonsense"}) == ""


@pytest.mark.parametrize(
    ("number", "command"), [(resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")]
)
def test_a_limit_of_memory_is_named(number: int, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (2**28, 2**28) if asked == number else unlimited)
    monkeypatch.setattr("mlhpc.suite.cli.main.group.main", mock.Mock(side_effect=MemoryError()))
    done = mlhpc("workload", "list")
    assert done.returncode == 2
    assert f"at most 268,435,456 bytes of {'data' if command.endswith('d') else 'memory'}" in done.stderr
    assert f"({command})" in done.stderr
