"""Predicts what a rank holds, sends and reads in one training step under a plan, from a step on tensors without memory.

The step runs the workload's own loss on the model with the plan applied, on fake tensors and axes that send nothing. It allocates
nothing and needs no ranks: what is counted is what the run will do. Gradients' all-reduce is a closed form: their size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from suite.config import RunConfig
from suite.descriptor import Descriptor
from suite.errors import InputError
from suite.performance.flops import count
from suite.performance.plans.memory import LiveBytes
from suite.training.parallel.apply import apply, explained
from suite.training.parallel.data import clip_gradients, give_norms
from suite.training.parallel.exchange import Note
from suite.training.parallel.products import note_exchanges
from suite.training.parallel.sharing import Parallel
from suite.training.parallel.skeleton import build_on_meta, build_without_memory
from suite.training.parallel.states import ShardedStates, names_of, opened, sharded_modules
from suite.workload import Workload, load_workload

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
    """One rank's bytes and FLOPs in one step. ``reads``: of its samples; ``activations``: kept for the backward pass.

    ``peak``: the most of activations, gradients and temporary tensors at any moment of a step. Both are None if the loss cannot
    run on tensors without memory; ``flops`` are those of the workload's closed form then.
    """

    mesh: str
    ranks: int
    samples: int
    parameters: int
    gradients: int
    optimizer: int | None
    activations: int | None
    peak: int | None
    inputs: int
    reads: int
    flops: float
    exchanges: tuple[Exchange, ...]

    @property
    def memory(self) -> int:
        """Bytes of everything that lives when there is most of it."""
        beside = self.gradients if self.peak is None else max(self.peak, self.gradients)
        return self.parameters + (self.optimizer or 0) + self.inputs + beside

    def exchanged(self) -> dict[str, float]:
        """``<kind>_calls`` and ``<kind>_bytes`` of all exchanges but that of gradients, as a run counts them."""
        found: Counter[str] = Counter()
        for each in self.exchanges:
            if each.axis != GRADIENTS:
                found[f"{each.kind}_calls"] += each.calls
                found[f"{each.kind}_bytes"] += each.bytes
        return {name: float(value) for name, value in found.items()}


class _Notes:
    """Collectives that would have been: calls and bytes by axis, kind and ranks."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, int], list[int]] = {}

    def __call__(self, axis: str, kind: str, given: int, ranks: int) -> None:
        entry = self.found.setdefault((axis, kind, ranks), [0, 0])
        entry[0] += 1
        entry[1] += given

    def take(self, times: int) -> Iterator[Exchange]:
        """What was noted, so many times, and forget it."""
        for (axis, kind, ranks), (calls, given) in self.found.items():
            yield Exchange(axis, kind, ranks, calls * times, given * times)
        self.found = {}


