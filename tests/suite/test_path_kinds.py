"""What lies at a path that a command did not take is said, with what to do; nothing is added where it would not help."""

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mlhpc.suite.cli.main import OUTPUTS, _explain, _run, group
from mlhpc.suite.cli.usage_errors import explain_usage
from mlhpc.suite.commands.status import read_rows
from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.data.build import find_data
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import explain_link, read_json
from mlhpc.suite.log.run_folder import create_run_folder
from mlhpc.suite.path_kinds import FOLDERS, add_kind
from mlhpc.suite.plugins import list_missing_wings
from tests.fixtures.wings import needs_all_wings

ERRORS = (
    "not a run folder (no run.json)",
    "no data set here",
    "no search here to resume",
    "is a directory, expected a file",
    "expected a folder with the files",
    "cannot be read: Is a directory",
    "no contest here (no contest.yaml)",
    "no result below it; expected results/",
)
BEGINNINGS = {
    ':::MLLOG {"key": "a"}\n': "log of a run",
    "\n": "empty file",
    "PK\x03\x04": "packed file",
    "# mine\nwaivers:\n- rule: x\n": "waiver file",
    "# mine\nname: a\nresources: {}\n": "system file",
    "workload: a\nglobal_batch_size: 4\n": "file of settings",
    "workload: a\ntitle: A\n": "card",
}


def numbers(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Option, click.Context]]:
    context = click.Context(command, info_name=" ".join(path))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (below := command.get_command(context, name)) is not None:
                yield from numbers(below, (*path, name))
    for option in command.params:
        if isinstance(option, click.Option) and isinstance(option.type, click.IntRange | click.FloatRange):
            yield " ".join(path), option, context


def test_a_path_that_does_not_exist_is_answered_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert add_kind("runs/a: does not exist") == "runs/a: does not exist; this folder is empty"
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "run.json").touch()
    for slip in ("frist", "fist", "firsts", "first2"):
        assert add_kind(f"runs/{slip}: does not exist") == f"runs/{slip}: does not exist; did you mean runs/first?"
        absolute = tmp_path / "runs" / slip / "result_0.txt"
        assert f"did you mean {tmp_path / 'runs' / 'first'}?" in add_kind(f"{absolute}: does not exist")
    assert add_kind("4711: does not exist; expected a run folder").endswith("; here are runs/first")
    assert add_kind("4711: no such option") == "4711: no such option"


ODD: tuple[tuple[str, str], ...] = (  # a path as it was written, and what is said of it
    ("{0}\r", "carriage return"),
    ("{0}\n", "a line end"),
    (" {0}", "a blank"),
    ("{0}\t", "a tab"),
    ("{0}\u00a0", r"the character '\xa0'"),
    ('"{0}"', "quotation mark"),
    ("{0}'", "quotation mark"),
    ("\u201c{0}\u201d", "quotation mark"),
    ("$BASE/it", "no shell replaced $BASE"),
    ("${{BASE}}/it", "no shell replaced ${BASE}"),
    ("file://{0}", "an address"),
)
STRANGE: tuple[tuple[str, str], ...] = (  # the same of what lies nowhere here
    ("https://example.org/a/results", "an address: download it first"),
    ("s3://bucket/runs", "an address"),
    ("login1:/scratch/runs/a", "a place on login1: copy it here first, as with: rsync -a login1:/scratch/runs/a ."),
    ("ada@login.site.org:runs", "a place on login.site.org"),
    ("git@github.com:acme/results.git", "git clone git@github.com:acme/results.git"),
    ("$UNSET_HERE/runs", "UNSET_HERE is not set"),
    ("$(pwd)/runs", "no shell replaced $("),
    ("C:\\\\runs\\\\a", "written as on Windows"),
    ("runs/<name>", "a placeholder"),
    ("/a:/b/c", "a list of 2 paths"),
    ("nothing/*", "a pattern that no shell replaced"),
)


