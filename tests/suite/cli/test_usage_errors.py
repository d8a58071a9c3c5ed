"""What is told to a person who types what another tool would take: the right form, in one line, with exit code 2.

`habits.tsv` is the kept table: tool, words after `mlhpc`, what the answer must say.
"""

import re
from pathlib import Path

import click
import msgspec
import pytest

from mlhpc.suite.cli.main import group
from mlhpc.suite.cli.options import PercentRange
from mlhpc.suite.cli.usage_errors import SIZES, SYSTEM_KEYS
from mlhpc.suite.config import list_setting_keys
from mlhpc.suite.descriptor import load_descriptors
from mlhpc.suite.launch.job import SystemFile
from mlhpc.suite.meanings import find_same_meaning, read_meanings
from tests.fixtures.cli import mlhpc
from tests.fixtures.wings import MISSING_COMMANDS, needs_all_wings

TABLE = [line.split("\t") for line in Path(__file__).with_name("habits.tsv").read_text().splitlines()]
FORMS = re.compile(r"--set ([\w.]+)=|(?:here it is|did you mean) '?(--?[\w-]+)|(?:mlhpc (\w+(?: \w+)*) has (--[\w-]+))")


def answer(words: list[str], place: Path) -> str:
    done = mlhpc(*words, cwd=place)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


