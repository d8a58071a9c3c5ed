"""Answers whether a change of the system reproduces a training step: same weights, data and seed, other arithmetic.

A `Reference` has the step in float64 and the bounds of rounding. It can be written to a file, for another machine.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
    list_names,
    run_step,
    run_truth,
)
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import write_file_atomically
from mlhpc.suite.machine.choice.layout import keep_process_settings, use_onednn
from mlhpc.suite.training.devices import use_precision
from mlhpc.suite.training.parallel.recompute import recompute_blocks
from mlhpc.suite.world import World

FLOAT32, BFLOAT16, TF32 = "float32", "bfloat16", "tf32"
FORMAT = 1  # of a reference's file

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Reference:
    """A step in float64, and bounds by precision: those of ``runs`` perturbed runs each."""

    case: Case
    truth: Trace
    bounds: dict[str, dict[str, Bound]]
    runs: int

    def judge(self, change: str, found: Trace, precision: str = FLOAT32, rate: float = ERROR_RATE) -> Reproduced:
        """Judge a step that another system computed."""
        errors = compute_errors(found, self.truth)
        bounds = self.bounds[precision]
        if precision == BFLOAT16:  # the optimizer computes in float32 all the same
            bounds = bounds | {name: self.bounds[FLOAT32][name] for name in list_names(list(bounds), UPDATE)}
        finding = judge(errors, bounds, rate)
        return Reproduced(
            change=change,
            precision=precision,
            outcome=finding.origin.value,
            first=finding.first,
            module=find_module(finding.first),
            factor=finding.factor if finding.factor < float("inf") else None,
            error=errors[LOSS] if errors[LOSS] < float("inf") else None,
            tensors=finding.tensors,
            beyond=finding.beyond,
            undecided=finding.undecided,
        )


def make_reference(case: Case, runs: int, precisions: Sequence[str] = (FLOAT32,)) -> Reference:
    """Run the step in float64, and perturbed ``runs`` times in each precision."""
    truth, bounds = run_truth(case), {}
    for precision in precisions:
        unit, context = UNITS[precision], _contexts.get(precision, nullcontext)
        errors = [compute_errors(run_step(case, noise=(unit, seed), context=context), truth) for seed in range(runs)]
        bounds[precision] = make_bounds(errors, unit)
    return Reference(case, truth, bounds, runs)


_contexts: dict[str, Context] = {FLOAT32: nullcontext, BFLOAT16: partial(torch.autocast, "cpu", torch.bfloat16)}


@dataclass(frozen=True)
class Change:
    """What a system may change. ``use`` sets the process, ``alter`` the model; ``explain`` says why it cannot act."""

    use: Context = nullcontext
    alter: Callable[[nn.Module], object] = lambda model: None
    precision: str = FLOAT32
    device: str = "cpu"
    batch: Callable[[Case], Case] = lambda case: case
    explain: Callable[[Case], str] = lambda case: ""
    only: tuple[str, ...] = ()  # kinds of tensors that are comparable; all if empty


@contextmanager
def _setting(change: Callable[[], object], undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    with keep_process_settings():
        change()
        try:
            yield
        finally:
            undo()


def _compile(model: nn.Module) -> None:
    torch._dynamo.reset()
    torch._inductor.config.fallback_random = True
    model.compile()


def _recompute(model: nn.Module) -> None:
    recompute_blocks(model, dict.fromkeys(_list_blocks(model), "full"))


def _list_blocks(model: nn.Module) -> list[str]:
    """List the outermost modules with parameters that may be computed again."""
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{block}.") for block in found)
        normal = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())
        called = "forward" in type(module).__dict__ or type(module).__module__.startswith("torch.nn")
        if path and not inside and not normal and called and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            found += [path] if any(True for _ in module.parameters()) else []
    return found


def _reverse(case: Case) -> Case:
    return replace(case, parts=tuple({name: value.flip(0) for name, value in part.items()} for part in case.parts))


def _divide(case: Case) -> Case:
    halves = [{name: value[half::2] for name, value in part.items()} for part in case.parts for half in (0, 1)]
    return replace(case, parts=tuple(halves))


def _explain_mixed(case: Case) -> str:
    """Say why the samples of a batch are no sum over samples to a model."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in case.model.modules()):
        return "the samples of a batch are normalised together"
    return "the samples of a batch are routed together" if hasattr(case.model, "moe_layers") else ""


def _lay_out_otherwise(model: nn.Module) -> None:
    model.lay_out(not model.channels_last)  # type: ignore[operator]


def _use_other_threads() -> None:
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)


def _flush(wanted: bool) -> None:
    torch.set_flush_denormal(wanted)


