"""Splits samples over ranks: gives the layers of a finished model the positions they need from neighbours. No data, no
loop.

`split_model` puts hooks on layers and changes no parameter, name or forward pass. A layer's output is split as
`mesh.part_of` splits its extent, and the hook fetches what the window of this rank's outputs covers, dimension by
dimension, so that corners come along. `trace` runs the unsplit model once on meta tensors and tells the extents at each
layer.

The positions around a rank's part of a tensor: fetched for a layer and given back.

Steps say what a layer's input needs: positions of other ranks, fewer of its own, padding at the border of the sample.

Which input positions an operator needs for a range of its output, per dimension: numbers only, no torch.

A window of k values with dilation d and stride s, padded by p on the left, computes output o from inputs o s - p + i d
for i = 0..k-1. A transposed one adds input i into outputs i s - p + j d for j = 0..k-1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from mlhpc.plugins.axes.collectives import add_up, gather
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.batch_norm import GroupBatchNorm2d
from mlhpc.suite.training.parallel.exchange import Axis
from mlhpc.suite.training.parallel.mesh import Interval, part_of
from mlhpc.suite.training.parallel.plan import SAMPLE, Boundary


def common(a: Interval, b: Interval) -> Interval:
    """The positions in both; of equal ends if there is none."""
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))


@dataclass(frozen=True)
class Fetch:
    """What each rank of a line holds of a dimension of ``n`` positions, and what it needs for its next operator."""

    held: tuple[Interval, ...]
    needed: tuple[Interval, ...]

    def sent(self, sender: int, receiver: int) -> Interval:
        """The positions that one rank gives to another."""
        return common(self.held[sender], self.needed[receiver])

    @property
    def is_local(self) -> bool:
        """True if every rank holds what it needs. Equal on all ranks, so none of them communicates then."""
        return all(h[0] <= n[0] and n[1] <= h[1] for h, n in zip(self.held, self.needed, strict=True))


@dataclass(frozen=True)
class Take:
    """Own positions of a dimension and those of other ranks, in order. All ranks of the axis do it."""

    dimension: int
    axis: Axis
    plan: Fetch

    def forward(self, x: Tensor) -> Tensor:
        """Fetch what this rank needs."""
        dimension, axis, plan = self.dimension, self.axis, self.plan
        me = axis.rank
        given = [_piece(x, dimension, plan, me, other) for other in range(axis.size)]
        shapes = [_shape(x, dimension, plan.sent(other, me), other != me) for other in range(axis.size)]
        got = axis.all_to_all(given, shapes)
        own = plan.sent(me, me)
        got[me] = x.narrow(dimension, own[0] - plan.held[me][0], own[1] - own[0])
        return torch.cat([part for part in got if part.shape[dimension]], dimension)

    def backward(self, grad: Tensor) -> Tensor:
        """Give gradients back to where the positions are from, and add up those of the own part."""
        dimension, axis, plan = self.dimension, self.axis, self.plan
        me = axis.rank
        extents = [_length(plan.sent(other, me)) for other in range(axis.size)]
        parts = list(torch.split(grad, extents, dimension))
        own, parts[me] = parts[me], grad.narrow(dimension, 0, 0)
        shapes = [_shape(grad, dimension, plan.sent(me, other), other != me) for other in range(axis.size)]
        got = axis.all_to_all(parts, shapes)
        shape = list(grad.shape)
        shape[dimension] = _length(plan.held[me])
        total = grad.new_zeros(shape)
        got[me] = own
        for other in range(axis.size):
            low, high = plan.sent(me, other)
            if high > low:
                total.narrow(dimension, low - plan.held[me][0], high - low).add_(got[other])
        return total


@dataclass(frozen=True)
class Keep:
    """Some of ``whole`` positions of a dimension."""

    dimension: int
    begin: int
    length: int
    whole: int

    def forward(self, x: Tensor) -> Tensor:
        """Leave the others out."""
        return x.narrow(self.dimension, self.begin, self.length)

    def backward(self, grad: Tensor) -> Tensor:
        """Zeros for the others."""
        after = (grad.dim() - 1 - self.dimension) * (0, 0)
        return F.pad(grad, (*after, self.begin, self.whole - self.begin - self.length))


@dataclass(frozen=True)
class Pad:
    """Positions beyond the sample, as `torch.nn.functional.pad` counts them."""

    pads: tuple[int, ...]
    value: float

    def forward(self, x: Tensor) -> Tensor:
        """Add them."""
        return F.pad(x, self.pads, value=self.value)

    def backward(self, grad: Tensor) -> Tensor:
        """Leave them out."""
        return F.pad(grad, [-each for each in self.pads])


Steps = tuple[Take | Keep | Pad, ...]


def extend(x: Tensor, steps: Steps) -> Tensor:
    """Take all steps; differentiable. All ranks call it that have an exchange in common."""
    result: Tensor = _Extended.apply(x, steps) if steps else x  # type: ignore[no-untyped-call]
    return result


def _forward(x: Tensor, steps: Steps) -> Tensor:
    with torch.no_grad():
        for step in steps:
            x = step.forward(x)
        return x


def _backward(grad: Tensor, steps: Steps) -> Tensor:
    with torch.no_grad():
        for step in reversed(steps):
            grad = step.backward(grad)
        return grad


class _Extended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Steps) -> Tensor:
        ctx.steps = steps
        return _forward(x, steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _backward(grad, ctx.steps), None


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _piece(x: Tensor, dimension: int, plan: Fetch, me: int, other: int) -> Tensor:
    low, high = plan.sent(me, other)
    if other == me or high == low:
        return x.narrow(dimension, 0, 0)
    return x.narrow(dimension, low - plan.held[me][0], high - low)


def _shape(x: Tensor, dimension: int, interval: Interval, wanted: bool) -> list[int]:
    shape = list(x.shape)
    shape[dimension] = _length(interval) if wanted else 0
    return shape


@dataclass(frozen=True)
class Window:
    """Convolution or pooling along one dimension."""

    kernel: int
    stride: int
    dilation: int
    left: int

    def needs(self, out: Interval) -> Interval:
        """The inputs of a range of outputs; positions outside of the input are padding."""
        first = out[0] * self.stride - self.left
        return first, (out[1] - 1) * self.stride - self.left + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Transposed:
    """Transposed convolution along one dimension."""

    kernel: int
    stride: int
    dilation: int
    left: int

    def needs(self, out: Interval) -> Interval:
        """The inputs of a range of outputs; positions outside of the input are zeros.

        What comes of them covers the range.
        """
        reach = self.dilation * (self.kernel - 1)
        first = -((reach - out[0] - self.left) // self.stride)  # least i with i s - p + reach >= the first output
        last = (out[1] - 1 + self.left) // self.stride
        first = min(first, (out[0] + self.left) // self.stride)  # a kernel shorter than the stride leaves gaps
        if last * self.stride - self.left + reach < out[1] - 1:
            last += 1
        return first, last + 1

    def begins(self, first: int) -> int:
        """The output position of the first value that comes of inputs from ``first`` on, without cropping."""
        return first * self.stride - self.left


NEAREST, NEAREST_EXACT = "nearest", "nearest-exact"
LINEAR = ("linear", "bilinear", "trilinear")


@dataclass(frozen=True)
class Upsampled:
    """Upsampling along one dimension: each output lies between inputs ``first`` and ``second``, by ``weight`` towards
    that.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    weight: tuple[float, ...]

    @staticmethod
    def of(mode: str, n: int, out: int, *, factor: float | None, align_corners: bool) -> Upsampled:
        """As torch.nn.functional.interpolate takes ``out`` outputs from ``n`` inputs, by their ratio or by the
        ``factor``.
        """
        scale = n / out if factor is None else 1 / factor
        if mode in LINEAR:
            if align_corners:
                scale = (n - 1) / (out - 1) if out > 1 else 0.0
            places = [max(0.0, o * scale if align_corners else (o + 0.5) * scale - 0.5) for o in range(out)]
            first = tuple(min(math.floor(place), n - 1) for place in places)
            second = tuple(min(low + 1, n - 1) for low in first)
            weight = tuple(min(place - low, high - low) for place, low, high in zip(places, first, second, strict=True))
            return Upsampled(first, second, weight)
        shift, narrow = 0.5 if mode == NEAREST_EXACT else 0.0, _single(scale)  # torch counts in single precision here
        nearest = tuple(min(math.floor(_single((o + shift) * narrow)), n - 1) for o in range(out))
        return Upsampled(nearest, nearest, (0.0,) * out)

    def needs(self, out: Interval) -> Interval:
        """The inputs of a range of outputs."""
        return min(self.first[slice(*out)]), max(self.second[slice(*out)]) + 1