@needs_all_wings
def test_the_kept_mistakes_are_answered_with_the_right_form(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    said = {words: answer(words.split(), tmp_path) for _, words, _ in TABLE}
    wrong = [(words, said[words]) for _, words, expected in TABLE if expected not in said[words]]
    assert len(TABLE) >= 150
    assert not wrong


@pytest.mark.parametrize("command", sorted({"run", "submit", "tune", "data generate", "score"} - MISSING_COMMANDS))
def test_what_is_named_for_any_known_word_exists(command: str, tmp_path: Path) -> None:
    """Each word of the table of meanings, on each command: no traceback, and no form that would be a mistake again."""
    keys, parts, context = set(list_setting_keys("cosmoflow")), command.split(), click.Context(group)
    found: click.Command | None = group
    for part in parts:
        assert isinstance(found, click.Group)
        found = found.get_command(context, part)
    assert found is not None
    own = {name for parameter in found.params for name in parameter.opts}
    words = sorted({word for line in read_meanings()["names"] for word in line.split()})[
        :: 1 if command == "run" else 4
    ]
    answered = 0
    for word in words:
        option = f"-{word}" if len(word) == 1 else f"--{word.replace('_', '-')}"
        if option in own:
            continue
        said = answer(
            [*parts, "cosmoflow", f"{option}=3"] if len(word) > 1 else [*parts, "cosmoflow", option, "3"], tmp_path
        )
        for key, here, _, _ in FORMS.findall(said):
            assert key in ("", "KEY", "max_epochs") or key in keys, said
            assert not here or here in own, said
        answered += not said.rstrip().endswith(f"; mlhpc help {command} has all")
    assert answered > 0.85 * len(words), (answered, len(words))


def test_a_word_in_capitals_stays_so_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """What an option does begins with a small letter there, but not an abbreviation or a name."""
    assert "(YAML card " in answer(["history", "add", "run", "--card", "x.yaml"], tmp_path)
    told = answer(["package", "run", "--verify=1"], tmp_path)
    assert re.search(r"it takes no value \([a-z]", told), told


def test_a_mistyped_word_means_what_it_does_without_the_slip() -> None:
    """Two letters of each longer word change places: at least nine of ten are still understood."""
    known, chosen, right = list(list_setting_keys("cosmoflow")), 0, 0
    for word in sorted({word for line in read_meanings()["names"] for word in line.split() if len(word) > 5}):
        if meant := find_same_meaning(word, known):
            middle = len(word) // 2
            typed = word[:middle] + word[middle + 1] + word[middle] + word[middle + 2 :]
            chosen, right = chosen + 1, right + (find_same_meaning(typed, known) == meant)
    assert chosen > 50
    assert right >= 0.9 * chosen


@needs_all_wings
def test_every_word_of_a_tool_has_an_answer(tmp_path: Path) -> None:
    for each in read_meanings()["tools"]:
        for word in each.get("options", "").split()[::6]:
            said = answer(["run", "cosmoflow", f"--{word}" if len(word) > 1 else f"-{word}"], tmp_path)
            assert said.startswith("mlhpc: no such option")
            assert not said.rstrip().endswith("mlhpc help run has all"), said
        for word in each.get("commands", "").split()[::6]:
            said = answer(
                word.split("-", 1) if word not in ("cherry-pick", "rev-parse", "ls-files") else [word], tmp_path
            )
            assert re.search("mlhpc|RUN", said.partition(": ")[2]), said


def test_runs_that_are_compared_with_themselves_are_said_to_be_the_same(tmp_path: Path) -> None:
    assert "are the same runs" in mlhpc("compare", ".", ".", cwd=tmp_path).stderr


def test_a_share_is_in_per_cent_with_or_without_its_sign() -> None:
    kind = PercentRange(0.1, 50)
    assert kind.convert("5%", None, None) == kind.convert("5", None, None) == 0.05
    assert kind.convert("0.5%", None, None) == 0.005
    assert PercentRange(0, fraction=False).convert("0", None, None) == 0
    with pytest.raises(click.BadParameter, match="write 5% or 0.05%"):
        kind.convert("0.05", None, None)


def test_the_value_says_what_an_option_of_any_name_means(tmp_path: Path) -> None:
    """Each kind of setting, in each form in which other tools pass settings, by options of any name."""
    keys = [key for key in list_setting_keys("cosmoflow") if not key.startswith("tuned")]
    assert len(keys) > 30
    for at, key in enumerate(keys[::7]):
        last = key.rpartition(".")[2]
        for option, value in (
            (f"--{'xyzq'[at % 4]}{at}", f"{key}=3"),
            ("-P", f"{key}=3"),
            ("--extra-vars", '{"a": 3}'.replace('"a"', f'"{key}"')),
            ("--model-args", f"{last}=3,max_epochs=2"),
        ):
            said = answer(["run", "cosmoflow", option, value], tmp_path)
            assert f"--set {key}=3" in said or find_same_meaning(last, keys) != key, said
            assert ("--set max_epochs=2" in said) == ("max_epochs" in value or key == "max_epochs" == 2), said
    assert "OMP_X=3 mlhpc run" in answer(["run", "cosmoflow", "--q", "OMP_X=3"], tmp_path)
    assert "site.environment: {OMP_X: 3}" in answer(["submit", "cosmoflow", "--q", "ALL,OMP_X=3"], tmp_path)
    assert "mlhpc tune" in answer(["run", "cosmoflow", "--q", "max_epochs=1,2"], tmp_path)
    for each in load_descriptors():
        assert f"mlhpc run {each}" in answer(["run", "--q", f"deepcam,{each}"], tmp_path)
        assert "'/a:/b' is no workload" in answer(["run", "/a:/b", each], tmp_path)


@needs_all_wings
def test_commands_of_other_tools_lead_to_one_that_exists(tmp_path: Path) -> None:
    for path, words in read_meanings()["commands"].items():
        for word in words.split():
            if word not in group.list_commands(click.Context(group)) and not word.startswith("-"):
                assert re.search(r"mlhpc|did you mean", answer([word], tmp_path).partition("unknown")[2]), (path, word)


def test_keys_of_system_files_and_sizes_are_those_that_exist() -> None:
    for block, _, key in (each.partition(".") for each in SYSTEM_KEYS):
        assert key in msgspec.structs.asdict(getattr(SystemFile(name="x"), block))
    assert set(SIZES) <= {size for each in load_descriptors().values() for size in each.card().sizes}
