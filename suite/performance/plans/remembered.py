"""Implements a FakeTensorMode that caches operators' results by the shapes and types of their arguments.

torch's own cache does the same. But its keys also describe what cannot happen in a dry run (symbolic sizes, devices
that differ). With it OpenFold at size full takes over two minutes of CPU, with this one 50 s (on a busy machine).
Special tensors go to torch: known values (constants), sparse tensors, complex numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
AS_STRIDED = aten.as_strided.default  # the only one whose arguments say where memory begins
META_OPERATORS = {  # whose results do not depend on the device
    *(aten.clone.default, aten._unsafe_view.default, aten.view.default, aten.detach.default, aten.alias.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default, aten.unsqueeze.default),
    *(aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default),
    *(aten.unbind.int, aten.constant_pad_nd.default, aten._to_copy.default, aten.split_with_sizes_copy.default),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mm.default, aten.bmm.default),
    *(aten.addmm.default, aten.sigmoid.default, aten.sigmoid_backward.default, aten.relu.default, aten.tanh.default),
    *(aten.threshold_backward.default, aten.sum.dim_IntList, aten.to.dtype, aten.cat.default),
    aten.tanh_backward.default,
    *(aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default, aten.zero_.default, aten.fill_.Scalar),
}
PLAIN_TYPES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
MAX_LIST_TENSORS = 64  # tensors of a list; of longer ones nothing is remembered
NOT_CACHEABLE: Any = object()  # of a key or a result: torch must work it out each time


class CachingFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A `FakeTensorMode` that caches results by their arguments, and which tensors share memory."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own: in vain below this one
        self._known: dict[Any, Any] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # that torch gives a fake tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to guard against it takes as long as an operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors: list[FakeTensor] = []
        key = _make_call_key(func, args, kwargs, tensors)
        if key is NOT_CACHEABLE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        known = self._known.get(key)
        if known is None and _is_meta_operator(func, kwargs, tensors):
            known = self._known[key] = _run_on_meta(func, args, kwargs, tensors)
        if known is None:
            found = super().__torch_dispatch__(func, types, args, kwargs)
            self._known[key] = _make_recipe(found, tensors)
            return found
        if known is NOT_CACHEABLE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return self._made(known, tensors)

    def _made(self, known: Any, tensors: list[FakeTensor]) -> Any:
        """Make a noted result anew."""
        how, *what = known
        if how is list or how is tuple:
            return how(self._made(each, tensors) for each in what)
        if how is None:
            return what[0]
        if how is FakeTensor:
            return tensors[what[0]]
        shares, shape, stride, dtype, further, device = what
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if shares is not None:
            base = tensors[shares]
            made.set_(base.untyped_storage(), base.storage_offset() + further, shape, stride)
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self, made, device)))
        found = Tensor._make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(found)
        vars(found).update(self._attributes[device])
        return found


def _make_call_key(func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor]) -> Any:
    """Return a key of a call, or UNKNOWN. The tensors of the arguments are appended to a list."""
    if type(func) is not OpOverload or torch.Tag.inplace_view in func.tags:  # changes the shape of its argument
        return NOT_CACHEABLE
    kinds = _make_values_key((*args, *kwargs.items()), tensors)
    if kinds is NOT_CACHEABLE:
        return NOT_CACHEABLE
    return func, kinds, tensors[0].storage_offset() if func is AS_STRIDED else 0


def _is_meta_operator(func: Any, kwargs: Any, tensors: Sequence[FakeTensor]) -> bool:
    """Return True if the operator gives the same on meta tensors, which is quicker than on fake ones."""
    return func in META_OPERATORS and not kwargs.get("device") and len({each.fake_device for each in tensors}) == 1


def _run_on_meta(func: Any, args: Any, kwargs: Any, tensors: Sequence[FakeTensor]) -> Any:
    """Note an operator's result, from torch's kernels for meta tensors, which are quick."""
    plain: dict[int, Tensor] = {}

    def of(value: Any) -> Any:
        if type(value) is FakeTensor:
            if id(value) not in plain:
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                plain[id(value)] = made
            return plain[id(value)]
        return type(value)(map(of, value)) if type(value) in (list, tuple) else value

    found = func(*map(of, args), **{name: of(value) for name, value in kwargs.items()})
    return _make_recipe(found, [plain[id(each)] for each in tensors], tensors[0].fake_device)


def _make_values_key(values: Iterable[Any], tensors: list[FakeTensor]) -> Any:
    """Return a key that is equal if an operator gives equal results, or UNKNOWN. Its tensors go to a list."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.layout is not torch.strided or value.constant is not None or value.dtype.is_complex:
                return NOT_CACHEABLE
            tensors.append(value)
            found.append((value.shape, value.stride(), value.dtype, value.requires_grad, value.fake_device))
        elif kind is list or kind is tuple:
            inner = (
                NOT_CACHEABLE
                if len(value) > MAX_LIST_TENSORS and isinstance(value[0], Tensor)
                else _make_values_key(value, tensors)
            )
            if inner is NOT_CACHEABLE:
                return NOT_CACHEABLE
            found.append((kind, inner))
        elif kind in PLAIN_TYPES:
            found.append((kind, value))
        else:
            return NOT_CACHEABLE
    return tuple(found)


