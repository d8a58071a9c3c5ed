"""`mlhpc tune` with a machine that is a function: its answer, its files, its resumption, and one line for each mistake."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlhpc.plugins.tune.candidates import Launch
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.log import mllog
from mlhpc.suite.log.mllog import EventLog
from tests.fixtures.cli import mlhpc
from tests.fixtures.wings import needs_axes
from tests.suite.test_missing_packages import without

pytestmark = needs_axes  # `tune` predicts with it what can run
OPTIONS = (
    "--only",
    "precision",
    "--only",
    "gradient_accumulation_steps",
    "--objective",
    "cpu-time",
    "--pairs",
    9,
    "--evaluations",
    8,
)


class Simulated:
    """Takes the place of `run_job`: bfloat16 takes ``factor`` of the time of float32, with noise. Counts its jobs."""

    def __init__(self, factor: float, kill: int = -1) -> None:
        self.factor, self.kill, self.jobs, self.drawn = factor, kill, 0, random.Random(1)

    def __call__(
        self, workload: str, configs: list[RunConfig], launch: Launch, *_: Any
    ) -> list[list[dict[str, float]]]:
        self.jobs += 1
        if self.jobs == self.kill:
            raise KeyboardInterrupt
        return [[{"CPU time": self.time(config), "step time": 1.0} for _ in range(2)] for config in configs]

    def time(self, config: RunConfig) -> float:
        part = self.factor if config.precision == "bfloat16" else 1.0
        return part * config.gradient_accumulation_steps**0.2 * self.drawn.lognormvariate(0, 0.01)


def search(
    settings: list[str], folder: Path, machine: Simulated, monkeypatch: pytest.MonkeyPatch, *more: object
) -> tuple[int, str]:
    monkeypatch.setattr("mlhpc.plugins.tune.job.run_job", machine)
    words = [word for each in settings for word in ("--set", each)]
    done = mlhpc("tune", "swinv2_moe", "--size", "smoke", *words, *OPTIONS, "-o", folder, *more)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def test_the_faster_setting_is_found_and_its_file_can_be_run(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = search(settings, tmp_path / "out", Simulated(0.6), monkeypatch)
    assert code == 0, said
    document = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert document["outcome"] == "faster"
    assert document["best"]["precision"] == "bfloat16"
    assert document["best"]["gradient_accumulation_steps"] == 1
    assert document["pairs"] == 7
    assert document["ratio"]["low"] < 0.6 < document["ratio"]["high"] < 1
    assert sum(trial["seconds"] for trial in document["trials"]) == pytest.approx(document["search_s"])
    best = tmp_path / "out" / "best.yaml"
    assert f"--config {best}" in said
    assert best.read_text().startswith("# OMP_NUM_THREADS=")
    config = load_config(load_descriptor("swinv2_moe"), str(best))
    assert config.precision == "bfloat16"
    assert config.tuned is not None
    assert (config.tuned.ranks, config.tuned.objective, config.tuned.pairs) == (1, "cpu-time", 7)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["best.yaml", "history.log", "tune.json"]


def test_nothing_better_is_an_answer_without_a_file(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = search(settings, tmp_path / "out", Simulated(1.5), monkeypatch)
    assert code == 0, said
    power = r"\d+ pairs show one that is [\d.]+ % faster in 8 of 10 cases\n"
    assert re.search(rf"nothing better than the default was found; {power}$", said)
    assert not (tmp_path / "out" / "best.yaml").exists()


def test_a_killed_search_goes_on_and_measures_nothing_twice(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _ = search(settings, tmp_path / "out", Simulated(0.6, kill=4), monkeypatch)
    assert code == 130
    code, said = search(settings, tmp_path / "out", Simulated(0.6), monkeypatch)
    assert (code, "exists already; choose another folder with -o, or continue it with --resume" in said) == (2, True)
    code, said = search(settings, tmp_path / "out", Simulated(0.6), monkeypatch, "--resume", "--steps", 9)
    assert (code, "was begun with other settings" in said) == (2, True)
    machine = Simulated(0.6)
    code, said = search(settings, tmp_path / "out", machine, monkeypatch, "--resume", "--format", "json")
    assert code == 0, said
    document = json.loads((tmp_path / "out" / "tune.json").read_text())
    points = [json.dumps(trial["point"]) for trial in document["trials"]]
    assert len(points) > 2
    # One trial was whole. The default's job, then two a pair: the memory of this back end is not known.
    assert machine.jobs == 1 + 2 * (len(points) - 1 + document["pairs"])


@pytest.mark.long
def test_settings_of_an_earlier_search_and_of_a_run_are_measured_first(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert search(settings, tmp_path / "first", Simulated(0.6), monkeypatch)[0] == 0
    fastest = json.loads((tmp_path / "first" / "tune.json").read_text())["best"]
    run = tmp_path / "package" / "results" / "run"
    run.mkdir(parents=True)
    config = load_config(load_descriptor("swinv2_moe"), "smoke", [*settings, "gradient_accumulation_steps=4"])
    (run / "config.yaml").write_text(yaml.safe_dump(convert_to_plain_data(config)))
    info = {"workload": "swinv2_moe", "size": "smoke", "mode": "strong", "runs": 1, "ranks": 1, "created": "2026-11-28",
            "command": [], "git": None, "same_allocation": False, "version": 1}  # fmt: skip
    (run / "run.json").write_text(json.dumps(info))
    earlier = ("--from", tmp_path / "first", "--from", tmp_path / "package", "--evaluations", 4)
    code, said = search(settings, tmp_path / "second", Simulated(0.6), monkeypatch, *earlier)
    assert code == 0, said
    points = [trial["point"] for trial in json.loads((tmp_path / "second" / "tune.json").read_text())["trials"]]
    assert points[0] == fastest
    # At most three points come from the search, then the run's.
    assert 4 in [point["gradient_accumulation_steps"] for point in points]
    assert len(points) == 4


@pytest.mark.long
def test_predictions_measure_nothing_and_order_what_was_measured(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert search(settings, tmp_path / "first", Simulated(0.6), monkeypatch)[0] == 0
    machine = Simulated(1.0)
    asked = ("--predict", "--from", tmp_path / "first")
    code, said = search(settings, tmp_path / "second", machine, monkeypatch, *asked)
    assert (code, machine.jobs, (tmp_path / "second").exists()) == (0, 0, False), said
    lines = said.splitlines()
    (head,) = (line for line in lines if line.endswith("time / default's, 90 % interval:"))
    first = lines[lines.index(head) + 1].split()
    assert float(first[0]) == pytest.approx(0.6, rel=0.1)
    assert float(first[1]) < float(first[0]) < float(first[3])
    assert "precision=bfloat16" in first
    code, said = search(settings, tmp_path / "second", machine, monkeypatch, "--predict")
    assert (code, "--predict needs --from PATH" in said) == (2, True)
    (tmp_path / "first" / "tune.json").unlink()
    code, said = search(settings, tmp_path / "second", machine, monkeypatch, *asked)
    assert (code, "has no tune.json; expected the folder of a search" in said) == (2, True)
    (tmp_path / "first" / "tune.json").write_text('{"version": 9}')
    asked = ("--from", tmp_path / "first")
    code, said = search(settings, tmp_path / "second", machine, monkeypatch, *asked)
    assert (code, "predicting which can run" in said) == (2, False), "that takes a minute"


WRONG = {
    "an unknown tunable": (["--fix", "rank=1"], "--fix rank: unknown tunable 'rank'"),
    "a value that no setting has": (["--fix", "precision=float12"], "no configuration of the space can run"),
    "no time": (["--budget", "30"], "'30' is no time; expected a number with a unit, such as 90s, 30m or 2h"),
    "no time at all": (["--budget", "0s"], "is no time"),
    "few pairs": (["--pairs", "6"], "--pairs: 6 is not in the range"),
    "an objective that is none": (["--objective", "loss"], "'loss' is not one of"),
    "an unknown size": (["--size", "smok"], "unknown size 'smok'; did you mean 'smoke'"),
    "no space file": (["--space", "/nowhere.yaml"], "/nowhere.yaml"),
    "nothing to begin from": (["--from", "/nowhere"], "'/nowhere' does not exist"),
    "all fixed": (
        ["--fix", "precision=float32", "--fix", "gradient_accumulation_steps=1"],
        "it is all that --fix and --only leave",
    ),
    "no data": (["--set", "data=/nowhere"], "/nowhere"),
    "a precision to choose": (["--set", "precision=auto"], "mlhpc tune does not measure which is fastest"),
    "more ranks than fit": (["--ranks", "3"], "the default itself cannot run here"),
    "a wrong limit": (["--limit-s", "0"], "--limit-s"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line_before_anything_runs(
    mistake: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, reason = WRONG[mistake]
    machine = Simulated(1.0)
    code, said = search(settings, tmp_path / "out", machine, monkeypatch, *options)
    assert (code, machine.jobs) == (2, 0), said
    assert reason in said
    assert not (tmp_path / "out").exists()


def test_a_closed_search_never_leaves_the_rules(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "space.yaml").write_text("version: 1\ntunable: {hyperparameters.learning_rate: {values: [0.1, 0.2]}}\n")
    closed = [each for each in settings if not each.startswith("submission")]
    code, said = search(closed, tmp_path / "out", Simulated(1.0), monkeypatch, "--space", tmp_path / "space.yaml")
    assert (code, "it may change the training, so the closed division has it fixed" in said) == (2, True), said


def test_a_resumption_needs_a_folder_with_a_search(settings: list[str], tmp_path: Path) -> None:
    done = mlhpc("tune", "swinv2_moe", "--size", "smoke", "--resume")
    assert (done.returncode, "--resume: say which search" in done.stderr) == (2, True)
    done = mlhpc("tune", "swinv2_moe", "--size", "smoke", "--resume", "-o", tmp_path / "out")
    assert (done.returncode, "no search here to resume" in done.stderr) == (2, True)


def test_a_tuned_run_says_so_in_its_log(tmp_path: Path) -> None:
    from mlhpc.suite.log.run_folder import RunFolder
    from mlhpc.suite.training.statement import RunHeader, TrialPlan, log_run_header
    from mlhpc.suite.world import World

    found = {"evaluations": 20, "search_s": 600.0, "ratio": 0.8, "low": 0.7, "high": 0.9, "pairs": 7}
    tuned = {"by": "mlhpc tune 1.0", "objective": "step-time", "ranks": 2, "threads": 1, **found}
    chosen = load_descriptor("cosmoflow")
    shipped = yaml.safe_load((chosen.folder / "config" / "smoke.yaml").read_text())
    (tmp_path / "best.yaml").write_text(yaml.safe_dump({**shipped, "tuned": tuned}))
    log = EventLog(tmp_path / "log.txt")
    header = RunHeader("cpu", 1, {}, {}, {}, "0" * 64)
    plan = TrialPlan(chosen, load_config(chosen, str(tmp_path / "best.yaml")), RunFolder(tmp_path), 0)
    log_run_header(log, plan, World.create(None), header)
    log.close()
    lines = [json.loads(line.partition(" ")[2]) for line in (tmp_path / "log.txt").read_text().splitlines()]
    (event,) = [line for line in lines if line["key"] == mllog.TUNED]
    assert event["value"] == tuned


@pytest.mark.parametrize(("module", "package"), [("optuna", "optuna"), ("sklearn", "scikit-learn")])
def test_a_missing_package_is_named_in_one_line(module: str, package: str, tmp_path: Path) -> None:
    done = without([module], "tune", "moe_lm", "--size", "smoke", folder=tmp_path)
    assert done.returncode == 2, done.stderr
    wanted = f"mlhpc: the Python package {package} is not installed (pip install 'mlhpc[tune]'); "
    assert done.stderr.startswith(wanted)
    assert done.stderr.count("\n") == 1
