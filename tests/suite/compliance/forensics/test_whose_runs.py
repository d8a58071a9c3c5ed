"""Whose runs a result holds: carried over by its submitter, of another, too fast for its machine, or judged by nobody."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlhpc.suite.compliance.check import Verdict, check
from mlhpc.suite.compliance.exchange.review_files import add_waivers
from mlhpc.suite.compliance.rules.base import Waiver
from mlhpc.suite.log.results_tree import find_results
from tests.fixtures.logs import (
    START_MS,
    Line,
    Lines,
    Mutation,
    chain,
    drop,
    edit,
    hpc_run,
    insert,
    our_runs,
    results,
    shift_after,
    write,
)
from tests.fixtures.runs import describe
from tests.fixtures.systems import hpc_package, system_fields
from tests.fixtures.training import training_run

BEGIN_MS = 1_695_000_000_000


def rules(verdict: Verdict) -> dict[str, str]:
    """The severity of each rule that found something."""
    return {finding.rule: finding.severity for finding in verdict.findings}


other_seeds = edit("seed", value=4711)
other_platform = edit("submission_platform", value="other")


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("hpc_results_v2.0/ACME", "hpc_results_v3.0/Thief"),
        ("hpc_results_v3.0/ACME", "hpc_results_v3.0/Thief"),
        ("hpc_results_v2.0/ACME", "mine/Thief"),
        ("hpc_results_v2.0/Fujitsu+RIKEN", "hpc_results_v3.0/Thief"),
        ("hpc_results_v2.0/Dell", "hpc_results_v3.0/Delling"),
    ],
)
@pytest.mark.parametrize("disguise", [chain(), other_seeds, chain(other_seeds, other_platform)])
def test_runs_of_another_submitter_are_an_error(tmp_path: Path, first: str, second: str, disguise: Mutation) -> None:
    staged = drop("staging_start", "staging_stop")
    for place, change in ((first, staged), (second, chain(staged, disguise))):
        hpc_package(tmp_path / Path(place).parent, Path(place).name, change=change)
    found = rules(check([tmp_path]))
    assert found.get("run-reused") == "error"
    assert "carried-over" not in found


_TIMED = ("_start", "_stop", "eval_error", "target_accuracy_reached")
_STATED = sorted({x.key for x in hpc_run() if not x.key.endswith(_TIMED)})


@pytest.mark.drawn(6)
@pytest.mark.parametrize("key", ["", *_STATED])
def test_a_copy_in_the_same_package_that_states_something_else_is_no_second_use(tmp_path: Path, key: str) -> None:
    package = hpc_package(tmp_path / "hpc_results_v3.0", "ACME")
    result = next(package.glob("results/*"))
    again = Path(shutil.copytree(result, result.with_name("other")))
    shutil.copyfile(package / "systems" / f"{result.name}.json", package / "systems" / "other.json")
    log = sorted(again.rglob("result_*.txt"))[1]
    text = log.read_text()
    if key:
        events = [json.loads(line.partition(":::MLLOG ")[2]) for line in text.splitlines()]
        more = [each | {"value": "other"} if each["key"] == key else each for each in events]
        log.write_text("".join(f":::MLLOG {json.dumps(each)}\n" for each in more))
    found = [(item.rule, Path(item.file)) for item in check([package]).findings if "is also" in item.message]
    copied = {path for rule, path in found if rule == "run-copied"}
    reused = {path for rule, path in found if rule == "run-reused"}
    assert copied == ({log} if key else set())
    assert reused == {*again.rglob("result_*.txt")} - copied


@pytest.mark.parametrize(
    ("first", "second", "system", "carried"),
    [
        ("hpc_results_v2.0/ACME", "hpc_results_v3.0/ACME", "big", True),
        ("hpc_results_v2.0/TACC", "hpc_results_v3.0/tacc", "big", True),
        ("hpc_results_v1.0/LBNL", "hpc_results_v3.0/HPE+LBNL", "big", True),
        ("hpc_results_v2.0/ACME", "new/ACME", "big", True),
        ("a/ACME", "b/ACME", "big", True),
        ("hpc_results_v2.0/ACME", "hpc_results_v3.0/ACME", "small", False),
        ("x/hpc_results_v3.0/ACME", "y/hpc_results_v3.0/ACME", "big", False),
    ],
)
def test_a_result_is_carried_over_by_its_submitter_of_its_system(
    tmp_path: Path, first: str, second: str, system: str, carried: bool
) -> None:
    staged = drop("staging_start", "staging_stop")
    hpc_package(tmp_path / Path(first).parent, Path(first).name, change=staged)
    hpc_package(tmp_path / Path(second).parent, Path(second).name, system, change=staged)
    found = rules(check([tmp_path]))
    assert found.get("carried-over") == ("info" if carried else None)
    assert found.get("run-reused") == (None if carried else "error")


@pytest.mark.parametrize(
    ("fields", "carried"),
    [
        ({}, True),
        ({"owner": "HPE+ACME"}, True),
        ({"number_of_nodes": "32"}, False),
        ({"accelerator_model_name": "NVIDIA B200"}, False),
        ({"other_software_stack": "newer"}, False),
        ({"status": "research"}, False),
        ({"division": "open"}, False),
        ({"sw_notes": "tuned again"}, False),
        ({"host_memory_capacity": "2 TB"}, False),
        ({"a field": "more"}, False),
    ],
)
def test_a_result_is_carried_over_with_its_system_description(
    tmp_path: Path, fields: dict[str, str], carried: bool
) -> None:
    staged = drop("staging_start", "staging_stop")
    hpc_package(tmp_path / "hpc_results_v2.0", change=staged)
    hpc_package(tmp_path / "hpc_results_v3.0", change=staged, **fields)
    found = check([tmp_path]).findings
    assert carried == ("carried-over" in {item.rule for item in found})
    texts = [item.message for item in found if item.rule == "run-reused"]
    assert len(texts) == (0 if carried else 10)
    assert all("(with another system description)" in text for text in texts)


@pytest.mark.parametrize("announced", [False, True])
def test_from_v5_1_of_training_on_a_result_is_carried_over_if_it_was_announced(tmp_path: Path, announced: bool) -> None:
    for number in ("5.0", "5.1"):
        folder = tmp_path / f"training_results_v{number}" / "ACME"
        results(folder / "results" / "big" / "llama2_70b_lora", 10,
                lambda n: training_run(seed=n + 1, evals=9, start_ms=BEGIN_MS + n * 10**6 + 77 * n * n))  # fmt: skip
        (folder / "systems").mkdir()
        fields = system_fields(number_of_nodes="1", accelerators_per_node="8")
        (folder / "systems" / "big.json").write_text(json.dumps(fields))
    verdict = check([tmp_path])
    if announced:
        place = "training_results_v5.1/ACME/results/big/llama2_70b_lora"
        verdict = add_waivers(verdict, [Waiver("carried-over", place, "issue 7 of the round", "review committee")])
    assert verdict.compliant is announced
    errors = [(item.rule, "v5.1" in item.file) for item in verdict.findings if item.severity == "error"]
    assert errors == [("carried-over", True)]


def test_a_run_folder_beside_its_package_is_no_theft(tmp_path: Path) -> None:
    runs = our_runs(tmp_path / "runs")
    copy = tmp_path / "ACME" / "results" / "bed" / "strong" / "cosmoflow"
    copy.mkdir(parents=True)
    (tmp_path / "ACME" / "systems").mkdir()
    for path in runs.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert "run-reused" not in rules(check([tmp_path]))


@pytest.mark.parametrize("name", [".git", "power", "pruned_results"])
def test_a_system_of_any_name_is_judged(tmp_path: Path, name: str) -> None:
    folder = hpc_package(tmp_path, system=name)
    verdict = check([folder])
    assert verdict.logs == 10
    assert "number_of_nodes" not in str(verdict.findings)
    log = next(folder.rglob("result_3.txt"))
    log.write_text("nothing")
    assert "log-empty" in rules(check([folder]))


@pytest.mark.parametrize(
    "path",
    ["results/.git/objects/ab/cd", "results/.git/HEAD", "results/big/strong/cosmoflow/power/result_0/node_0.txt",
     "results/big/strong/cosmoflow/.git/x", "results/big/strong/cosmoflow/pruned_results/notes.md", ".git/config"],
)  # fmt: skip
def test_folders_beside_results_are_no_results(tmp_path: Path, path: str) -> None:
    folder = hpc_package(tmp_path)
    before = [group.folder for group in find_results(folder).groups]
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text("x")
    assert [group.folder for group in find_results(folder).groups] == before


# Speed


def faster(factor: float) -> Mutation:
    def apply(lines: Lines) -> Lines:
        start = next(line.time_ms for line in lines if line.key == "run_start")
        return [replace(line, time_ms=start + max(0.0, line.time_ms - start) * factor if line.time_ms > start else line.time_ms)
                for line in lines]  # fmt: skip

    return apply


Case = tuple[str, float, dict[str, int], bool]


@pytest.mark.parametrize(
    ("benchmark", "factor", "changed", "possible"),
    [
        ("deepcam", 1.0, {}, True),
        ("deepcam", 1e-4, {}, False),
        ("deepcam", 1e-3, {"number_of_nodes": 1}, False),
        ("cosmoflow", 1.0, {}, True),
        ("cosmoflow", 1e-5, {"number_of_nodes": 1}, False),
        ("oc20", 1.0, {}, True),
        ("oc20", 1e-5, {"number_of_nodes": 1}, False),
        ("openfold", 1.0, {}, True),
        ("openfold", 1e-5, {"number_of_nodes": 1}, False),
        ("deepcam", 1e-3, {"number_of_nodes": 1, "accelerators_per_node": 0}, False),
    ],
)
def test_a_round_has_a_bound_of_speed_too(
    tmp_path: Path, benchmark: str, factor: float, changed: dict[str, int], possible: bool
) -> None:
    edits = [edit(key, value=value) for key, value in changed.items()]
    runs = {"deepcam": 5, "oc20": 5}.get(benchmark, 10)
    folder = results(tmp_path, runs, lambda n: chain(*edits, faster(factor))(
        hpc_run(benchmark, seed=n + 1, start_ms=BEGIN_MS + n * 10**6)))  # fmt: skip
    assert ("speed-possible" not in rules(check([folder], "3.0.0"))) == possible


def test_the_open_division_may_train_another_model(tmp_path: Path) -> None:
    change = chain(edit("submission_division", value="open"), faster(1e-5))
    folder = results(tmp_path, 5, lambda n: change(hpc_run("deepcam", seed=n + 1, start_ms=BEGIN_MS + n * 10**6)))
    assert "speed-possible" not in rules(check([folder], "3.0.0"))


@pytest.mark.parametrize(
    ("fields", "factor", "possible"),
    [
        ({"accelerator_model_name": "NVIDIA A100-SXM4-40GB"}, 0.1, False),
        ({"accelerator_model_name": "NVIDIA A100-SXM4-80GB (400W)"}, 0.2, False),
        ({"accelerator_model_name": "NVIDIA H100 80GB HBM3"}, 0.1, False),
        ({"accelerator_model_name": "NVIDIA H100 80GB HBM3"}, 0.001, False),
        ({"accelerator_model_name": "Tesla V100-SXM2-16GB"}, 0.1, False),
        ({"accelerator_model_name": "nvidia p100-pcie-16gb"}, 0.1, False),
        ({"accelerators_per_node": "0", "host_processor_model_name": "FUJITSU Processor A64FX"}, 0.01, False),
        ({"accelerator_model_name": "NVIDIA A100-SXM4-40GB", "number_of_nodes": "32"}, 0.1, False),
        ({"accelerator_model_name": "NVIDIA A100-SXM4-40GB"}, 1.0, True),
        ({"accelerator_model_name": "NVIDIA H100 80GB HBM3"}, 0.5, True),
        ({"accelerator_model_name": "NVIDIA GH200 480GB"}, 0.4, True),
        ({"accelerator_model_name": "NVIDIA B200"}, 0.4, True),
        ({"accelerator_model_name": "NVIDIA B200"}, 0.1, False),  # unknown: bounded by the fastest that is known
        ({"accelerator_model_name": "N/A", "host_processor_model_name": "A64FX"}, 0.1, False),
        ({"accelerator_model_name": "100 boxes of type A"}, 0.1, False),
        ({"accelerator_model_name": "NVIDIA A100-SXM4-40GB", "number_of_nodes": "900"}, 0.1, True),
        ({"accelerator_model_name": "NVIDIA A100-SXM4-40GB", "division": "open"}, 0.1, True),
    ],
)
def test_no_run_is_much_faster_than_the_published_ones_on_the_same_accelerators(
    tmp_path: Path, fields: dict[str, str], factor: float, possible: bool
) -> None:
    found = check([hpc_package(tmp_path / "hpc_results_v3.0", change=faster(factor), **fields)]).findings
    texts = [item.message for item in found if item.rule == "speed-possible"]
    assert len(texts) == (0 if possible else 10), texts


@pytest.mark.parametrize(
    ("benchmark", "model", "factor", "possible"),
    [
        ("llama2_70b_lora", "NVIDIA B200-SXM-180GB", 0.1, False),
        ("llama2_70b_lora", "AMD Instinct MI300X 192GB HBM3", 0.1, False),
        ("llama31_405b", "NVIDIA Blackwell GPU (GB200)", 0.1, False),
        ("stable_diffusion", "NVIDIA H200-SXM5-141GB", 0.1, False),
        ("llama2_70b_lora", "NVIDIA Blackwell GPU (B200-SXM-180GB)", 3.0, True),
        ("llama2_70b_lora", "TPU-trillium", 0.1, False),
        ("rgat", "NVIDIA H200-SXM5-141GB", 3.0, True),
    ],
)
def test_the_bound_holds_for_training_too(
    tmp_path: Path, benchmark: str, model: str, factor: float, possible: bool
) -> None:
    runs = 3 if benchmark == "llama31_405b" else 10
    folder = tmp_path / "training_results_v5.0" / "ACME"
    results(folder / "results" / "big" / benchmark, runs, lambda n: faster(factor)(training_run(benchmark, seed=n + 1)))
    (folder / "systems").mkdir()
    fields = system_fields(number_of_nodes="1", accelerators_per_node="8", accelerator_model_name=model)
    (folder / "systems" / "big.json").write_text(json.dumps(fields))
    assert ("speed-possible" not in rules(check([folder]))) == possible


@pytest.mark.parametrize(
    ("apart_ms", "nodes", "possible"),
    [
        (0, 1, False),
        (1000, 1, False),
        (5000, 1, False),
        (0, 4, False),
        (0, 5, True),
        (100_000, 1, True),
        (20_000, 1, True),
    ],
)
def test_runs_at_once_have_nodes_of_their_own(tmp_path: Path, apart_ms: int, nodes: int, possible: bool) -> None:
    begin: Callable[[int], int] = lambda n: START_MS + n * apart_ms  # noqa: E731
    folder = tmp_path / "runs"
    our_runs(folder)
    for n, path in enumerate(sorted(folder.glob("result_*.txt"))):
        text = path.read_text()
        for line in set(text.splitlines()):
            event = json.loads(line.removeprefix(":::MLLOG "))
            moved = event | {"time_ms": event["time_ms"] - (START_MS + n * 100_000) + begin(n)}
            text = text.replace(line, f":::MLLOG {json.dumps(moved)}")
        path.write_text(text)
    describe(folder, nodes=nodes)
    place = (
        tmp_path / "ACME" / "benchmarks" / "cosmoflow" / "implementations" / "mlhpc-1" / "bed" / "strong" / "provenance"
    )
    place.mkdir(parents=True)
    kept = tmp_path / "ACME" / "results" / "bed" / "strong" / "cosmoflow"
    kept.mkdir(parents=True)
    (tmp_path / "ACME" / "systems").mkdir()
    for path in folder.glob("result_*.txt"):
        path.rename(kept / path.name)
    folder.rename(place / "run_0")
    assert ("runs-at-once" not in rules(check([tmp_path / "ACME"]))) == possible


# Measured numbers of another run, beside evaluations of its own

DRAW = [[draw.uniform(0.1, 2.0) for _ in range(20)] for draw in map(random.Random, range(3))]
DRAW.append([float(f"{number:.6f}") for number in DRAW[0]])


def with_numbers(key: str, numbers: list[float], seed: int) -> Lines:
    """A DeepCAM log of a seed with measured numbers, one event each, or in one event."""
    lines = hpc_run("deepcam", seed=seed, start_ms=BEGIN_MS + seed * 10**6)
    values: list[object]
    if key == "first_losses":
        values = [numbers]
    elif key == "step_phases":
        names = ("step", "data_wait", "forward_backward", "exposed_communication", "optimizer", "other")
        rows = [(*numbers[n : n + 4], 0.0) for n in range(0, len(numbers) - 3, 4)]
        values = [dict(zip(names, (sum(row), *row), strict=True)) for row in rows]
    else:
        values = [{"throughput": number} if key == "tracked_stats" else number for number in numbers]
    for number, value in enumerate(values):
        metadata = {"epoch_num": number + 1, "step_num": 7 * number}
        lines = insert(Line(key, value, metadata=metadata), "eval_start", min(number, 23))(lines)
    return lines


def _with_other_evaluations(lines: Lines) -> Lines:
    draw = random.Random(7)
    changed = (replace(line, value=line.value * draw.uniform(0.97, 1.0)) if line.key == "eval_accuracy" else line
               for line in lines)  # fmt: skip
    return chain(*(shift_after("eval_start", n, draw.uniform(100, 900)) for n in range(24)))(list(changed))


@pytest.mark.parametrize(
    ("key", "numbers", "other", "seeds", "copied"),
    [
        ("first_losses", DRAW[0], DRAW[0], (1, 2), True),
        ("first_losses", DRAW[0], DRAW[0][3:9], (1, 2), True),
        ("first_losses", DRAW[0], [*DRAW[1][:10], *DRAW[0][10:]], (1, 2), True),
        ("train_loss", DRAW[0], DRAW[0], (1, 2), True),
        ("train_loss", DRAW[0][:3], DRAW[0][:3], (1, 2), True),
        ("tracked_stats", DRAW[0], DRAW[0], (1, 2), True),
        ("tracked_stats", DRAW[0][:5], DRAW[0][1:], (1, 2), True),
        ("tracked_stats", DRAW[0], DRAW[0], (1, 1), True),
        ("step_phases", DRAW[0], DRAW[0], (1, 2), True),
        ("step_phases", DRAW[0], [*DRAW[1][:16], *DRAW[0][16:]], (1, 2), True),
        ("step_phases", DRAW[0][:4], DRAW[0][:4], (1, 1), True),
        ("first_losses", DRAW[0], DRAW[1], (1, 2), False),
        ("first_losses", DRAW[0], DRAW[0], (1, 1), False),
        ("train_loss", DRAW[0], DRAW[0], (1, 1), False),
        ("train_loss", DRAW[0], DRAW[1], (1, 2), False),
        ("first_losses", DRAW[3], DRAW[3], (1, 2), False),
        ("train_loss", [0.5, 0.25, 0.125] * 6, [0.5, 0.25, 0.125] * 6, (1, 2), False),
        ("tracked_stats", [1234.5678901234567] * 20, [1234.5678901234567] * 20, (1, 2), False),
        ("tracked_stats", DRAW[0][:2], DRAW[0][:2], (1, 2), False),
        ("tracked_stats", DRAW[0], sorted(DRAW[0]), (1, 2), False),
        ("step_phases", DRAW[0], DRAW[2], (1, 2), False),
    ],
)
def test_no_run_has_measured_numbers_of_another(
    tmp_path: Path, key: str, numbers: list[float], other: list[float], seeds: tuple[int, int], copied: bool
) -> None:
    first, second = with_numbers(key, numbers, seeds[0]), with_numbers(key, other, seeds[1])
    if seeds[0] == seeds[1]:
        second = _with_other_evaluations(second)
    write(tmp_path / "a" / "result_0.txt", first)
    write(tmp_path / "a" / "result_1.txt", second)
    assert ("run-copied" in rules(check([tmp_path / "a"], "3.0.0"))) == copied
    for number, lines in enumerate((first, second)):
        write(tmp_path / "b" / str(number) / "result_0.txt", lines)
    reused = [item.message for item in check([tmp_path / "b"], "3.0.0").findings if item.rule == "run-reused"]
    # Between two results of a round equal numbers are a copy, whatever the seed.
    assert any(text.startswith(f"measured {key} ") for text in reused) == (
        copied or (numbers == other and seeds == (1, 1))
    )
