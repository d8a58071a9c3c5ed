"""Measures the bytes of tensors that live while torch code runs, real ones or fake ones: every storage that an operator makes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the body `now` are the bytes of living storages that were made in it, `peak` is the most that there were.

    ``known``: tensors from before, which do not count. What an operator needs inside itself is not seen.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen = WeakIdKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **kwargs or {})
        for each in (found,) if isinstance(found, Tensor) else tree_iter(found):
            if isinstance(each, Tensor):
                self._add(each)
        return found

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen[storage] = True
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size
