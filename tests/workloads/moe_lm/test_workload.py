"""The language model: counts on the meta device, work by a counter, metric, schedule, and the same losses on any ranks."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.world import World
from mlhpc.workloads.moe.layer import MoELayer
from mlhpc.workloads.moe.schedule import learning_rate
from mlhpc.workloads.moe_lm import DESCRIPTOR
from mlhpc.workloads.moe_lm.config import MoELMConfig, parameter_count
from mlhpc.workloads.moe_lm.model import MoELanguageModel, add_rotary_positions
from mlhpc.workloads.moe_lm.workload import MoELM

ROOT = Path(__file__).resolve().parents[3]
SIZES = ("smoke", "mini", "mini_dense", "mini_facts", "mini_facts_dense", "middle", "full")


def own(name: str, *overrides: str) -> MoELMConfig:
    return load_config(DESCRIPTOR, name, overrides).hyperparameters  # type: ignore[return-value]


def config(*overrides: str) -> RunConfig:
    return load_config(DESCRIPTOR, "smoke", overrides)


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_closed_form_counts_the_parameters(size: str, twin: bool) -> None:
    settings = own(size, f"hyperparameters.dense={str(twin).lower()}") if twin else own(size)
    with torch.device("meta"):
        model = MoELanguageModel(settings)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(settings)
    if not twin:
        assert settings.row_bytes == DESCRIPTOR.card().size(size).sample_bytes


def test_full_is_olmoe_shaped_and_middle_fits_one_gpu() -> None:
    """OLMoE has 6.9 B, 1.3 B active (arXiv:2409.02060): 0.2 B of both are its 50,304-token embeddings, ours are 256 bytes."""
    full, middle = own("full"), own("middle")
    assert parameter_count(full) == pytest.approx(6.8e9, rel=0.02)
    assert parameter_count(full, active=True) == pytest.approx(1.08e9, rel=0.01)
    assert parameter_count(middle) == pytest.approx(1.7e9, rel=0.02)
    assert 16 * parameter_count(middle) < 40e9  # weights, gradients and both moments in float32


@pytest.mark.parametrize("size", SIZES)
def test_the_dense_twin_has_the_active_work(size: str) -> None:
    moe, dense = own(size), own(size, "hyperparameters.dense=true")
    router = moe.width * moe.moe.experts * sum(moe.has_experts(layer) for layer in range(moe.layers))
    assert parameter_count(moe, active=True) - router == parameter_count(dense) == parameter_count(dense, active=True)


def test_no_prediction_looks_ahead() -> None:
    torch.manual_seed(0)
    model = MoELanguageModel(own("smoke")).eval()
    text = torch.randint(0, 256, (2, 20), dtype=torch.uint8)
    changed = text.clone()
    changed[:, 12:] = 7
    torch.testing.assert_close(model(text)[0][:, :12], model(changed)[0][:, :12])
    assert not torch.allclose(model(text)[0][:, 12:], model(changed)[0][:, 12:])


def test_rotary_products_depend_on_the_distance_alone() -> None:
    x = torch.randn(1, 1, 1, 8).expand(1, 1, 6, 8)
    turned = add_rotary_positions(x)[0, 0]
    products = turned @ turned.t()
    torch.testing.assert_close(products[0, 2], products[3, 5])


def test_the_schedule_warms_up_falls_and_stays() -> None:
    settings = own("mini")
    warm = settings.warmup_steps
    rates = [learning_rate(settings, step) for step in range(settings.schedule_steps + 200)]
    assert rates[warm - 1] == rates[warm] == settings.learning_rate
    assert rates[0] == pytest.approx(settings.learning_rate / warm)
    assert all(a >= b for a, b in pairwise(rates[warm:]))
    assert rates[-1] == pytest.approx(0.1 * settings.learning_rate)


def test_uniform_logits_are_eight_bits_per_byte_however_batches_are_cut() -> None:
    workload = MoELM(config())
    model = MoELanguageModel(own("smoke")).eval()
    torch.nn.init.zeros_(model.head.weight)
    text = torch.randint(0, 256, (10, 65), dtype=torch.uint8)
    totals = {"nats": 0.0, "bytes": 0.0}
    with torch.no_grad():
        for part in text.split((1, 4, 5)):
            for name, value in workload.eval_stats(model, {"bytes": part}).items():
                totals[name] += float(value)
    assert totals["bytes"] == 640
    assert workload.metrics(totals)["eval_error"] == pytest.approx(8.0, rel=1e-6)


def test_the_bias_moves_after_each_step() -> None:
    workload = MoELM(config("hyperparameters.moe.balance=bias", "hyperparameters.moe.balance_coefficient=0.001"))
    torch.manual_seed(0)
    model = workload.build_model(World.create(None))
    optimizer = workload.build_optimizer(model, 50).optimizer
    workload.loss(model, {"bytes": torch.randint(0, 256, (2, 65), dtype=torch.uint8)}).backward()
    optimizer.step()
    (layer,) = [module for module in model.modules() if isinstance(module, MoELayer)]
    assert layer.router.bias_E.abs().max() > 0


def test_a_few_steps_learn() -> None:
    workload = MoELM(config())
    torch.manual_seed(0)
    model = workload.build_model(World.create(None))
    optimization = workload.build_optimizer(model, 50)
    text = torch.frombuffer(bytearray(b"the same words over and over, " * 40), dtype=torch.uint8)[:1040].view(16, 65)
    losses = []
    for _ in range(25):
        optimization.optimizer.zero_grad()
        loss = workload.loss(model, {"bytes": text})
        loss.backward()
        optimization.optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler itself reads it
def test_a_compiled_model_has_the_same_code_in_every_step(world: World) -> None:
    """The compiler stays out of the experts, whose numbers of rows differ from step to step."""
    counts: list[int] = []

    def count(module: torch.fx.GraphModule, inputs: object) -> object:
        counts.append(len(module.graph.nodes))
        return module.forward

    workload = MoELM(config("compile=true", "hyperparameters.context=16"))
    model = workload.build_model(world)
    model.compile(backend=count)
    after = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = {"bytes": torch.randint(0, 256, (2, 17), generator=generator, dtype=torch.uint8)}
        workload.loss(model, batch).backward()
        after.append(len(counts))
    assert 0 < after[0] == after[-1]
