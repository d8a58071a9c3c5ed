"""`mlhpc reproduce` on packages that no run wrote: levels, causes, exit codes; nothing of a package is run."""

# ruff: noqa: E501  one case a line reads best as a table
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.documents import convert
from mlhpc.suite.log.reader import read_limits
from mlhpc.suite.package.build import write_package_manifest
from mlhpc.suite.package.reproduction.judge import (
    LevelOutcome,
    Reproduction,
    ResultVerdict,
    is_reproduced,
    make_level_verdict,
    read_reproduction,
)
from tests.fixtures.cli import mlhpc
from tests.fixtures.once import made_once
from tests.fixtures.package_mutations import example
from tests.fixtures.reproduction import LOSSES, beside, edit_json, forge, left_by_run, package_of

LOG = "results/bed_1x2_smoke/strong/cosmoflow/result_2.txt"


def _make(folder: Path) -> None:
    package_of(left_by_run(folder / "run"), folder)
    left_by_run(folder / "again", seeds=(1, 2))


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package, and the run folder ``again`` that reproduces it."""
    return made_once(tmp_path_factory, "reproduction", _make)


@pytest.fixture
def package(stage: Path, tmp_path: Path) -> Path:
    """A copy of the package, to be changed."""
    return Path(shutil.copytree(stage / "ACME", tmp_path / "ACME"))


def reproduce(package: Path, out: Path, *words: object, code: int) -> Reproduction:
    done = mlhpc("reproduce", package, "-o", out, *words, "-q")
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return read_reproduction(out / "reproduction.json")


def verdicts(document: Reproduction) -> list[str]:
    return [str(level.verdict) for result in document.results for level in result.levels]


def test_a_package_that_was_reproduced(stage: Path, tmp_path: Path) -> None:
    found = reproduce(stage / "ACME", tmp_path / "out", "--with", stage / "again", code=0)
    assert verdicts(found) == ["reproduced"] * 4, found.results[0].levels
    assert found.results[0].levels[1].reason == "the run verified data with this manifest"
    assert found.results[0].differences == ()
    assert found.results[0].against == "the run again"
    assert (found.asked, found.package, found.reproduced) == ((0, 1, 2, 3), "ACME", True)


def test_the_log_alone_and_its_table(stage: Path, tmp_path: Path) -> None:
    done = mlhpc("reproduce", stage / "ACME", "--level", 0, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "0 log          reproduced" in done.stdout
    assert "are those that result.json states" in done.stdout
    as_json = mlhpc("reproduce", stage / "ACME", "--level", 0, "-o", tmp_path / "json", "--format", "json")
    assert json.loads(as_json.stdout)["reproduced"] is True


def _into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_copy(path: Path) -> None:
    """The manifest is a link to what was it."""
    path.rename(path.parent.with_name("moved"))
    path.symlink_to("../moved")


@pytest.mark.parametrize("damage", [Path.unlink, _into_folder, _to_copy], ids=["gone", "a folder", "a link"])
def test_without_its_manifest_nothing_says_that_a_package_is_whole(
    package: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    damage(package / "manifest.sha256")
    found = reproduce(package, tmp_path / "out", "--level", 0, code=1)
    assert verdicts(found) == ["not reproduced"]
    assert "manifest.sha256" in found.results[0].levels[0].reason
    assert mlhpc("package", "--verify", package).returncode == 1


def test_levels_that_need_a_run_say_so(stage: Path, tmp_path: Path) -> None:
    found = reproduce(stage / "ACME", tmp_path / "out", "--level", 4, "--data", stage / "again", code=1)
    assert verdicts(found) == ["reproduced", "inconclusive", "inconclusive", "inconclusive", "inconclusive"]
    assert "--run makes one" in found.results[0].levels[2].reason


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a log lost": (lambda package: (package / LOG).unlink(), "lost file", LOG),
    "all logs lost": (lambda package: shutil.rmtree(package / "results"), "lost file", "results/"),
    "a log altered": (
        lambda package: (package / LOG).write_bytes((package / LOG).read_bytes() + b" "), "altered file", LOG,
    ),
    "a file added": (lambda package: (package / "systems" / "x.json").write_text("{}"), "altered file", "systems/x.json"),
    "facts lost": (lambda package: (beside(package) / "facts" / "node1.json").unlink(), "lost file", "facts/node1.json"),
    "a time in result.json": (
        lambda package: _renew(package, lambda: edit_json(next(package.rglob("result.json")), lambda d: d["runs"][1].update(time_s=1.0))),
        "altered file", "result.json: runs[1].time_s",
    ),
    "the score in result.json": (
        lambda package: _renew(package, lambda: edit_json(next(package.rglob("result.json")), lambda d: d.update(score_s=1.0))),
        "altered file", "result.json: score_s",
    ),
    "a log cut, manifest renewed": (
        lambda package: _renew(package, lambda: os.truncate(package / LOG, 9000)), "altered file", "result.json",
    ),
}  # fmt: skip


def _renew(package: Path, change: Callable[[], object]) -> None:
    change()
    write_package_manifest(package)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_package_that_is_not_whole(package: Path, tmp_path: Path, name: str) -> None:
    damage, kind, what = DAMAGE[name]
    damage(package)
    found = reproduce(package, tmp_path / "out", "--level", 0, code=1)
    (level,) = found.results[0].levels
    assert level.verdict == LevelOutcome.NOT_REPRODUCED
    assert level.cause is not None
    assert level.cause.kind == kind
    assert what in level.cause.what


FORGED: dict[str, tuple[str, Callable[[dict], object], str, str]] = {
    "torch": (
        "environment.json", lambda d: next(i for i in d["distributions"] if i["name"] == "torch").update(version="2.12.0"), "torch", "torch",
    ),
    "a processor": ("facts/node1.json", lambda d: d["cpu"].update(model="Model Z"), "processor", "processor"),
    "a file of the suite": (
        "sources.json", lambda d: d["files"].update({"suite/training/loop.py": "0" * 64}), "suite files", "suite/training/loop.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_drift_is_named_though_every_level_is_reproduced(
    stage: Path, package: Path, tmp_path: Path, name: str
) -> None:
    file, edit, kind, what = FORGED[name]
    forge(package, lambda folder: edit_json(folder / file, edit))
    found = reproduce(package, tmp_path / "out", "--with", stage / "again", code=0)
    assert "not reproduced" not in verdicts(found)
    assert (found.results[0].differences[0].kind, found.results[0].differences[0].what) == (kind, what)


def test_other_losses_name_the_first_difference_as_their_cause(package: Path, tmp_path: Path) -> None:
    again = left_by_run(tmp_path / "again", losses=[loss * 1.1 for loss in LOSSES], facts={"cpu": {"model": "Model Z"}})
    found = reproduce(package, tmp_path / "out", "--with", again, code=1)
    level = found.results[0].levels[2]
    assert (level.verdict, level.cause and level.cause.what) == (LevelOutcome.NOT_REPRODUCED, "processor")
    assert level.compared["equal_bits"] == 0
    table = mlhpc("reproduce", package, "--with", again, "-o", tmp_path / "table").stdout
    assert "first cause: processor: processor: Model T in the package, Model Z here" in table


def with_other_settings(run: Path) -> Path:
    """A run whose losses and evaluations are those of the package, and one of whose settings is not."""
    for path in run.glob("result_*.txt"):
        text = path.read_text()
        assert '"l2": 0.0' in text
        path.write_text(text.replace('"l2": 0.0', '"l2": 0.1'))
    return run


def test_a_run_with_other_settings_reproduces_nothing_though_all_agrees(package: Path, tmp_path: Path) -> None:
    again = with_other_settings(left_by_run(tmp_path / "again"))
    found = reproduce(package, tmp_path / "out", "--with", again, code=1)
    assert verdicts(found)[2:] == ["inconclusive", "inconclusive"]
    assert found.results[0].settings == ("hyperparameters.l2",)
    level = found.results[0].levels[2]
    assert "bit for bit" in level.reason
    assert "settings differ that this cannot show: hyperparameters.l2" in level.reason
    assert level.compared["settings"] == ["hyperparameters.l2"]
    low = replace_all_reproduced(found)
    assert not is_reproduced(low)


def replace_all_reproduced(found: Reproduction) -> tuple[ResultVerdict, ...]:
    """The results as if only the levels that no run decides had been asked for, and had been reproduced."""
    level = make_level_verdict(0, LevelOutcome.REPRODUCED, "whole")
    return tuple(structs.replace(result, levels=(level,)) for result in found.results)


def test_other_evaluations_are_not_rounding(package: Path, tmp_path: Path) -> None:
    again = left_by_run(tmp_path / "again", values=(0.421, 0.41, 0.4, 0.39, 0.355))
    level = reproduce(package, tmp_path / "out", "--with", again, code=1).results[0].levels[2]
    assert level.verdict == LevelOutcome.NOT_REPRODUCED
    assert "bit for bit; evaluation 1 of 5 differs by 0.0024: more than 1e-05" in level.reason


def test_other_data_at_the_usual_place_are_said(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlhpc.suite.package.reproduction import rerun
    from mlhpc.suite.package.reproduction.judge import Difference
    from mlhpc.suite.package.reproduction.original import read_originals

    attempt = rerun.Rerun(read_originals(stage / "ACME")[0], tmp_path / "out")
    made = make_level_verdict(1, LevelOutcome.REPRODUCED, "regenerated")
    monkeypatch.setenv("MLHPC_DATA", str(tmp_path))
    assert attempt._with_own_copy(made) is made
    (tmp_path / "cosmoflow-smoke").mkdir()
    (tmp_path / "cosmoflow-smoke" / "manifest.json").write_text("{}")
    cause = Difference(kind="data", what="train/shard_00000.h5", was="sha256 a", now="sha256 b")
    other = make_level_verdict(1, LevelOutcome.NOT_REPRODUCED, "shard", cause)
    monkeypatch.setattr(rerun, "judge_data", lambda *words: other)
    found = attempt._with_own_copy(made)
    assert found.verdict == LevelOutcome.REPRODUCED
    assert f"those in {tmp_path / 'cosmoflow-smoke'} differ (train/shard_00000.h5: sha256 b)" in found.reason
    monkeypatch.setattr(rerun, "judge_data", lambda *words: made)
    assert attempt._with_own_copy(made) is made


def test_a_package_without_losses_cannot_be_compared_at_level_2(stage: Path, tmp_path: Path) -> None:
    package = package_of(left_by_run(tmp_path / "old", losses=None), tmp_path)
    found = reproduce(package, tmp_path / "out", "--with", stage / "again", code=1)
    assert found.results[0].levels[2].verdict == LevelOutcome.CANNOT
    assert "first_losses" in found.results[0].levels[2].reason


def test_a_result_is_chosen_by_the_end_of_its_folder(stage: Path, tmp_path: Path) -> None:
    found = reproduce(stage / "ACME", tmp_path / "out", "--level", 0, "--result", "strong/cosmoflow", code=0)
    assert [result.result for result in found.results] == ["results/bed_1x2_smoke/strong/cosmoflow"]
    done = mlhpc("reproduce", stage / "ACME", "--result", "weak/cosmoflow", "-o", tmp_path / "x")
    assert (done.returncode, "no such result; results: results/bed_1x2_smoke/strong/cosmoflow" in done.stderr) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--run", "--with", "."), "--run makes a new run, --with RUN takes one that exists"),
        (("--set", "max_epochs=2"), "give --level 4"),
        (("--level", "5"), "0<=x<=4"),
        (("--margin", "0"), "range"),
    ],
)
def test_wrong_usage(stage: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = mlhpc("reproduce", stage / "ACME", "-o", tmp_path / "out", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_a_folder_without_results_is_refused(stage: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    done = mlhpc("reproduce", stage / "ACME", "-o", tmp_path / "out")
    assert (done.returncode, "exists already" in done.stderr) == (2, True)
    done = mlhpc("reproduce", tmp_path / "out", "-o", tmp_path / "new")
    assert (done.returncode, "no result below it" in done.stderr) == (2, True)


def test_a_reproduction_that_was_ended_starts_again_and_keeps_what_was_made(stage: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("data/manifest.json", "run_0/result_0.txt", "run_0.log", "data.log"):
        path = out / "result_0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    with create_lock(out / "reproduction.lock", "this reproduction"):
        done = mlhpc("reproduce", stage / "ACME", "--level", 0, "-o", out)
        assert (done.returncode, "this reproduction is in use by process" in done.stderr) == (2, True)
        assert (out / "result_0" / "run_0.log").exists()
        lock = (out / "reproduction.lock").read_text()
    gone = json.loads(lock) | {"started": 1}  # a killed command leaves its lock
    (out / "reproduction.lock").write_text(json.dumps(gone))
    found = reproduce(stage / "ACME", out, "--level", 0, code=0)
    assert verdicts(found) == ["reproduced"]
    kept = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert kept == ["reproduction.json", "result_0/data/manifest.json"] + [
        f"result_0/killed_1/{name}" for name in ("data.log", "run_0.log", "run_0/result_0.txt")
    ]
    done = mlhpc("reproduce", stage / "ACME", "--level", 0, "-o", out)
    assert (done.returncode, "exists already" in done.stderr) == (2, True)


def test_a_package_of_another_suite_says_why_it_cannot_be_run(tmp_path: Path) -> None:
    package = example(tmp_path)
    for folder in package.glob("benchmarks/*"):
        shutil.rmtree(folder)
    (package / "manifest.sha256").unlink()
    found = reproduce(package, tmp_path / "out", "--level", 4, "--run", code=1)
    for result in found.results:
        assert [str(level.verdict) for level in result.levels] == ["cannot"] * 5
        assert "the package states no score" in result.levels[0].reason
        assert "not made by mlhpc" in result.levels[1].reason


def test_a_loop_of_the_submitters_own_is_never_run(package: Path, tmp_path: Path) -> None:
    forge(package, lambda folder: edit_json(folder / "run.json", lambda d: d.update(loop="train.py")))
    found = reproduce(package, tmp_path / "out", "--level", 3, "--run", code=1)
    assert [str(level.verdict) for level in found.results[0].levels[1:]] == ["cannot"] * 3
    assert "code of a package is never run" in found.results[0].levels[2].reason


HOSTILE_CONFIGS = {
    "aliases": "a: &a [x, x]\nb: &b [*a, *a, *a]\nworkload: cosmoflow\nhyperparameters: *b\n",
    "depth": "hyperparameters: " + "[" * 400 + "]" * 400 + "\n",
    "python tag": "workload: !!python/object/apply:os.system ['touch RAN']\nsize: smoke\n",
    "a workload of code": "workload: ../../x\nsize: smoke\nglobal_batch_size: 8\nmax_epochs: 1\nhyperparameters: {}\n",
    "size": "workload: cosmoflow\nsize: smoke\nx: '" + "y" * 300_000 + "'\n",
    "not YAML": "{{{{",
    "not UTF-8": "workload: \udcff",
}


@pytest.mark.parametrize("name", HOSTILE_CONFIGS)
def test_a_hostile_configuration_is_refused_with_one_line(
    stage: Path, package: Path, tmp_path: Path, name: str
) -> None:
    content = HOSTILE_CONFIGS[name].encode("utf-8", "surrogateescape")
    forge(package, lambda folder: (folder / "config.yaml").write_bytes(content))
    found = reproduce(package, tmp_path / "out", "--run", "--level", 2, "--data", stage / "again", code=1)
    last = found.results[0].levels[-1]
    assert last.verdict == LevelOutcome.CANNOT
    assert "refuses the configuration" in last.reason
    assert not list(tmp_path.rglob("RAN"))
    assert not list((tmp_path / "out").rglob("run_*"))


@pytest.mark.parametrize("code", [2, 1])
def test_a_run_that_fails_is_said_once_and_every_level_has_a_verdict(
    stage: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A second attempt in the same folder once ended the command without a document."""
    from mlhpc.suite.package.reproduction import rerun

    fails = [sys.executable, "-c", f"print('no memory'); raise SystemExit({code})"]
    monkeypatch.setattr(rerun, "make_suite_command", lambda *words: fails)
    monkeypatch.setattr(rerun.Rerun, "judge_data", lambda self: make_level_verdict(1, LevelOutcome.REPRODUCED, "given"))
    found = reproduce(package, tmp_path / "out", "--run", "--level", 4, "--data", stage / "again", code=1)
    assert verdicts(found) == ["reproduced", "reproduced", *["not reproduced"] * 3]
    assert all("no memory" in level.reason for level in found.results[0].levels[2:])