def _single(value: float) -> float:
    """The nearest number of single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


Extents = tuple[int, ...]
CHANNELS_LAST = ((4, torch.channels_last), (5, torch.channels_last_3d))
MAX_POOL = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE_POOL = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
GLOBAL_POOL = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
WINDOWED = (_ConvNd, *MAX_POOL, *AVERAGE_POOL)
SPLIT = (*WINDOWED, *GLOBAL_POOL, nn.Upsample)
REFUSED = (
    *(nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.MultiheadAttention, nn.RNNBase),
)


@dataclass(frozen=True)
class Call:
    """One call of a layer in the unsplit model: extents of the split dimensions before and after it."""

    path: str
    before: Extents
    after: Extents


@dataclass
class Trace:
    """The calls of layers, in order, and for each boundary the extents of the last layer before it."""

    calls: list[Call] = field(default_factory=list)
    boundaries: dict[str, Extents] = field(default_factory=dict)

    def of(self, path: str) -> list[Call]:
        """The different calls of one layer."""
        return list(dict.fromkeys(call for call in self.calls if call.path == path))


@dataclass(frozen=True)
class Split:
    """How samples are split: this rank's part of each dimension, the axes of those that have parts, all ranks of a
    sample.
    """

    parts: tuple[int, ...]
    place: tuple[int, ...]
    lines: tuple[Axis | None, ...]
    group: Axis
    names: tuple[str, ...]


def trace(
    model: nn.Module, run: Callable[[nn.Module], object], boundaries: Mapping[str, Boundary], names: Sequence[str]
) -> Trace:
    """Run an unsplit model whose tensors are meta tensors and note the extents at its layers.

    ``names``: the split dimensions. InputError for a layer that cannot be split, with its path.
    """
    found, n = Trace(), len(names)
    handles = []

    def note(path: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            before, after = inputs[0].shape[2:], output.shape[2:]
            if len(before) != n:
                raise InputError(
                    f"plan: layer {path or 'model'!r} works on {len(before)} dimensions, the plan splits {n}: "
                    f"{', '.join(names)}"
                )
            if set(before) != {1}:  # after global pooling every rank has the whole
                found.calls.append(Call(path, tuple(before), tuple(after)))

        return hook

    def mark(path: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            found.boundaries[path] = found.calls[-1].after if found.calls else ()

        return hook

    for path, module in model.named_modules():
        _refuse(path, module)
        if isinstance(module, SPLIT):
            handles.append(module.register_forward_hook(note(path)))
    modules = dict(model.named_modules())
    for path, boundary in boundaries.items():
        if boundary.at == "input":
            handles.append(modules[path].register_forward_pre_hook(mark(path)))
        else:
            handles.append(modules[path].register_forward_hook(mark(path)))
    run(model)
    for handle in handles:
        handle.remove()
    return found


def _refuse(path: str, module: nn.Module) -> None:
    """InputError for a layer that would compute something else on a part of its input."""
    kind = type(module).__name__
    if isinstance(module, REFUSED):
        raise InputError(f"plan: layer {path!r} ({kind}) cannot be split: leave spatial out of --mesh")
    if isinstance(module, _BatchNorm) and not isinstance(module, GroupBatchNorm2d):
        raise InputError(f"plan: layer {path!r} ({kind}) normalises over one rank alone: expected GroupBatchNorm2d")
    if isinstance(module, _ConvNd) and module.padding_mode != "zeros":
        raise InputError(f"plan: layer {path!r} pads with {module.padding_mode!r}: only zeros can be split")
    if isinstance(module, (*MAX_POOL, *AVERAGE_POOL)) and module.ceil_mode:
        raise InputError(f"plan: layer {path!r} has ceil_mode: it cannot be split")
    if isinstance(module, AVERAGE_POOL) and not module.count_include_pad and any(_each(module.padding, 3)):
        raise InputError(f"plan: layer {path!r} does not count its padding: it cannot be split")
    if isinstance(module, MAX_POOL) and module.return_indices:
        raise InputError(f"plan: layer {path!r} returns indices: it cannot be split")
    if isinstance(module, nn.Upsample) and module.mode not in (*LINEAR, NEAREST, NEAREST_EXACT):
        raise InputError(
            f"plan: layer {path!r} upsamples in mode {module.mode!r}: only nearest and linear ones can be split"
        )
    if isinstance(module, GLOBAL_POOL) and set(_each(module.output_size, 1)) != {1}:
        raise InputError(f"plan: layer {path!r} pools to {module.output_size}: only pooling to 1 can be split")


def check_extents(found: Trace, parts: Sequence[int], names: Sequence[str]) -> None:
    """InputError, which names layer and dimension, if a rank would have no position of a tensor."""
    for call in found.calls:
        for n, p, name in zip((*call.before, *call.after), (*parts, *parts), (*names, *names), strict=True):
            if n < p and not (set(call.after) == {1} and n == 1):
                raise InputError(
                    f"plan: {name} has {n} positions at layer {call.path!r}, fewer than its {p} parts: "
                    f"expected at most {name} in {n} parts"
                )


def split_model(model: nn.Module, found: Trace, split: Split, boundaries: Mapping[str, Boundary]) -> None:
    """Put the hooks on a model, whose layers then take and give this rank's part.

    InputError for a call that is ambiguous.
    """
    for path, module in model.named_modules():
        if isinstance(module, SPLIT):
            _split_layer(path, module, found.of(path), split)
        if isinstance(module, GroupBatchNorm2d) and module.axis is None:
            module.axis = split.group
    modules = dict(model.named_modules())
    for path, boundary in boundaries.items():
        join = _Join(boundary, found.boundaries.get(path, ()), split)
        if boundary.at == "input":
            modules[path].register_forward_pre_hook(join.before)
        else:
            modules[path].register_forward_hook(join.after)


def _split_layer(path: str, module: nn.Module, calls: Sequence[Call], split: Split) -> None:
    dimensions = len(split.parts)
    if not calls:
        return
    if isinstance(module, GLOBAL_POOL):
        module.register_forward_hook(_global_pool(path, calls, split))
        return
    if isinstance(module, nn.Upsample):
        setattr(module, "forward", _Stretch(path, calls, split, module))  # noqa: B010  torch types it as a method
        return
    windows = [_window(module, d, dimensions) for d in range(dimensions)]
    hook = _Halo(path, calls, split, windows, float("-inf") if isinstance(module, MAX_POOL) else 0.0)
    whole = [d for d in range(dimensions) if split.parts[d] == 1]
    if isinstance(module, _ConvTransposeNd):
        padding, after = _each(module.padding, dimensions), _each(module.output_padding, dimensions)
        module.padding = tuple(padding[d] if d in whole else 0 for d in range(dimensions))
        module.output_padding = tuple(after[d] if d in whole else 0 for d in range(dimensions))
        module.register_forward_hook(hook.crop)
    else:
        symmetric = all(_pads(module, d, dimensions)[0] == _pads(module, d, dimensions)[1] for d in whole)
        hook.padded = () if symmetric else tuple(whole)
        pads = [_pads(module, d, dimensions)[0] if d in whole and symmetric else 0 for d in range(dimensions)]
        one = isinstance(module, (nn.MaxPool1d, nn.AvgPool1d))
        setattr(module, "padding", pads[0] if one else tuple(pads))  # noqa: B010  torch types it by kind
    module.register_forward_pre_hook(hook)


def _each(value: object, dimensions: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * dimensions  # type: ignore[return-value]


def _pads(module: nn.Module, d: int, dimensions: int) -> Interval:
    """Positions of padding on the left and on the right."""
    if module.padding == "same":
        total = _each(module.dilation, dimensions)[d] * (_each(module.kernel_size, dimensions)[d] - 1)
        return total // 2, total - total // 2
    one = 0 if module.padding == "valid" else _each(module.padding, dimensions)[d]
    return one, one


def _window(module: nn.Module, d: int, dimensions: int) -> Window | Transposed:
    kind = Transposed if isinstance(module, _ConvTransposeNd) else Window
    stride = module.kernel_size if module.stride is None else module.stride
    dilation = getattr(module, "dilation", 1)
    left = _pads(module, d, dimensions)[0]
    return kind(
        _each(module.kernel_size, dimensions)[d], _each(stride, dimensions)[d], _each(dilation, dimensions)[d], left
    )


def _by_part(path: str, calls: Sequence[Call], split: Split) -> dict[Extents, Call]:
    """The call that each extent of this rank's part belongs to.

    InputError if two calls give a rank parts of one extent.
    """

    def mine(call: Call) -> Extents:
        parts = (part_of(n, p, i) for n, p, i in zip(call.before, split.parts, split.place, strict=True))
        return tuple(high - low for low, high in parts)

    found: dict[Extents, Call] = {}
    for call in calls:
        other = found.setdefault(mine(call), call)
        if other.before != call.before:
            raise InputError(
                f"plan: layer {path!r} is called with extents {other.before} and {call.before}, "
                f"which give a rank equal parts: expected another spatial than {'x'.join(map(str, split.parts))}"
            )
    return found


class _Halo:
    """The hook of one layer with a window: fetches and pads its input; after a transposed convolution crops the
    output.
    """

    def __init__(
        self, path: str, calls: Sequence[Call], split: Split, windows: Sequence[Window | Transposed], fill: float
    ) -> None:
        self._path, self._split, self._windows, self._fill = path, split, windows, fill
        self._calls = _by_part(path, calls, split)
        self._last: Call | None = None
        self.padded: tuple[int, ...] = ()  # dimensions that are not split, but whose padding is not symmetric

    def _needed(self, call: Call, d: int, part: int) -> Interval:
        return self._windows[d].needs(part_of(call.after[d], self._split.parts[d], part))

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        call = self._last = _find(self._path, self._calls, inputs[0])
        return (extend(inputs[0], self._steps(call)), *inputs[1:])

    def _steps(self, call: Call) -> Steps:
        """What this rank's input of a call needs, dimension by dimension."""
        split, pads = self._split, []
        steps: list[Take | Keep | Pad] = []
        for d, axis in enumerate(split.lines):
            if axis is None:
                pads.append(_pads_of_window(self._windows[d], call, d) if d in self.padded else (0, 0))
                continue
            n, parts = call.before[d], split.parts[d]
            wanted = [self._needed(call, d, part) for part in range(parts)]
            inside = tuple((max(0, low), min(n, high)) for low, high in wanted)
            held = tuple(part_of(n, parts, part) for part in range(parts))
            plan, me = Fetch(held, inside), split.place[d]
            if not plan.is_local:
                steps.append(Take(d + 2, axis, plan))
            elif inside[me] != held[me]:
                begin, whole = inside[me][0] - held[me][0], held[me][1] - held[me][0]
                steps.append(Keep(d + 2, begin, inside[me][1] - inside[me][0], whole))
            pads.append((max(0, -wanted[me][0]), max(0, wanted[me][1] - n)))
        if any(map(any, pads)):
            steps.append(Pad(tuple(each for pair in reversed(pads) for each in pair), self._fill))
        return tuple(steps)

    def crop(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Keep this rank's outputs of a transposed convolution."""
        assert self._last is not None
        for d, window in enumerate(self._windows):
            if self._split.lines[d] is not None and isinstance(window, Transposed):
                part = self._split.place[d]
                low, high = part_of(self._last.after[d], self._split.parts[d], part)
                begins = window.begins(self._needed(self._last, d, part)[0])
                output = output.narrow(d + 2, low - begins, high - low)
        return output


class _Stretch(_Halo):
    """The forward pass of an upsampling layer: fetches what this rank's outputs need, and computes them dimension by
    dimension.
    """

    def __init__(self, path: str, calls: Sequence[Call], split: Split, layer: nn.Upsample) -> None:
        super().__init__(path, calls, split, (), 0.0)
        factors = _each(layer.scale_factor, len(split.parts)) if not layer.recompute_scale_factor else ()
        self._stretched = {
            call: [
                Upsampled.of(
                    layer.mode, n, out, factor=factors[d] if factors else None, align_corners=bool(layer.align_corners)
                )
                for d, (n, out) in enumerate(zip(call.before, call.after, strict=True))
            ]
            for call in calls
        }

    def _needed(self, call: Call, d: int, part: int) -> Interval:
        return self._stretched[call][d].needs(part_of(call.after[d], self._split.parts[d], part))

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]  # in the place of forward, which is no hook
        call, split = _find(self._path, self._calls, x), self._split
        last = next(
            (each for each in CHANNELS_LAST if x.dim() == each[0] and x.is_contiguous(memory_format=each[1])), None
        )
        dtype, x = x.dtype, extend(x, self._steps(call))
        x = x.to(torch.promote_types(dtype, torch.float32))
        for d, stretched in enumerate(self._stretched[call]):
            own = slice(*part_of(call.after[d], split.parts[d], split.place[d]))
            begin = self._needed(call, d, split.place[d])[0]
            first, second = (
                torch.tensor([at - begin for at in places[own]], device=x.device)
                for places in (stretched.first, stretched.second)
            )
            weight = torch.tensor(stretched.weight[own], dtype=x.dtype, device=x.device)
            shape = [-1 if at == d + 2 else 1 for at in range(x.dim())]
            x = torch.lerp(x.index_select(d + 2, first), x.index_select(d + 2, second), weight.view(shape))
        return (x if last is None else x.contiguous(memory_format=last[1])).to(dtype)


