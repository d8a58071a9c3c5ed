"""Predicts what a rank holds, sends and reads in one training step under a plan, from a step on tensors without memory.

The step runs the workload's own loss on the model with the plan applied, on fake tensors and axes that send nothing. It allocates
nothing and needs no ranks: what is counted is what the run will do. Gradients' all-reduce is a closed form: their size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from suite.config import RunConfig
from suite.descriptor import Descriptor
from suite.performance.flops import count
from suite.training.parallel.apply import apply, build_on_meta, explained
from suite.training.parallel.sharing import Parallel
from suite.transport import Alone
from suite.workload import Workload, load_workload
from suite.world import World

GRADIENTS = "gradients"


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in one step: ``bytes`` are what this rank gives in all its ``calls``."""

    axis: str
    kind: str
    ranks: int
    calls: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """One rank's bytes and FLOPs in one step. ``reads``: of its samples; ``activations``: kept for the backward pass."""

    mesh: str
    ranks: int
    samples: int
    parameters: int
    gradients: int
    optimizer: int | None
    activations: int
    inputs: int
    reads: int
    flops: float
    exchanges: tuple[Exchange, ...]

    @property
    def memory(self) -> int:
        """Bytes of everything that lives at the end of a forward pass."""
        return self.parameters + self.gradients + (self.optimizer or 0) + self.activations + self.inputs

    def exchanged(self) -> dict[str, float]:
        """``<kind>_calls`` and ``<kind>_bytes`` of all exchanges but that of gradients, as a run counts them."""
        found: Counter[str] = Counter()
        for each in self.exchanges:
            if each.axis != GRADIENTS:
                found[f"{each.kind}_calls"] += each.calls
                found[f"{each.kind}_bytes"] += each.bytes
        return {name: float(value) for name, value in found.items()}


def predict(descriptor: Descriptor, config: RunConfig, parallel: Parallel) -> Cost:
    """Predict one step of the rank that ``parallel`` is of, in torch's default precision. InputError if the plan does not fit."""
    config = config.model_copy(
        update={"channels_last": False}
    )  # the same bytes; fake parameters cannot change their layout
    default = torch.get_default_dtype()
    samples = config.global_batch_size // parallel.mesh.data_size // config.gradient_accumulation_steps
    noted: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()

    def note(axis: str, kind: str, given: int, ranks: int) -> None:
        noted[axis, kind, ranks] += 1
        sizes[axis, kind, ranks] += given

    workload: Workload = load_workload(descriptor)(config)
    alone = World("plan", 0, 1, 0, 1, 0, 1, ("plan",), Alone(), Alone())
    with _fake(), torch.random.fork_rng(devices=[]):
        model = workload.build_model(alone)
        apply(parallel, model, workload, lambda: _unsplit(descriptor, config), note=note)
        batch = {
            name: torch.empty(shape, dtype=default if dtype == "float32" else getattr(torch, dtype))
            for name, (shape, dtype) in parallel.shapes(samples, split=True).items()
        }
        with explained():
            activations, flops = _step(model, workload, batch, config)
        optimizer = _optimizer_bytes(workload, model)
    parameters = list(model.parameters())
    inputs = sum(tensor.nbytes for tensor in batch.values())
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    exchanges = [Exchange(*key[:2], key[2], calls, sizes[key]) for key, calls in noted.items()]
    if parallel.mesh.size > 1:
        exchanges.append(Exchange(GRADIENTS, "all_reduce", parallel.mesh.size, 1, gradients))
    parts = config.gradient_accumulation_steps
    return Cost(
        mesh=parallel.mesh.text(),
        ranks=parallel.mesh.size,
        samples=samples,
        parameters=sum(parameter.nbytes for parameter in parameters) + sum(each.nbytes for each in model.buffers()),
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        inputs=inputs,
        reads=inputs * parts,
        flops=flops * parts,
        exchanges=tuple(
            each if each.axis == GRADIENTS else replace(each, calls=each.calls * parts, bytes=each.bytes * parts)
            for each in exchanges
        ),
    )


def largest(descriptor: Descriptor, config: RunConfig, parallel: Parallel) -> Cost:
    """Predict the rank that has most: in the middle of a sample (neighbours on both sides) or at its end (the largest part)."""
    mesh = parallel.mesh
    places = {tuple(parts // 2 for parts in mesh.spatial), tuple(parts - 1 for parts in mesh.spatial)}
    ranks = {_rank(place, mesh.spatial) for place in places}
    costs = [predict(descriptor, config, replace(parallel, mesh=replace(mesh, rank=rank))) for rank in sorted(ranks)]
    return max(costs, key=lambda cost: (cost.memory, sum(each.bytes for each in cost.exchanges)))


def _rank(place: tuple[int, ...], parts: tuple[int, ...]) -> int:
    return sum(at * math.prod(parts[d + 1 :]) for d, at in enumerate(place))


@contextmanager
def _fake() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _unsplit(descriptor: Descriptor, config: RunConfig) -> nn.Module:
    return build_on_meta(descriptor, config)[1]


def _step(model: nn.Module, workload: Workload, batch: Mapping[str, Tensor], config: RunConfig) -> tuple[int, float]:
    """Bytes kept for the backward pass, each storage once, parameters and inputs left out; and FLOPs of both passes."""
    known = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers(), *batch.values())}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    def passes() -> None:
        bfloat16 = config.precision == "bfloat16"
        kept_for_backward = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with kept_for_backward, torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]

    model.train()
    found = count(passes, model)
    return sum(storage.nbytes() for storage in kept.values()), found.flops


def _optimizer_bytes(workload: Workload, model: nn.Module) -> int | None:
    """Bytes of the optimizer's state after a step. None if the optimizer cannot take one on tensors without memory."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer = workload.build_optimizer(model, 1).optimizer
    try:
        optimizer.step()
    except (RuntimeError, TypeError, ValueError):  # an optimizer that looks at values
        return None
    tensors = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(tensor.nbytes for tensor in tensors)
