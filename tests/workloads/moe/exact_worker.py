"""`exact_worker.py RANKS quick|long`: every case of RANKS ranks (`1,2,4`: of each) in one process start; prints cases and errors.

The ranks are forked after torch is imported. Each case: all weights and every rank's tokens from a seed, the dense float64
reference of `oracle` on all of them, the layer on this rank's, then y, dX, dGate and dW compared.
"""

import contextlib
import itertools
import math
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mlhpc.workloads.moe.config import MoEConfig, count_ranks_per_expert, list_valid_r
from mlhpc.workloads.moe.experts import Experts, Weights
from mlhpc.workloads.moe.layer import Execution, MoELayer
from mlhpc.workloads.moe.mesh import ExpertMesh
from tests.workloads.moe.oracle import dense_layer, queue_lengths, tutel_capacity

WIDTH, HIDDEN, TOKENS = 12, 48, 10
EXPERTS = {1: (1, 4), 2: (1, 2, 4), 4: (1, 2, 4, 8), 6: (1, 2, 3, 6, 12)}
NODES = {1: 1, 2: 1, 4: 2, 6: 3}
MODES = (("dropless", None), ("capacity", None), ("capacity", 0.0), ("capacity", -1.25), ("einsum", 1.5))
LOADS = ("balanced", "skewed", "idle expert", "idle rank")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
AT_A_KINK = 1e-6

FORMS = (  # back end, type, one of how many cases of the matrix, about how many of its slice
    ("loop", torch.float64, 1, 48),
    ("onednn", torch.float32, 1, 20),
    ("bmm", torch.float64, 5, 8),
    ("loop", torch.float32, 5, 8),
    ("bmm", torch.float32, 5, 8),
    ("grouped_mm", torch.float32, 5, 8),
)
if os.environ.get("TRITON_INTERPRET") == "1":
    FORMS = (*FORMS, ("triton", torch.float32, 5, 8))


@dataclass(frozen=True)
class Case:
    mode: str
    factor: float | None
    experts: int
    r: int
    degree: int
    algorithm: str
    top_k: int
    load: str
    backend: str = "loop"
    activation: str = "relu"
    bias: bool = False
    prioritised: bool = False
    dtype: torch.dtype = torch.float64


