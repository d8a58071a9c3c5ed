"""Reading of files that a person, or a stranger, wrote."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct, ValidationError

from mlhpc.suite import files
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.documents import LARGEST_YAML, Mistake, YamlSource, convert, find_mistake, parse_yaml
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import TrackedFolder, render_duration_range
from mlhpc.suite.training.parallel.plan import ParallelPlan
from tests.fixtures.cli import mlhpc

ROOT = Path(files.__file__).parents[1]


DEEP = {
    "lists": "[" * 2**13,
    "lists and mappings": "{[" * 40_000,
    "dashes": "- " * 2**12,
    "longer": "a: " + "[" * 2**13,
    "closed": "a: " + "[" * 600 + "]" * 600,
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_yaml_text_of_brackets_is_an_error_and_ends_no_process(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(InputError, match="not valid YAML|expected a mapping"):
        YamlSource.read(path)


@pytest.mark.parametrize("text", ["a: " + "[" * 90 + "]" * 90, "a: 1 # " + "[{" * 200, "a: [" + "[1], " * 2000 + "]"])
def test_a_yaml_text_of_some_brackets_is_read(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "some.yaml").write_text(text)
    assert YamlSource.read(path).data.keys() == {"a"}


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
@pytest.mark.parametrize(
    "read",
    [
        YamlSource.read,
        lambda path: list(pytest.importorskip("mlhpc.plugins.fleet.samples").read_table(path, ["worker"])),
        lambda path: pytest.importorskip("mlhpc.plugins.exchange.counters").read("ncu", path),
        lambda path: files.read_json(path, 9),
    ],
    ids=["YAML", "table", "counters", "JSON"],
)
def test_what_never_ends_is_not_read(
    tmp_path: Path, read: Callable[[Path], object], make: Callable[[Path], object]
) -> None:
    make(path := tmp_path / "given")
    signal.alarm(60)  # ends a test that waits for ever
    try:
        with pytest.raises((InputError, OSError), match="neither a file nor a folder|directory") as caught:
            read(path)
    finally:
        signal.alarm(0)
    assert str(path) in str(caught.value)


def test_a_pipe_of_the_shell_is_read(tmp_path: Path) -> None:
    command = 'sleep 0.3; echo "a: 1"'
    program = "import sys; from pathlib import Path; from mlhpc.suite.documents import YamlSource; " + (
        "print(YamlSource.read(Path(sys.argv[1])).data)"
    )
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{program}" <({command})'], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "{'a': 1}\n", done.stderr


@pytest.mark.parametrize(
    ("text", "said"), [("[1" + "0" * 4400 + "]", "4,300 digits"), ('["x\\ud800"]', "half of a character")]
)
def test_what_python_refuses_in_json_is_told_in_words_for_people(tmp_path: Path, text: str, said: str) -> None:
    (path := tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        files.read_json(path, 10**5)
    assert "sys." not in str(caught.value)
    assert "codec" not in str(caught.value)


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (path := tmp_path / "x.json").write_text('["\\ud83d\\ude00"]')
    assert files.read_json(path, 99) == ["\N{GRINNING FACE}"]


def test_a_long_number_in_yaml_is_told_in_words_for_people(tmp_path: Path) -> None:
    (path := tmp_path / "x.yaml").write_text(f"a: 1{'0' * 4400}\n")
    with pytest.raises(InputError, match=r"a number has more than 4,300 digits$"):
        YamlSource.read(path)


def test_a_large_yaml_file_is_not_parsed(tmp_path: Path) -> None:
    (path := tmp_path / "large.yaml").write_text("a: 1\n" + "#" * LARGEST_YAML)
    with pytest.raises(InputError, match=r"large.yaml: is larger than 4 MiB, the most"):
        YamlSource.read(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("parameters: {b: {split: -1}}", "3: parameters.b.split = -1: "),
        ("parameters: {b: {much: 2}}", "3: unknown key 'much'"),
        ("parameters: {b: often}", "3: parameters.b = 'often': "),
        ("recompute: {blocks.*: often}", "4: recompute.blocks.* = 'often': "),
        ("recompute: {blocks.*: {budget: 0.5}}", "4: recompute.blocks.* = {'budget': 0.5}: "),
        ("recompute: {blocks.*: [full]}", "4: recompute.blocks.* = ['full']: "),
        ("recompute: [full]", "4: recompute = ['full']: "),
        ("split: [d, 3]", "4: split.1 = 3: "),
        ("meshes: 2", "4: unknown key 'meshes'"),
    ],
)
def test_a_key_is_named_as_the_file_states_it(tmp_path: Path, line: str, says: str) -> None:
    """Not by the kind of value that was tried."""
    rest = "" if line.startswith("parameters") else "parameters: {a: replicate}\n"
    (path := tmp_path / "plan.yaml").write_text(f"version: 1\ndescription: d\n{rest}{line}\n")
    source = YamlSource.read(path)
    with pytest.raises(InputError) as caught:
        source.convert(ParallelPlan)
    assert str(caught.value).startswith(f"{path}:{says}")


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    runs: Annotated[int, Meta(ge=1)]
    root: Path | None = None
    kind: Literal["a", "b"] = "a"


class Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1] = 1
    sizes: dict[str, Part] = {}
    parts: tuple[Part, ...] = ()
    counts: Mapping[int, tuple[float, float] | None] = {}
    one: Part = Part(runs=1)


@pytest.mark.parametrize(
    ("data", "key", "text"),
    [
        ({"sizes": {"a": {"runs": 1}, "b.c": {"runs": 0}}}, "sizes|b.c|runs", "sizes.b.c.runs = 0: expected int >= 1"),
        ({"sizes": {"a": {}}}, "sizes|a", "missing key 'sizes.a.runs'"),
        ({"sizes": {"a": {"runs": 1, "root": 3}}}, "sizes|a|root", "sizes.a.root = 3: expected a path, got int"),
        ({"parts": [{"runs": 1}, {"runs": True}]}, "parts|1|runs", "parts.1.runs = True: expected int, got bool"),
        (
            {"parts": [{"run": 1}]},
            "parts|0|run",
            "unknown key 'run'; did you mean 'runs'? valid keys: kind, root, runs",
        ),
        ({"counts": {1: [1, 2], 2: [1]}}, "counts|2", "counts.2 = [1]: expected a list of length 2, got 1"),
        ({"counts": {"x": None}}, "counts|x", "counts.x: expected int, got str as the key"),
        ({3: 4}, "3", "3: expected str as the key"),
        ({"one": {"runs": 1, "kind": "c"}}, "one|kind", "one.kind = 'c': expected one of 'a', 'b'"),
        ({"one": 7}, "one", "one = 7: expected a mapping, got int"),
        (
            {"runs": 1},
            "runs",
            "unknown key 'runs'; did you mean 'one.runs'? valid keys: counts, one, parts, sizes, version",
        ),
        ([], "", "[]: expected a mapping, got a list"),
    ],
)
def test_a_mistake_is_found_by_its_key_with_value_and_what_was_expected(data: Any, key: str, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        convert(data, Document)
    assert find_mistake(data, Document, caught.value) == Mistake(tuple(key.split("|")) if key else (), text)


def test_a_power_of_ten_is_a_number_and_in_quotes_a_text() -> None:
    assert parse_yaml("[1e-3, 1.5E3, 2e+1, 1e, '1e-3', e5, 1e1234]") == [
        0.001,
        1500.0,
        20.0,
        "1e",
        "1e-3",
        "e5",
        "1e1234",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.01234, "0.0123 s"),
        (9.41868, "9.42 s"),
        (119.4, "119 s"),
        (120.0, "2 min"),
        (7199.0, "120 min"),
        (7200.0, "2 h"),
        (4.4e6, "1,222 h"),
        (-300.0, "-5 min"),
        (float("nan"), "not known"),
    ],
)
def test_a_duration_has_three_digits_in_the_unit_that_a_person_expects(seconds: float, text: str) -> None:
    assert files.render_duration(seconds) == text


def test_no_text_renders_a_time_in_its_own_way() -> None:
    """Seconds, minutes and hours are rendered by `render_duration` alone; tables of figures have their own units."""
    own = re.compile(r"\{[^{}]+:[,.\d>]*[gf]?\} ?(?:s|min|h)\b(?!\))")
    places = [path for room in ("suite", "analysis", "workloads", "plugins") for path in (ROOT / room).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in places
        if "figures" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if own.search(line)
    ]
    assert found == [], "use mlhpc.suite.files.render_duration"


def test_a_user_without_a_home_has_one_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user without HOME whom /etc/passwd does not name: Altair fails to be imported there."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", "")  # so that it is removed again
    monkeypatch.delenv("HOME")
    with pytest.raises(RuntimeError):
        Path.home()
    files.set_missing_home()
    assert Path.home().parent == tmp_path
    monkeypatch.setenv("HOME", "/home/me")
    files.set_missing_home()
    assert Path.home() == Path("/home/me")


def list_tildes(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith("~")]


WAYS = {
    "an option with its value in one word": ["data", "generate", "moe_lm", "--size", "smoke", "--output={}"],
    "an option's own word": ["data", "generate", "moe_lm", "--size", "smoke", "-o", "{}"],
    "a short option with its value": ["data", "generate", "moe_lm", "--size", "smoke", "-o{}"],
    "a setting": ["run", "cosmoflow", "--size", "smoke", "--set", "data={}", "-o", "run"],
    "a mapping of settings": ["run", "cosmoflow", "--size", "smoke", "--set", "staging={{directory: {}}}", "-o", "run"],
    "a file of settings": ["run", "cosmoflow", "--config", "own.yaml", "-o", "run"],
    "a variable": ["data", "generate", "moe_lm", "--size", "smoke"],
    "a system file": ["submit", "cosmoflow", "--system", "own.yaml", "--nodes", "1", "--dry-run"],
}


@pytest.mark.parametrize("words", WAYS.values(), ids=WAYS)
def test_a_path_below_an_unknown_home_is_refused_in_one_line(words: list[str], tmp_path: Path) -> None:
    wrong = "~nobody-has-this-name/place"
    kind = f"name: n\nsite: {{scratch: {wrong}}}\n" if "submit" in words else f"workload: cosmoflow\ndata: {wrong}\n"
    (tmp_path / "own.yaml").write_text(kind)
    variables = {"MLHPC_DATA": wrong} if not any("{}" in word or "own.yaml" in word for word in words) else {}
    done = mlhpc(*(word.format(wrong) for word in words), cwd=tmp_path, environment={**os.environ, **variables})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"{wrong}: there is no user nobody-has-this-name" in done.stderr
    assert not list_tildes(tmp_path)


@pytest.mark.parametrize("way", ["an option with its value in one word", "a short option with its value", "a variable"])
def test_a_path_below_the_home_is_made_there(way: str, tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    place = "~/d" if way != "a variable" else "~"
    environment = {**os.environ, "HOME": str(home), "MLHPC_DATA": place if way == "a variable" else ""}
    done = mlhpc(*(word.format(place) for word in WAYS[way]), cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert [path.parent for path in home.rglob("manifest.json")] == [home / ("d" if place == "~/d" else "moe_lm-smoke")]
    assert not list_tildes(tmp_path)


@pytest.mark.parametrize("home", ["", "~", "relative", "/h"])
@pytest.mark.parametrize("rest", ["", "/", "/x", "/x/~/y", "name", "root/x", "nobody-has-this-name/x"])
def test_an_expanded_path_is_absolute_or_a_plain_name(home: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    own = rest[:1] in ("", "/")
    if (own and home not in ("", "/h")) or rest.startswith("nobody"):
        with pytest.raises(InputError, match=f"^~{rest}: there is no "):
            files.expand_home(f"~{rest}")
        return
    found = files.expand_home(f"~{rest}")
    assert found.startswith("/") or "/" not in rest
    assert not own or Path(found) == Path(f"{home}{rest}" or "/")


def test_words_of_another_program_and_texts_keep_their_tilde() -> None:
    words = ["run", "--set", "hyperparameters.a=~/x", "b~/c", "-", "--", "--out=~/x", "~/y"]
    assert files.expand_home_in_words(words) == words


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ((17, 0, 100, 90), "no free inodes (df -i)"),
        ((17, 1, 100, 90), "no free inodes (df -i)"),  # that of a file which failed and was removed
        ((17, 0, 100, 0), "disk full"),
        ((17, 12, 100, 1), "disk full"),
        ((10**6, 5000, 10**6, 10), "disk full"),
        ((10**6, 0, 10**6, 10**5), "no free inodes (df -i)"),
        ((0, 0, 100, 0), "disk full"),  # btrfs states no number
    ],
)
def test_what_a_file_system_lacks_is_told(
    state: tuple[int, int, int, int], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("f_files", "f_favail", "f_blocks", "f_bavail")
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(**dict(zip(names, state, strict=True))))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "a" / "b"))
    assert files.render_reason(error) == reason
    assert files.render_error(error) == f"{tmp_path / 'a' / 'b'}: {reason}"
    assert files.render_reason(OSError(errno.ENOSPC, "words of ours", str(tmp_path))) == "words of ours"


def test_a_limit_of_this_shell_and_a_quota_are_told(tmp_path: Path) -> None:
    program = """if True:
    import errno, os, resource, sys
    from pathlib import Path
    from mlhpc.suite.files import render_error, render_reason, write_file_atomically
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try: write_file_atomically(Path("large"), "x" * 10000)
    except OSError as error: print(render_error(error))
    print(render_reason(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "x")))"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        "large: larger than this shell's file size limit (ulimit -f)",
        "quota exceeded",
    ], done.stderr


