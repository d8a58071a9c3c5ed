"""One way to call things: one spelling for each meaning on every command; a slip is answered with the nearest name."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlhpc.suite.cli.main import group
from mlhpc.suite.cli.options import FiniteRange, IntegerRange
from mlhpc.suite.errors import explain_near_names
from mlhpc.suite.files import QUIET, print_progress
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import our_runs
from tests.fixtures.warm import warm_python


def commands(prefix: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(f"{prefix} {name}".strip(), found)
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield prefix, command


ALL = dict(commands("", group))
OPTIONS = {
    name: {
        spelling: option for option in command.params if isinstance(option, click.Option) for spelling in option.opts
    }
    for name, command in ALL.items()
}
NAMES = sorted(ALL)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_the_command_line_is_finite_and_not_too_long(name: str) -> None:
    context = click.Context(ALL[name])
    for option in ALL[name].params:
        kind = option.type
        if isinstance(kind, click.types.FloatParamType):
            assert isinstance(kind, FiniteRange), option.name
        if isinstance(kind, click.types.IntParamType) and not getattr(option, "count", False):
            assert isinstance(kind, IntegerRange), option.name
        if isinstance(kind, FiniteRange):
            for text in ("nan", "inf", "-inf", "1e300", "-1e300", "1e999"):
                with pytest.raises(click.UsageError):
                    kind.convert(text, option, context)
        if isinstance(kind, IntegerRange):
            for text in ("1" + "0" * 30, "1" + "0" * 5000, "1.5", "nan"):
                with pytest.raises(click.UsageError):
                    kind.convert(text, option, context)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_means_one_thing(name: str) -> None:
    options = OPTIONS[name]
    assert "-" not in name, "no command has a hyphen"
    assert {"-q", "--quiet", "--no-color"} <= set(options)
    assert "--json" not in options
    assert all(option.help for option in options.values()), [key for key, option in options.items() if not option.help]
    if "--size" in options:
        assert options["--size"].metavar == "NAME"
    if "--config" in options:
        assert (options["--config"].metavar, "--size" in options) == ("FILE", True)
    if "--set" in options:
        assert options["--set"].metavar == "KEY=VALUE"
    if "--output" in options:
        assert "-o" in options
        assert not options["--output"].required, "where output goes without -o is said, and is never an error"
        assert re.search(r"\[.+\]", options["--output"].help or "") or options["--output"].default
    if "--format" in options:
        kinds = options["--format"].type
        assert isinstance(kinds, click.Choice)
        assert list(kinds.choices)[:2] == ["text", "json"]
        assert options["--format"].default == "text"


def test_every_command_that_prints_results_prints_json_too() -> None:
    printing = {"check", "compare", "doctor", "workload list", "moe", "moe fit", "workload rcp show", "score", "status"}
    assert printing <= {name for name in NAMES if "--format" in OPTIONS[name]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run cosmoflow --config smoke", "--config smoke: expected a YAML file; a size is --size smoke"),
        ("submit cosmoflow --system s --nodes 1 --config mini", "a size is --size mini"),
        ("profile cosmoflow --size my.yaml", "a file of settings is --config my.yaml"),
        ("run cosmoflow --size smoke --config my.yaml", "--size and --config: give one"),
    ],
)
def test_a_size_and_a_file_of_settings_are_told_apart(words: str, said: str, tmp_path: Path) -> None:
    done = mlhpc(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chek", "did you mean 'check'?"),
        ("help scroe", "did you mean 'score'?"),
        ("data genrate cosmoflow", "did you mean 'generate'?"),
        ("workload rcp shw cosmoflow", "did you mean 'show'?"),
        ("run cosmoflow --rnks 2", "no such option --rnks; did you mean '--ranks'?"),
        ("run cosmflow", "did you mean 'cosmoflow'?"),
        ("run cosmoflow --size smok", "did you mean 'smoke'?"),
        ("data generate cosmoflow --size Mini", "did you mean 'mini'?"),
        ("run cosmoflow --set max_epoch=3", "did you mean 'max_epochs'?"),
        ("run cosmoflow --set batchsize=3", "did you mean 'global_batch_size'?"),
        ("run cosmoflow --set dropout=0.1", "did you mean 'hyperparameters.dropout'?"),
        ("run cosmoflow --set staging.dir=/x", "valid keys: directory"),
        ("check --explain seed-distnct", "did you mean 'seed-distinct'?"),
        ("check . --ruleset mlhpc1.0", "did you mean 'mlhpc-1.0'?"),
        ("submit cosmoflow --system slurm-two-nodes --nodes 1", "did you mean 'slurm-two-node'?"),
        ("check . --format jsn", "did you mean 'json'?"),
    ],
)
def test_a_slip_is_answered_with_the_nearest_name(words: str, said: str, tmp_path: Path) -> None:
    done = mlhpc(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    "words", ["xyzzy", "list --jsno", "run qqqq", "run cosmoflow --zzzzzz", "check --explain zzzz"]
)
def test_nothing_is_suggested_where_nothing_is_near(words: str, tmp_path: Path) -> None:
    done = mlhpc(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean" not in done.stderr


def test_a_suggestion_is_one_of_the_known_names() -> None:
    assert explain_near_names("SMOKE", ["smoke", "mini"]) == "; did you mean 'smoke'?"
    assert explain_near_names("smoke", []) == ""
    assert explain_near_names("--rank", ["--ranks", "--runs"]) == "; did you mean '--ranks'?"


@pytest.mark.parametrize("words", ["run", "data", "data generate", "check"])
def test_help_of_a_command_is_its_help(words: str) -> None:
    assert mlhpc("help", *words.split()).stdout == mlhpc(*words.split(), "--help").stdout


def test_help_alone_is_the_list_of_commands() -> None:
    assert mlhpc("help").stdout == mlhpc("--help").stdout == mlhpc("help", "help").stdout != ""


def test_the_shared_options_may_stand_before_the_command() -> None:
    assert (
        mlhpc("--quiet", "--no-color", "workload", "list", "cosmoflow").stdout
        == mlhpc("workload", "list", "cosmoflow", "-q").stdout
        != ""
    )
    assert QUIET not in os.environ


def test_quiet_prints_results_and_no_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_progress("half")
    monkeypatch.setenv(QUIET, "1")
    print_progress("done")
    assert capsys.readouterr().out == "half\n"


def test_quiet_and_no_color_hold_for_one_command_and_what_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def look(*arguments: object) -> list[object]:
        seen.update({name: os.environ.get(name) for name in (QUIET, "NO_COLOR")})
        return []

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("mlhpc.suite.commands.status.find_runs", look)
    assert mlhpc("status", "--quiet", "--no-color").returncode == 0
    assert seen == {QUIET: "1", "NO_COLOR": "1"}
    assert mlhpc("status").returncode == 0
    assert seen == {QUIET: None, "NO_COLOR": None}


def on_a_terminal(*words: str, environment: dict[str, str] | None = None) -> str:
    """What a command prints on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*warm_python(), "-m", "mlhpc", *words],
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color"} | (environment or {}),
    ) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the last process that had the terminal has ended
                break
            if not part:
                break
            text += part
        process.wait()
    os.close(ours)
    return text.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


def test_no_color_prints_without_colours(tmp_path: Path) -> None:
    runs = str(our_runs(tmp_path / "runs", 3))
    assert COLOUR.search(on_a_terminal("check", runs, environment={"NO_COLOR": ""}))
    assert not COLOUR.search(on_a_terminal("check", runs, "--no-color", environment={"NO_COLOR": ""}))
    assert not COLOUR.search(on_a_terminal("check", runs, environment={"NO_COLOR": "1"}))


def test_a_strangers_command_gets_the_shared_options_and_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @click.option("-q", "shout", is_flag=True)
    def theirs(shout: bool) -> None:
        click.echo(f"shout {shout}")

    from mlhpc.suite.cli.options import add_shared

    command = add_shared(theirs)
    assert CliRunner().invoke(command, ["-q", "--no-color"]).output == "shout True\n"
    assert len(add_shared(command).params) == len(command.params), "added once"
