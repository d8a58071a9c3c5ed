"""Builds a model of which a rank keeps rows only: its initialisation is noted, then repeated tensor by tensor.

While the workload builds, new tensors have no memory and every operator on them is noted. `Recipe.fill` then repeats
the operators in the same order, so random numbers are the same. A parameter, or this rank's rows of it, gets its values
as soon as no later operator touches it. Torch's own way (``to_empty``, ``reset_parameters``) draws other random numbers
on each number of ranks. An initialisation that looks at values cannot be noted; such a model is built whole.

Models without memory: what a workload builds, on meta or fake tensors, and batches for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from mlhpc.suite.config import RunConfig
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.training.parallel.fsdp import local, states_of
from mlhpc.suite.training.parallel.mesh import Interval
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World

_MAKES = {"empty", "rand", "randn", "zeros", "ones", "full", "empty_strided", "empty_like", "zeros_like", "ones_like"}


class _NeedsValuesError(Exception):
    """The initialisation looks at values, or draws random numbers in a way that cannot be repeated in order."""


@dataclass(frozen=True, eq=False)
class _StandIn:
    """A tensor without memory as it was when an operator took it: later its storage may be another."""

    storage: Any
    shape: Any
    stride: Any
    offset: int

    def of(self, base: Tensor) -> Tensor:
        """The same view of the storage's values."""
        return base.as_strided(self.shape, self.stride, self.offset)


def _stand_in(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    return _StandIn(value.untyped_storage(), value.shape, value.stride(), int(value.storage_offset()))


@dataclass(frozen=True)
class _Note:
    run: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    found: Any


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[_Note] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, keywords = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)], dict(kwargs or {})
        name = func.overloadpacket.__name__
        makes = not given and name in _MAKES
        if makes:
            keywords["device"] = torch.device("meta")
        elif not any(tensor.is_meta for tensor in given):
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise _NeedsValuesError
            return func(*args, **keywords)
        if name in {"_local_scalar_dense", "equal", "is_nonzero"}:
            raise _NeedsValuesError
        found = func(*args, **keywords)
        self.notes.append(
            _Note(func, tree_map(_stand_in, args), tree_map(_stand_in, dict(kwargs or {})), tree_map(_stand_in, found))
        )
        return found


class Recipe:
    """How a model without memory becomes one with memory."""

    def __init__(self, model: nn.Module, notes: list[_Note]) -> None:
        self._notes = notes
        self._last: Any = WeakIdKeyDictionary()
        for number, note in enumerate(notes):
            for each in tree_iter((note.arguments, note.keywords, note.found)):
                if isinstance(each, _StandIn):
                    self._last[each.storage] = number
        self._whole: dict[str, _StandIn] = {name: _stand_in(each) for name, each in model.named_parameters()}

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Repeat the notes; leave values in the model's buffers and parameters, of which it may have rows by now."""
        wanted: Any = WeakIdKeyDictionary()
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                put = _buffer_setter(model, name, buffer, device)
                wanted.setdefault(buffer.untyped_storage(), []).append(put)
        made = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():
            if name in made:
                buffer.copy_(made[name])
        states = states_of(model)
        split = states.shapes if states is not None else {}
        for name, parameter in model.named_parameters():
            rows = states.rows(name) if states is not None and name in split else None
            wanted.setdefault(self._whole[name].storage, []).append(self._setter(name, local(parameter.detach()), rows))
        self._replay(wanted)

    def _setter(self, name: str, mine: Tensor, rows: Interval | None) -> Callable[[Tensor], None]:
        view = self._whole[name]

        def put(base: Tensor) -> None:
            whole = view.of(base)
            mine.copy_(whole if rows is None else whole[slice(*rows)])

        return put

    def _replay(self, wanted: Any) -> None:
        real: Any = WeakIdKeyDictionary()

        def of(value: Any) -> Any:
            return value.of(real[value.storage]) if isinstance(value, _StandIn) else value

        with torch.no_grad():
            for number, note in enumerate(self._notes):
                found = note.run(*tree_map(of, note.arguments), **tree_map(of, note.keywords))
                both = zip(tree_iter(note.found), tree_iter(found), strict=True)
                touched = list(tree_iter((note.arguments, note.keywords, note.found)))
                for stand_in, tensor in both:
                    if isinstance(stand_in, _StandIn):
                        real.setdefault(stand_in.storage, tensor)
                for each in touched:
                    if isinstance(each, _StandIn) and self._last[each.storage] == number:
                        base = real.pop(each.storage, None)
                        for put in wanted.get(each.storage, ()) if base is not None else ():
                            put(base)


def _buffer_setter(model: nn.Module, name: str, buffer: Tensor, device: torch.device) -> Callable[[Tensor], None]:
    def put(base: Tensor) -> None:
        path, _, last = name.rpartition(".")
        values = base.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset()).clone().to(device)
        model.get_submodule(path)._buffers[last] = values

    return put


def build_deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, Recipe | None]:
    """The model without memory and how to fill it; or the whole model and None if it cannot be noted."""
    state, noting = torch.get_rng_state(), _Noting()
    try:
        with noting:
            model = build()
    except _NeedsValuesError:
        model = None
    if model is None or any(
        isinstance(value, Tensor) and value.is_meta for module in model.modules() for value in vars(module).values()
    ):
        torch.set_rng_state(state)
        return build(), None
    return model, Recipe(model, noting.notes)


aten = torch.ops.aten
VALUES = {  # write values into their first argument, and change nothing else of it
    *(aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor),
    *(aten.mul_.Tensor, aten.add_.Tensor, aten.erfinv_.default, aten.clamp_.default),
}
INITIALISERS = {nn.init.constant_, nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}  # as a mode sees them
ALONE = World("plan", 0, 1, 0, 1, 0, 1, ("plan",), SingleProcessTransport(), SingleProcessTransport())


def has_values(tensor: Tensor) -> bool:
    """False for a tensor without memory, on meta or fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


class _MadeUp(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reading a value out of a tensor gives 1, or False: initialisations look at values, and tensors without memory
    have none.

    What only writes values is left out.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled within, and to guard against it takes as long as an operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in VALUES and not has_values(args[0]):
            return args[0]
        if func is aten._local_scalar_dense.default and not has_values(args[0]):
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        return func(*args, **kwargs or {})


class _NotInitialised(TorchFunctionMode):
    """Initialisers give their tensor back, and numbers become tensors of a type without a value."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.new_tensor and type(args[1]) is float and not has_values(args[0]):
            return torch.empty((), dtype=args[0].dtype)  # of `trunc_normal_`, twice for each weight
        if func in INITIALISERS and not has_values(tensor := (*args, *kwargs.values())[0]):
            return tensor
        return func(*args, **kwargs)


def build_without_memory(workload: Workload) -> nn.Module:
    """The model of a workload, for use where new tensors have no memory. Draws no random number."""
    with torch.random.fork_rng(devices=[]), _MadeUp(), _NotInitialised():  # type: ignore[no-untyped-call]
        return workload.build_model(ALONE)


def build_on_meta(descriptor: Descriptor, config: RunConfig) -> tuple[Workload, nn.Module]:
    """The workload and its unsplit model on meta tensors. Draws no random number and allocates nothing."""
    workload: Workload = load_workload(descriptor)(config)
    with torch.device("meta"):
        return workload, build_without_memory(workload)