# Who may tell an error's own words: of reading, of other things than files, and what another module would import
OWN_WORDS = {
    "suite/files.py",
    "suite/errors.py",
    "suite/world.py",
    "suite/documents.py",
    "suite/training/instrument.py",
    "suite/training/session.py",
    "suite/compliance/package_files.py",
    "suite/machine/power/counters.py",
}


def test_what_cannot_be_written_is_told_by_one_function() -> None:
    """Python's words for a full disk do not say what is full."""
    told = {
        str(path.relative_to(ROOT))
        for top in ("suite", "plugins", "workloads")
        for path in (ROOT / top).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"(?<!os)\.strerror", line) and "cannot be read" not in line
    }
    assert told == OWN_WORDS


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("target", ["victim", "nowhere", "laid", "/dev/full"])
def test_a_link_in_a_folder_of_outputs_is_refused(tmp_path: Path, target: str, overwrite: bool) -> None:
    (tmp_path / "victim").write_text("mine")
    path = tmp_path / "laid"
    path.symlink_to(target)
    with pytest.raises(InputError, match=r"laid: is a link, which is not followed; remove it, or choose another"):
        files.write_file_of_folder(path, "other", overwrite=overwrite)
    assert (tmp_path / "victim").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["laid", "victim"]
    path.unlink()
    files.write_file_of_folder(path, "other", overwrite=overwrite)
    assert path.read_text() == "other"