def _hostile(package: Path, ran: Path) -> None:
    """Scripts that would leave a trace, links, FIFOs, devices, huge and deep files, pickles, names that climb."""
    script = f"#!/bin/sh\ntouch {ran}\nrm -rf {package}\n"
    implementation = beside(package).parent.parent
    for path in (*implementation.glob("*.sh"), implementation / "conftest.py", package / "sitecustomize.py"):
        path.write_text(script)
        path.chmod(0o755)
    folder = beside(package)
    (folder / "model.pkl").write_bytes(b"cos\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR.")
    (folder / "facts" / "zz.json").write_text("[" * 100_000)
    (folder / "origin.json").write_text(
        json.dumps({"version": 1, "logs": {"../../../etc/passwd": "../../x"}, "redacted": 5})
    )
    (folder / "environment.json").unlink()
    os.mkfifo(folder / "environment.json")
    (folder / "sources.json").unlink()
    with (folder / "sources.json").open("wb") as file:
        file.truncate(read_limits().json * 1000)
    (folder / "changes.diff").symlink_to("/dev/zero")
    (folder / "data.json").symlink_to("/dev/random")
    (package / "results" / "loop").symlink_to(package)
    edit_json(
        folder / "run.json",
        lambda d: d.update(command=["mlhpc", "--set", "data=$(touch x)", "--set", 5], workload="cosmoflow"),
    )


