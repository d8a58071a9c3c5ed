"""`mlhpc workload new` writes a package that runs at once and passes its own test; `mlhpc workload card` counts its card."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlhpc.suite.card import read_card
from mlhpc.suite.commands.workload import _judge_count, _select_card_value
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.performance.card_counts import CardCounts
from mlhpc.suite.workload import Work
from tests.fixtures.cli import mlhpc
from tests.fixtures.once import made_once

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
INFO = "Metadata-Version: 2.1\nName: tides\nVersion: 0.1.0\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the import path with the skeleton ``tides`` in it, and its entry point as pip writes it."""

    def make(folder: Path) -> None:
        done = mlhpc("workload", "new", "tides", "-o", folder / "package")
        assert done.returncode == 0, done.stderr
        (folder / "tides").symlink_to("package/tides")
        info = folder / "tides-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(INFO)
        (info / "entry_points.txt").write_text("[mlhpc.workloads]\ntides = tides:DESCRIPTOR\n")

    return made_once(tmp_path_factory, "skeleton", make)


def suite(site: Path, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlhpc", *map(str, words)]
    environment = ENV | {"PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_the_skeletons_own_test_passes_beside_another_projects(site: Path, tmp_path: Path) -> None:
    """As the tutorial has it: from a clone of mlhpc, in which the new folder has the name of its package."""
    shutil.copytree(site / "package", tmp_path / "tides")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n')
    # Without a folder of its own pytest would delete those of earlier sessions at its end, which may take minutes.
    own = ["-p", "no:cacheprovider", "--basetemp", tmp_path / "inner"]
    command = [sys.executable, "-m", "pytest", "-q", *map(str, own), "tides"]
    environment = ENV | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.long
def test_the_skeleton_installs_without_a_network_and_is_scored(tmp_path: Path) -> None:
    assert mlhpc("workload", "new", "tides", cwd=tmp_path).returncode == 0
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", "site", "./tides"], cwd=tmp_path, check=True, timeout=300)
    for words in (
        ("workload", "list", "tides"),
        ("data", "generate", "tides", "--size", "smoke"),
        ("run", "tides", "--size", "smoke", "--ranks", "2", "--runs", "3", "-o", "runs/first"),
        ("check", "runs/first"),
        ("score", "runs/first"),
        ("workload", "rcp", "record", "runs/first", "-o", "points"),
    ):
        done = suite(tmp_path / "site", *words, cwd=tmp_path)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"


def test_the_skeleton_is_formatted_as_the_suite_is(site: Path) -> None:
    package, always = site / "package", ("--isolated", "--line-length", "120", "--no-cache")
    for words in (("check", "--select", "E,F,W,I,UP,B,SIM,PTH"), ("format", "--check")):
        command = [sys.executable, "-m", "ruff", *words, *always, "."]
        done = subprocess.run(command, cwd=package, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tides", "lower-case"),
        ("my-tides", "lower-case"),
        ("2tides", "lower-case"),
        ("class", "lower-case"),
        ("../tides", "lower-case"),
        ("été", "lower-case"),
        ("cosmoflow", "name of an installed workload"),
        ("json", "name of an installed workload or module"),
        ("mlhpc", "name of an installed workload or module"),
    ],
)
def test_a_name_that_cannot_be_a_package_is_refused(name: str, expected: str, tmp_path: Path) -> None:
    done = mlhpc("workload", "new", name, cwd=tmp_path)
    assert done.returncode == 2
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_skeleton_never_writes_into_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tides").mkdir()
    assert mlhpc("workload", "new", "tides", cwd=tmp_path).returncode == 2
    assert list((tmp_path / "tides").iterdir()) == []


def test_counts_of_a_shipped_card_are_those_counted(smoke_data: Path) -> None:
    done = mlhpc("workload", "card", "cosmoflow", "--size", "smoke", environment=ENV | {"MLHPC_DATA": str(smoke_data)})
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("as the card says") == 6
    assert "written" not in done.stdout


CARD = load_descriptor("cosmoflow").card_path


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The card of CosmoFlow, as one that may be changed: the descriptor reads it for this test."""
    path = tmp_path / "card.yaml"
    path.write_text(CARD.read_text())
    monkeypatch.setattr("mlhpc.suite.descriptor.Descriptor.card_path", path)
    return path


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_counts_of_0_are_filled_in_and_nothing_else_changes(copy: Path, smoke_data: Path) -> None:
    before = copy.read_text()
    changed(copy, "    model_parameters: 59612\n", "    model_parameters: 0  # to be counted\n")
    changed(copy, "    training_flops_per_sample: 30328320\n", "    training_flops_per_sample: 0\n")
    done = mlhpc("workload", "card", "cosmoflow", environment=ENV | {"MLHPC_DATA": str(smoke_data)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("filled in") == 2
    assert copy.read_text() == before.replace("parameters: 59612\n", "parameters: 59612  # to be counted\n", 1)
    assert read_card(copy) == read_card(CARD)
    again = mlhpc("workload", "card", "cosmoflow")
    assert (again.returncode, "every count is there" in again.stdout) == (0, True)


WRONG = {
    "another model": ("model_parameters: 59612", "model_parameters: 59613"),
    "FLOPs off by 2 %": ("forward_flops_per_sample: 12468736", "forward_flops_per_sample: 12700000"),
    "half the training": ("training_flops_per_sample: 30328320", "training_flops_per_sample: 15164160"),
    "fewer samples": ("train_samples: 2000", "train_samples: 1999"),
    "larger samples": ("sample_bytes: 32784", "sample_bytes: 65568"),
}


def test_wrong_counts_are_found_and_left_as_they_are(copy: Path, smoke_data: Path) -> None:
    for old, new in WRONG.values():
        changed(copy, old, new)
    before = copy.read_text()
    done = mlhpc("workload", "card", "cosmoflow", "--size", "smoke", environment=ENV | {"MLHPC_DATA": str(smoke_data)})
    assert done.returncode == 1
    assert done.stdout.count("WRONG") == len(WRONG)
    assert copy.read_text() == before


def counted(**changes: float) -> CardCounts:
    """A count of code that executes a tenth more than the model, on samples half as large as the mean one."""
    form = Work(300.0, 330.0, 1.0, forward_flops=100.0, forward_extra_flops=10.0, **dict.fromkeys(OTHERS, 1.0))
    half = Work(150.0, 165.0, 1.0, forward_flops=50.0, forward_extra_flops=5.0, **dict.fromkeys(OTHERS, 1.0))
    values = {"forward_flops_per_sample": 55.0, "training_flops_per_sample": 165.0} | changes
    return CardCounts(1, 1, 1, sample_bytes=100, closed_form=form, counted_form=half, **values)


OTHERS = ("forward_bytes", "optimizer_flops_per_step", "optimizer_bytes_per_step", "all_reduce_bytes_per_step")
FORWARD, TRAINING = "forward_flops_per_sample", "training_flops_per_sample"


@pytest.mark.parametrize(
    ("key", "stated", "changes", "said"),
    [
        (TRAINING, 300.0, {}, "executed, as the closed form says; of the model 300, as the card says"),
        (TRAINING, 330.0, {}, "the card says 330, the closed form of the model 300: WRONG"),
        (TRAINING, 165.0, {}, "the card says 165, the closed form of the model 300: WRONG"),
        (TRAINING, 300.0, {TRAINING: 330.0}, "that 165 are executed: WRONG"),
        (TRAINING, 0.0, {TRAINING: 300.0}, "that 165 are executed: WRONG"),
        (TRAINING, 0.0, {}, "filled in"),
        (FORWARD, 100.0, {}, "executed, as the closed form says; of the model 100, as the card says"),
        (FORWARD, 55.0, {}, "the card says 55, the closed form of the model 100: WRONG"),
        (FORWARD, 100.0, {FORWARD: 50.0}, "that 55 are executed: WRONG"),
        (FORWARD, 0.0, {}, "filled in"),
        ("sample_bytes", 100.0, {}, "as the card says"),
        ("sample_bytes", 102.0, {}, "the card says 102: WRONG"),
    ],
)
def test_what_is_executed_beside_the_model_is_told_from_a_wrong_card(
    key: str, stated: float, changes: dict[str, float], said: str
) -> None:
    text, right = _judge_count(key, stated, counted(**changes))
    assert said in text
    assert right == ("WRONG" not in text)


def test_flops_that_are_filled_in_are_the_model_s_of_a_mean_sample() -> None:
    assert _select_card_value(TRAINING, counted()) == 300.0
    assert _select_card_value(TRAINING, counted(training_flops_per_sample=500.0)) == 500.0
    assert _select_card_value(FORWARD, counted()) == 100.0
    assert _select_card_value("sample_bytes", counted()) == 100.0


def test_a_count_that_is_not_on_a_line_of_its_own_is_named(copy: Path, smoke_data: Path) -> None:
    changed(copy, "    sample_bytes: 32784\n", "    ? sample_bytes\n    : 0\n")
    before = copy.read_text()
    done = mlhpc("workload", "card", "cosmoflow", "--size", "smoke", environment=ENV | {"MLHPC_DATA": str(smoke_data)})
    assert done.returncode == 2
    assert "sizes.smoke.sample_bytes cannot be filled in" in done.stderr
    assert copy.read_text() == before


def test_unknown_workloads_sizes_and_cards_without_code_are_named(tmp_path: Path) -> None:
    assert mlhpc("workload", "card", "cosmoflou").returncode == 2
    assert "cosmoflow" in mlhpc("workload", "card", "cosmoflou").stderr
    assert mlhpc("workload", "card", "cosmoflow", "--size", "smokey").returncode == 2
    example = Path(__file__).resolve().parents[3] / "examples" / "own_loop" / "card.yaml"
    done = mlhpc("workload", "card", "shapes", environment=ENV | {"MLHPC_CARDS": str(example)})
    assert done.returncode == 2
    assert "a loop of your own runs it" in done.stderr
