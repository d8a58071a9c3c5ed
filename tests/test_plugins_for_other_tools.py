"""The plug-ins for other tools name only what is there: commands, options, keys of figures (the tools: tests/reference)."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import click
import yaml

from mlhpc.suite.cli.main import group
from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.exchange.figures_of_merit import FOM_PATTERN, compute_figures_of_merit, render_lines
from mlhpc.suite.descriptor import load_descriptors
from tests.fixtures.logs import our_runs

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ROOT / "submissions" / "plugins"
JUBE_NUMBER = r"([+-]?(?:\d*\.?\d+(?:[eE][-+]?\d+)?|\d+\.))"  # what JUBE puts for $jube_pat_fp


def command(words: list[str]) -> click.Command:
    """The command that words begin with."""
    found: click.Command = group
    while isinstance(found, click.Group) and words:
        after = found.get_command(click.Context(found), words.pop(0))
        assert after is not None
        found = after
    return found


def check_call(text: str) -> None:
    """That the command of a line exists and has the options that the line gives it."""
    words = shlex.split(text)
    options = {spelling for each in command(words).params for spelling in each.opts}
    given = {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)}
    assert given <= options, (text, given - options)


def test_jube_calls_commands_that_exist_and_reads_lines_that_exist(tmp_path: Path) -> None:
    document: dict[str, Any] = yaml.safe_load((PLUGINS / "jube" / "mlhpc.yaml").read_text())
    calls = [each if isinstance(each, str) else each["_"] for step in document["step"] for each in step["do"]]
    ours = [call.partition("$mlhpc ")[2].partition(" > ")[0] for call in calls if "$mlhpc " in call]
    assert len(ours) == 5
    for call in ours:
        check_call(call)
    text = render_lines(check([our_runs(tmp_path)]).results)
    for pattern in document["patternset"]["pattern"]:
        assert re.search(pattern["_"].replace("$jube_pat_fp", JUBE_NUMBER), text, re.MULTILINE), pattern["name"]
    known = {each["name"] for each in (*document["patternset"]["pattern"], *document["parameterset"]["parameter"])}
    assert set(document["result"]["table"]["column"]) <= known


def test_ramble_calls_commands_that_exist_and_reads_lines_that_exist(tmp_path: Path) -> None:
    source = (PLUGINS / "ramble" / "applications" / "mlhpc" / "application.py").read_text()
    calls = re.findall(r"[\"']\{mlhpc\} ([^;\"']+)", source)
    assert len(calls) == 4
    for call in calls:
        check_call(call.replace("{", "").replace("}", ""))
    names = next(
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_names"
    )
    assert set(ast.literal_eval(names)) == set(load_descriptors())
    keys = {figure.key for figure in compute_figures_of_merit(check([our_runs(tmp_path)]).results[0])}
    stated = set(
        re.findall(r'"([a-z_]+)"', source[source.index("for _key, _unit in") : source.index("figure_of_merit(")])
    )
    parts = {"mean", "min", "max", "std", "s"}
    assert stated - parts <= keys
    assert {f"time_to_train_{part}" for part in parts - {"s"}} <= keys


def test_reframe_calls_commands_that_exist() -> None:
    source = (PLUGINS / "reframe" / "rfm_mlhpc.py").read_text()
    ast.parse(source)
    for call in ("run W --size S --set a=b --runs 5 --output run --trial 0", "data generate W --size S"):
        check_call(call)
    for call in re.findall(r"\{self\.program\} ([a-z]+ run[^;>\"']*)", source):
        check_call(call)
    assert "MLHPC_CHECK $?" in source


def test_the_page_has_the_expression_and_every_key(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "exchange.md").read_text()
    assert FOM_PATTERN in page
    example = re.search(r"^ +(MLHPC_FOM .*)$", page, re.MULTILINE)
    assert example is not None
    assert re.fullmatch(FOM_PATTERN, example[1])
    for mode in ("strong", "weak"):
        for figure in compute_figures_of_merit(check([our_runs(tmp_path / mode, mode=mode)]).results[0]):
            stem = re.sub(r"_(min|max|std)$", "_mean", figure.key) if "_" in figure.key else figure.key
            assert f"`{figure.key}`" in page or f"`{stem}`" in page, figure.key
