"""Answers whether a change of the system reproduces a training step: same weights, data and seed, other arithmetic.

A `Reference` has the step in float64 and the bounds of rounding. It can be written to a file, for another machine.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from mlhpc.plugins.numerics.judge import ERROR_RATE, UNITS, Bound, judge, make_bounds
from mlhpc.plugins.numerics.results import Reproduced
from mlhpc.plugins.numerics.step import (
    LOSS,
    UPDATE,
    Case,
    Trace,
    compute_errors,
    find_module,
    make_case,
    run_step,
    run_truth,
)
from mlhpc.suite.config import RunConfig
from mlhpc.suite.data.build import find_data
from mlhpc.suite.data.manifest import MANIFEST_NAME
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.files import print_progress, write_file_atomically
from mlhpc.suite.machine.choice.layout import keep_process_settings, use_onednn
from mlhpc.suite.training.devices import use_precision
from mlhpc.suite.training.parallel.recompute import recompute_blocks
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World

FLOAT32, BFLOAT16, TF32 = "float32", "bfloat16", "tf32"
FORMAT = 1  # of a reference's file

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Reference:
    """A step in float64, and the bounds of rounding by precision."""

    case: Case
    truth: Trace
    bounds: dict[str, dict[str, Bound]]

    def judge(self, change: str, found: Trace, precision: str = FLOAT32, rate: float = ERROR_RATE) -> Reproduced:
        """Judge a step that another system computed."""
        errors = compute_errors(found, self.truth)
        bounds = self.bounds[precision]
        if precision == BFLOAT16:  # the optimizer computes in float32 all the same
            bounds = bounds | {UPDATE: self.bounds[FLOAT32][UPDATE]}
        finding = judge(errors, bounds, rate)
        return Reproduced(
            change=change,
            precision=precision,
            module=find_module(finding.first),
            error=errors[LOSS] if errors[LOSS] < float("inf") else None,
            **structs.asdict(finding),
        )


def make_reference(case: Case, runs: int, precisions: Iterable[str] = (FLOAT32,)) -> Reference:
    """Run the step in float64, and perturbed ``runs`` times in each precision."""
    truth, bounds = run_truth(case), {}
    for precision in precisions:
        unit, context = UNITS[precision], _contexts.get(precision, nullcontext)
        errors = [compute_errors(run_step(case, noise=(unit, seed), context=context), truth) for seed in range(runs)]
        bounds[precision] = make_bounds(errors, unit)
    return Reference(case, truth, bounds)


_contexts: dict[str, Context] = {BFLOAT16: partial(torch.autocast, "cpu", torch.bfloat16)}


@dataclass(frozen=True)
class Change:
    """What a system may change. ``use`` sets the process and ``undo`` what is not kept; ``alter`` changes the model."""

    use: Callable[[], object] = lambda: None
    undo: Callable[[], object] = lambda: None
    alter: Callable[[nn.Module], object] = lambda model: None
    precision: str = FLOAT32
    device: str = "cpu"

    def explain(self, case: Case) -> str:
        """Say why it cannot act."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return "no GPU here"
        if self.alter is _lay_out_otherwise and not hasattr(case.model, "lay_out"):
            return "the model has one memory format"
        return ""


def _compile(model: nn.Module) -> None:
    torch._dynamo.reset()
    torch._inductor.config.fallback_random = True
    for module in model.modules():
        if hasattr(module, "dispatcher"):  # layers with experts, as in training
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
    model.compile()


def _recompute(model: nn.Module) -> None:
    """Recompute the outermost modules with parameters that may be."""
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{block}.") for block in found)
        normal = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())
        called = "forward" in type(module).__dict__ or type(module).__module__.startswith("torch.nn")
        if path and not inside and not normal and called and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found += [path] if any(True for _ in module.parameters()) else []
    recompute_blocks(model, dict.fromkeys(found, "full"))


def _lay_out_otherwise(model: nn.Module) -> None:
    model.lay_out(not model.channels_last)  # type: ignore[operator]


def _use_other_threads() -> None:
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)


_be_deterministic = torch.use_deterministic_algorithms
CHANGES: Mapping[str, Change] = {
    "as set": Change(),
    "other number of threads": Change(_use_other_threads),
    "native convolutions": Change(partial(use_onednn, wanted=False)),
    "denormals flushed": Change(partial(torch.set_flush_denormal, True), partial(torch.set_flush_denormal, False)),
    "other memory format": Change(alter=_lay_out_otherwise),
    "deterministic algorithms": Change(
        partial(_be_deterministic, True, warn_only=True), partial(_be_deterministic, False)
    ),
    "recomputed": Change(alter=_recompute),
    "compiled": Change(alter=_compile),
    "bfloat16": Change(precision=BFLOAT16),
    "cuda": Change(device="cuda"),
    "cuda, tf32": Change(partial(use_precision, TF32, torch.device("cuda")), precision=TF32, device="cuda"),
}


