"""Predicts whether it pays to keep experts in a slower memory: `mlhpc plan --offload`. Closed forms, no torch.

A layer's experts are loaded while the layer before computes, in each pass again; of the first layer nothing hides the
load. The backward pass also writes gradients, while it loads. The update comes after the last gradient, as clipping by
the norm needs all of them: it loads weights, gradients and states of the optimizer, and writes weights and states.
Loading and computing do not slow each other.

Or the waits are measured, by steps in the tier whose layers only spin for as long. Then they have what the CPU pays
for the tier, and what the update's arithmetic hides.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from mlhpc.plugins.axes.predict import Cost
from mlhpc.plugins.axes.step_time import Estimate, find_compute_rate, find_span
from mlhpc.suite.documents import read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import align_columns, render_bytes
from mlhpc.suite.performance.ceilings_file import Ceiling, Ceilings
from mlhpc.suite.workload import ExpertLayer

Tier = Literal["host", "file"]
TIERS: tuple[Tier, ...] = get_args(Tier)
GRADIENT_BYTES = 4  # of a parameter: gradients are float32 in any precision
FORWARD, BACKWARD = 2, 4  # FLOPs of a parameter and token
SHORTEST_S = 1e-9  # of a pass that waits for nothing: the cache has all
Waits = tuple[Sequence[float], Sequence[float], float]  # of a step: the layers' forward and backward passes, the update
LAYERS_ON_DEVICE = 2  # the one that computes, and the next, which is being loaded


@dataclass(frozen=True)
class Rates:
    """What a rank reaches: FLOP/s, and bytes/s from and to the tier. ``weight_bytes``: of a parameter as it is
    loaded.
    """

    tier: Tier
    flops: Estimate
    load: Estimate
    store: Estimate
    weight_bytes: int
    source: str

    @property
    def break_even_tokens(self) -> Estimate:
        """The tokens of an expert from which on its own products take longer than its load, in both passes.

        Source: b F / (2 B) with b bytes of a parameter, F FLOP/s, B bytes/s; the backward pass has twice the FLOPs and
        also writes gradients.
        """
        flops = self.flops.low, self.flops.value, self.flops.high  # fast transfers and slow products need the fewest
        rates = zip(flops, self.load.fastest_first(), self.store.fastest_first(), strict=True)
        return Estimate(*(self._break_even(*each) for each in rates))

    def _break_even(self, flops: float, load: float, store: float) -> float:
        forward, backward = self.pass_seconds(1.0, load, store)
        return flops * max(forward / FORWARD, backward / BACKWARD)

    def pass_seconds(self, parameters: float, load: float, store: float) -> tuple[float, float]:
        """Return the seconds in which the forward and the backward pass move parameters at these rates."""
        loading = parameters * self.weight_bytes / load
        return loading, max(loading, parameters * GRADIENT_BYTES / store)


@dataclass(frozen=True)
class LayerTime:
    """One layer's bytes, and its seconds in one part of a step: loading, computing all between two layers, waiting."""

    layer: ExpertLayer
    weight_bytes: float
    state_bytes: float
    load_s: float
    compute_s: float
    wait_s: float


@dataclass(frozen=True)
class Offload:
    """What a step costs with the experts in a tier. ``wait_s`` is of all parts of the step and of the update."""

    rates: Rates
    layers: tuple[LayerTime, ...]
    update_s: float
    compute_s: float
    wait_s: float
    device_bytes: float
    tier_bytes: float

    @property
    def wait_share(self) -> float:
        """The share of the step that waits."""
        return self.wait_s / (self.wait_s + self.compute_s)

    @property
    def verdict(self) -> str:
        """Say whether it pays, from how many tokens on, and what a step waits."""
        needed, has = self.rates.break_even_tokens, min(each.layer.tokens for each in self.layers)
        ends = f" ({needed.low:,.0f} to {needed.high:,.0f})" if needed.high > needed.low else ""
        rest = "; updates and copies of the CPU come on top" if self.rates.tier == "file" else ""
        word = "pays" if has >= needed.high else "does not pay" if has < needed.low else "may pay"
        return (
            f"{word}: an expert's products hide its load from {needed.value:,.0f}{ends} tokens on; it has {has:,.0f}. "
            f"Each step waits {100 * self.wait_share:.2g} % for the tier{rest}"
        )

    def render(self, cost: Cost) -> Iterator[str]:
        """Yield lines for people: rates, a row for each layer, memory, the verdict."""
        rates = self.rates
        yield (
            f"offload to {rates.tier}: load {rates.load.value / 1e9:.4g} GB/s, store"
            f" {rates.store.value / 1e9:.4g} GB/s, "
            f"compute {rates.flops.value / 1e12:.4g} TFLOP/s ({rates.source}); times of one part of a step (modelled)"
        )
        head = ("layer", "experts", "weights", "states", "tokens per expert", "load", "compute", "wait")
        yield from align_columns([head, *_list_rows(self.layers)], right=range(1, len(head)))
        yield (
            f"  a rank needs {render_bytes(round(self.device_bytes))} on the device"
            f" ({render_bytes(cost.memory)} without "
            f"offload) and {render_bytes(round(self.tier_bytes))} in the tier"
        )
        yield f"  the update, with states of the optimizer: {self.update_s * 1e3:.4g} ms in each step"
        yield f"  {self.verdict}"

    def use_waits(self, idle: Sequence[Waits], computing: Sequence[Waits], parts: int) -> Offload:
        """Replace rates and waits by those of steps: of ones that compute nothing, and of ones that compute."""
        held = sum(each.layer.experts * each.layer.parameters for each in self.layers)
        load = _find_rate(held * self.rates.weight_bytes, [sum(forward) for forward, _, _ in idle])
        store = _find_rate(held * GRADIENT_BYTES, [sum(backward) for _, backward, _ in idle])
        layers = tuple(
            replace(layer, load_s=_find_passes(idle, number), wait_s=_find_passes(computing, number))
            for number, layer in enumerate(self.layers)
        )
        update_s = statistics.median(update for _, _, update in computing)
        source = f"{self.rates.source}; the tier by {len(idle)} steps without computing, {len(computing)} with it"
        return replace(
            self,
            rates=replace(self.rates, load=load, store=store, source=source),
            layers=layers,
            update_s=update_s,
            wait_s=parts * sum(each.wait_s for each in layers) + update_s,
        )

    def row(self) -> dict[str, Any]:
        """Return the content for JSON."""
        derived = {"verdict": self.verdict, "break_even_tokens": asdict(self.rates.break_even_tokens)}
        return asdict(self) | derived | {"wait_share": self.wait_share}