def _pads_of_window(window: Window | Transposed, call: Call, d: int) -> Interval:
    low, high = window.needs((0, call.after[d]))
    return max(0, -low), max(0, high - call.before[d])


def _find(path: str, calls: Mapping[Extents, Call], x: Tensor) -> Call:
    extents = tuple(x.shape[2:])
    if extents not in calls:
        raise InputError(f"plan: layer {path!r} got extents {extents}: expected {' or '.join(map(str, calls))}")
    return calls[extents]


def _global_pool(path: str, calls: Sequence[Call], split: Split) -> Callable[..., Tensor]:
    """A hook that makes the mean of a part the mean of all parts."""
    known = _by_part(path, calls, split)

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        call = _find(path, known, inputs[0])
        return add_up(output * (prod(inputs[0].shape[2:]) / prod(call.before)), split.group)

    return hook


class _Join:
    """The hooks of a boundary: the parts of a tensor become the whole on every rank of the group."""

    def __init__(self, boundary: Boundary, extents: Extents, split: Split) -> None:
        self._boundary, self._extents, self._split = boundary, extents, split

    def before(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self._join(inputs[0], module), *inputs[1:])

    def after(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return self._join(output, module)

    def _join(self, x: Tensor, module: nn.Module) -> Tensor:
        if self._boundary.when == "evaluation" and module.training:
            return x
        split, dims = self._split, self._boundary.dims
        at = [dims.index(name) for name in split.names]
        flat = x.dim() != len(dims)
        if flat:
            mine = [part_of(n, p, i) for n, p, i in zip(self._extents, split.parts, split.place, strict=True)]
            shape = [len(x) if name == SAMPLE else -1 for name in dims]
            for d, (low, high) in zip(at, mine, strict=True):
                shape[d] = high - low
            x = x.reshape(shape)
        x = gather(x, at, self._extents, split.parts, split.group)
        return x.flatten(1) if flat else x
