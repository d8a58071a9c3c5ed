"""Selects the back end of the experts by a short measurement before a run, where the configuration says ``auto``.

All back ends of `mlhpc.workloads.moe.experts.BACKENDS` take part, registered ones too. Each runs what a layer would run
with it, from tokens to weighted sums and back: the fused kernels gather the tokens, other back ends need copies. Only
rows that come from other ranks are sorted already. The load is uneven, as a router's is. A back end that pads is
selected only up to a load imbalance: up to it, it wins by the measured seconds.

N rows on this rank, T tokens, K choices, E experts and H hidden width that it computes with, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlhpc.suite.machine.choice.chooser import (
    Question,
    choose_fastest,
    compute_nearest_power_of_two,
    measure_candidates,
)
from mlhpc.suite.workload import ChooserProtocol
from mlhpc.workloads.moe.config import Activation, MoEConfig, count_ranks_per_expert
from mlhpc.workloads.moe.experts import (
    BACKENDS,
    SelectedBackend,
    Weights,
    choose_unmeasured_backend,
    run_experts,
    run_experts_on_tokens,
)
from mlhpc.workloads.moe.router import Capacity, Dropless, Routing

MOST_FLOPS = 4e9  # of a measured pass on a processor: a larger problem is measured on fewer of its experts and rows
# a problem is not cut below these: so far the order of the back ends was measured to be that of the whole problem
FEWEST_EXPERTS, FEWEST_ROWS = 16, 256
MARGIN = 1.03  # a back end that pads must win by this, since loads differ from step to step
MOST_PADDING = 2.0  # times the rows; memory grows as they do, and no run should end for a choice
EVEN_SUFFIX = ", even"  # after the name of a back end that pads: measured with an even load
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


@dataclass(frozen=True)
class ExpertShape:
    """What a rank's experts compute in one pass. ``even``: all experts have equally many rows (a capacity).

    ``top_k``: the choices of a token. None: rows come from other ranks, sorted, and go back as they are.
    """

    rows: int
    experts: int
    width: int
    hidden: int
    activation: Activation
    bias: bool
    even: bool
    dtype: torch.dtype
    top_k: int | None = None

    @staticmethod
    def of(config: MoEConfig, width: int, rows: float, dtype: torch.dtype, ranks: int = 1) -> ExpertShape:
        """Return the shape of a layer: ``rows`` are sent per rank, empty ones included; ``ranks`` share the experts."""
        experts, hidden = config.experts, config.hidden
        top_k: int | None = config.top_k
        if ranks > 1 and config.parallel_r:
            hidden //= config.parallel_r if count_ranks_per_expert(experts, ranks) > 1 else 1
            experts = max(1, experts // ranks)
            rows *= config.parallel_r / config.overlap_degree
            top_k = None
        form = config.activation, config.bias, config.dispatch != "dropless", dtype, top_k
        return ExpertShape(max(1, round(rows)), experts, width, hidden, *form)

    @property
    def matrices(self) -> int:
        """Return the number of matrices of one expert."""
        return 3 if self.activation == "swiglu" else 2

    @property
    def flops(self) -> float:
        """Return FLOPs of a training pass."""
        return 6.0 * self.matrices * self.rows * self.width * self.hidden

    def logged(self) -> dict[str, Any]:
        """Return what the choice depends on, as JSON types."""
        return {**vars(self), "dtype": DTYPE_NAMES[self.dtype]}

    def name(self) -> str:
        """Return the name in logs and pins: experts x hidden x width, and the class of the rows.

        In a run, rows of one power of two are measured once.
        """
        return f"experts-{self.experts}x{self.hidden}x{self.width}-rows-{compute_nearest_power_of_two(self.rows)}"

    def measured(self, device: torch.device) -> ExpertShape:
        """Return the shape that is measured. On a processor it is smaller if a pass would take long.

        With ``top_k`` its rows are of whole tokens.
        """
        rows, experts = self.rows, self.experts
        while device.type == "cpu" and rows * self.flops / self.rows > MOST_FLOPS:
            if experts > FEWEST_EXPERTS:
                experts, rows = -(-experts // 2), rows // 2
            elif rows > FEWEST_ROWS * experts:
                rows //= 2
            else:
                break
        unit = self.top_k or 1
        return replace(self, rows=max(rows // unit, 1) * unit, experts=experts)


def choose_backend(chooser: ChooserProtocol, shape: ExpertShape) -> SelectedBackend:
    """Choose the back end for a shape. Every rank calls, with equal shapes."""
    device = chooser.device
    rows_ND, weights = _inputs(replace(shape, rows=1, experts=1), device)
    reads = device.type == "cpu"
    able = [name for name, backend in BACKENDS.items() if backend.problem(rows_ND, weights) is None]
    measured = shape.measured(device)
    question = Question(
        name=shape.name(),
        shape=shape.logged(),
        rule=str(choose_unmeasured_backend(rows_ND, weights)),
        ways=lambda: _build_candidates(measured, device, able),
        possible=lambda text: (
            (found := SelectedBackend.parse(text)) is not None and {found.name, found.padded or found.name} <= {*able}
        ),
        decide=partial(
            select_backend,
            even=shape.even,
            reads=reads,
            padding=compute_padding_of(make_uneven_rows(measured.rows, measured.experts)),
        ),
        beside=lambda: _measure_bfloat16_gain(measured, device),
    )
    chosen = SelectedBackend.parse(chooser.choose(question))
    assert chosen is not None
    return chosen


def select_backend(seconds: Mapping[str, float], *, even: bool, padding: float, reads: bool = True) -> str:
    """Select the back end from the seconds of a pass. ``even``: any, because all experts have equally many rows.

    Otherwise select the fastest back end without padding. Add the load imbalance up to which a padding one is faster.
    The seconds of a back end that pads are of a load with ``padding`` times the rows. They grow at most as the padded
    rows do.
    ``NAME, even`` are those of an even load, which needs no padding. Without ``reads`` the host would wait for the
    device to read a load. That does not pay for exactly even loads alone.
    """
    if even:
        return choose_fastest(seconds)
    plain = {name: each for name, each in seconds.items() if name in BACKENDS and not BACKENDS[name].pads}
    padded = {name: each for name, each in seconds.items() if name in BACKENDS and BACKENDS[name].pads}
    if not plain:
        return choose_fastest(padded)
    best = choose_fastest(plain)
    if not padded:
        return best
    other = choose_fastest(padded)
    won = plain[best] / MARGIN
    if padded[other] <= won:
        # copies of tokens do not grow with the padded rows, so it still wins somewhat beyond this load
        up_to = math.floor(100 * padding * won / padded[other]) / 100
        return str(SelectedBackend(best, other, min(MOST_PADDING, up_to)))
    if not reads:
        return best
    return str(SelectedBackend(best, other, 1.0)) if seconds.get(f"{other}{EVEN_SUFFIX}", math.inf) <= won else best


def compute_padding_of(rows_E: Tensor) -> float:
    """Return the rows of experts that all have as many as the longest, over the rows."""
    return int(rows_E.max()) * len(rows_E) / int(rows_E.sum())


def make_uneven_rows(rows: int, experts: int) -> Tensor:
    """Return the rows of each expert: from half to one and a half times the mean, in a mixed order.

    They sum to ``rows``.
    """
    # 7 is prime, so its multiples visit every place once, and long queues are not neighbours
    place_E = torch.arange(experts) * 7 % experts if experts % 7 else torch.arange(experts)
    ends_E = ((place_E + 0.5) / experts + 0.5).cumsum(0)
    cuts_E = (ends_E / ends_E[-1] * rows).round().long()
    return torch.diff(cuts_E, prepend=cuts_E.new_zeros(1))


def make_even_rows(rows: int, experts: int) -> Tensor:
    """Return the rows of each expert, as equal as can be."""
    return torch.full((experts,), rows // experts) + (torch.arange(experts) < rows % experts)


def make_choices(rows_E: Tensor, top_k: int) -> Tensor:
    """Return the experts (T, K) of tokens that make this load. The tokens of an expert lie in any order.

    No token chooses an expert twice, unless the expert has more than T rows.
    """
    experts_TK = torch.arange(len(rows_E)).repeat_interleave(rows_E).view(top_k, -1).t()
    return experts_TK[torch.randperm(len(experts_TK), generator=torch.Generator().manual_seed(0))]


def _inputs(shape: ExpertShape, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Tensor, Weights]:
    """Make random rows and weights without using or changing torch's global random state.

    Rows have ``dtype``, by default the shape's. Weights are float32, or float64 for a float64 shape.
    """
    generator = torch.Generator().manual_seed(0)

    def make(*sizes: int) -> Tensor:
        return (torch.rand(sizes, generator=generator) - 0.5).div_(math.sqrt(shape.width)).to(device).requires_grad_()

    whole = (shape.experts, shape.hidden, shape.width)
    weights = Weights(
        make(*whole),
        make(*whole),
        make(*whole) if shape.activation == "swiglu" else None,
        make(shape.experts, shape.hidden) if shape.bias else None,
        make(shape.experts, shape.width) if shape.bias else None,
    )
    wide = torch.float64 if shape.dtype == torch.float64 else torch.float32
    # detached after the cast, so that gradients end at these tensors
    weights = weights.map(lambda weight: weight.detach().to(wide).requires_grad_())
    return make(shape.rows, shape.width).detach().to(dtype or shape.dtype), weights


def _build_candidates(shape: ExpertShape, device: torch.device, names: list[str]) -> dict[str, Callable[[], object]]:
    """Build a training pass for each back end: cast weights to the rows' type, forward, backward.

    With ``top_k`` it is a pass of tokens, which copies them to rows and back unless the back end gathers them.
    """
    generator, top_k = torch.Generator().manual_seed(1), shape.top_k
    rows = shape.rows if top_k is None else shape.rows // top_k
    x_XD, weights = _inputs(replace(shape, rows=rows), device)
    # random: a GPU multiplies constant numbers faster
    d_out_XD = (torch.rand(x_XD.shape, generator=generator) - 0.5).to(x_XD)
    weights_TK = torch.rand(rows, top_k or 0, generator=generator).to(weights.up_EHD).requires_grad_()
    wanted = [weights_TK, *(weight for weight in vars(weights).values() if weight is not None)]
    permute = Capacity() if shape.even else Dropless()

    def prepare(load_E: Tensor) -> Callable[[str], object]:
        """Return the pass of a back end with this load."""
        rows_E, plan = load_E.to(device), None
        if top_k is not None:
            # a layer sorts the choices in every pass, but alike for all back ends
            chosen_TK = make_choices(load_E, top_k).to(device)
            plan = permute.plan(Routing(chosen_TK, weights_TK, weights_TK.new_zeros(())), shape.experts)

        def run(name: str) -> object:
            leaf = x_XD.detach().requires_grad_()
            with torch.enable_grad():
                if plan is None:
                    cast = weights.map(lambda weight: weight.to(leaf.dtype))
                    out = run_experts(leaf, rows_E, cast, shape.activation, name)  # type: ignore[arg-type]
                else:
                    form = permute, plan, weights, shape.activation, name
                    out = run_experts_on_tokens(leaf, weights_TK, *form)  # type: ignore[arg-type]
                out.backward(d_out_XD)  # type: ignore[no-untyped-call]
            # otherwise the next pass would add to these gradients, which costs time
            for weight in wanted:
                weight.grad = None
            return leaf.grad

        return run

    run = prepare((make_even_rows if shape.even else make_uneven_rows)(shape.rows, shape.experts))
    ways: dict[str, Callable[[], object]] = {name: partial(run, name) for name in names}
    if not shape.even and device.type == "cpu":
        even = prepare(make_even_rows(shape.rows, shape.experts))
        ways |= {f"{name}{EVEN_SUFFIX}": partial(even, name) for name in names if BACKENDS[name].pads}
    return ways


def _measure_bfloat16_gain(shape: ExpertShape, device: torch.device) -> dict[str, Any]:
    """Measure how much faster one expert's product is in bfloat16. It is only reported: it would change the numbers."""
    if shape.dtype != torch.float32:
        return {}
    rows = min(FEWEST_ROWS, max(1, shape.rows // shape.experts))
    x_ND = torch.ones(rows, shape.width, device=device)
    weight_HD = torch.ones(shape.hidden, shape.width, device=device)
    short = x_ND.bfloat16(), weight_HD.bfloat16()
    ways = {"float32": lambda: x_ND @ weight_HD.t(), "bfloat16": lambda: short[0] @ short[1].t()}
    found = {name: timing.seconds for name, timing in measure_candidates(ways, device, budget_s=0.02).items()}
    gain = found["float32"] / found["bfloat16"]
    return {"bfloat16_product_speedup": round(gain, 2)} if math.isfinite(gain) and gain > 0 else {}
