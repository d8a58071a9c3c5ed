"""Stages of a pipeline: which plans are refused, what a rank keeps, and training on real ranks that equals the unsplit run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from multiprocessing import Manager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from mlhpc.plugins.axes.pipeline import Pipeline, divide
from mlhpc.plugins.axes.predict import predict
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor, load_descriptors
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.parallel.apply import apply
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.layout import stages_of
from mlhpc.suite.training.parallel.meta_init import ALONE
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import Schedule
from mlhpc.suite.training.state import Position, TrainingState
from mlhpc.suite.transport import SingleProcessTransport, TorchTransport
from mlhpc.suite.workload import ExpertSpread, load_workload
from mlhpc.suite.world import World
from tests.plugins.axes.test_ranks import check, rows

PLAN = Path(__file__).parents[3] / "workloads" / "moe_lm" / "plans" / "pipeline.yaml"
FOUR = ("hyperparameters.layers=4",)
SCHEDULES: list[Schedule] = ["GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]


def written(folder: Path, *changes: tuple[str, str]) -> str:
    """The path of the shipped plan with changes."""
    text = PLAN.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "mine.yaml").write_text(text)
    return str(folder / "mine.yaml")


def parallel(plan: str, mesh: str, rank: int, ranks: int, *settings: str) -> Parallel:
    chosen = load_descriptor("moe_lm")
    return Parallel.of(load_config(chosen, "smoke", [f"plan={plan}", f"mesh={mesh}", *settings]), chosen, rank, ranks)


@pytest.mark.parametrize("name", ["cosmoflow", "deepcam", "open_catalyst", "openfold", "swinv2_moe"])
def test_a_workload_without_stages_says_why(name: str) -> None:
    chosen = load_descriptors()[name]
    plan = sorted((chosen.folder / "plans").glob("*.yaml"))[0].stem
    with pytest.raises(InputError, match=f"{name} has no stages for a pipeline: its .*: leave pipeline out"):
        Parallel.of(load_config(chosen, "smoke", [f"plan={plan}", "mesh=pipeline=2"]), chosen, 0, 2)


@pytest.mark.parametrize(
    ("changes", "mesh", "settings", "expected"),
    [
        ((("schedule: 1F1B", "schedule: FIFO"),), "pipeline=2", (), "schedule"),
        ((("schedule: 1F1B", "schedule: 1F1B\n  stages: 2"),), "pipeline=2", (), "1F1B needs 1 per rank, not 2"),
        ((("schedule: 1F1B", "schedule: ZBVZeroBubble\n  stages: 3"),), "pipeline=2", (), "needs 2 per rank, not 3"),
        ((("[sample, position, width]", "[sample, height]"),), "pipeline=2", (), "'height' has no entry under extents"),
        ((), "pipeline=2,tensor=2", (), "tensor and pipeline cannot be combined"),
        (
            (("schedule: 1F1B", "schedule: ZBVZeroBubble"),),
            "shard=2,pipeline=2",
            (),
            "ZBVZeroBubble with shard is not supported: .* expected 1F1B or GPipe",
        ),
        ((), "expert=2,pipeline=2", (), "expert and pipeline cannot be combined"),
        ((), "pipeline=2", ("compile=true",), "torch.compile"),
        ((), "pipeline=2", ("gradient_accumulation_steps=2",), "4 microbatches and gradient_accumulation_steps=2"),
        ((("microbatches: 4", "microbatches: 1"),), "pipeline=2", (), "needs at least 2 microbatches, not 1"),
        (
            (("schedule: 1F1B", "schedule: Interleaved1F1B"), ("microbatches: 4", "microbatches: 5")),
            "pipeline=2",
            (),
            "expected a multiple of 2",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_one_line(
    changes: tuple[tuple[str, str], ...], mesh: str, settings: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    chosen = load_descriptor("moe_lm")
    config = load_config(chosen, "smoke", [f"plan={written(tmp_path, *changes)}", f"mesh={mesh}", *settings])
    with pytest.raises(InputError, match=expected) as error:
        Parallel.of(config, chosen, 0, 4 if "," in mesh else 2).with_microbatches(config)
    assert "\n" not in str(error.value)


def test_the_microbatches_are_the_parts_of_a_step(tmp_path: Path) -> None:
    chosen = load_descriptor("moe_lm")
    config = load_config(chosen, "smoke", ["plan=pipeline", "mesh=pipeline=2"])
    found = Parallel.of(config, chosen, 0, 2)
    assert found.with_microbatches(config).gradient_accumulation_steps == 4
    without = written(tmp_path, ("  microbatches: 4\n", ""))
    config = load_config(chosen, "smoke", [f"plan={without}", "mesh=pipeline=2", "gradient_accumulation_steps=8"])
    assert Parallel.of(config, chosen, 0, 2).with_microbatches(config).gradient_accumulation_steps == 8
    assert parallel("pipeline", "data=2", 0, 2).with_microbatches(config).gradient_accumulation_steps == 8


def test_stages_lie_on_ranks_as_torch_expects(tmp_path: Path) -> None:
    def stages(schedule: Schedule) -> list[tuple[int, ...]]:
        plan = written(tmp_path, ("schedule: 1F1B", f"schedule: {schedule}"))
        return [parallel(plan, "pipeline=2", rank, 2, *FOUR).stages for rank in range(2)]

    assert stages("1F1B") == [(0,), (1,)]
    assert stages("LoopedBFS") == [(0, 2), (1, 3)]
    assert stages("ZBVZeroBubble") == [(0, 3), (1, 2)]


@pytest.mark.parametrize("schedule", ["1F1B", "LoopedBFS", "ZBVZeroBubble"])
def test_the_stages_of_all_ranks_are_the_model_and_give_its_output(schedule: Schedule, tmp_path: Path) -> None:
    chosen = load_descriptor("moe_lm")
    plan = written(tmp_path, ("schedule: 1F1B", f"schedule: {schedule}"))
    config = load_config(chosen, "smoke", [f"plan={plan}", "mesh=pipeline=2", *FOUR])

    def build() -> nn.Module:
        torch.manual_seed(3)
        return load_workload(chosen)(config).build_model(ALONE)

    whole = build()
    parts: dict[int, nn.Module] = {}
    names: list[str] = []
    for rank in range(2):
        model, mine = build(), Parallel.of(config, chosen, rank, 2)
        divide(model, mine, Axis("pipeline", rank, 2), Axis("replicas", 0, 1))
        names += [name for name, _ in model.named_parameters()]
        stages = stages_of(model)
        assert stages is not None
        parts |= stages.modules
        assert mine.counts == (max(stages.modules) == stages.total - 1)
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    given = (torch.randint(0, 256, (3, 64), dtype=torch.uint8),)
    found = given
    for stage in sorted(parts):
        found = parts[stage](*found)
    for mine_, expected in zip(found, whole(*given), strict=True):
        assert torch.equal(mine_, expected)


def test_a_plan_of_other_modules_is_refused(tmp_path: Path) -> None:
    chosen = load_descriptor("moe_lm")
    for change, expected in (
        (("last: [norm, head]", "last: [head]"), "'norm.weight' is of no stage"),
        (("blocks: blocks", "blocks: norm"), "'norm' is no list of modules"),
        (("first: [embedding]", "first: [bytes]"), "'bytes' is no module"),
        (("mesh: pipeline=2", "mesh: pipeline=3"), "3 stages, and 'blocks' has 2 blocks"),
    ):
        plan = written(tmp_path, change)
        config = load_config(chosen, "smoke", [f"plan={plan}"])
        ranks = 3 if "=3" in change[1] else 2
        with pytest.raises(InputError, match=expected):
            predict(chosen, config, Parallel.of(config, chosen, 0, ranks))


def test_two_stages_train_as_one_rank_with_as_many_parts() -> None:
    """Losses, gradients, metrics, and sends to the byte."""
    check(rows("moe_lm", 2, ["pipeline=2"], 3, (), "--plan", "pipeline"), ["pipeline=2"])


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_rank(schedule: Schedule, tmp_path: Path) -> None:
    plan = written(tmp_path, ("schedule: 1F1B", f"schedule: {schedule}"))
    check(rows("moe_lm", 2, ["pipeline=2"], 20, FOUR, "--plan", plan), ["pipeline=2"])


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [(), ("hyperparameters.moe.balance=bias",), ("hyperparameters.moe.dispatch=capacity",)],
    ids=["dropless", "bias", "capacity"],
)
def test_four_ranks_train_as_one_also_where_balance_or_capacity_depend_on_the_microbatch(
    settings: tuple[str, ...],
) -> None:
    meshes = ["pipeline=4", "data=2,pipeline=2", "shard=2,pipeline=2"]
    check(rows("moe_lm", 4, meshes, 20, (*FOUR, *settings), "--plan", "pipeline"), meshes)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_stages_whose_states_are_sharded_and_replicated_train_as_one_rank(schedule: Schedule, tmp_path: Path) -> None:
    plan = written(tmp_path, ("schedule: 1F1B", f"schedule: {schedule}"))
    check(rows("moe_lm", 8, ["data=2,shard=2,pipeline=2"], 5, FOUR, "--plan", plan), ["data=2,shard=2,pipeline=2"])


class Run:
    """Training of one rank under a plan in float64, as the trainer does it."""

    def __init__(self, plan: str | None, world: World) -> None:
        chosen = load_descriptor("moe_lm")
        settings = [*FOUR, "hyperparameters.moe.balance=bias", "gradient_accumulation_steps=4"]
        config = load_config(chosen, "smoke", settings + ([f"plan={plan}"] if plan else []))
        self.world, self.parallel = world, Parallel.of(config, chosen, world.rank, world.size)
        self.workload = load_workload(chosen)(config)
        if world is ALONE:  # beside the other rank: its load is summed with no other
            self.workload.spread = ExpertSpread(size=1, replicas=dist.group.WORLD)
        torch.manual_seed(3)
        model = self.workload.build_model(world)
        apply(self.parallel, model, self.workload, lambda: model)
        self.state = TrainingState.create(self.workload, model, 8, 1)
        device = torch.device("cpu")
        self.pipeline = Pipeline(self.workload, model, 4, device) if plan else None
        first = replace(self.parallel, mesh=replace(self.parallel.mesh, rank=0))
        self.checkpoint = partial(Checkpoint, identity={}, mesh=self.parallel.mesh, stages=first.stages)

    def step(self, number: int) -> float:
        text = torch.randint(0, 256, (16, 65), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        self.state.optimization.optimizer.zero_grad()
        if self.pipeline is not None:
            loss = float(self.pipeline.step({"bytes": text})[0])
        else:
            losses = [self.workload.loss(self.state.model, {"bytes": part}) / 4 for part in text.chunk(4)]
            for each in losses:
                each.backward()
            loss = sum(float(each) for each in losses)
        self.state.update(number, 1)
        return self.world.sum({"loss": loss})["loss"] / self.world.size


def run_stages(rank: int, folder: str, plans: list[str], found: Any) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]  # the models' own casts
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    transport = TorchTransport(dist.group.WORLD)
    world = World("test", rank, 2, 0, 1, rank, 2, ("here",), transport, SingleProcessTransport())
    path = Path(folder) / "trial_0.pt"
    run = Run(plans[0], world)
    for number in range(3):
        run.step(number)
    snapshot = run.checkpoint(path).snapshot(world, run.state, Position(1, 3))
    every = world.gather(snapshot.write(), bytes)
    if every is not None:
        snapshot.commit(every)
    losses = [[run.step(number) for number in range(3, 6)]]
    for plan in plans:  # the first is resumed under its own plan
        again = Run(plan, world)
        again.checkpoint(path).load(world, again.state)
        losses.append([again.step(number) for number in range(3, 6)])
    if rank == 0:
        alone = Run(None, ALONE)
        alone.checkpoint(path).load(ALONE, alone.state)
        found.append([*losses, [alone.step(number) for number in range(3, 6)]])
    world.barrier()
    dist.destroy_process_group()


@pytest.mark.long
def test_a_checkpoint_of_stages_goes_on_under_other_stages_and_without_a_plan(tmp_path: Path) -> None:
    """Balance ``bias`` has buffers, which one rank of the first plan lacks."""
    shipped = written(tmp_path)
    Path(shipped).rename(tmp_path / "first.yaml")
    other = written(tmp_path, ("schedule: 1F1B", "schedule: ZBVZeroBubble"))
    with Manager() as manager:
        found = manager.list()
        spawn(run_stages, (str(tmp_path), [str(tmp_path / "first.yaml"), other], found), nprocs=2)  # type: ignore[no-untyped-call]
        expected, *resumed = found[0]
    for losses in resumed:
        assert losses == pytest.approx(expected, rel=1e-12)
