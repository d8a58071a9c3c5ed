"""Profiles a few training steps: a trace with phases and layers, times and FLOPs by layer, ranks compared.

Ranks are compared by steps without the profiler. Steps under the profiler come later. Its cost inflates their times:
shares are right, absolute times are not. The forward time of a layer is that of its calls. A backward operator is
charged to the module that called its forward operator. torch gives both the same sequence number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from mlhpc.suite.config import RunConfig
from mlhpc.suite.data.sampling import list_train_batches
from mlhpc.suite.machine.choice.chooser import make_chooser
from mlhpc.suite.performance.stragglers import StragglerTest, find_straggler
from mlhpc.suite.training.batch_loading import BatchCopier, has_no_idle_core, load_with_prefetch
from mlhpc.suite.training.counts.flops import Count, count
from mlhpc.suite.training.gradient_exchange import register_exchange_timing
from mlhpc.suite.training.instrument import CollectiveCounter
from mlhpc.suite.training.loop import make_autocast
from mlhpc.suite.training.parallel.ddp import wrap
from mlhpc.suite.training.state import TrainingState
from mlhpc.suite.training.step_timing import DATA_WAIT, EXPOSED_COMMUNICATION, OPTIMIZER, PhaseTimer, make_device_clock
from mlhpc.suite.workload import Dataset, Workload
from mlhpc.suite.world import World

LAYER = "layer "  # begins the name of a module's range on the trace; its path follows
PHASE = "phase "
FORWARD, BACKWARD = "forward", "backward"  # the two parts of the phase forward_backward
ROOT = "(model)"
# Times do not depend on weights or order; a fixed seed makes two profiles comparable.
SEED = 0


@dataclass
class LayerTime:
    """Seconds per profiled step of one module with its children; ``own_s`` is without them."""

    path: str
    kind: str
    depth: int
    calls: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    own_s: float = 0.0
    forward_flops: int = 0


@dataclass(frozen=True)
class Profile:
    """The profile of rank 0, and the comparison of all ranks (None for one rank).

    ``phases`` are seconds per step without the profiler, ``profiled_phases`` with it.
    """

    layers: Sequence[LayerTime]
    phases: Mapping[str, float]
    profiled_phases: Mapping[str, float]
    counted: Count
    stated_flops: float
    samples: int
    ranks: StragglerTest | None
    trace: profile


@dataclass
class _Session:
    workload: Workload
    config: RunConfig
    world: World
    device: torch.device
    wrapped: nn.Module
    state: TrainingState
    timer: PhaseTimer
    mark_exchange: Callable[[], None]
    batches: Iterator[Any] = field(default_factory=lambda: iter(()))

    def step(self) -> None:
        """Make one training step. Its phases are marked in the timer and named on the trace."""
        with record_function(PHASE + DATA_WAIT):
            batch = next(self.batches)
        self.timer.mark(DATA_WAIT)
        self.state.optimization.optimizer.zero_grad(set_to_none=True)
        with record_function(PHASE + FORWARD), make_autocast(self.config, self.device):
            loss = self.workload.loss(self.wrapped, batch)
        with record_function(PHASE + BACKWARD):
            loss.backward()  # type: ignore[no-untyped-call]
        self.mark_exchange()
        with record_function(PHASE + OPTIMIZER):
            self.state.update(0, 1)
        self.timer.mark(OPTIMIZER)


def run_profile(
    workload: Workload,
    config: RunConfig,
    data: Dataset,
    world: World,
    device: torch.device,
    *,
    steps: int,
    profiled_steps: int,
    say: Callable[[str], None],
) -> Profile:
    """Train for two warm-up steps, ``steps`` timed steps and ``profiled_steps`` profiled steps. All ranks call it."""
    chooser = make_chooser(config, world, device)
    world.init_torch(device)
    torch.manual_seed(SEED)
    model = workload.build_model(world).to(device)
    workload.choose(model, chooser)
    torch.manual_seed(SEED + world.rank)
    state = TrainingState.create(workload, model, max(1, len(data) // config.global_batch_size), SEED)
    timer = PhaseTimer(make_device_clock(device))
    wrapped = wrap(model, state.sharded, world, device)
    model.train()
    marks = register_exchange_timing(wrapped, timer, CollectiveCounter())
    session = _Session(workload, config, world, device, wrapped, state, timer, marks)
    # Two warm-up steps and one for counting FLOPs.
    session.batches = _load_batches(config, data, world, device, steps + profiled_steps + 3)
    # The first step allocates memory and the optimizer's state.
    for _ in range(2):
        session.step()
    say(f"{steps} steps without the profiler")
    timed = _measure_steps(session, steps)
    say(f"{profiled_steps} steps with it")
    timer.restart()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    # Hooks only here: they cost time in every call of a module.
    with _name_layers(model), profile(activities=activities) as trace:
        for _ in range(profiled_steps):
            session.step()
    profiled = {name: seconds / profiled_steps for name, seconds in timer.flush().items()}
    counted = _count_flops(session)
    own, wait = _gather_by_rank(world, timed)
    layers = measure_layer_times(trace, model, counted, profiled_steps, on_device=device.type == "cuda")
    return Profile(
        layers=layers,
        phases={name: float(np.mean([step[name] for step in timed])) for name in timed[0]},
        profiled_phases=profiled,
        counted=counted,
        stated_flops=workload.work().executed_flops,
        samples=config.global_batch_size // world.size,
        ranks=find_straggler(own, wait, np.ones(len(own))),
        trace=trace,
    )


def measure_layer_times(
    trace: profile, model: nn.Module, counted: Count, steps: int, *, on_device: bool
) -> list[LayerTime]:
    """Return the times of every module that ran, in the order of the model's tree."""
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    layers = {path: LayerTime(path or ROOT, kind, path.count(".") + bool(path)) for path, kind in kinds.items()}
    # GPU kernels have no module; the operator on the CPU that launched them has.
    recorded = trace.events() or []  # type: ignore[no-untyped-call]
    events = [event for event in recorded if event.device_type.name == "CPU"]
    callers = _add_forward(layers, events, steps, on_device=on_device)
    _add_backward(layers, events, callers, steps, on_device=on_device)
    for path, flops in counted.by_module.items():
        layers[path].forward_flops = flops
    _set_own_times(layers)
    return [layer for layer in layers.values() if layer.calls]


