"""Models without memory: what a workload builds, on meta or fake tensors, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mlhpc.suite.config import RunConfig
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.training.parallel.sharing import Parallel
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.workload import Workload, load_workload
from mlhpc.suite.world import World

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


def batch_on_meta(parallel: Parallel, samples: int, *, split: bool) -> dict[str, Tensor]:
    """A batch of meta tensors; those of float32 in torch's default type."""
    shapes, default = parallel.shapes(samples, split=split), torch.get_default_dtype()
    return {
        name: torch.empty(shape, dtype=default if dtype == "float32" else getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in shapes.items()
    }