_GRADIENTS = (LOSS, "gradient", "buffer")
CHANGES: Mapping[str, Change] = {
    "as set": Change(),
    "other number of threads": Change(partial(_setting, _use_other_threads)),
    "native convolutions": Change(partial(_setting, partial(use_onednn, wanted=False))),
    "denormals flushed": Change(partial(_setting, partial(_flush, True), partial(_flush, False))),
    "other memory format": Change(
        alter=_lay_out_otherwise,
        explain=lambda case: "" if hasattr(case.model, "lay_out") else "the model has one memory format",
    ),
    "deterministic algorithms": Change(
        partial(
            _setting,
            partial(torch.use_deterministic_algorithms, True, warn_only=True),
            partial(torch.use_deterministic_algorithms, False),
        )
    ),
    "samples in reverse": Change(batch=_reverse, only=_GRADIENTS, explain=_explain_mixed),
    "accumulated in halves": Change(batch=_divide, only=_GRADIENTS, explain=_explain_mixed),
    "recomputed": Change(alter=_recompute),
    "compiled": Change(alter=_compile),
    "bfloat16": Change(precision=BFLOAT16),
    "cuda": Change(device="cuda", explain=lambda case: "" if torch.cuda.is_available() else "no GPU here"),
    "cuda, tf32": Change(
        partial(_setting, partial(use_precision, TF32, torch.device("cuda"))),
        precision=TF32,
        device="cuda",
        explain=lambda case: "" if torch.cuda.is_available() else "no GPU here",
    ),
}


def run_change(reference: Reference, name: str, rate: float = ERROR_RATE, case: Case | None = None) -> Reproduced:
    """Run the step under a change and judge it. ``case``: of this machine, if it is not the reference's."""
    change, case = CHANGES[name], case or reference.case
    why = change.explain(case)
    if why:
        return Reproduced(change=name, why=why)
    with change.use():
        found = run_step(
            change.batch(case),
            device=torch.device(change.device),
            alter=change.alter,
            context=_contexts.get(change.precision, nullcontext),
        )
    if change.only:
        found = {key: value for key, value in found.items() if key.partition(" ")[0] in change.only}
    return reference.judge(name, found, change.precision, rate)


def run_ranks(reference: Reference, world: World, rate: float = ERROR_RATE) -> Reproduced:
    """Run the step on all ranks, one part each, and judge what rank 0 has. All ranks call it."""
    return reference.judge(f"{world.size} ranks", run_step(reference.case, world=world), FLOAT32, rate)


def write_reference(path: Path, reference: Reference, about: Mapping[str, Any]) -> None:
    """Write a reference with its weights, batches, truth and bounds: a NumPy archive without code."""
    case = reference.case
    arrays = {f"weight {name}": value.numpy() for name, value in case.model.state_dict().items()}
    for number, part in enumerate(case.parts):
        arrays |= {f"part {number} {name}": value.numpy() for name, value in part.items()}
    arrays |= {f"truth {name}": value.numpy() for name, value in reference.truth.items()}
    bounds = {
        precision: {name: asdict(bound) for name, bound in each.items()} for precision, each in reference.bounds.items()
    }
    meta = {"format": FORMAT, **about, "parts": len(case.parts), "seed": case.seed, "runs": reference.runs}
    text = json.dumps({**meta, "bounds": bounds, "order": list(reference.truth)})
    file = io.BytesIO()
    np.savez_compressed(file, meta=np.frombuffer(text.encode(), dtype=np.uint8), **arrays)
    write_file_atomically(path, file.getvalue())


def read_reference(path: Path, case: Case, about: Mapping[str, Any]) -> Reference:
    """Read a reference for the model of ``case``. InputError if it is of another workload, size or shape."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(arrays.pop("meta").tobytes())
        stated = {name: meta[name] for name in about}
        if meta["format"] != FORMAT or stated != dict(about):
            raise InputError(f"{path}: is a reference of {stated}; expected {dict(about)}")
        kinds: dict[str, dict[str, torch.Tensor]] = {"weight": {}, "part": {}, "truth": {}}
        for name, array in arrays.items():
            kind, _, rest = name.partition(" ")
            kinds[kind][rest] = torch.from_numpy(array)
        bounds = {
            precision: {name: Bound(**bound) for name, bound in each.items()}
            for precision, each in meta["bounds"].items()
        }
        parts = tuple(
            {name[len(str(n)) + 1 :]: each for name, each in kinds["part"].items() if name.startswith(f"{n} ")}
            for n in range(meta["parts"])
        )
        truth = {name: kinds["truth"][name] for name in meta["order"]}
        case.model.load_state_dict(kinds["weight"])
        return Reference(replace(case, parts=parts, seed=meta["seed"]), truth, bounds, meta["runs"])
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{path}: no reference of this model: {error}; make one with mlhpc numerics reproduce --record"
        ) from None