def cases(ranks: int, amount: str) -> Iterator[Case]:
    """All of them in float64 (loop) and in float32 (the default back end), every fifth with each other back end, or a slice in
    which every value of every axis occurs; then what the matrix does not cross.
    """
    matrix = [
        Case(mode, factor, experts, r, degree, algorithm, top_k, load)
        for experts in EXPERTS[ranks]
        for (mode, factor), r, degree, algorithm, top_k, load in itertools.product(
            MODES, list_valid_r(experts, ranks), (1, 2, 4), ("linear", "2dh"), (1, 2), LOADS
        )
        if top_k <= experts
    ]
    for backend, dtype, share, quick in FORMS:
        chosen = thinned(matrix, len(matrix) // share if amount == "long" else quick)
        yield from (replace(case, backend=backend, dtype=dtype) for case in chosen)
    # The slice has 20 of each r: every third one is another kind of case with each of three r in a row
    yield from itertools.islice(uncrossed(ranks, amount), 0, None, 1 if amount == "long" else 3)


def uncrossed(ranks: int, amount: str) -> Iterator[Case]:
    """Activations, biases and priorities with every number of experts and every r."""
    for experts in EXPERTS[ranks]:
        for r in list_valid_r(experts, ranks):
            for activation, bias in (("swiglu", False), ("gelu", True), ("silu", True)):
                yield Case("dropless", None, experts, r, 2, "2dh", 1, "skewed", activation=activation, bias=bias)
            yield Case("capacity", None, experts, r, 2, "2dh", 1, "skewed", prioritised=True)
            for backend, load in itertools.product(("loop", "bmm") if amount == "long" else ("bmm",), LOADS):
                for mode in ("dropless", "capacity"):
                    yield Case(mode, None, experts, r, 2, "linear", 1, load, backend=backend, bias=True)
            for backend, load in itertools.product(("grouped_mm", "onednn"), LOADS):
                case = Case("dropless", None, experts, r, 2, "2dh", 1, load, backend=backend, activation="swiglu")
                yield replace(case, dtype=torch.float32)


def thinned(matrix: list[Case], about: int) -> list[Case]:
    """Equally spaced cases; the step has no factor in common with the length of an axis, so none of its values is missed."""
    step = next(step for step in itertools.count(max(1, len(matrix) // about)) if math.gcd(step, 2 * 3 * 5) == 1)
    return matrix[::step]


def tokens_of(rank: int, ranks: int, case: Case) -> int:
    if case.load == "idle rank":
        return 0 if rank == ranks - 1 else TOKENS
    return TOKENS if case.load == "balanced" else TOKENS + rank  # else ragged


def inputs(ranks: int, case: Case, seed: int) -> tuple[Tensor, Weights, list[Tensor], list[Tensor]]:
    """Router weights, all experts, and each rank's tokens and output gradients, in float64.

    Where rounding would decide whether a relu passes a value on, they are drawn again.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        drawn = drawn_inputs(ranks, case, generator)
        if case.activation != "relu" or case.dtype == torch.float64 or nearest_to_zero(drawn) > AT_A_KINK:
            return drawn


def nearest_to_zero(drawn: tuple[Tensor, Weights, list[Tensor], list[Tensor]]) -> float:
    """The smallest value, without its sign, that any expert's activation could get from any token."""
    _, weights, x, _ = drawn
    hidden = torch.einsum("td,ehd->teh", torch.cat(x), weights.up_EHD)
    hidden = hidden if weights.up_bias_EH is None else hidden + weights.up_bias_EH
    return float(hidden.abs().min()) if hidden.numel() else math.inf


def drawn_inputs(
    ranks: int, case: Case, generator: torch.Generator
) -> tuple[Tensor, Weights, list[Tensor], list[Tensor]]:
    """Once."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_ED = normal(case.experts, WIDTH)
    x = [normal(tokens_of(rank, ranks, case), WIDTH) for rank in range(ranks)]
    if case.load in ("skewed", "idle expert"):
        direction = normal(WIDTH)
        direction /= direction.norm()
        wanted = 4.0 if case.load == "skewed" else -60.0  # in logits, of expert 0
        x = [part - (part @ direction)[:, None] * direction + direction for part in x]
        gate_ED[0] += wanted * direction
    weights = Weights(
        normal(case.experts, HIDDEN, WIDTH),
        normal(case.experts, HIDDEN, WIDTH),
        normal(case.experts, HIDDEN, WIDTH) if case.activation == "swiglu" else None,
        normal(case.experts, HIDDEN) if case.bias else None,
        normal(case.experts, WIDTH) if case.bias else None,
    )
    scale = weights.map(lambda weight: weight / 4)
    return gate_ED, scale, x, [normal(*part.shape) for part in x]


def layer_for(case: Case, mesh: ExpertMesh | None, gate_ED: Tensor, weights: Weights) -> MoELayer:
    config = MoEConfig(
        experts=case.experts, top_k=case.top_k, hidden=HIDDEN, activation=case.activation, bias=case.bias,
        batch_prioritised=case.prioritised, balance="none", dispatch=case.mode, capacity_factor=case.factor,
        backend=case.backend,
    )  # fmt: skip
    layer = MoELayer(WIDTH, config, mesh).to(case.dtype)
    whole = Experts(case.experts, WIDTH, HIDDEN, case.activation, bias=case.bias).to(case.dtype)
    for name, value in vars(weights).items():
        if value is not None:
            getattr(whole, name).data.copy_(value)
    if layer.mesh is not None:
        each = max(1, case.experts // mesh.size)
        first = mesh.rank // layer.sharers * each
        whole.keep(slice(first, first + each), mesh.rank % layer.sharers, layer.sharers)
    layer.experts.load_state_dict(whole.state_dict())
    layer.router.gate.weight.data.copy_(gate_ED)
    layer.use(Execution(case.r, case.degree, case.algorithm))
    return layer


def reference(ranks: int, case: Case, gate_ED: Tensor, weights: Weights, x: list[Tensor], dy: list[Tensor]):
    """y and dX of each rank, dGate and dW of all, kept assignments of each rank."""
    gate_ED = gate_ED.clone().requires_grad_()
    weights = weights.map(lambda weight: weight.clone().requires_grad_())
    x = [part.clone().requires_grad_() for part in x]
    choices = [(part @ gate_ED.t()).topk(case.top_k, dim=1).indices.tolist() for part in x]
    longest = max(max(queue_lengths(rows, case.experts)) for rows in choices)
    alignment = case.degree * count_ranks_per_expert(case.experts, ranks)
    factor = 1.0 if case.factor is None else case.factor
    total, ys, kept = torch.zeros((), dtype=torch.float64), [], []
    for part, gradient in zip(x, dy, strict=True):
        capacity = None
        if case.mode != "dropless":
            capacity = tutel_capacity(factor, len(part), case.experts, case.top_k, longest, alignment)
        dense = dense_layer(part, gate_ED, weights, case.activation, case.top_k, capacity, prioritised=case.prioritised)
        total = total + (dense.y_TD * gradient).sum()
        ys.append(dense.y_TD.detach())
        kept.append(dense.kept)
    total.backward()
    return ys, [part.grad for part in x], gate_ED.grad, weights.map(lambda weight: weight.grad), kept


def run_case(case: Case, mesh: ExpertMesh | None, rank: int, ranks: int, seed: int) -> float:
    """Largest relative error of y, dX, dGate and dW on this rank."""
    gate_ED, weights, x, dy = inputs(ranks, case, seed)
    ys, dxs, d_gate, d_weights, kept = reference(ranks, case, gate_ED, weights, x, dy)
    if mesh is not None:
        mesh = replace(mesh, even=case.load == "balanced")
    layer = layer_for(case, mesh, gate_ED, weights)
    mine = x[rank].to(case.dtype).requires_grad_()
    y = layer(mine).y_TD
    y.backward(dy[rank].to(case.dtype))
    gate_gradient = layer.router.gate.weight.grad
    if layer.mesh is not None:
        dist.all_reduce(gate_gradient)
    found = layer.load.read().kept
    assert found == len(kept[rank]), f"{case}: kept {found}, oracle {len(kept[rank])}"
    pairs = [(y, ys[rank]), (mine.grad, dxs[rank]), (gate_gradient, d_gate)]
    wanted = Experts(case.experts, WIDTH, HIDDEN, case.activation, bias=case.bias).double()
    for name, value in vars(d_weights).items():
        if value is not None:
            getattr(wanted, name).data.copy_(value)
    if layer.mesh is not None:
        each = max(1, case.experts // ranks)
        first = rank // layer.sharers * each
        wanted.keep(slice(first, first + each), rank % layer.sharers, layer.sharers)
    for name, parameter in layer.experts.named_parameters():
        pairs.append((parameter.grad, getattr(wanted, name).detach()))
    return max(relative(found.detach().double(), right) for found, right in pairs)


def relative(found: Tensor, right: Tensor) -> float:
    assert found.shape == right.shape
    if not right.numel():
        return 0.0
    return float((found - right).abs().max() / right.abs().max().clamp(min=1.0))


def run_rank(rank: int, ranks: int, store: Path, amount: str) -> None:
    torch.set_num_threads(1)
    mesh = None
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
        sizes = {size for size in range(1, ranks + 1) if ranks % size == 0}
        mesh = ExpertMesh.create("cpu", ranks_per_node=ranks // NODES[ranks], block_sizes=sorted(sizes))
    worst: dict[tuple[str, torch.dtype], float] = {}
    count: Counter[tuple[str, torch.dtype]] = Counter()
    for seed, case in enumerate(cases(ranks, amount)):
        try:
            error = run_case(case, mesh, rank, ranks, seed)
            assert error <= TOLERANCE[case.dtype], f"error {error:.2e} on rank {rank}"
        except Exception as problem:
            raise AssertionError(f"{case}: {problem}") from problem
        form = (case.backend, case.dtype)
        worst[form] = max(worst.get(form, 0.0), error)
        count[form] += 1
    if ranks > 1:  # every rank has a share of the results
        everywhere: list[dict[tuple[str, torch.dtype], float]] = [{}] * ranks
        dist.all_gather_object(everywhere, worst)
        worst = {form: max(each[form] for each in everywhere) for form in worst}
    if rank == 0:
        print(f"{ranks} ranks: {count.total()} cases")
        for (backend, dtype), error in worst.items():
            number = count[backend, dtype]
            print(
                f"  {backend:<10} {str(dtype).removeprefix('torch.'):<8} {number:>5}, largest relative error {error:.1e}"
            )
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def fork_ranks(ranks: int, run: Callable[[int], None]) -> int:
    """Fork one process per rank; 1 if any fails, and then the others, which would wait in a collective, are ended."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    failed = 0
    for _ in range(ranks):
        ended, status = os.wait()
        children.remove(ended)
        if os.waitstatus_to_exitcode(status) and not failed:
            failed = 1
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, 15)
    return failed


def main() -> int:
    amount = sys.argv[2]
    return max(run_all(int(ranks), amount) for ranks in sys.argv[1].split(","))


def run_all(ranks: int, amount: str) -> int:
    if ranks == 1:
        run_rank(0, 1, Path(), amount)
        sys.stdout.flush()  # else each forked rank prints it again
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return fork_ranks(ranks, lambda rank: run_rank(rank, ranks, Path(folder) / "store", amount))


if __name__ == "__main__":
    sys.exit(main())