def predict(descriptor: Descriptor, config: RunConfig, parallel: Parallel) -> Cost:
    """Predict one step of the rank that ``parallel`` is of, in torch's default precision. InputError if the plan does not fit."""
    config = config.model_copy(
        update={"channels_last": False}
    )  # the same bytes; fake parameters cannot change their layout
    plan = parallel.plan
    assert plan is not None
    parts, size = config.gradient_accumulation_steps, parallel.mesh.size
    samples = config.global_batch_size // parallel.mesh.data_size // parts
    note = _Notes()
    workload: Workload = load_workload(descriptor)(config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_without_memory(workload)
        apply(parallel, model, workload, lambda: build_on_meta(descriptor, config)[1], note=note)
        wrapped = ShardedStates(model) if parallel.has_parts else model
        batch = _batch(parallel, samples)
        if batch:
            with explained():
                step = _step(wrapped, workload, batch, config)
        else:
            step = _Step(None, None, workload.work().executed_flops * samples / parallel.mesh.tensor)
            _gather_and_scatter(model)
            if parallel.mesh.tensor > 1:
                _note_products(parallel, config, model, samples, note)
        exchanges = list(note.take(parts))
        exchanges += [
            Exchange("loss", kind, size, own.calls * parts, own.bytes_per_rank * size * parts)
            for kind, own in plan.exchanges.items()
            if size > 1
        ]
        optimizer = _optimizer_bytes(workload, model)
        exchanges += note.take(1)
    parameters = list(model.parameters())
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    if size > 1 and not parallel.has_parts:
        exchanges.append(Exchange(GRADIENTS, "all_reduce", size, 1, gradients))
    inputs = sum(tensor.nbytes for tensor in batch.values())
    return Cost(
        mesh=parallel.mesh.text(),
        ranks=size,
        samples=samples,
        parameters=sum(parameter.nbytes for parameter in parameters) + sum(each.nbytes for each in model.buffers()),
        gradients=gradients,
        optimizer=optimizer,
        activations=step.activations,
        peak=step.peak,
        inputs=inputs,
        reads=inputs * parts,
        flops=step.flops * parts,
        exchanges=tuple(exchanges),
    )


def _note_products(parallel: Parallel, config: RunConfig, model: nn.Module, samples: int, note: Note) -> None:
    """Note what regions exchange in a part of a step. InputError where that depends on what a layer computes in."""
    plan = parallel.plan
    assert plan is not None
    assert plan.tensor is not None
    if config.precision == "bfloat16":
        raise InputError("plan: what the tensor axis sends is known for float32 only: expected --set precision=float32")
    note_exchanges(model, plan.tensor, parallel.extents, samples, parallel.mesh.tensor, note)


def _batch(parallel: Parallel, samples: int) -> dict[str, Tensor]:
    """A batch of this rank without memory; empty if the plan does not say what is in one."""
    default = torch.get_default_dtype()
    return {
        name: torch.empty(shape, dtype=default if dtype == "float32" else getattr(torch, dtype))
        for name, (shape, dtype) in parallel.shapes(samples, split=True).items()
    }


def largest(descriptor: Descriptor, config: RunConfig, parallel: Parallel) -> Cost:
    """Predict the rank that has most: in the middle of a sample (neighbours on both sides) or at its end (the largest part)."""
    mesh = parallel.mesh
    places = {tuple(parts // 2 for parts in mesh.spatial), tuple(parts - 1 for parts in mesh.spatial)}
    ranks = {_rank(place, mesh.spatial) for place in places}
    costs = [predict(descriptor, config, replace(parallel, mesh=replace(mesh, rank=rank))) for rank in sorted(ranks)]
    return max(costs, key=lambda cost: (cost.memory, sum(each.bytes for each in cost.exchanges)))


def _rank(place: tuple[int, ...], parts: tuple[int, ...]) -> int:
    return sum(at * math.prod(parts[d + 1 :]) for d, at in enumerate(place))


@dataclass(frozen=True)
class _Step:
    activations: int | None
    peak: int | None
    flops: float


def _step(model: nn.Module, workload: Workload, batch: Mapping[str, Tensor], config: RunConfig) -> _Step:
    """Bytes that live after the forward pass and at most, parameters and inputs left out; and FLOPs of both passes."""
    live = LiveBytes((*model.parameters(), *model.buffers(), *batch.values()))
    kept = 0

    def passes() -> None:
        nonlocal kept
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = workload.loss(model, batch)
        kept = live.now
        loss.backward()  # type: ignore[no-untyped-call]

    model.train()
    with live:
        found = count(passes)
    return _Step(kept, live.peak, found.flops)


def _gather_and_scatter(model: nn.Module) -> None:
    """Gather all parameters and scatter their gradients, as a step does whose layers gather nothing themselves."""
    with opened(model):
        whole = [getattr(module, name) for module in sharded_modules(model) for name in names_of(module)]
        total = torch.stack([tensor.sum() for tensor in whole if tensor.requires_grad]).sum() if whole else None
    if total is not None:
        total.backward()  # type: ignore[no-untyped-call]


def _optimizer_bytes(workload: Workload, model: nn.Module) -> int | None:
    """Bytes of the optimizer's state after a step. None if the optimizer cannot take one on tensors without memory."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimization = workload.build_optimizer(model, 1)
    optimizer = optimization.optimizer
    give_norms(optimizer, model)
    try:
        if optimization.clip_norm is not None:
            clip_gradients(model, (), optimization.clip_norm)
        optimizer.step()
    except (RuntimeError, TypeError, ValueError):  # an optimizer that looks at values
        return None
    tensors = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(tensor.nbytes for tensor in tensors)
