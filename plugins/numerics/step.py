"""Runs one training step and keeps what it computes: data, outputs of modules, probes of norms, loss,
gradients, buffers, rates, an update.

In float64 the same model on the same data is the truth. Random numbers are drawn in float32 and converted, and casts to
float32 in the model's own code become casts to float64.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mlhpc.suite.training.parallel.ddp import wrap
from mlhpc.suite.workload import Workload
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch


# In this order the first difference names the cause: what is computed later inherits it.
KINDS = ("data", "output", "probe", "loss", "gradient", "buffer", "schedule", "update")
DATA, OUTPUT, PROBE, LOSS, GRADIENT, BUFFER, SCHEDULE, UPDATE = KINDS
STEPS_PER_EPOCH = 50  # that a schedule is asked for
CONSTANT_SPREAD = 0.1  # of parameters that begin as constants: a weight of 0 hides all before it
SMALL = 1e-3  # deviation of what a norm is probed with: its epsilon counts there
UPDATES = 3  # of the optimizer: its moments and their corrections change
_DRAWS = (torch.rand, torch.randn, torch.rand_like, torch.randn_like)

Trace = dict[str, Tensor]  # in the order of computation; float64 on the host


@dataclass(frozen=True)
class Case:
    """One step of training: a workload, a model with fixed weights, and a batch for each rank.

    The model is in float32 on the host; each run takes a copy of it. ``seed`` is that of random numbers in the step.
    """

    workload: Workload
    model: nn.Module
    parts: tuple[Batch, ...]
    seed: int


def make_case(workload: Workload, world: World, batch: Batch, *, parts: int = 1, seed: int = 0) -> Case:
    """Build a model from a seed, spread its constant parameters, and divide a batch into equal parts.

    Constants hide faults: behind a weight of 0 all gradients are 0.
    """
    torch.manual_seed(seed)
    model = workload.build_model(world)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=CONSTANT_SPREAD)
    pieces = tuple({name: value[number::parts] for name, value in batch.items()} for number in range(parts))
    return Case(workload, model, pieces, seed)


class _Wide(TorchFunctionMode):
    """Computes in float64 what code asks for in float32, with the random numbers of float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0].double()
        if func in _DRAWS:
            return func(*args, **{**kwargs, "dtype": torch.float32}).double()
        if func is F.dropout and args[0].dtype == torch.float64:
            return args[0] * func(torch.ones_like(args[0], dtype=torch.float32), *args[1:], **kwargs).double()

        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})


@contextmanager
def _compute_wide() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def run_truth(case: Case, *, whole: bool = True) -> Trace:
    """Run the step in float64."""
    with _compute_wide():
        return run_step(case, dtype=torch.float64, whole=whole)


def run_step(
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    alter: Callable[[nn.Module], object] = lambda model: None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    noise: tuple[float, int] | None = None,
    world: World | None = None,
    whole: bool = True,
) -> Trace:
    """Run forward and backward pass of each part, and updates of a probe. Not ``whole``: keep loss and gradients alone.

    ``alter`` changes the model before the step; ``context`` surrounds each forward pass. ``noise``, a unit and a seed,
    changes each weight and each floating-point input by -1, 0 or 1 units, relative to its value. With ``world`` each of its
    ranks runs one part, and gradients are exchanged as in training.
    """
    model = copy.deepcopy(case.model).to(device, dtype).train()
    found: Trace = {}
    unit, seed = noise or (0.0, 0)
    parts = [
        {
            name: _shake(value.to(device, dtype), unit, seed) if value.is_floating_point() else value.to(device)
            for name, value in part.items()
        }
        for part in case.parts
    ]
    if unit:
        with torch.no_grad():
            for place, weight in enumerate(model.parameters()):
                weight.copy_(_shake(weight, unit, seed + (place << 32)))
    for module in model.modules():
        if getattr(module, "eps", 0) is None:  # which means the resolution of the type: another one in float64
            module.eps = torch.finfo(torch.float32).eps  # type: ignore[assignment]
        if dtype == torch.float64 and hasattr(module, "backend"):  # of experts: others have no float64
            module.backend = "loop"  # type: ignore[assignment]
    alter(model)
    mine = list(enumerate(parts)) if world is None else [(world.rank, parts[world.rank])]
    wrapped = (
        model if world is None else wrap(model, case.workload.sharded_parameters(model), world, torch.device(device))
    )
    losses, norms = [], dict[str, tuple[nn.Module, Tensor]]()
    for number, part in mine:
        kept = whole and number == mine[0][0]
        if kept:
            _keep(found, DATA, part)
        torch.manual_seed(case.seed + number)
        with _outputs_kept(model, found, norms) if kept else nullcontext(), context():
            loss = case.workload.loss(wrapped, part)
        (loss / len(mine)).backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    everywhere = losses if world is None else [loss for each in world.allgather(losses) for loss in each]
    found[LOSS] = torch.tensor(everywhere, dtype=torch.float64).mean()
    _add_gradients(found, model)
    if not whole:
        return found
    _keep(found, BUFFER, dict(model.named_buffers()))
    with torch.no_grad(), context():
        for name, (norm, x) in norms.items():
            _keep(found, PROBE, {name: norm(x * (SMALL / x.std()))})
    _add_updates(found, case, model)
    return dict(sorted(found.items(), key=lambda pair: KINDS.index(pair[0].partition(" ")[0])))


