"""Card-only benchmarks: a card file that the user names is judged by as an installed one, and nobody's rules are replaced."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from msgspec import Struct, ValidationError
from msgspec.structs import fields

from mlhpc import suite
from mlhpc.suite.card import read_card, render_metric_value
from mlhpc.suite.descriptor import CARDS, describe_card, list_card_files, load_descriptor, load_descriptors, use_cards
from mlhpc.suite.documents import convert
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.run_folder import RunInfo
from mlhpc.suite.workload import load_workload
from tests.fixtures.cli import mlhpc
from tests.fixtures.runs import run_folder

COSMOFLOW = load_descriptor("cosmoflow").card_path
TARGET = load_descriptor("cosmoflow").card().size("smoke").threshold


def card_file(path: Path, *, name: str = "mine", drop: tuple[str, ...] = (), **changes: object) -> Path:
    """A card with the smoke size of CosmoFlow's under another name; ``changes`` and ``drop`` are of keys of the size."""
    data = yaml.safe_load(COSMOFLOW.read_text())
    size = data["sizes"]["smoke"] | changes
    for key in ("official", *drop):
        size.pop(key, None)
    path.write_text(yaml.safe_dump(data | {"workload": name, "mlperf_name": name, "sizes": {"smoke": size}}))
    return path


def renamed(folder: Path, name: str = "mine") -> Path:
    """A run folder of CosmoFlow whose logs and run.json have another benchmark's name."""
    run_folder(folder)
    config = folder / "config.yaml"
    before = compute_sha256(config)
    for path in (config, *folder.glob("result_*.txt"), folder / "run.json"):
        path.write_text(path.read_text().replace("cosmoflow", name).replace(before, compute_sha256(config)))
    return folder


def compute_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def card(tmp_path: Path) -> Path:
    return card_file(tmp_path / "mine.yaml")


@pytest.fixture(autouse=True)
def _no_card_is_left_over() -> Iterator[None]:
    yield
    assert CARDS not in os.environ


EVIL = (
    "../../../evil",
    "..",
    ".",
    "",
    "a/b",
    "/evil",
    "a\\b",
    "a\nb",
    "a\x1bb",
    "a\x00b",
    "ok\n",
    "-rf",
    " a",
    "a" * 101,
)


@pytest.mark.parametrize("key", ["workload", "mlperf_name", "sizes", "official"])
def test_a_name_that_is_no_part_of_a_path_is_refused_when_the_card_is_read(tmp_path: Path, key: str) -> None:
    whole = yaml.safe_load(COSMOFLOW.read_text())
    size = whole["sizes"]["smoke"] | {"official": whole["sizes"]["full"]["official"]}
    whole["sizes"] = {"smoke": size}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(whole))
    read_card(path)  # what is refused below is the name
    for name in EVIL:
        evil = {
            "sizes": {name: size},
            "official": {"smoke": size | {"official": size["official"] | {"benchmark": name}}},
        }
        path.write_text(yaml.safe_dump(whole | {"sizes" if key in evil else key: evil.get(key, name)}))
        with pytest.raises(InputError, match=r"c\.yaml") as refused:
            read_card(path)
        assert "expected letters, digits and _ . + - (it becomes a part of paths)" in str(refused.value)
        assert "\n" not in str(refused.value)
        assert not set("\x00\x1b") & set(str(refused.value))