def test_nothing_of_a_hostile_package_runs_or_blocks(stage: Path, package: Path, tmp_path: Path) -> None:
    ran = tmp_path / "RAN"
    _hostile(package, ran)
    code = (
        "import sys; sys.argv = ['mlhpc', *sys.argv[1:]]\n"
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "from mlhpc.suite.cli.main import main; main()"
    )
    for manifest in ("as it was", "none"):
        if manifest == "none":
            (package / "manifest.sha256").unlink()
        out = tmp_path / f"out-{manifest[0]}"
        words = ["reproduce", package, "--with", stage / "again", "--level", "4", "-o", out, "--data", stage / "again"]
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *map(str, words)],
            cwd=package, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        found = read_reproduction(out / "reproduction.json")
        assert not found.reproduced
        assert found.results[0].levels[0].verdict == LevelOutcome.NOT_REPRODUCED
    assert not ran.exists()
    assert package.is_dir()


def test_settings_that_act_on_this_machine_are_not_followed(package: Path, tmp_path: Path) -> None:
    from mlhpc.suite.descriptor import load_descriptor
    from mlhpc.suite.package.reproduction.rerun import read_package_config

    path = beside(package) / "config.yaml"
    document = yaml.safe_load(path.read_text())
    document |= {"cache_drop_command": "touch RAN", "data": "/etc", "loader_threads": 10**6}
    document |= {"staging": {"directory": "/home/you", "overlap": True}}
    path.write_text(json.dumps(document))
    config, left_out = read_package_config(load_descriptor("cosmoflow"), path)
    assert (config.cache_drop_command, config.data, config.staging.directory, config.loader_threads) == (
        None,
        None,
        None,
        64,
    )
    assert len(left_out) == 4


