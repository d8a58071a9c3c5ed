"""Forgeries of a package are errors, or on the list of what nobody can detect, which docs/checker.md has with the reasons."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.rules.sum_rules import _SWITCHED
from mlhpc.suite.machine.system import System
from mlhpc.suite.package.build import build_package
from tests.fixtures.logs import ENVIRONMENT, START_MS, Lines, our_run, results
from tests.fixtures.once import made_once
from tests.fixtures.runs import describe
from tests.suite.compliance.forge.forgeries import (
    ONE,
    Events,
    Forgery,
    change_document,
    draw,
    edit_logs,
    find_kept,
    list_forgeries,
)

DRAWN, SEED = 40, 20261129
COMMAND = [
    "/opt/mlhpc",
    "run",
    "cosmoflow",
    "--config",
    "mine.yaml",
    "--ranks",
    "2",
    "--runs",
    "5",
    "--seed",
    "100",
    "-o",
    "runs/mine",
]
PACKAGES = {item.name: item.version for item in ENVIRONMENT.distributions}
UNDETECTED = yaml.safe_load((Path(__file__).parent / "undetected.yaml").read_text())


def make_package(root: Path) -> Path:
    """A package whose logs and kept files have all that those of a run have."""

    def run(n: int) -> Lines:
        return our_run(seed=100 + n, trial=n, start_ms=START_MS + n * 10**5, epoch_s=2 + n / 10, measured=True, interval_s=2.0,
                       values=(0.4518733, 0.4203129 - n / 1000, 0.4008177 + n / 2000,
                               0.3907113 - n / 3000, 0.3552391))  # fmt: skip

    runs = describe(results(root / "runs", 5, run))
    info = json.loads((runs / "run.json").read_text())
    (runs / "run.json").write_text(json.dumps(info | {"seed": 100, "command": COMMAND}))
    facts = json.loads((runs / "facts" / "node1.json").read_text())
    facts |= {"memory": {"total_gib": 238.4}, "software": {"packages": PACKAGES, "kernel": "6.1"}}
    (runs / "facts" / "node1.json").write_text(json.dumps(facts))
    stated = System(cooling="air", networking_topology="single switch")
    return build_package([runs], system="bed", out=root / "ACME", stated=stated).folder


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "forge", lambda folder: make_package(folder)) / "ACME"


def is_undetected(name: str) -> bool:
    """True if a forgery is on the list of what nobody can detect."""
    return any(re.match(pattern, name) for row in UNDETECTED for pattern in row["forgeries"])


def find_missed(package: Path, folder: Path, forgeries: list[Forgery]) -> list[str]:
    """The forgeries that cause no error and are not on the list."""
    missed = []
    for number, forgery in enumerate(forgeries):
        place = folder / str(number)
        place.mkdir()
        if not forgery.errors(package, place) and not is_undetected(forgery.name):
            missed.append(forgery.name)
        shutil.rmtree(place)
    return missed


def test_drawn_forgeries_are_errors(package: Path, tmp_path: Path) -> None:
    assert check([package]).compliant
    assert find_missed(package, tmp_path, draw(list_forgeries(package), DRAWN, SEED)) == []


@pytest.mark.parametrize("setting", _SWITCHED)
@pytest.mark.parametrize("there", [True, False])
def test_a_setting_has_its_events_and_none_without(setting: str, there: bool, package: Path, tmp_path: Path) -> None:
    part, _, name = setting.rpartition(".")

    def forge(events: Events) -> Events:
        for event in events:
            if event["key"] == "run_config":
                above = event["value"][part] if part else event["value"]
                on = 0.5 if name == "interval_s" else above[name] or "other"
                above[name] = on if there else None
        return [event for event in events if not (there and event["key"] in _SWITCHED[setting])]

    copy = Path(shutil.copytree(package, tmp_path / "ACME"))
    edit_logs(copy, forge)
    found = [item for item in check([copy]).counted("error") if f"has {setting} = " in item.message]
    # The package has no plan, whose absence is no forgery.
    assert bool(found) != (setting == "plan" and not there)


@pytest.mark.long
def test_all_forgeries_are_errors(package: Path, tmp_path: Path) -> None:
    assert find_missed(package, tmp_path, list_forgeries(package)) == []


def test_the_docs_list_what_nobody_can_detect() -> None:
    text = (Path(__file__).parents[4] / "docs" / "checker.md").read_text()
    assert [row["reason"] for row in UNDETECTED if row["reason"] not in text] == []


@pytest.mark.parametrize("key", ["epoch_start", "eval_start", "eval_stop", "epoch_stop"])
def test_one_run_of_other_code_is_an_error(key: str, package: Path, tmp_path: Path) -> None:
    def forge(events: Events) -> Events:
        for event in events:
            if event["key"] == key:
                event["metadata"]["lineno"] = event["metadata"].get("lineno", 0) + 3
        return events

    copy = Path(shutil.copytree(package, tmp_path / "ACME"))
    edit_logs(copy, forge)
    assert "run-drift" not in {item.rule for item in check([copy]).counted("error")}
    edit_logs(copy, forge, ONE)
    assert "run-drift" in {item.rule for item in check([copy]).counted("error")}


@pytest.mark.parametrize("quota", [0.01, 64.0])
def test_runs_used_no_more_cpus_than_their_containers_had(quota: float, package: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(package, tmp_path / "ACME"))
    change_document(find_kept(copy) / "facts" / "node1.json", ("limits", "cpu_quota"), lambda _: quota)
    assert ("facts-agree" in {item.rule for item in check([copy]).counted("error")}) == (quota < 1.0)
