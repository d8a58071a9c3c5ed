"""Says what lies at a path that a command did not take: which kind of folder or file it is, and what to do with it."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from glob import glob
from itertools import islice
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import explain_link, quote_path, show_path

# A message about the kind of a path, not about what is wrong inside
_KIND = re.compile(
    r"\bnot an? |\bno \w+ (?:below|under|here)|\bno (?:data set|run folder|search)\b|"
    r"\bexpected (?:an? |the |run |logs|results|JSON|YAML)|"
    r"[Ii]s a directory|nothing to |does not exist|missing key|unknown key|unknown system|has no|cannot be read"
)
_OPTION = re.compile(r"(?:--?[\w-]+ |unknown system )?'?")
_PLACE = re.compile(r"(?:--?[\w-]+ |unknown system )?'?(?P<path>[^:'\n]+?)'?(?:(?::\d+)?[:;,] | is a directory)")
# File of a folder: the kind of the folder, and what to do
FOLDERS = {
    "run.json": "run folder: {path}/result_0.txt is a log of it, mlhpc package makes a package of it",
    "manifest.json": "data set: runs read it from the folder above, which MLHPC_DATA may name",
    "contest.yaml": "contest: mlhpc ab runs show {path}",
    "tune.json": "search of mlhpc tune: --from {path} takes it",
    "ab.json": "comparison of mlhpc ab steps: its result is {path}/ab.json",
    "report.html": "report: give the run folders or packages that it was made from",
    "reproduction.json": "verdict of mlhpc reproduce: give the package or its runs/",
    "pyproject.toml": "Python package: install it with pip",
    "results": "package: mlhpc check, score, compare, report and reproduce take it",
}
# How a file begins: its kind, and what to do
FILES = {
    r":::MLLOG .*loadgen_version": "log of LoadGen: it belongs to MLPerf Inference, for which this suite has no rules",
    r":::MLLOG": "log of a run: the run folder is {parent}",
    r"\s*$": "empty file: was it copied or written in part?",
    r"(PK\x03\x04|\x1f\x8b|BZh|\xfd7zXZ)": "packed file: unpack it first, and give the folder",
    r"(?s).*^waivers:": "waiver file: mlhpc check PATH --waive {path}",
    r"(?s).*^(resources|site|kind):": "system file: --system {path}",
    r"(?s).*^workload:.*^(title|sizes|mlperf_name):": "card: --card {path}",
    r"(?s).*^(global_batch_size|hyperparameters|max_epochs):": "file of settings: --config {path}",
}
_BEGINNING = 2000  # bytes of a file that tell its kind
_SHOWN = 3
_ALIKE = 0.75
_PLACES = ("data", "runs", "packages", "submissions")  # folders that hold what commands write


# How a path looks that is none: what it is, and what to do. {0} is the path, {1} the machine
_FORMS: tuple[tuple[str, str], ...] = (
    (r"(?i)(?:https?|s?ftp|gsiftp|ssh|git|hf|s3|gs|az|doi):/|[a-z][a-z0-9+.-]+://", "an address: download it first"),
    (r"[\w.-]+@([\w.-]+):.", "a place on {1}: copy it here first, as with: rsync -a {0} . (git clone {0})"),
    (r"([\w.-]{2,}):[./~]", "a place on {1}: copy it here first, as with: rsync -a {0} ."),
    (r"(?i)[a-z]:[\\/]|[^/]*\\", "written as on Windows: folders are separated by /"),
    (r".*[<>{}]|.*\.\.\.|.*…", "a placeholder: put the real name in its place"),
)
_FILE = re.compile(r"(?i)file:/+")
_VARIABLE = re.compile(r"\$\{(\w+)[^}/]*\}|\$([A-Za-z_]\w*)|%(\w+)%|\$\(|`")
_QUOTES = "'\"`´‘’“”„«»"
_NAMES = {"\r": "a carriage return (line ends of Windows)", "\n": "a line end", "\t": "a tab", " ": "a blank"}


def add_kind(message: str) -> str:
    """Return the message of an error with what lies at the path that it begins with, if that explains the error."""
    found = _find_place(message)
    if found is None or not _KIND.search(message):
        return message
    given, begin, rest = found
    path = Path(given)
    if not os.path.exists(path) and (path.name not in FOLDERS or not path.parent.is_dir()):  # noqa: PTH110  no error for a name that is too long
        message = message if show_path(given) == given else f"{begin}{show_path(given)}{rest}"
        said = "did you mean" in message or not re.search("does not exist|No such file", message)
        return message if said or " is a link to " in message else f"{message}; {explain_absent(given)}".rstrip("; ")
    # A file below what was given is of the right kind: something is wrong within it
    if path.is_file() and not any(path.name in word for word in sys.argv):
        return message
    try:
        what = _describe(path if path.exists() else path.parent)
    except OSError:  # not ours to read
        return message
    kind = what.partition(":")[0]
    # The mistake lies within a file of the right kind
    right = "did you mean" in message or not set(re.findall(r"--\w+", what)).isdisjoint(sys.argv)
    if not what or right or re.search(rf"(?<!not ){kind}\b", message):
        return message
    return f"{message}; {'it' if path.exists() else path.parent} is {what}"


def _find_place(message: str) -> tuple[str, str, str] | None:
    """Return the path that a message begins with as it was given, what stands before it, and the rest of the message.

    A word of the command line may have any character. In a message of one line its white space is a blank.
    """
    begin = _OPTION.match(message)
    assert begin is not None
    said = message[begin.end() :]
    words = {part for word in sys.argv[1:] for part in (word, word.partition("=")[2], word[2:]) if part}
    forms = {form: word for word in words for form in (word, " ".join(word.split()), str(Path(word)))}
    for form in sorted(forms, key=len, reverse=True):
        if form and said.startswith(form) and re.match(r"'?[:;,] ", said[len(form) :]):
            return forms[form], begin[0].rstrip("'"), said[len(form) :].removeprefix("'")
    found = _PLACE.match(message)
    return None if found is None else (found["path"], message[: found.start("path")], message[found.end("path") :])


def explain_absent(given: str) -> str:
    """Return why a path does not exist: a link on the way, its form, or a name like it. "" if nothing is known."""
    return find_oddity(given) or _find_like(Path(given))


def find_oddity(given: str) -> str:
    """Return what is odd about a path that does not exist, and the right form if it is known. "" for a usual one."""
    path = Path(given)
    if link := explain_link(path):
        return link
    if file := next((each for each in path.parents if each.is_file()), None):
        return f"{show_path(file)} is a file, not a folder"
    if odd := [char for char in given if not char.isprintable()] or [
        char for char in (given[0], given[-1]) if char == " "
    ]:
        if "\udc80" <= odd[0] <= "\udcff":
            return f"this shell's locale has no such character ({os.fsencode(given)!r}): LC_ALL=C.UTF-8 mlhpc …"
        plain = "".join(char for char in given if char.isprintable()).strip()
        where = "at its end" if given.endswith(odd[0]) else "in it"
        return f"it has {_NAMES.get(odd[0], f'the character {odd[0]!r}')} {where}{_ask(plain)}"
    if given[0] in _QUOTES or given[-1] in _QUOTES:
        return f"a quotation mark is a part of it{_ask(given.strip(_QUOTES))}"
    there = next((str(each) for each in path.parents if each.exists()), "")
    place = len(there) if given.startswith(there) else 0  # a folder that is there may have any name
    if found := _VARIABLE.search(given, place):
        name = found[1] or found[2] or found[3]
        state = "" if name is None else f"; {name} is {'not set' if name not in os.environ else repr(os.environ[name])}"
        return f"no shell replaced {found[0]}: quotes keep it from that{state}{_ask(os.path.expandvars(given))}"
    if address := _FILE.match(given):
        return f"it is an address: give its path alone{_ask(f'/{given[address.end() :]}')}"
    for form, what in _FORMS:
        if match := re.match(form, given):
            return f"it is {what.format(quote_path(given), *match.groups())}"
    for mark, how in ((os.pathsep, "give one"), (",", "separate paths by blanks")):
        parts = [part for part in given.split(mark) if part]
        known = [os.path.exists(part) for part in parts]  # noqa: PTH110
        if len(parts) > 1 and (any(known) or all(part.startswith("/") for part in parts)):
            return f"it is a list of {len(parts)} paths: {how}"
    if re.search(r"[*?[]", given[place:]):
        matches = sorted(glob(given))  # noqa: PTH207  a pattern with a root has no Path
        shown = f"; it stands for {', '.join(matches[:_SHOWN])}{' …' * (len(matches) > _SHOWN)}" if matches else ""
        return f"it is a pattern that no shell replaced: write it without quotes{shown}"
    return ""


def _ask(right: str) -> str:
    return f"; did you mean {right}?" if right and os.path.exists(right) else ""  # noqa: PTH110


def refuse_odd(path: Path | str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise InputError for a path that does not exist and that nobody can mean: no command may make a folder of it.

    A path below a variable that names a place is the variable's.
    """
    given, source = str(path), ""
    for name in PLACE_VARIABLES:
        if (value := environ.get(name, "")) and Path(given).is_relative_to(value):
            given, source = value, f"{name}="
    if os.path.exists(given):  # noqa: PTH110
        if not source or Path(given).is_dir():
            return
        raise InputError(f"{source}{given}: it is a file; expected a folder")
    if odd := find_oddity(given):
        shown = repr(given) if source and show_path(given) == given else show_path(given)
        raise InputError(f"{source}{shown}: {odd}")


