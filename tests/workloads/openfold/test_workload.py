"""OpenFold through the Workload protocol: metric, schedule, logged keys, learning."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from msgspec import structs

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.sampling import list_train_batches
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import DESCRIPTOR
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.data import compute_batch_work
from mlhpc.workloads.openfold.public.selection import Dates
from mlhpc.workloads.openfold.schedule import learning_rate
from mlhpc.workloads.openfold.work import count_forward
from mlhpc.workloads.openfold.workload import OpenFold
from tests.workloads.openfold.conftest import SMALL_NET

RULES = Path(__file__).parents[3] / "suite" / "compliance" / "rulesets" / "3.0.0.yaml"


def small(**changes: object) -> RunConfig:
    config = load_config(DESCRIPTOR, "smoke")
    return structs.replace(config, hyperparameters=structs.replace(SMALL_NET, **changes))


def test_the_loss_of_a_global_batch_is_the_mean_of_its_parts(tiny_data: Path, world: World) -> None:
    workload = OpenFold(small())
    torch.manual_seed(0)
    model = workload.build_model(world)
    data = workload.dataset("train", tiny_data)
    with torch.no_grad():
        whole = workload.loss(model, data.load([0, 1, 2, 3], seed=1, epoch=1))
        halves = [workload.loss(model, data.load(part, seed=1, epoch=1)) for part in ([0, 2], [1, 3])]
    assert float(whole) == pytest.approx(float(sum(halves)) / 2, rel=1e-4)


class TwoRanks:
    """A world whose other rank did ``theirs``."""

    size = 2

    def __init__(self, theirs: list[float] | None = None) -> None:
        self.theirs = theirs

    def allgather(self, mine: list[float]) -> list[list[float] | None]:
        return [mine, self.theirs]


def test_the_imbalance_of_recycles_is_logged_where_ranks_draw_them(tiny_data: Path, world: World) -> None:
    workload = OpenFold(small(num_recycling_iters=2))
    data = workload.dataset("train", tiny_data)
    model = workload.build_model(world)
    recycles = []
    for index in range(3):
        batch = data.load([index], seed=0, epoch=1)
        recycles.append(int(batch["recycles"]))
        workload.loss(model, batch)
    one = count_forward(SMALL_NET, residues=SMALL_NET.crop_size).multiply_adds
    other: Any = TwoRanks([3 * one, 3 * one, 5 * one])
    pairs = [(mine + 3, theirs) for mine, theirs in zip(recycles, (3, 3, 5), strict=True)]
    expected = sum(2 * max(pair) / sum(pair) for pair in pairs) / 3
    assert workload.window_stats(other) == {"imbalance": pytest.approx(expected)}
    workload.loss(model, batch)
    assert workload.window_stats(world) == {}  # one rank
    assert OpenFold(small(num_recycling_iters=0)).window_stats(other) == {}


def test_balanced_ranks_share_the_batch_by_work_and_its_mean_loss_stays(tiny_data: Path, world: World) -> None:
    """Chains of different length, recycled differently: each rank computes some whole samples, padded to its own longest."""
    two: Any = TwoRanks()
    results: dict[bool, list[float]] = {}
    work: dict[bool, list[list[float]]] = {}
    config = small(crop_size=14, fape_clamp_probability=1.0)
    for balanced in (False, True):
        own = structs.replace(cast(OpenFoldConfig, config.hyperparameters), balanced_batches=balanced)
        workload = OpenFold(structs.replace(config, hyperparameters=own, global_batch_size=6))
        data = workload.dataset("train", tiny_data)
        torch.manual_seed(0)
        model = workload.build_model(two)
        results[balanced], work[balanced] = [], []
        for epoch in (1, 2, 3):
            for step, _ in enumerate(list_train_batches(len(data), 6, seed=1, epoch=epoch, rank=0, size=1)):
                loads, parts, samples = [], [], 0
                for rank in range(2):
                    batches = list(list_train_batches(len(data), 6, seed=1, epoch=epoch, rank=rank, size=2))
                    batch = data.load(batches[step], seed=1, epoch=epoch)
                    samples += len(batch["msa"])
                    assert batch["msa"].shape[-1] <= 14
                    with torch.no_grad():
                        parts.append(float(workload.loss(model, batch)))
                    loads.append(
                        compute_batch_work(own, len(batch["msa"]), batch["msa"].shape[-1], batch["msa"].shape[1] - 1)
                    )
                assert samples == 6
                results[balanced].append(sum(parts) / 2)
                work[balanced].append(loads)
    assert results[True] == pytest.approx(results[False], rel=1e-4)
    assert sum(map(max, work[True])) < 0.9 * sum(map(max, work[False]))


def test_logged_keys_are_those_of_the_rules_and_full_has_their_values() -> None:
    closed = yaml.safe_load(RULES.read_text())["benchmarks"]["openfold"]["closed"]
    config = load_config(DESCRIPTOR, "full")
    workload = OpenFold(config)
    logged = workload.hyperparameters() | workload.data_hyperparameters(Dates().stated())
    from_harness = {"train_samples", "eval_samples"}
    assert set(closed) - from_harness <= set(logged)
    wrong = {key for key, rule in closed.items() if key in logged and rule.get("equals", logged[key]) != logged[key]}
    assert wrong == {"init_checkpoint_sha256sum"}  # our own initialisation: open division
    card = DESCRIPTOR.card().size("full")
    assert (card.train_samples, card.eval_samples, card.eval_every_steps, card.required_runs) == (594_595, 180, 40, 10)


def test_what_was_not_done_with_the_data_is_not_logged(tiny_data: Path) -> None:
    """Synthetic chains have no days of release, and each is trained on once in an epoch."""
    workload = OpenFold(load_config(DESCRIPTOR, "smoke"))
    assert workload.data_hyperparameters(read_manifest(tiny_data).attributes) == {}
    of_the_data = set(Dates().stated())
    assert len(of_the_data) == 4
    assert not of_the_data & set(workload.hyperparameters())
    for size in ("smoke", "mini", "small"):  # so the card cannot ask for it there
        assert not of_the_data & set(DESCRIPTOR.card().size(size).constraints)
    assert of_the_data <= set(DESCRIPTOR.card().size("full").constraints)


@pytest.mark.parametrize("size", ["smoke", "mini", "small", "full"])
def test_cards_say_what_the_closed_forms_say(size: str) -> None:
    own, card = load_config(DESCRIPTOR, size).hyperparameters, DESCRIPTOR.card().size(size)
    once = count_forward(own, residues=own.crop_size)
    assert card.forward_flops_per_sample == (1 + own.num_recycling_iters / 2) * 2 * once.multiply_adds
    assert card.constraints["model_parameters_count"].equals == once.parameters


def test_the_schedule_warms_up_and_decays_by_steps() -> None:
    own = OpenFoldConfig(learning_rate=1.0, warmup_init=0.0, warmup_steps=10, decay_steps=(20, 30), decay_factor=0.5)
    assert [learning_rate(own, step) for step in (0, 3, 9, 10, 19, 20, 30)] == [
        0.0, 0.3333333333, 1.0, 1.0, 1.0, 0.5, 0.25,
    ]  # fmt: skip
    assert [learning_rate(structs.replace(own, warmup_steps=1), step) for step in (0, 1)] == [0.0, 1.0]
    with pytest.raises(ValueError, match="decay_steps is .*, expected increasing steps"):
        OpenFoldConfig(decay_steps=(3, 2))


def test_clipping_and_averaging_are_asked_of_the_harness(world: World) -> None:
    workload = OpenFold(small())
    optimization = workload.build_optimizer(workload.build_model(world), 10)
    assert (optimization.clip_norm, optimization.ema_decay) == (0.1, 0.9)
    group = optimization.optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-6, 0)


def test_what_is_not_supported_cannot_be_claimed() -> None:
    with pytest.raises(ValueError, match="no images to lay out"):
        OpenFold(structs.replace(small(), channels_last=True))


@pytest.mark.long
def test_two_proteins_can_be_learned_by_heart(tiny_data: Path, world: World) -> None:
    workload = OpenFold(small(max_templates=0, num_recycling_iters=0, structure_iterations=3))
    torch.manual_seed(0)
    model = workload.build_model(world)
    batch = workload.dataset("train", tiny_data).load([0, 1], seed=0, epoch=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-6)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