@pytest.mark.parametrize(
    ("words", "factor", "verdict"),
    [
        (("--set", "window_steps=7"), 1.0, "reproduced"),
        (("--set", "window_steps=7"), 1.4, "not reproduced"),
        ((), 1.0, "reproduced"),
    ],
)
def test_times_are_compared_in_pairs_whose_order_changes(
    stage: Path,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    factor: float,
    verdict: str,
) -> None:
    from mlhpc.suite.config import RunConfig
    from mlhpc.suite.package.reproduction import rerun
    from mlhpc.suite.package.reproduction.run_facts import RunFacts

    started: list[tuple[str, int, int]] = []

    def start(self: rerun.Rerun, config: RunConfig, folder: Path, seed: int) -> RunFacts:
        started.append((folder.name, config.window_steps, seed))
        seconds = (10.0 + len(started) * 0.01) * (factor if folder.name.endswith("B") else 1.0)
        return replace(self.was, run=replace(self.was.run, seed=seed, time_to_train_s=seconds))

    monkeypatch.setattr(rerun.Rerun, "_start", start)
    monkeypatch.setattr(rerun.Rerun, "judge_data", lambda self: make_level_verdict(1, LevelOutcome.REPRODUCED, "given"))
    code = 0 if verdict == "reproduced" else 1
    found = reproduce(
        package, tmp_path / "out", "--run", "--level", 4, "--pairs", 4, "--data", stage / "again", *words, code=code
    )
    level = found.results[0].levels[4]
    assert (str(level.verdict), level.compared["pairs"]) == (verdict, 4)
    pairs = [each for each in started if each[0].startswith("pair")]
    assert [name[-1] for name, _, _ in pairs] == list("ABBAABBA")
    assert [seed for _, _, seed in pairs] == [1, 1, 2, 2, 3, 3, 4, 4]
    if words:
        assert {steps for name, steps, _ in pairs if name.endswith("B")} == {7}
        assert level.cause is None or level.cause.what == "window_steps"