def _shake(value: Tensor, unit: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return value * (1 + unit * torch.randint(-1, 2, value.shape, generator=generator).to(value)) if unit else value


def _keep(found: Trace, kind: str, tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        key = f"{kind} {name}".strip()
        while key in found:  # a module that is called again
            key += "'"
        found[key] = value.detach().cpu().to(torch.float64, copy=True)


@contextmanager
def _outputs_kept(model: nn.Module, found: Trace, norms: dict[str, tuple[nn.Module, Tensor]]) -> Iterator[None]:
    """Keep the floating-point outputs of every module, in the order in which they are ready, and inputs of norms."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if hasattr(module, "eps"):
                norms[name] = module, inputs[0].detach()
            each = list(_list_tensors(output))
            many = len(each) > 1
            _keep(found, OUTPUT, {f"{name}[{place}]" if many else name: value for place, value in enumerate(each)})

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _list_tensors(value: Any) -> Iterator[Tensor]:
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _list_tensors(each)
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield value


def find_module(name: str) -> str:
    """Return the module that a name of a trace is about; the kind if it is about none."""
    kind, _, path = name.partition(" ")
    path = path.partition("[")[0].rstrip("'")
    if kind in (GRADIENT, BUFFER):
        path = path.rpartition(".")[0]
    return path or (kind if kind != OUTPUT else "the whole model")


def _add_gradients(found: Trace, model: nn.Module) -> None:
    """Keep gradients in the order of the backward pass: those of the module that ended last come first."""
    ended = {find_module(name): place for place, name in enumerate(found)}

    def find_place(name: str) -> int:
        path = name
        while path and path not in ended:
            path = path.rpartition(".")[0]
        return ended.get(path, -1)

    weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    for name, weight in sorted(weights, key=lambda pair: -find_place(pair[0].rpartition(".")[0])):
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        _keep(found, GRADIENT, {name: gradient})


def _add_updates(found: Trace, case: Case, model: nn.Module) -> None:
    """Keep the rates of the schedule, and what the optimizer makes of made-up gradients of many sizes.

    An update of the model's own gradients would not do: Adam turns rounding near 0 into steps of full size.
    """
    optimization = case.workload.build_optimizer(model, STEPS_PER_EPOCH)
    steps = range(STEPS_PER_EPOCH * case.workload.config.max_epochs)
    rates = [optimization.learning_rate(step, 1 + step // STEPS_PER_EPOCH) for step in steps]
    found[SCHEDULE] = torch.tensor(rates, dtype=torch.float64)
    random = np.random.default_rng(case.seed)  # and not torch, which draws other numbers in float64
    weights = [weight for group in optimization.optimizer.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in weights]
    for step in range(UPDATES):
        for group in optimization.optimizer.param_groups:
            group["lr"] = max(rates)
        for weight in weights:
            probe = 10.0 ** random.uniform(-12 + step, 0, weight.shape) * random.choice((-1, 1), weight.shape)
            # Laid out as the weight is: fused optimizers look at no strides
            weight.grad = torch.empty_like(weight).copy_(torch.from_numpy(probe.astype(np.float32)))
        optimization.optimizer.step()
    changes = [(weight.detach() - old).flatten() for weight, old in zip(weights, before, strict=True)]
    _keep(found, UPDATE, {"": torch.cat(changes)})


def compute_errors(found: Trace, truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute the relative error (2-norm) of each tensor that both traces have, in the order of the truth."""
    return {name: _compute_error(found[name], right) for name, right in truth.items() if name in found}


def _compute_error(value: Tensor, right: Tensor) -> float:
    if value.shape != right.shape:
        return math.inf
    apart = torch.where(value == right, 0.0, value - right)  # infinities of a mask are equal
    scale = float(torch.where(right.isfinite(), right, 0.0).norm())
    error = float(apart.norm())
    if not math.isfinite(error):
        return math.inf
    return error / scale if scale else (math.inf if error else 0.0)
