"""A package against itself: what several files state must agree; what may differ is no finding."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlhpc.suite.compliance.check import check
from mlhpc.suite.compliance.package_files import compute_sha256
from mlhpc.suite.machine.system import System
from mlhpc.suite.package.build import build_package, write_package_manifest
from tests.fixtures.logs import START_MS, Lines, Mutation, chain, edit, our_run, results, write
from tests.fixtures.once import made_once
from tests.fixtures.package_mutations import lines_of
from tests.fixtures.runs import describe

Damage = Callable[[Path], object]
CONFIG = {
    "workload": "cosmoflow", "size": "smoke", "global_batch_size": 16, "gradient_accumulation_steps": 1,
    "precision": "float32", "data": "/scratch/me/cosmoflow",
    "hyperparameters": {"layers": 3, "base_learning_rate": 0.01, "channels": [16, 32]},
}  # fmt: skip
COMMAND = ["/opt/mlhpc", "run", "cosmoflow", "--size", "smoke", "--runs", "5", "--set", "data=/scratch/me/cosmoflow"]


def configured(**values: object) -> Mutation:
    """Change settings of run_config; ``...`` removes one."""

    def apply(lines: Lines) -> Lines:
        (config,) = (line.value for line in lines if line.key == "run_config")
        merged = {key: value for key, value in {**config, **values}.items() if value is not ...}
        return edit("run_config", value=merged)(lines)

    return apply


def make_package(root: Path) -> Path:
    """A package whose five logs and kept files state all that ours do."""

    def run(n: int) -> Lines:
        lines = our_run(seed=100 + n, trial=n, start_ms=START_MS + n * 10**5, epoch_s=2 + n / 10,
                        values=(0.4518733, 0.4203129 - n / 1000, 0.4008177 + n / 2000,
                                0.3907113 - n / 3000, 0.3552391))  # fmt: skip
        return configured(**CONFIG | {"data": "cosmoflow"}, device="auto")(lines)

    runs = results(root / "runs", 5, run)
    describe(runs)
    stated = System(cooling="air", networking_topology="single switch")
    folder = build_package([runs], system="bed", out=root / "ACME", stated=stated).folder
    write_json(folder, "run.json", seed=100, command=[*COMMAND, "--seed", "100"])
    write_json(folder, "facts/node1.json", memory={"total_gib": 238.4})
    kept(folder, "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


def kept(folder: Path, name: str) -> Path:
    """A file that the package keeps of the run folder."""
    return next(folder.glob("benchmarks/*/implementations/*/*/strong/provenance/run_0")) / name


def write_json(folder: Path, name: str, **fields: Any) -> None:
    path = kept(folder, name) if name != "result.json" else kept(folder, "").parent.parent / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def info(**fields: Any) -> Damage:
    return lambda folder: write_json(folder, "run.json", **fields)


def command(*words: str) -> Damage:
    return info(command=[*COMMAND, *words])


def config(**fields: Any) -> Damage:
    return lambda folder: kept(folder, "config.yaml").write_text(yaml.safe_dump(CONFIG | fields))


def hyper(**fields: Any) -> Damage:
    return config(hyperparameters={**CONFIG["hyperparameters"], **fields})  # type: ignore[dict-item]


def score(**fields: Any) -> Damage:
    return lambda folder: write_json(folder, "result.json", **fields)


def scored_run(**fields: Any) -> Damage:
    def apply(folder: Path) -> None:
        rows = json.loads((kept(folder, "").parent.parent / "result.json").read_text())["runs"]
        write_json(folder, "result.json", runs=[rows[0], rows[1] | fields, *rows[2:]])

    return apply


def facts(**fields: Any) -> Damage:
    return lambda folder: write_json(folder, "facts/node1.json", **fields)


def system(**fields: str) -> Damage:
    def apply(folder: Path) -> None:
        (path,) = (folder / "systems").glob("*.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


def log(index: int, *mutations: Mutation) -> Damage:
    def apply(folder: Path) -> None:
        (path,) = folder.glob(f"results/*/strong/*/result_{index}.txt")
        write(path, chain(*mutations)(lines_of(path)))
        rows = json.loads((kept(folder, "").parent.parent / "result.json").read_text())["runs"]
        rows[index]["sha256"] = compute_sha256(path)
        write_json(folder, "result.json", runs=rows)

    return apply


def every(mutation: Mutation) -> Damage:
    return lambda folder: [log(index, mutation)(folder) for index in range(5)]


def no_result(folder: Path) -> None:
    (kept(folder, "").parent.parent / "result.json").unlink()


FOUND: dict[str, tuple[str, Damage]] = {
    "config.yaml of batch 32": ("statements-agree", config(global_batch_size=32)),
    "config.yaml of bfloat16": ("statements-agree", config(precision="bfloat16")),
    "config.yaml of another size": ("statements-agree", config(size="mini")),
    "config.yaml of another workload": ("statements-agree", config(workload="deepcam")),
    "config.yaml of more accumulation": ("statements-agree", config(gradient_accumulation_steps=2)),
    "config.yaml of another rate": ("statements-agree", hyper(base_learning_rate=0.02)),
    "config.yaml of another model": ("statements-agree", hyper(channels=[16, 64])),
    "config.yaml of a deeper model": ("statements-agree", hyper(layers=4)),
    "a log of another rate than config.yaml": (
        "statements-agree", every(configured(hyperparameters={"base_learning_rate": 0.5}))),
    "a log of another precision than config.yaml": ("statements-agree", every(configured(precision="tf32"))),
    "run.json of another seed": ("statements-agree", info(seed=7)),
    "run.json of fewer runs": ("statements-agree", info(runs=3)),
    "a command of another seed": ("statements-agree", command("--seed", "7")),
    "a command of another size": ("statements-agree", command("--size", "mini")),
    "a command of another batch": ("statements-agree", command("--set", "global_batch_size=64")),
    "a command of another rate": ("statements-agree", command("--set", "hyperparameters.base_learning_rate=0.5")),
    "a command of another precision": ("statements-agree", command("--set=precision=bfloat16")),
    "a command of other runs": ("statements-agree", command("--runs=50")),
    "result.json of half the score": ("statements-agree", score(score_s=1.0)),
    "result.json of half a run's time": ("statements-agree", scored_run(time_s=1.0)),
    "result.json of another seed": ("statements-agree", scored_run(seed=1)),
    "result.json of fewer epochs": ("statements-agree", scored_run(epochs=1.0)),
    "result.json of another log": ("statements-agree", scored_run(sha256="ab" * 32)),
    "result.json of another benchmark": ("statements-agree", score(benchmark="deepcam")),
    "result.json of another size": ("statements-agree", score(size="mini")),
    "result.json of a throughput that was not measured": ("statements-agree", score(models_per_min=7.0)),
    "a description of twice the cores": ("statements-agree", system(host_processor_core_count="96")),
    "a description of half the cores": ("statements-agree", system(host_processor_core_count="16")),
    "a description of four times the memory": ("statements-agree", system(host_memory_capacity="1 TB")),
    "a description of half the memory": ("statements-agree", system(host_memory_capacity="128 GiB")),
    "a GPU and no accelerator": ("config-agrees", every(configured(device="cuda"))),
    "a GPU in the metadata and no accelerator": ("config-agrees", every(edit("run_config", meta={"device": "cuda"}))),
    "a status of one run": ("platform-drift", log(2, edit("submission_status", value="onprem"), configured(
        submission={"org": "ACME", "division": "closed", "status": "onprem", "platform": "test bed"}))),
    "a platform of one run": ("platform-drift", log(3, edit("submission_platform", value="other"), configured(
        submission={"org": "ACME", "division": "closed", "status": "research", "platform": "other"}))),
    "a precision of one run": ("config-drift", log(4, configured(precision="bfloat16"))),
    "no precision of one run": ("config-drift", log(4, configured(precision=...))),
    "a seed of one run": ("statements-agree", log(1, edit("seed", value=4242))),
    "another data set": ("data-expected", every(edit("data_manifest", value="ab" * 32))),
}  # fmt: skip

LEGAL: dict[str, Damage] = {
    "untouched": lambda folder: None, "a command of the same seed": command("--seed", "100"),
    "a command with what it may give again": command("--set", "precision=float32", "--set", "global_batch_size=16"),
    "a command whose last of two counts": command("--seed", "7", "--seed", "100"),
    "a command with numbers as YAML writes them": command("--set", "hyperparameters.base_learning_rate=1.0e-2"),
    "a command with a list": command("--set", "hyperparameters.channels=[16, 32]"),
    "a command with settings of the place": command("--set", "data=/elsewhere/cosmoflow", "-o", "runs/mine"),
    "a command with words that are no options": command("--quiet", "--wait-for-quiet"),
    "a command that is redacted": command("--set", "data=REDACTED"),
    "a command of a person's own loop": info(command=["python", "train.py", "--seed", "7"], loop="train.py"),
    "a command of no words": info(command=[]), "no seed in run.json": info(seed=None, command=COMMAND),
    "more runs asked for": info(runs=50, command=COMMAND[:5]),
    "config.yaml with fewer settings": lambda folder: kept(folder, "config.yaml").write_text("workload: cosmoflow\n"),
    "config.yaml with settings of the place": config(data="/other/cosmoflow", loader_threads=7, max_epochs=99),
    "config.yaml with a whole number as 16.0": config(global_batch_size=16.0),
    "a rate with fewer digits": hyper(base_learning_rate=0.010000000000000002), "no result.json": no_result,
    "result.json without a score": score(score_s=None, score_with_staging_s=None),
    "cores of the node": system(host_processor_core_count="64"),
    "threads of a processor": system(host_processor_core_count="64 "),
    "memory as sold": system(host_memory_capacity="256 GB"),
    "memory with its kind": system(host_memory_capacity="256 GB DDR5"),
    "memory in words": system(host_memory_capacity="a lot"),
    "memory of a larger unit": system(host_memory_capacity="0.25 TB"), "facts without memory": facts(memory={}),
    "facts without cores": facts(cpu={"model": "Model T"}), "a device that is chosen": every(configured(device="auto")),
    "no accelerator and a CPU": every(edit("run_config", meta={"device": "cpu"})),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "statements", lambda folder: make_package(folder))


def judge(whole: Path, tmp_path: Path, damage: Damage) -> list[tuple[str, str]]:
    """The errors of the damaged package, whose manifest is written anew."""
    folder = Path(shutil.copytree(whole / "ACME", tmp_path / "ACME"))
    damage(folder)
    write_package_manifest(folder)
    return [(item.rule, item.message) for item in check([folder]).findings if item.severity == "error"]


@pytest.mark.parametrize("name", FOUND)
def test_two_files_that_contradict_each_other_are_an_error(whole: Path, tmp_path: Path, name: str) -> None:
    rule, damage = FOUND[name]
    assert rule in [found for found, _ in judge(whole, tmp_path, damage)]


@pytest.mark.parametrize("name", LEGAL)
def test_what_may_differ_is_none(whole: Path, tmp_path: Path, name: str) -> None:
    assert not judge(whole, tmp_path, LEGAL[name])


def test_a_finding_names_both_files_and_both_values(whole: Path, tmp_path: Path) -> None:
    found = judge(whole, tmp_path, config(global_batch_size=32))
    assert ("statements-agree", "global_batch_size: 16 in the log, 32 in config.yaml") in found
