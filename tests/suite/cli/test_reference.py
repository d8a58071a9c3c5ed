"""The page of commands has every command and option, and what docs and CI files type is understood."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click
import pytest
import yaml

from docs.pages.commands import page
from mlhpc.suite.cli.main import group
from tests.fixtures.wings import MISSING_COMMANDS

ROOT = Path(__file__).resolve().parents[3]
CI = sorted((ROOT / "docs" / "ci").glob("*.yml"))


def test_the_page_has_every_command_and_option_and_no_raw_html() -> None:
    text = page()
    for name in group.list_commands(click.Context(group)):
        assert f"\n### mlhpc {name}\n" in text
    for option in ("--since", "--baseline", "--any", "--count-failed", "--profiled-steps", "--trust-pickles"):
        assert f"`{option}`" in text
    prose = re.sub(r"^    .*$|`[^`]*`", "", text, flags=re.MULTILINE)
    assert "<" not in prose
    assert "Sentinel" not in text


def parse(words: list[str]) -> None:
    """Let the commands parse a command line; a mistake is raised."""
    # Files need not exist. The contexts are closed: what --quiet set ends with them.
    with (
        mock.patch.object(click.Path, "convert", lambda self, value, parameter, context: Path(value)),
        contextlib.ExitStack() as contexts,
    ):
        command: click.Command = group
        context = contexts.enter_context(command.make_context("mlhpc", words))
        while isinstance(command, click.Group) and (words := [*context._protected_args, *context.args]):
            name, found, words = command.resolve_command(context, words)
            assert found is not None
            command = found
            context = contexts.enter_context(command.make_context(name, words, parent=context))


def mlhpc_lines(text: str) -> Iterator[str]:
    """The mlhpc commands in a script, with what follows them on the line cut off."""
    for line in text.splitlines():
        for match in re.finditer(r"(?:^|\s|\$\()(mlhpc [a-z][^|&;>#)]*)", line):
            yield match.group(1).strip()


def scripts(data: object) -> Iterator[str]:
    """Every script in a workflow file of GitHub or GitLab."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key in {"run", "script", "before_script"}:
                yield "\n".join(value) if isinstance(value, list) else str(value)
            else:
                yield from scripts(value)
    elif isinstance(data, list):
        for item in data:
            yield from scripts(item)


def variables(data: object) -> dict[str, str]:
    """The variables that a workflow file sets."""
    found: dict[str, str] = {}
    if isinstance(data, dict):
        for key, value in data.items():
            found |= value if key in {"env", "variables"} else variables(value)
    return found


@pytest.mark.parametrize("path", CI, ids=lambda path: path.name)
def test_a_ci_file_parses_and_so_does_every_command_in_it(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    lines = [line for script in scripts(data) for line in mlhpc_lines(script)]
    assert lines
    known = variables(data)
    for line in lines:
        parse(shlex.split(string.Template(line).safe_substitute(known))[1:])


@pytest.mark.parametrize("platform", ["github-actions", "gitlab-ci"])
def test_the_gates_train_compare_and_remember(platform: str) -> None:
    data = yaml.safe_load((ROOT / "docs" / "ci" / f"{platform}-gate.yml").read_text())
    text = "\n".join(scripts(data))
    lines = [line.split()[1:3] for line in mlhpc_lines(text)]
    for words in (["data", "generate"], ["run", "cosmoflow"], ["history", "add"], ["history", "check"]):
        assert words in lines
    gates = [line for line in text.splitlines() if "mlhpc compare" in line or "history check" in line]
    assert len(gates) == 2
    assert all(line.rstrip().endswith("|| test $? = 4") for line in gates), (
        "slower fails the job, inconclusive does not"
    )


def test_a_wrong_command_in_a_ci_file_would_be_found() -> None:
    for wrong in ("mlhpc run cosmoflow --sise smoke", "mlhpc history chek h", "mlhpc score x --json"):
        with pytest.raises(click.UsageError):
            parse(wrong.split()[1:])


DOCS = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def documented() -> Iterator[tuple[str, str]]:
    """The command lines in code blocks and examples of docs; those with placeholders or choices are left out."""
    for path in DOCS:
        fenced = False
        for line in path.read_text().splitlines():
            fenced ^= line.startswith("```")
            text = line.strip().removeprefix("$ ")
            text = re.sub(r"^srun [^m]*(?=mlhpc )", "", text)
            if (line.startswith("    ") or fenced) and text.startswith("mlhpc "):
                command = re.split(r"\s{2,}| [|&>;#]", text)[0]
                if command.split()[1] in MISSING_COMMANDS:
                    continue
                if not re.search(r"[\[\]…|*]|\b[A-Z]{2,}\b\.\.\.| \.\.\.", command):
                    yield path.name, command


@pytest.mark.parametrize(("name", "command"), sorted(set(documented())))
def test_a_command_in_the_docs_is_understood(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        words = shlex.split(command)[1:]
    except ValueError:
        pytest.skip("no whole command line")
    if "--card" in words:  # a card is read while the words are
        shutil.copy(ROOT / "examples" / "own_loop" / "card.yaml", tmp_path / words[words.index("--card") + 1])
        monkeypatch.chdir(tmp_path)
    with contextlib.suppress(click.exceptions.NoArgsIsHelpError):
        parse(words)