def list_documents(kind: type[Struct] = Struct) -> Iterator[type[Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from list_documents(each)


def test_every_document_refuses_a_workload_or_size_that_is_no_part_of_a_path() -> None:
    """One that lies in a run folder, a data set or a search may come from anybody, as a card may."""
    for module in pkgutil.walk_packages(suite.__path__, "mlhpc.suite."):
        importlib.import_module(module.name)
    named = {
        (kind, each.name): each.type
        for kind in list_documents()
        if kind.__module__.startswith(("mlhpc.suite.", "mlhpc.plugins."))  # an index only looks names up
        for each in fields(kind)
        if each.name in ("workload", "size", "mlperf_name") and type(None) not in get_args(each.type)
    }
    assert {kind.__name__ for kind, _ in named} >= {"Card", "RunInfo", "RunConfig", "Manifest", "ReferencePoints"}
    for place, kind in {
        **named,
        (RunInfo, "suite_version"): get_type_hints(RunInfo, include_extras=True)["suite_version"],
    }.items():
        assert convert("mlhpc_1.0+g1", kind), place
        for name in EVIL:
            with pytest.raises(ValidationError):
                pytest.fail(f"{place}: {convert(name, kind)!r}")


def test_a_card_file_is_a_benchmark_without_code(card: Path) -> None:
    found = describe_card(card)
    assert (found.name, found.card_path, found.implementation) == ("mine", card, None)
    assert found.card().size("smoke").official is None
    with pytest.raises(InputError, match=r"mlhpc\.Run"):
        load_workload(found)
    with pytest.raises(InputError, match="makes no data"):
        found.load_generator()


def test_a_given_card_is_known_within_the_body_only(card: Path) -> None:
    with use_cards([card, card]):
        assert "mine" in load_descriptors()
        assert load_descriptor("mine").card_path == card
        assert len(list_card_files()) == 1
    assert "mine" not in load_descriptors()
    with pytest.raises(InputError, match="unknown workload 'mine'"):
        load_descriptor("mine")


@pytest.mark.parametrize("command", ["check", "score"])
def test_logs_of_a_card_are_judged_by_it(command: str, card: Path, tmp_path: Path) -> None:
    run = renamed(tmp_path / "run")
    without, done = mlhpc(command, run), mlhpc(command, run, "--card", card)
    assert without.returncode == 1
    assert done.returncode == 0, done.stdout + done.stderr
    assert mlhpc(command, run, environment=os.environ | {CARDS: str(card)}).stdout == done.stdout


def test_a_log_of_an_unknown_benchmark_names_the_way_to_give_its_card(tmp_path: Path) -> None:
    assert "--card FILE adds that of a card" in mlhpc("check", renamed(tmp_path / "run")).stdout


def test_the_cards_target_counts_and_not_the_logs(tmp_path: Path) -> None:
    strict = card_file(tmp_path / "strict.yaml", threshold=0.001)
    done = mlhpc("check", renamed(tmp_path / "run"), "--card", strict, "--format", "json")
    assert done.returncode == 1
    assert "target-missed" in {finding["rule"] for finding in json.loads(done.stdout)["findings"]}


def test_a_changed_card_counts_at_once(tmp_path: Path) -> None:
    run, path = renamed(tmp_path / "run"), tmp_path / "mine.yaml"
    for threshold, code in ((TARGET, 0), (0.001, 1), (TARGET, 0)):
        card_file(path, threshold=threshold)
        os.utime(path, ns=(0, int(threshold * 1e6)))
        assert mlhpc("check", run, "--card", path).returncode == code


def test_results_of_a_card_are_packaged_compared_listed_shown_and_reported(card: Path, tmp_path: Path) -> None:
    run, package = renamed(tmp_path / "run"), tmp_path / "ACME"
    give = ("--card", card)
    built = mlhpc("package", run, "--system", "laptop", "--submitter", "ACME", "-o", package, *give)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "95 % [" in mlhpc("compare", run, run, *give).stdout
    assert "card only" in mlhpc("workload", "list", *give).stdout
    assert f"{TARGET:g}" in mlhpc("status", run, *give).stdout
    reported = mlhpc("report", run, "-o", tmp_path / "report", *give)
    assert reported.returncode == 0, reported.stderr
    assert json.loads((tmp_path / "report" / "report.json").read_text())["verdicts"][0]["compliant"]


FORGED = {
    "the name of ours": ({"name": "cosmoflow"}, "workload 'cosmoflow' is that of another card"),
    "no YAML": ("a: [\n", "not valid YAML"),
    "a list": ("- 1\n", "expected a mapping"),
    "no threshold": ({"drop": ("threshold",)}, "missing key 'sizes.smoke.threshold'"),
    "a target of text": ({"threshold": "low"}, "threshold = 'low'"),
    "two runs": ({"required_runs": 2}, "required_runs = 2"),
    "a metric of its own": ({"metric": "loss"}, "metric = 'loss'"),
    "an unknown key": ({"treshold": 1}, "unknown key 'treshold'; did you mean 'threshold'?"),
    "a direction": ({"direction": "up"}, "direction = 'up'"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_card_that_cannot_be_judged_by_is_refused_with_one_line(case: str, tmp_path: Path) -> None:
    content, expected = FORGED[case]
    path = tmp_path / "card.yaml"
    if isinstance(content, str):
        path.write_text(content)
    else:
        card_file(path, **content)  # type: ignore[arg-type]
    for command in ("check", "score", "list"):
        words = ("workload", "list") if command == "list" else (command, run_folder(tmp_path / command))
        done = mlhpc(*words, "--card", path)
        assert done.returncode == 2, done.stdout
        assert len(done.stderr.splitlines()) == 1
        assert expected in done.stderr
        assert str(path) in done.stderr


def test_two_cards_of_one_name_are_refused_and_one_given_twice_is_not(card: Path, tmp_path: Path) -> None:
    other = card_file(tmp_path / "other.yaml", threshold=0.99)
    same = card_file(tmp_path / "same.yaml")
    run = renamed(tmp_path / "run")
    assert mlhpc("check", run, "--card", card, "--card", other).returncode == 2
    assert mlhpc("check", run, "--card", card, "--card", same).returncode == 0


def test_a_card_that_is_given_changes_no_verdict_of_another_benchmark(card: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    assert mlhpc("check", run, "--card", card).stdout == mlhpc("check", run).stdout


def test_all_missing_keys_of_a_card_are_named_together(tmp_path: Path) -> None:
    path = card_file(tmp_path / "card.yaml", drop=("metric", "threshold", "direction", "sample_bytes"))
    with pytest.raises(InputError) as caught:
        read_card(path)
    named = [f"'sizes.smoke.{key}'" for key in ("metric", "threshold", "direction", "sample_bytes")]
    said = str(caught.value).partition("missing keys ")[2]
    assert [word for word in said.replace(",", " ").split() if word.startswith("'sizes")] == named
    assert f"{named[2]} (min, max)" in said


def test_a_card_needs_neither_official_rules_nor_constraints(tmp_path: Path) -> None:
    size = read_card(card_file(tmp_path / "card.yaml", drop=("constraints",))).size("smoke")
    assert (size.official, size.constraints) == (None, {})


@pytest.mark.parametrize(
    "command", [("run", "mine"), ("submit", "mine", "--system", "slurm-two-node", "--nodes", "1", "--dry-run")]
)
def test_a_card_without_code_is_not_run_by_the_harness(command: tuple[str, ...], card: Path) -> None:
    done = mlhpc(*command, "--size", "smoke", environment=os.environ | {CARDS: str(card)})
    assert done.returncode == 2
    assert "a loop of your own runs it" in done.stderr


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (0.08004, "f", "0.08004"),
        (0.07999, "f", "0.07999"),
        (0.08, "f", "0.0800"),
        (0.0812345, "f", "0.0812"),
        (0.08 + 2**-56, "f", "0.08000000000000002"),
        (float("nan"), "f", "nan"),
        (float("inf"), "f", "inf"),
        (0.0800004, "g", "0.0800004"),
        (1.23456, "g", "1.235"),
        (123456.0, "g", "1.235e+05"),
    ],
)
def test_a_value_is_shown_on_its_side_of_the_threshold(value: float, style: str, text: str) -> None:
    assert render_metric_value(value, 0.08, style) == text