@pytest.mark.parametrize("fate", ["moved", "moved up", "parent moved", "removed"])
def test_a_folder_that_left_its_place_is_found_by_the_kernel(fate: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    tracked = TrackedFolder(folder)
    assert tracked.find() == folder
    places = {"moved": "runs/b", "moved up": "b", "parent moved": "old/a", "removed": ""}
    if fate == "removed":
        folder.rmdir()
    elif fate == "parent moved":
        folder.parent.rename(tmp_path / "old")
    else:
        folder.rename(tmp_path / places[fate])
    now = tmp_path / places[fate] if places[fate] else None
    assert tracked.find() == now
    assert tracked.describe_loss() == (
        f"was moved to {now} while it was used" if now else "was removed while it was used"
    )
    tracked.close()
    tracked.close()
    assert tracked.find() is None
    assert TrackedFolder(tmp_path / "none").find() is None


@pytest.mark.parametrize("fate", ["moved", "removed"])
def test_the_holder_of_a_lock_says_what_became_of_its_folder(
    fate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with create_lock(folder / "trial_0.lock", "trial 0") as lease:
        if fate == "moved":
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        lease.check()
        assert lease.lost
    where = f"was moved to {tmp_path / 'elsewhere'}" if fate == "moved" else "was removed"
    assert capsys.readouterr().err == f"mlhpc: warning: {folder}: {where} while it was used\n"


def test_a_range_has_the_unit_of_what_it_stands_beside() -> None:
    assert render_duration_range(94.0, 123.0) == "1.57 to 2.05 min"
    assert render_duration_range(94.0, 123.0, like_s=109.0) == "94 to 123 s"
    assert render_duration_range(94.0, 123.0, like_s=121.0) == "1.57 to 2.05 min"