def read_rates(path: Path, tier: Tier, precision: str, reached: Estimate | None) -> Rates:
    """Read a tier's rates from a ceilings file. ``reached``: the part of the compute ceiling that a step reaches.

    InputError if it lacks the tier or the number format.
    """
    file = read_json_document(path, Ceilings, "ceilings", 1)
    flops = find_compute_rate(file, precision, path)
    if tier == "host":
        load, store = (_find_roof(file, path, "host_link", name) for name in ("host_to_device", "device_to_host"))
    else:
        load, store = _find_roof(file, path, "storage_read", "cold"), _find_roof(file, path, "storage_write")
    return Rates(
        tier=tier,
        flops=flops if reached is None else flops.times(reached),
        load=find_span(load),
        store=find_span(store),
        weight_bytes=2 if precision == "bfloat16" else 4,
        source=f"ceilings of {file.system}, {file.date[:10]}",
    )


def _find_roof(file: Ceilings, path: Path, resource: str, kind: str = "") -> Ceiling:
    """Return the fastest roof of a resource whose name or mode is ``kind``. InputError if there is none."""
    roofs = [roof for roof in file.of(resource) if kind in ("", roof.name, roof.mode)]
    if roofs:
        return max(roofs, key=lambda roof: roof.value)
    on_host = "; experts on a CPU are in the host's memory already: --offload file" if resource == "host_link" else ""
    raise InputError(f"{path}: no {resource} {kind}".rstrip() + f": {file.why_not(resource)}{on_host}")


def predict_offload(rates: Rates, cost: Cost, parts: int) -> Offload:
    """Predict a step with all experts in a tier. ``parts``: forward passes of a step. InputError without experts."""
    if not cost.experts:
        raise InputError("--offload moves experts: this workload, or a stage of its pipeline, has none")
    load, store, flops = rates.load.value, rates.store.value, rates.flops.value
    held = sum(layer.experts * layer.parameters for layer in cost.experts)
    # By parameters: the optimizer keeps as much of each.
    state_bytes = 0.0 if cost.optimizer is None else cost.optimizer * GRADIENT_BYTES / cost.gradients
    forward_s = cost.flops / parts / 3 / len(cost.experts) / flops  # a third of the FLOPs; layers are alike
    layers = list[LayerTime]()
    for number, layer in enumerate(cost.experts):
        count = layer.experts * layer.parameters
        loads = rates.pass_seconds(count, load, store)
        passes = zip(loads, (forward_s, 2 * forward_s), strict=True)
        waits = sum(max(0.0, loading - computing) for loading, computing in passes)
        # The first layer of each pass is loaded before anything computes; after the forward pass the last is there.
        fill = min(loads[0], forward_s) if number == 0 else 0.0
        layers.append(
            LayerTime(layer, count * rates.weight_bytes, count * state_bytes, sum(loads), 3 * forward_s, waits + fill)
        )
    kept = state_bytes + rates.weight_bytes
    update_s = held * max((kept + GRADIENT_BYTES) / load, kept / store)
    largest = max(each.weight_bytes + each.layer.experts * each.layer.parameters * GRADIENT_BYTES for each in layers)
    moved = held * (2 * GRADIENT_BYTES + state_bytes)  # parameters and gradients are float32 on the device
    return Offload(
        rates=rates,
        layers=tuple(layers),
        update_s=update_s,
        compute_s=cost.flops / flops,
        wait_s=parts * sum(each.wait_s for each in layers) + update_s,
        device_bytes=cost.memory - moved + LAYERS_ON_DEVICE * largest,
        tier_bytes=moved,
    )


def _find_rate(size: float, seconds: Sequence[float]) -> Estimate:
    spans = max(seconds), statistics.median(seconds), min(seconds)
    return Estimate(*(size / max(each, SHORTEST_S) for each in spans))


def _find_passes(steps: Sequence[Waits], number: int) -> float:
    return statistics.median(forward[number] + backward[number] for forward, backward, _ in steps)


def _list_rows(layers: Sequence[LayerTime]) -> Iterator[Sequence[str]]:
    """Yield a row for neighbouring layers whose cells are equal."""
    for cells, same in groupby(layers, _list_cells):
        names = [each.layer.name for each in same]
        yield (names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", *cells)


def _list_cells(each: LayerTime) -> Sequence[str]:
    layer, sizes = each.layer, (each.weight_bytes, each.state_bytes)
    times = (f"{seconds * 1e3:.4g} ms" for seconds in (each.load_s, each.compute_s, each.wait_s))
    return (str(layer.experts), *(render_bytes(round(size)) for size in sizes), f"{layer.tokens:,.0f}", *times)
