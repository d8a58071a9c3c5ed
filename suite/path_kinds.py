"""Says what lies at a path that a command did not take: which kind of folder or file it is, and what to do with it."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

# A message about the kind of a path, not about what is wrong inside
_KIND = re.compile(
    r"\bnot an? |\bno \w+ (?:below|under|here)|\bno (?:data set|run folder|search)\b|"
    r"\bexpected (?:an? |the |run |logs|results|JSON|YAML)|"
    r"[Ii]s a directory|nothing to |does not exist|missing key|unknown key|unknown system|has no|cannot be read"
)
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


def add_kind(message: str) -> str:
    """Return the message of an error with what lies at the path that it begins with, if that explains the error."""
    found = _PLACE.match(message)
    if found is None or not _KIND.search(message):
        return message
    path = Path(found["path"])
    if not path.exists() and path.name not in FOLDERS:
        said = "did you mean" in message or not re.search("does not exist|No such file", message)
        return message if said else f"{message}{_find_like(path)}"
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


def _find_like(path: Path) -> str:
    """Return which path is spelled like one that does not exist, else what lies in the nearest folder that does."""
    above = next(each for each in path.absolute().parents if each.is_dir())
    above = Path() if above == Path.cwd() else above if path.is_absolute() else Path(os.path.relpath(above))
    absent = path.absolute().relative_to(above.absolute()).parts[0]
    try:
        names = sorted(each.name for each in above.iterdir())
    except OSError:
        return ""
    if near := difflib.get_close_matches(absent, names, 1, _ALIKE):
        return f"; did you mean {above / near[0]}?"
    if below := list(islice(_find_below(above, _PLACES), _SHOWN)):
        return f"; here are {', '.join(below)}"
    if names:
        return ""
    return f"; {'this folder' if above == Path() else above} is empty"


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
