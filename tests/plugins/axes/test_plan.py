"""`mlhpc plan`: what it prints is what closed forms say; what is not legal is refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec import structs

from mlhpc.plugins.axes.predict import Cost, PredictionCache, predict, predict_largest_cost
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.parallel.meta_init import build_on_meta
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import find_plan
from mlhpc.workloads.cosmoflow.model import compute_work
from tests.fixtures.cli import mlhpc


def cosmoflow(*options: str) -> dict[str, object]:
    done = mlhpc("plan", "cosmoflow", "--size", "smoke", *options, "--format", "json")
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    return plan  # type: ignore[no-any-return]


def test_bytes_and_collectives_of_a_split_sample_are_the_closed_forms() -> None:
    """16^3 voxels, 3 convolutions from 8 channels, one dimension in two halves: every rank has one neighbour."""
    plan = cosmoflow("--mesh", "data=2,spatial=2x1x1")
    n, channels, sides = 16 // 2, (4, 8, 16), (16, 8, 4)
    planes = [
        4 * n * c * side * side for c, side in zip(channels, sides, strict=True)
    ]  # float32, one plane of one layer
    found = {each["axis"]: each for each in plan["exchanges"]}  # type: ignore[index]
    assert found["d"]["bytes"] == sum(planes) + sum(planes[1:])  # forward; backward, but not to the input
    assert found["d"]["calls"] == 5
    assert found["spatial"] == {
        "axis": "spatial",
        "kind": "all_gather",
        "ranks": 2,
        "calls": 1,
        "bytes": 4 * n * 32 * 2 * 2,
    }
    assert found["gradients"]["bytes"] == plan["parameters"] - 4 * 2 * 4 == 4 * 59612  # buffers: mean and factor
    assert plan["optimizer"] == plan["gradients"]
    assert plan["inputs"] == n * (8 * 16 * 16 * 4 * 2 + 4 * 4)


@pytest.mark.long
def test_memory_is_of_the_fullest_rank_and_collectives_are_of_the_rank_that_sends_most() -> None:
    """DeepCAM's strided layers: the first of two parts sends more, the second holds more."""
    chosen, common = load_descriptor("deepcam"), PredictionCache()
    config = structs.replace(load_config(chosen, "smoke"), plan="spatial", mesh="spatial=2x1")
    ranks = [Parallel.of(config, chosen, rank, 2) for rank in range(2)]
    first, second = (predict(chosen, config, parallel, common) for parallel in ranks)
    stated = predict_largest_cost(chosen, config, ranks[0], common)
    assert second.memory > first.memory
    assert stated.memory == second.memory
    assert _sent(first) > _sent(second)
    assert stated.exchanges == first.exchanges


def _sent(cost: Cost) -> int:
    return sum(each.bytes for each in cost.exchanges)


def test_without_a_split_the_flops_are_the_workloads_own() -> None:
    config = load_config(load_descriptor("cosmoflow"), "smoke")
    stated = compute_work(config.hyperparameters, global_batch_size=16, element_bytes=4)  # type: ignore[arg-type]
    plan = cosmoflow("--mesh", "data=2")
    assert plan["flops"] == 8 * stated.executed_flops
    assert [each["axis"] for each in plan["exchanges"]] == ["gradients"]  # type: ignore[attr-defined]


def test_splitting_halves_activations_and_what_is_read() -> None:
    whole, split = cosmoflow("--mesh", "data=2"), cosmoflow("--mesh", "data=1,spatial=2x1x1")
    assert split["samples"] == 2 * whole["samples"]  # type: ignore[operator]
    assert split["activations"] == pytest.approx(
        whole["activations"], rel=0.15
    )  # twice the samples, half of each, halos
    assert split["reads"] == pytest.approx(whole["reads"], rel=0.01)