@pytest.mark.parametrize(("form", "said"), [*ODD, *STRANGE])
def test_a_path_that_nobody_can_mean_is_said_to_be_what_it_is(
    form: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = tmp_path / "it"
    right.mkdir()
    monkeypatch.setenv("BASE", str(tmp_path))
    given = form.format(right) if (form, said) in ODD else form
    for words in (["score", given], ["run", "cosmoflow", "--size", "smoke", "-o", given]):
        monkeypatch.setattr(sys, "argv", ["mlhpc", *words])
        if words[0] == "run" and said.startswith(("a list", "a pattern")) and given == "nothing":
            continue
        assert _run() == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        assert said in text
        assert f"did you mean {right}?" in text or (form, said) in STRANGE or given.endswith("\r")
    assert list(tmp_path.iterdir()) == [right], "nothing was made under the odd name"
    monkeypatch.setenv("MLHPC_DATA", given)
    with pytest.raises(InputError) as caught:
        find_data(choose_default_data_root("cosmoflow", "smoke"), "cosmoflow", "smoke")
    assert str(caught.value).startswith(f"MLHPC_DATA={given!r}: ")
    assert said in str(caught.value)


def test_a_name_that_the_locale_does_not_know_is_answered_with_another_locale() -> None:
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "mlhpc", "run", "cosmoflow", "--size", "smoke", "-o", "\xf67"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert r"this shell's locale has no such character (b'\xc3\xb67'): LC_ALL=C.UTF-8 mlhpc" in done.stderr


@pytest.mark.parametrize("length", range(1, 4))
@pytest.mark.parametrize("loop", [True, False])
def test_a_link_that_leads_nowhere_is_named_with_its_end(
    length: int, loop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"link{number}" for number in range(length)]
    for name, target in zip(names, [*names[1:], names[0] if loop else "purged/run"], strict=True):
        Path(name).symlink_to(target)
    for given in (names[0], f"{names[0]}/run.json", f"./{names[0]}/a/b"):
        said = add_kind(f"{given}: does not exist; expected a run folder")
        assert f"{'it' if given == names[0] else names[0]} is a link to {Path(names[0]).readlink()}, which " in said
        assert ("leads back to it" in said) == loop
        assert "did you mean" not in said
    monkeypatch.setattr(sys, "argv", ["mlhpc", "status", "."])
    assert [row.note for row in read_rows([Path()])] == [explain_link(Path(name)) for name in names]
    if loop:
        with pytest.raises(InputError, match="cannot be created: it is a link to .* which leads back to it"):
            create_run_folder(Path(names[0]))
    # A person who leaves out a letter is sent to what exists, never to a link that leads nowhere
    assert "did you mean" not in add_kind("lin0: does not exist")


def test_a_data_set_half_made_is_called_so_with_the_command_that_goes_on(tmp_path: Path) -> None:
    for seed in (0, 7):
        (tmp_path / "generation.json").write_text(json.dumps({"name": "synthetic", "seed": seed}))
        with pytest.raises(
            InputError, match="unfinished data set; this goes on with it: mlhpc data generate"
        ) as caught:
            find_data(tmp_path, "cosmoflow", "smoke")
        assert str(caught.value).endswith(" --seed 7" if seed else f"-o {tmp_path}")
    (tmp_path / "generation.json").write_text(json.dumps({"name": "converted"}))
    with pytest.raises(InputError, match="the command that began it goes on"):
        find_data(tmp_path, "cosmoflow", "smoke")
    with pytest.raises(InputError, match="an unfinished data set"):
        read_manifest(tmp_path)


def test_a_misspelt_folder_of_data_sets_is_answered_with_the_one_that_exists(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    with pytest.raises(InputError, match=f"{tmp_path}/dataset does not exist, did you mean {tmp_path}/datasets?"):
        find_data(tmp_path / "dataset" / "cosmoflow-smoke", "cosmoflow", "smoke")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_kind_is_said_to_be_what_it_is(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    (folder / name).mkdir(parents=True)
    kind = FOLDERS[name].partition(":")[0]
    for error in ERRORS:
        for place in (f"{folder}", f"--from {folder}"):
            said = add_kind(f"{place}: {error}")
            assert said.startswith(f"{place}: {error}")
            assert kind in error or f"; it is a {kind}: " in said, said
    assert f"a folder above {folder}" in add_kind(f"{tmp_path}: not a run folder")


@pytest.mark.parametrize("text", BEGINNINGS)
def test_a_file_is_known_by_how_it_begins(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it").write_text(text)
    monkeypatch.setattr("sys.argv", ["mlhpc", "check", f"{tmp_path}/it"])
    assert BEGINNINGS[text] in add_kind(f"{tmp_path}/it: expected a data set")


def test_a_file_below_what_was_given_is_of_the_right_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("global_batch_size: 4\n")
    message = f"{path}:1: missing key 'workload'"
    monkeypatch.setattr(sys, "argv", ["mlhpc", "run", "moe_lm", "--output", str(tmp_path), "--resume"])
    assert add_kind(message) == message
    monkeypatch.setattr(sys, "argv", ["mlhpc", "submit", "moe_lm", "--system", str(path)])
    assert "file of settings" in add_kind(message)


def test_a_message_that_is_not_about_a_kind_of_path_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").touch()
    (tmp_path / "a.yaml").write_text("resources: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mlhpc", "submit", "--system", "a.yaml"])
    for text in (
        f"{tmp_path}: run 3 has another batch than run 0",
        "--mesh data:2: expected AXIS=N",
        "nothing here",
        "a.yaml:1: unknown key 'resource'; did you mean 'resources'?",
        "a.yaml:1: missing key 'name'",
        f"{tmp_path}/absent: expected a run folder",
    ):
        assert add_kind(text) == text


def test_each_number_with_a_unit_is_answered_with_what_the_option_means(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    for path, option, context in numbers(group):
        for text in ("16GB", "1.2kW", "3 s"):
            monkeypatch.setattr(sys, "argv", ["mlhpc", *path.split(), max(option.opts, key=len), text])
            try:
                option.type.convert(text, option, context)
            except click.BadParameter as error:
                if "not a valid" not in error.message:  # it has units of its own
                    continue
                said, asked = explain_usage(error, group), asked + 1
                assert f"'{text}': expected a " in said, said
                assert "number without a unit (" in said, said
    assert asked > (60 if list_missing_wings() else 150)


def test_a_json_file_that_ends_too_early_is_said_to(tmp_path: Path) -> None:
    path, text = tmp_path / "a.json", json.dumps({"a": [1, {"b": "cd"}], "e": None, "f": 1.5}, indent=1)
    for length in range(1, len(text) - 1):
        path.write_text(text[:length])
        with pytest.raises(ValueError, match=r"too early: copy it again|Expecting|delimiter"):
            read_json(path, 1000)
        if text[:length].rstrip()[-1] not in "}]":
            with pytest.raises(ValueError, match="too early"):
                read_json(path, 1000)
    path.write_text('{"a": 1,}')
    with pytest.raises(ValueError, match=r"^(?!.*too early)"):
        read_json(path, 1000)


@needs_all_wings
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("data verify run", "it is a run folder: run/result_0.txt is a log"),
        ("data describe data", "data is a folder above data/moe_lm-smoke"),
        ("score run/facts.json", "not a log (result_*.txt)"),
        ("offload simulate run", "it is a run folder"),
        ("report run --what-if run", "--what-if run: is a directory, expected a file; it is a run folder"),
        ("history check run", "run: not a history; expected a folder of records"),
        ("package p.zip -o x/y", "p.zip: is a file, expected a folder; it is a packed file"),
        ("check p.zip", "it is a packed file: unpack it first"),
        ("reproduce run --with data", "not a run folder (no result_*.txt)"),
        ("package run --system here --status onprem2", "'onprem2' is not one of 'cloud', 'onprem'"),
        ("run moe_lm --config list.yaml", "expected a mapping, found list; write lines KEY: VALUE"),
        ("tune moe_lm --size smoke --predict", "--predict needs --from PATH"),
        ("tune moe_lm --size smoke --resume -o run", "no search here to resume"),
        ("run moe_lm --config c.json", "rename it to NAME.yaml"),
        ("submit moe_lm --system slurm-two-node --nodes 1 --after 1,2 --dry-run", "expected one job"),
        ("ceilings --directory nowhere", "nowhere' does not exist"),
        ("preflight node --directory nowhere", "nowhere' does not exist"),
    ],
)
def test_a_command_says_what_it_was_given(
    words: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run/run.json", "run/facts.json", "data/moe_lm-smoke/manifest.json", "c.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    Path("p.zip").write_text("PK\x03\x04")
    Path("list.yaml").write_text("- a\n")
    monkeypatch.setattr(sys, "argv", ["mlhpc", *words.split()])
    assert _run() == 2
    said = capsys.readouterr().err
    assert expected in said
    assert len(said.splitlines()) == 1, said


def test_a_data_set_that_MLHPC_DATA_names_itself_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moe_lm-smoke").mkdir()
    (tmp_path / "moe_lm-smoke/manifest.json").write_text("{}")
    monkeypatch.setenv("MLHPC_DATA", str(tmp_path / "moe_lm-smoke"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mlhpc", "run", "moe_lm", "--size", "smoke", "--ranks", "1"])
    assert _run() == 2
    assert f"MLHPC_DATA names the folder above: MLHPC_DATA={tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["manifest.json", "train/shard_00000.h5", "train"])
@pytest.mark.parametrize("words", ["data verify {}", "run moe_lm --size smoke --set data={}"])
def test_a_part_of_a_data_set_is_told_with_the_folder_to_give(
    part: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "d"
    (whole / "train").mkdir(parents=True)
    for name in ("manifest.json", "train/shard_00000.h5"):
        (whole / name).write_text("{}")
    monkeypatch.setattr(sys, "argv", ["mlhpc", *words.format(whole / part).split()])
    assert _run() == 2
    said = capsys.readouterr().err
    assert f"{whole / part}: no data set, but in one: give {whole};" in said
    assert len(said.splitlines()) == 1


def test_a_current_folder_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in ("status", "plan moe_lm --size smoke", "run cosmoflow", "status relative"):
        monkeypatch.setattr(sys, "argv", ["mlhpc", *words.split()])
        assert _run() == 2
        assert capsys.readouterr().err == "mlhpc: the current folder was removed; go to one that exists: cd\n"


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_place_that_cannot_be_written_is_named_with_its_option(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mlhpc", "x", "a.csv", option, "/proc/x"])
    for number in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSPC):
        for file in ("/proc/x", "/proc/x/y"):
            said, _ = _explain(OSError(number, "why", file))
            assert said == f"{file}: why; choose another {option}"
        assert _explain(OSError(number, "why", "a.csv"))[0] == "a.csv: why"
    joined = f"{option}=/proc/x" if option.startswith("--") else f"{option}/proc/x"
    monkeypatch.setattr(sys, "argv", ["mlhpc", "x", joined])
    assert _explain(OSError(errno.EACCES, "why", "/proc/x/y"))[0] == f"/proc/x/y: why; choose another {option}"


@pytest.mark.parametrize("option", ["-o", "--output"])
def test_a_run_folder_that_another_may_not_write_is_continued_as_a_copy(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another folder there would be nothing to continue."""
    copy = "or continue a copy: cp -r '/a b/R' MINE && mlhpc run cosmoflow"
    for words in ([option, "/a b/R"], [f"{option}{'=' * option.startswith('--')}/a b/R"]):
        monkeypatch.setattr(sys, "argv", ["mlhpc", "run", "cosmoflow", *words, "--resume"])
        for number, first in ((errno.EACCES, "ask for write permission"), (errno.EROFS, "mend this")):
            said, _ = _explain(OSError(number, "why", "/a b/R/exit/trial_0"))
            assert said.startswith(f"/a b/R/exit/trial_0: why; {first}, {copy} ")
            assert said.endswith(" --resume")
            assert shlex.split(said.partition(" && ")[2])[3:-1] in (
                [option, "MINE"],
                [words[0].replace("/a b/R", "MINE")],
            )