def run_change(reference: Reference, name: str, rate: float = ERROR_RATE, case: Case | None = None) -> Reproduced:
    """Run the step under a change and judge it. ``case``: of this machine, if it is not the reference's."""
    change, case = CHANGES[name], case or reference.case
    if why := change.explain(case):
        return Reproduced(change=name, why=why)
    with keep_process_settings(), ExitStack() as after:
        after.callback(change.undo)
        change.use()
        found = run_step(
            case,
            device=change.device,
            alter=change.alter,
            context=_contexts.get(change.precision, nullcontext),
        )
    return reference.judge(name, found, change.precision, rate)


def reproduce_all(
    world: World,
    descriptor: Descriptor,
    config: RunConfig,
    root: Path,
    *,
    change: Sequence[str],
    samples: int,
    runs: int,
    error: float,
    seed: int,
    record: Path | None,
    against: Path | None,
) -> list[Reproduced]:
    """Judge a step under each change, on rank 0, and on all ranks together. All ranks call it."""
    unknown = next((name for name in change if name not in CHANGES), None)
    if unknown:
        raise InputError(f"--change: {explain_unknown_name('change', unknown, CHANGES)}")
    world.init_torch(torch.device("cpu"))
    workload = load_workload(descriptor)(config)
    data = workload.dataset("train", root) if (root / MANIFEST_NAME).exists() else None
    batch = workload.example(samples) if data is None else data.load(range(samples), seed=0, epoch=1)
    if batch is None:
        find_data(root, config.workload, config.size)  # which says how to make it
        raise AssertionError
    own = make_case(workload, world, batch, parts=world.size, seed=seed)
    if workload.sharded_parameters(own.model):
        raise InputError("experts are spread over ranks, which is not judged: give --ranks 1")
    tried = change or [name for name in CHANGES if name != "compiled"]
    about = f"{config.workload} {config.size}"
    if against is not None:
        reference = read_reference(against, own, about)
        tried = [name for name in tried if CHANGES[name].precision in reference.bounds]
    else:
        able = [CHANGES[name].precision for name in tried if not CHANGES[name].explain(own)]
        # Every rank has the step in float64; the first one alone has the bounds
        reference = make_reference(own, runs, {FLOAT32: None, **dict.fromkeys(able)} if world.is_first else ())
    rows = []
    if world.size > 1:
        found = run_step(reference.case, world=world)
        rows += [reference.judge(f"{world.size} ranks", found, rate=error)] if world.is_first else []
    if world.is_first and record is not None:
        write_reference(record, reference, about)
    for name in tried if world.is_first else ():
        print_progress(name)
        rows.append(run_change(reference, name, error, own))
    return rows


def write_reference(path: Path, reference: Reference, about: str) -> None:
    """Write a reference with its weights, batches, truth and bounds."""
    case, file = reference.case, io.BytesIO()
    bounds = {name: {key: asdict(bound) for key, bound in each.items()} for name, each in reference.bounds.items()}
    parts, weights = [dict(part) for part in case.parts], case.model.state_dict()
    torch.save([FORMAT, about, case.seed, weights, parts, reference.truth, bounds], file)
    write_file_atomically(path, file.getvalue())


def read_reference(path: Path, case: Case, about: str) -> Reference:
    """Read a reference for the model of ``case``. InputError if it is of another workload, size or shape."""
    try:
        # weights_only: a stranger's file is data, never code
        version, what, seed, weights, parts, truth, bounds = torch.load(path, weights_only=True)
        if (version, what) != (FORMAT, about):
            raise InputError(f"it is a reference of {what}; expected {about}")
        case.model.load_state_dict(weights)
        made = {name: {key: Bound(**bound) for key, bound in each.items()} for name, each in bounds.items()}
        return Reference(replace(case, parts=tuple(parts), seed=seed), truth, made)
    except Exception as error:  # torch.load raises many kinds
        # torch speaks of its own files, and gives advice to load what may run code
        first = error if isinstance(error, InputError) else "not a reference, or one of another model"
        raise InputError(f"{path}: {first}; `mlhpc numerics reproduce --record` writes a reference") from None