PLACE_VARIABLES = ("MLHPC_DATA",)


def _find_like(path: Path) -> str:
    """Return which path is spelled like one that does not exist, else what lies in the nearest folder that does."""
    above = next(each for each in path.absolute().parents if each.is_dir())
    above = Path() if above == Path.cwd() else above if path.is_absolute() else Path(os.path.relpath(above))
    absent = path.absolute().relative_to(above.absolute()).parts[0]
    try:
        names = sorted(each.name for each in above.iterdir() if each.exists())  # a link to nothing helps nobody
    except OSError:
        return ""
    if near := difflib.get_close_matches(absent, names, 1, _ALIKE):
        return f"did you mean {above / near[0]}?"
    if below := list(islice(_find_below(above, _PLACES), _SHOWN)):
        return f"here are {', '.join(below)}"
    if names:
        return ""
    return f"{'this folder' if above == Path() else above} is empty"


def _describe(path: Path) -> str:
    """Return what a folder or file is, with its article. "" if this is not known."""
    if path == Path() or path.is_fifo():
        return ""
    if path.is_dir():
        what = next((text for name, text in FOLDERS.items() if (path / name).exists()), "") or _list_below(path)
    else:
        with path.open("rb") as file:
            begin = file.read(_BEGINNING).decode("latin-1")
        what = next((text for form, text in FILES.items() if re.match(form, begin, re.MULTILINE)), "")
        if not what and (path.parent / "run.json").exists():
            what = "file of the run folder {parent}"
    return f"a{'n' * (what[0] in 'aeiou')} {what.format(path=path, parent=path.parent)}" if what else ""


def _list_below(path: Path) -> str:
    """Return that a folder is empty, or which folders of a known kind it holds. "" if it holds others alone."""
    if next(path.iterdir(), None) is None:
        return "empty folder"
    if below := list(islice(_find_below(path), _SHOWN)):
        return f"folder above {', '.join(below)}"
    if files := sorted(map(str, path.glob("*.y*ml")))[:_SHOWN]:
        return f"folder with the files {', '.join(files)}"
    return ""


def _find_below(path: Path, inside: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the folders of a known kind below a path, and below its folders with the names ``inside``."""
    for place in sorted(path.iterdir()):
        if place.is_dir() and is_of_known_kind(place):
            yield str(place)
        elif place.is_dir() and place.name in inside:
            yield from _find_below(place)


def is_of_known_kind(folder: Path) -> bool:
    """Return True for a folder that a command wrote: a run folder, a data set, a package ..."""
    return any((folder / name).exists() for name in FOLDERS)
