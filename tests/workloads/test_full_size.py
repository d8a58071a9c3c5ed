"""Every workload's training step runs at its full size on meta tensors, and what it would hold is what is stated of it.

Beside the card stands what `mlhpc plan` predicts, where a workload has plans: it runs the step on another kind of tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.parallel.meta_init import build_on_meta
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.workload import Workload
from tests.fixtures.device_steps import META, pretend_meta_computes, step_of, watching
from tests.fixtures.wings import needs_axes

SAMPLES = 2
SINGLE = (f"global_batch_size={SAMPLES}", "channels_last=false", "instrumentation=false")
Batch = Mapping[str, Tensor]


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def cosmoflow(config: RunConfig) -> Batch:
    side = config.hyperparameters.input_size  # type: ignore[attr-defined]
    return {"x": empty((SAMPLES, side, side, side, 4), torch.int16), "y": empty((SAMPLES, 4))}


def deepcam(config: RunConfig) -> Batch:
    pixels = (config.hyperparameters.height, config.hyperparameters.width)  # type: ignore[attr-defined]
    return {"x": empty((SAMPLES, *pixels, 16)), "y": empty((SAMPLES, *pixels), torch.uint8)}


def moe_lm(config: RunConfig) -> Batch:
    return {"bytes": empty((SAMPLES, config.hyperparameters.context + 1), torch.uint8)}  # type: ignore[attr-defined]


def swinv2_moe(config: RunConfig) -> Batch:
    side = config.hyperparameters.pixels  # type: ignore[attr-defined]
    return {"image": empty((SAMPLES, side, side), torch.uint8), "label": empty((SAMPLES,), torch.int64)}


def open_catalyst(config: RunConfig) -> Batch:
    """Structures of the mean size that the configuration states."""
    stated: Any = config.hyperparameters
    atoms, edges, triplets = (
        SAMPLES * int(each) for each in (stated.mean_atoms, stated.mean_edges, stated.mean_triplets)
    )
    long = torch.int64
    return {
        **{name: empty((atoms, 3)) for name in ("position", "force")},
        **{name: empty((atoms,), long) for name in ("number", "structure")},
        **{name: empty((edges,), long) for name in ("source", "target")},
        **{name: empty((triplets,), long) for name in ("into", "out", "by_into")},
        **{name: empty((edges + 1,), long) for name in ("into_begin", "out_begin")},
        "free": empty((atoms,)),
        "shift": empty((edges, 3)),
        "energy": empty((SAMPLES,), torch.float64),
        "counts": empty((3,), long),
    }


@dataclass(frozen=True)
class Held:
    """Bytes at the end of a forward pass (``activations``: kept for the backward pass, each storage once), and after a step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    inputs: int


def traced(workload: Workload, model: nn.Module, batch: Batch) -> Held:
    """What a step on meta tensors holds. It fails where the step would wait for the device or copy to it."""
    known = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers(), *batch.values())}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    states: list[Any] = []
    build = workload.build_optimizer
    workload.build_optimizer = lambda *given: states.append(build(*given)) or states[-1]  # type: ignore[method-assign, func-returns-value]
    step = step_of(workload, model, META)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(batch)
    optimizer = states[0].optimizer
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    activations = sum(storage.nbytes() for storage in kept.values())
    kept.clear()
    with watching() as watched:
        step(batch)
    assert watched.found == {}
    return Held(
        parameters=sum(each.nbytes for each in (*model.parameters(), *model.buffers())),
        gradients=sum(each.grad.nbytes for each in model.parameters() if each.grad is not None),
        optimizer=sum(each.nbytes for each in moments),
        activations=activations,
        inputs=sum(each.nbytes for each in batch.values()),
    )


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Workload, nn.Module]]:
    def build(name: str, size: str, *settings: str) -> tuple[Workload, nn.Module]:
        config = load_config(load_descriptor(name), size, [*SINGLE, *settings])
        built = build_on_meta(load_descriptor(name), config)
        pretend_meta_computes(monkeypatch, bfloat16=config.precision == "bfloat16")
        return built

    return build


def check_stated(name: str, size: str, held: Held, model: nn.Module) -> None:
    """Weights and gradients are the card's; Adam's and LAMB's moments are twice, momentum once as much."""
    stated = 4 * load_descriptor(name).card().size(size).model_parameters
    weights = sum(each.nbytes for each in model.parameters())
    assert weights == held.gradients == stated
    scalars = 8 * len(list(model.parameters()))  # each parameter's number of steps
    assert abs(held.optimizer - (1 if name == "cosmoflow" else 2) * stated) <= scalars


PLANNED = [
    pytest.param("cosmoflow", "full", cosmoflow, "spatial=1x1x1"),  # 3 CPU-seconds
    pytest.param("deepcam", "full", deepcam, "spatial=1x1", marks=pytest.mark.long),
]


@needs_axes
@pytest.mark.parametrize(("name", "size", "batch_of", "mesh"), PLANNED)
def test_a_full_step_holds_what_the_plan_predicts(
    name: str, size: str, batch_of: Callable[[RunConfig], Batch], mesh: str, sizes: Callable[..., Any]
) -> None:
    from mlhpc.plugins.axes.predict import predict

    config = load_config(
        load_descriptor(name), size, [*SINGLE, "precision=float32", "plan=spatial", f"mesh=data=1,{mesh}"]
    )
    wanted = predict(load_descriptor(name), config, Parallel.of(config, load_descriptor(name), 0, 1))
    workload, model = sizes(name, size, "precision=float32")
    held = traced(workload, model, batch_of(workload.config))
    check_stated(name, size, held, model)
    assert held.parameters == wanted.parameters
    assert held.gradients == wanted.gradients
    assert held.optimizer == pytest.approx(wanted.optimizer, abs=8 * len(list(model.parameters())))
    assert held.inputs == wanted.inputs
    assert held.activations == pytest.approx(wanted.activations, rel=0.01)


OTHERS = [
    pytest.param("open_catalyst", "full", open_catalyst, ()),  # 2 CPU-seconds
    pytest.param("swinv2_moe", "full", swinv2_moe, ("precision=float32",), marks=pytest.mark.long),
    pytest.param("moe_lm", "full", moe_lm, ("precision=bfloat16", "hyperparameters.moe.backend=grouped_mm"),
                 marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "batch_of", "settings"), OTHERS)
def test_a_full_step_holds_what_the_card_states(
    name: str, size: str, batch_of: Callable[[RunConfig], Batch], settings: tuple[str, ...], sizes: Callable[..., Any]
) -> None:
    workload, model = sizes(name, size, *settings)
    held = traced(workload, model, batch_of(workload.config))
    print(name, size, held)
    check_stated(name, size, held, model)
    assert held.activations > held.inputs


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_full_step_of_openfold_holds_what_the_card_states(
    made_once: Callable[[str], Path], sizes: Callable[..., Any]
) -> None:
    """Short chains are padded to the crop of the full size. Recycling and checkpointing run."""
    workload, model = sizes("openfold", "full", "precision=float32")
    loaded = workload.dataset("train", made_once("openfold")).load(range(SAMPLES), seed=1, epoch=1)
    held = traced(workload, model, {name: each.to(META) for name, each in loaded.items()})
    print("openfold full", held)
    check_stated("openfold", "full", held, model)