@pytest.mark.long
def test_a_sweep_lists_every_legal_mesh_and_says_why_others_are_not() -> None:
    done = mlhpc(
        *("plan", "cosmoflow", "--plan", "spatial", "--size", "smoke", "--nodes", "4", "--sweep", "--format", "json"),
        *("--tflops", "1", "--gigabytes-per-s", "1", "--latency-us", "10"),
    )
    found = json.loads(done.stdout)
    meshes = {plan["mesh"] for plan in found["plans"]}
    assert {"data=4", "data=2,spatial=1x2x1", "data=1,spatial=2x1x2"} <= meshes
    refused = {each["mesh"]: each["reason"] for each in found["refused"]}
    assert "d has 2 positions" in refused["data=1,spatial=4x1x1"]
    assert len(meshes) + len(refused) == 1 + 3 + 6  # data alone, two parts, four parts
    times = [plan["time"]["total_s"] for plan in found["plans"]]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--mesh", "data=3,spatial=2x1x1"], "global_batch_size 16 cannot be split evenly over 3 ranks"),
        (["--mesh", "spatial=4x1x1"], "d has 2 positions at layer .*: expected at most d in 2 parts"),
        (["--mesh", "spatial=2x1x1", "--memory", "0.0001"], "--memory is 0.0001 GiB: split samples"),
        (["--nodes", "3", "--mesh", "spatial=2x1x1"], "expected a multiple of 2 ranks"),
        (["--plan", "none"], "unknown plan 'none'"),
        (["--sweep"], "--sweep needs --ranks or --nodes"),
        (["--tflops", "1"], "belong together"),
        (
            ["--tflops", "2-1", "--gigabytes-per-s", "1", "--latency-us", "1"],
            "--tflops 2-1: expected a positive number",
        ),
        (["--ceilings", "none.json"], "--ceilings needs --network"),
        (["--reached", "50%"], "and --reached needs both"),
        (["--ceilings", "a", "--network", "b", "--reached", "150%"], "--reached 150%: expected per cent from 1 to 100"),
        (["--ceilings", "none.json", "--network", "none.json"], "none.json: cannot be read"),
        (
            ["--ceilings", "a", "--network", "b", "--tflops", "1", "--gigabytes-per-s", "1", "--latency-us", "1"],
            "not both groups",
        ),
    ],
)
def test_what_is_not_legal_is_refused_in_one_line(options: list[str], reason: str) -> None:
    done = mlhpc("plan", "cosmoflow", "--size", "smoke", *options)
    assert done.returncode == 2

    assert re.search(reason, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_sizes_that_no_memory_holds_are_told_in_one_line() -> None:
    done = mlhpc("plan", "moe_lm", "--size", "smoke", "--set", "hyperparameters.width=1000000000")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no memory can hold an array of [3000000000, 1000000000] elements" in done.stderr


def test_a_plan_that_a_workload_does_not_ship_and_an_unknown_axis_are_told() -> None:
    refused = mlhpc("plan", "moe_lm", "--plan", "spatial", "--mesh", "data=2").stderr
    assert "moe_lm: unknown plan 'spatial'; plans: experts, pipeline, sharded, tensor" in refused
    assert (
        "unknown axis 'foo'; axes: data, shard, expert, tensor, spatial"
        in mlhpc("plan", "cosmoflow", "--mesh", "foo=2").stderr
    )


WRONG = {
    "another number of channels": (
        "channel: 4",
        "channel: 5",
        "the model cannot take what extents, dims and boundaries",
    ),
    "no boundary": (
        "  hidden.0: {at: input",
        "  output: {at: output",
        "the model cannot take what|does not name dimension",
    ),
    "a boundary too late": ("at: input", "at: output", "the model cannot take what"),
    "an unknown boundary": ("hidden.0", "hidden.7", "boundary 'hidden.7' is no module"),
    "a boundary that lacks a dimension": ("d, h, w, channel]}  #", "d, h, channel]}  #", "does not name dimension 'w'"),
    "an extent that grows": (
        "channel: 4",
        "channel: conv_channels * samples",
        "grows with the samples, which a plan with split does not support",
    ),
    "a parameter without pattern": ("convolutions.*", "convs.*", "add 'convolutions.0.*: replicate'"),
    "a parameter with two patterns": ("  hidden.*", "  h*", "narrow|matched"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_plan_that_does_not_fit_the_model_is_refused_before_anything_runs(mistake: str, tmp_path: Path) -> None:
    before, after, reason = WRONG[mistake]
    text = find_plan(load_descriptor("cosmoflow"), "spatial").read_text()
    assert before in text
    if mistake == "a parameter with two patterns":
        after = before + ": replicate\n" + after
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(before, after, 1))
    done = mlhpc("plan", "cosmoflow", "--size", "smoke", "--plan", path, "--mesh", "spatial=2x1x1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(reason, done.stderr), done.stderr


def test_a_profile_does_not_leave_a_plan_out_silently() -> None:
    done = mlhpc("profile", "cosmoflow", "--size", "smoke", "--set", "plan=spatial")
    assert done.returncode == 2
    assert "mlhpc plan predicts what a plan costs" in done.stderr


def test_pieces_of_states_are_the_closed_forms() -> None:
    """Four ranks hold rows of each tensor. Those of the two blocks are gathered twice per step, all others once."""
    whole = json.loads(mlhpc("plan", "moe_lm", "--size", "smoke", "--mesh", "data=4", "--format", "json").stdout)[
        "plans"
    ][0]
    split = json.loads(mlhpc("plan", "moe_lm", "--size", "smoke", "--mesh", "shard=4", "--format", "json").stdout)[
        "plans"
    ][0]
    assert split["gradients"] == pytest.approx(whole["gradients"] / 4, rel=1e-3)
    assert split["optimizer"] == pytest.approx(whole["optimizer"] / 4, rel=1e-2)
    assert split["gathered"] == 4 * split["gradients"]  # all parameters, padded to four equal pieces
    assert whole["gathered"] == 0
    assert split["activations"] == whole["activations"]  # those that are gathered do not count as activations
    assert split["peak"] > split["activations"] + split["gathered"] * 0.5
    assert split["lacks"] == whole["lacks"] == []
    exchanges = {each["kind"]: each for each in split["exchanges"]}
    every = build_on_meta(load_descriptor("moe_lm"), load_config(load_descriptor("moe_lm"), "smoke"))[
        1
    ].named_parameters()
    again = sum(parameter.nbytes for name, parameter in every if name.startswith("blocks.")) // 4
    assert exchanges["all_gather"]["bytes"] == split["gradients"] + again
    assert (exchanges["all_gather"]["calls"], exchanges["reduce_scatter"]["calls"]) == (5, 3)
    assert exchanges["reduce_scatter"]["bytes"] == 4 * split["gradients"]
    assert exchanges["all_gather"]["axis"] == exchanges["reduce_scatter"]["axis"] == "shard"
    assert [each["axis"] for each in whole["exchanges"]] == ["gradients"]


def test_what_is_not_known_is_told_beside_a_total_that_lacks_it(tmp_path: Path) -> None:
    text = find_plan(load_descriptor("moe_lm"), "sharded").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(re.sub(r"extents:.*\ninputs:\n.*\n", "", text))
    done = mlhpc("plan", "moe_lm", "--size", "smoke", "--plan", path, "--mesh", "shard=2")
    lines = {line.strip().rpartition("  ")[0].strip(): line.split()[-2:] for line in done.stdout.splitlines()}
    assert lines["activations"] == lines["at most in a step"] == lines["inputs"] == ["not", "known"]
    assert "not known, and not in all of these: activations, inputs" in done.stdout
    assert re.search(r"all of these +> \d", done.stdout)
    known = json.loads(mlhpc("plan", "moe_lm", "--size", "smoke", "--mesh", "shard=2", "--format", "json").stdout)
    lacking = json.loads(
        mlhpc(*("plan", "moe_lm", "--size", "smoke", "--plan", path, "--mesh", "shard=2", "--format", "json")).stdout
    )
    (known,), (lacking,) = known["plans"], lacking["plans"]
    assert lacking["gathered"] == known["gathered"] == 461056
    assert lacking["exchanges"] == known["exchanges"]
    assert lacking["memory"] < known["memory"]


@pytest.mark.parametrize(
    ("extent", "reason"),
    [
        ("context - 1", "expected a number or HYPERPARAMETER"),
        ("context + 0", "expected a number or HYPERPARAMETER"),
        ("samples * context", "expected a number or HYPERPARAMETER"),
        ("contexts + 1", "extents.position: unknown hyperparameter 'contexts'"),
        ("learning_rate + 1", "extents.position: unknown hyperparameter 'learning_rate'"),
    ],
)
def test_an_extent_that_says_nothing_is_refused(extent: str, reason: str, tmp_path: Path) -> None:
    text = find_plan(load_descriptor("moe_lm"), "sharded").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("context + 1", extent))
    done = mlhpc("plan", "moe_lm", "--size", "smoke", "--plan", path, "--mesh", "shard=2")
    assert done.returncode == 2
    assert reason in done.stderr


@pytest.mark.long
def test_a_sweep_tries_every_axis_of_every_shipped_plan_once() -> None:
    """Shards come from the plan that has only them; a plan of dense twins is refused once, heads once for all meshes."""
    settings = ("--set", "global_batch_size=16", "--set", "hyperparameters.heads=2")
    done = mlhpc("plan", "moe_lm", "--size", "smoke", "--nodes", "8", "--sweep", "--format", "json", *settings)
    found = json.loads(done.stdout)
    tried = sorted((plan["plan"], plan["mesh"]) for plan in found["plans"])
    assert tried == [
        ("experts", "data=1,expert=8"),
        ("experts", "data=2,expert=4"),
        ("experts", "data=4,expert=2"),
        ("pipeline", "data=4,pipeline=2"),
        ("sharded", "data=1,shard=8"),
        ("sharded", "data=2,shard=4"),
        ("sharded", "data=4,shard=2"),
        ("sharded", "data=8"),
        ("tensor", "data=1,expert=4,tensor=2"),
        ("tensor", "data=2,expert=2,tensor=2"),
        ("tensor", "data=4,expert=1,tensor=2"),
    ]
    refused = {(each["plan"], each["mesh"]): each["reason"] for each in found["refused"]}
    heads = "2 heads on tensor=4: expected one of [1, 2]"
    assert heads in refused["tensor", "data=2,expert=1,tensor=4"]
    assert heads in refused["tensor", "data=1,expert=2,tensor=4"]
    assert {plan for plan, mesh in refused if mesh == "any"} == {"tensor_dense", "tensor_experts"}


def test_a_sweep_of_one_plan_tries_its_axes_alone() -> None:
    words = ("--plan", "sharded", "--size", "smoke", "--nodes", "4", "--sweep", "--format", "json")
    meshes = {plan["mesh"] for plan in json.loads(mlhpc("plan", "moe_lm", *words).stdout)["plans"]}
    assert meshes == {"data=4", "data=2,shard=2", "data=1,shard=4"}