def test_a_run_that_is_repeated_keeps_the_choices_of_its_own_log(
    stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the package's configuration says of choices is not followed: what was chosen is in the logs."""
    from mlhpc.suite.config import ChoiceSettings
    from mlhpc.suite.package.reproduction import rerun
    from mlhpc.suite.package.reproduction.original import Original
    from mlhpc.suite.package.reproduction.rerun import CommandResult, RunLimits
    from mlhpc.suite.package.reproduction.run_facts import RunFacts

    written: list[str] = []

    def execute(words: tuple[str, ...], log: Path, bounds: RunLimits, ranks: Path) -> CommandResult:
        written.append(Path(words[words.index("--config") + 1]).read_text())
        return CommandResult(1, "not run")

    def tell(self: Original, record: object) -> RunFacts:
        told = real(self, record)  # type: ignore[arg-type]
        seed = told.run.seed
        chosen = {"experts": f"loop, bmm to {seed}"} if seed in (1, 2) else told.run.choices
        return replace(told, run=replace(told.run, choices=chosen))

    real = Original.run_facts
    monkeypatch.setattr(Original, "run_facts", tell)
    monkeypatch.setattr(rerun, "run_limited", execute)
    monkeypatch.setattr(rerun.Rerun, "judge_data", lambda self: make_level_verdict(1, LevelOutcome.REPRODUCED, "given"))
    for seed in (1, 2, 3):
        words = ("--run", "--level", 2, "--seed", seed, "--data", stage / "again")
        reproduce(stage / "ACME", tmp_path / f"out_{seed}", *words, code=1)
    found = [convert(yaml.safe_load(text)["choices"], ChoiceSettings) for text in written]
    assert not any(each.measure for each in found)
    assert [each.pinned for each in found] == [{"experts": "loop, bmm to 1"}, {"experts": "loop, bmm to 2"}, {}]


@pytest.mark.parametrize(
    ("steps", "factor", "verdicts_after"),
    [
        (20, 1.0, ["reproduced", "inconclusive", "inconclusive"]),  # what it logged before is judged
        (12, 1.0, ["inconclusive", "inconclusive", "inconclusive"]),
        (12, 1.2, ["not reproduced", "inconclusive", "inconclusive"]),
        (0, 1.0, ["inconclusive", "inconclusive", "inconclusive"]),
        (None, 1.0, ["inconclusive", "inconclusive", "inconclusive"]),  # no log yet
    ],
)
def test_of_a_run_that_a_limit_ended_every_level_says_what_it_can(
    stage: Path,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int | None,
    factor: float,
    verdicts_after: list[str],
) -> None:
    from mlhpc.suite.package.reproduction import rerun

    def command(*words: str) -> list[str]:
        folder = Path(words[words.index("-o") + 1])
        if steps is not None:
            losses = [loss * factor for loss in LOSSES[:steps]] or None
            left_by_run(folder, seeds=(1,), losses=losses)
            lines = (folder / "result_0.txt").read_text().splitlines(keepends=True)
            (folder / "result_0.txt").write_text("".join(line for line in lines if '"run_stop"' not in line))
        return [sys.executable, "-S", "-c", "import time; time.sleep(60)"]

    monkeypatch.setattr(rerun, "make_suite_command", command)
    monkeypatch.setattr(rerun.Rerun, "judge_data", lambda self: make_level_verdict(1, LevelOutcome.REPRODUCED, "given"))
    words = ("--run", "--level", 4, "--limit-minutes", 0.005, "--data", stage / "again")
    found = reproduce(package, tmp_path / "out", *words, code=1)
    assert verdicts(found)[2:] == verdicts_after
    assert "it was ended after 0.3 s (--limit-minutes)" in found.results[0].levels[3].reason
    assert found.results[0].against == ("this machine" if steps is None else "the new run")
    assert (tmp_path / "out" / "result_0" / "run_0" / "result_0.txt").is_file() == (steps is not None)
