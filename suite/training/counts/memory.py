"""Measures the bytes of tensors that live while torch code runs, by following every storage that an operator makes.

Tensors may be real or fake.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

from mlhpc.suite.training.counts.flops import FlopSum

DEVICE = torch.ops.prim.device.default


class LiveBytes(FlopSum):  # type: ignore[no-untyped-call]
    """Follows the bytes of storages that are made in the body: `now` living, `peak` their maximum.

    ``known``: tensors from before, which do not count. An operator's internal buffers are not seen. Bytes that are made
    while `label` is set also count in `labelled`. With ``formulas`` (mlhpc.suite.training.counts.flops) `flops` are
    counted in the same pass.
    """

    def __init__(
        self, known: Iterable[Tensor] = (), formulas: Callable[[], dict[Any, Callable[..., int]]] = dict
    ) -> None:
        # In this pass, since torch's own counter keeps what checkpointed blocks computed again until the garbage
        # collector runs.
        super().__init__(formulas)
        self.now = self.peak = 0
        self.label = ""
        self.labelled: Counter[str] = Counter()
        self._living: dict[int, Any] = {}  # by id of the storage, which is not used again while the reference is here
        for tensor in known:
            self._watch(tensor.untyped_storage(), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls, and fake tensors' own way is slow
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if found is NotImplemented:
            return found
        for each in (found,) if isinstance(found, Tensor) else tree_iter(found):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if id(storage) not in self._living:
                    self._watch(storage, storage.nbytes())
        return found

    def _watch(self, storage: Any, size: int) -> None:
        key, label = id(storage), self.label

        def free(_: object) -> None:
            del self._living[key]
            self.now -= size
            if label:
                self.labelled[label] -= size

        self._living[key] = weakref.ref(storage, free)
        self.now += size
        self.peak = max(self.peak, self.now)
        if label:
            self.labelled[label] += size