def _add_forward(
    layers: Mapping[str, LayerTime], events: Sequence[Any], steps: int, *, on_device: bool
) -> dict[int, str]:
    """Add calls and forward times. Returns the innermost module around each forward operator, by sequence number."""
    callers: dict[int, str] = {}
    for event in events:
        path = _find_path(event)
        if path is None:
            continue
        if event.name.startswith(LAYER):
            layers[path].calls += 1 / steps
            layers[path].forward_s += _find_seconds(event, on_device=on_device) / steps
        # Scope 0 are operators; autograd's own events repeat the numbers of the forward pass.
        elif event.sequence_nr >= 0 and event.scope == 0 and not event.name.startswith("autograd::"):
            callers[event.sequence_nr] = path
    return callers


def _add_backward(
    layers: Mapping[str, LayerTime], events: Sequence[Any], callers: Mapping[int, str], steps: int, *, on_device: bool
) -> None:
    """Charge each backward operator to the module that called its forward operator, and to all modules around it."""
    for event in events:
        if event.name.startswith("autograd::engine::evaluate_function") and event.sequence_nr in callers:
            for path in _list_with_ancestors(callers[event.sequence_nr]):
                layers[path].backward_s += _find_seconds(event, on_device=on_device) / steps


def _set_own_times(layers: Mapping[str, LayerTime]) -> None:
    children: dict[str, list[LayerTime]] = {}
    for path, layer in layers.items():
        if path:
            children.setdefault(_find_parent(path), []).append(layer)
    for path, layer in layers.items():
        inside = sum(child.forward_s + child.backward_s for child in children.get(path, ()))
        # A module may be called outside of its parent's forward, so children can take longer than the parent.
        layer.own_s = max(0.0, layer.forward_s + layer.backward_s - inside)


def _measure_steps(session: _Session, steps: int) -> list[dict[str, float]]:
    """Return the seconds by phase of each of some steps."""
    phases = []
    session.timer.restart()
    for _ in range(steps):
        session.step()
        phases.append(session.timer.flush())
    return phases


def _count_flops(session: _Session) -> Count:
    """Count the FLOPs of the forward and backward pass of one more step on this rank's samples."""
    batch = next(session.batches)

    def passes() -> None:
        with make_autocast(session.config, session.device):
            loss = session.workload.loss(session.state.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]

    return count(passes, session.state.model)


def _gather_by_rank(
    world: World, timed: Sequence[Mapping[str, float]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return own and waiting time of each step and rank (K, R) in seconds. Waiting is the exposed exchange."""
    own = [step["step"] - step[EXPOSED_COMMUNICATION] for step in timed]
    wait = [step[EXPOSED_COMMUNICATION] for step in timed]
    pairs = world.allgather((own, wait))
    return np.array([pair[0] for pair in pairs]).T, np.array([pair[1] for pair in pairs]).T


def _load_batches(config: RunConfig, data: Dataset, world: World, device: torch.device, steps: int) -> Iterator[Any]:
    """Yield ``steps`` batches of this rank on the device, over as many epochs as that takes."""

    def indices() -> Iterator[tuple[int, Any]]:
        epoch = 1
        while True:
            yield from ((epoch, chosen) for chosen in _load_epoch(config, data, world, epoch))
            epoch += 1

    def load(item: tuple[int, Any]) -> Any:
        return data.load(item[1], seed=SEED, epoch=item[0])

    batches = load_with_prefetch(
        load,
        islice(indices(), steps),
        threads=config.loader_threads,
        feed=BatchCopier(device, alone=has_no_idle_core(world)),
    )
    yield from (batch for _, batch in batches)


def _load_epoch(config: RunConfig, data: Dataset, world: World, epoch: int) -> Iterator[Any]:
    return iter(
        list_train_batches(
            len(data), config.global_batch_size, seed=SEED, epoch=epoch, rank=world.rank, size=world.size, first_step=0
        )
    )


@contextmanager
def _name_layers(model: nn.Module) -> Iterator[None]:
    """Name every call of a module in the body as a range on the trace, by its path."""
    open_ranges: list[record_function] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            open_ranges.append(record_function(LAYER + (path or ROOT)))
            open_ranges[-1].__enter__()  # type: ignore[no-untyped-call]

        return hook

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path)))
        # always_call: after an exception in a module its range must be closed, too.
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _find_path(event: Any) -> str | None:
    """Return the path of the innermost module around an event, or of its own range. None outside all modules."""
    while event is not None and not event.name.startswith(LAYER):
        event = event.cpu_parent
    if event is None:
        return None
    path = str(event.name.removeprefix(LAYER))
    return "" if path == ROOT else path


def _find_parent(path: str) -> str:
    return path.rpartition(".")[0]


def _list_with_ancestors(path: str) -> Iterator[str]:
    """Yield a module, the modules around it, and the model."""
    while path:
        yield path
        path = _find_parent(path)
    yield ""


def _find_seconds(event: Any, *, on_device: bool) -> float:
    microseconds = event.device_time_total if on_device else event.cpu_time_total
    return float(microseconds) * 1e-6