def _make_recipe(found: Any, tensors: Sequence[Tensor], device: torch.device | None = None) -> Any:
    """Note how to make a result again: a tuple whose first element is its kind. ``device``: for results on meta."""
    if type(found) in (list, tuple):
        return _make_sequence_recipe(found, tensors, device)
    if type(found) in PLAIN_TYPES:
        return None, found
    same = next((position for position, each in enumerate(tensors) if each is found), None)
    if same is not None:  # an operator in place returns its argument
        return FakeTensor, same
    return (
        _make_tensor_recipe(found, tensors, device)
        if _can_be_made(found, on_meta=device is not None)
        else NOT_CACHEABLE
    )


def _make_tensor_recipe(found: Any, tensors: Sequence[Tensor], device: torch.device | None) -> Any:
    """Note a tensor: the argument whose memory it shares, its offset there, shape, strides, type and device."""
    storage = found.untyped_storage()
    shares = [position for position, each in enumerate(tensors) if each.untyped_storage() is storage]
    if len(shares) > 1:  # the arguments share memory: another call's arguments may not
        return NOT_CACHEABLE
    where = found.fake_device if device is None else device
    if shares:
        further = found.storage_offset() - tensors[shares[0]].storage_offset()
        return Tensor, shares[0], found.shape, found.stride(), found.dtype, further, where
    alone = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta").untyped_storage()
    if found.storage_offset() or storage.nbytes() != alone.nbytes():  # a part of memory that nothing here holds
        return NOT_CACHEABLE
    return Tensor, None, found.shape, found.stride(), found.dtype, 0, where


def _can_be_made(found: Any, *, on_meta: bool) -> bool:
    """Return True for a plain tensor: shape, strides, type and device describe it fully."""
    if not isinstance(found, Tensor) or found.layout is not torch.strided:
        return False
    if found.requires_grad or found.dtype.is_complex:
        return False
    return on_meta or (type(found) is FakeTensor and found.constant is None)


def _make_sequence_recipe(found: Any, tensors: Sequence[Tensor], device: torch.device | None) -> Any:
    """Note a list or tuple of results. UNKNOWN if two of them share memory that no argument holds."""
    inner = [_make_recipe(each, tensors, device) for each in found]
    if NOT_CACHEABLE in inner:
        return NOT_CACHEABLE
    fresh = [
        id(each.untyped_storage())
        for each, noted in zip(found, inner, strict=True)
        if noted[0] is Tensor and noted[1] is None
    ]
    return NOT_CACHEABLE if len(set(fresh)) < len(fresh) else (type(found), *inner)
