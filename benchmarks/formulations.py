"""Pieces of OpenCatalyst and OpenFold against the best library and the obvious dense formulation, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/formulations.py [--blocks 9] [--repeats 1]

Neighbour lists (scipy's k-d tree as the suite uses it; all pairs in numpy; matscipy; ASE), triplets of edges (index arithmetic;
a product of sparse incidence matrices; a dense comparison of all pairs of edges), the sum over triplets with forward and two
backward passes (sparse product; gather, multiply, scatter; a dense matrix), and of OpenFold, forward and backward: attention
with biases, triangle multiplication, outer product mean, side chain FAPE. The first of each table is what the suite does.
All formulations of a table are checked to give one result before they are timed. Lists of edges and triplets are found in a
row, as a loader does for the structures of a batch; a single call with cold caches takes two to three times as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

import numpy as np
import torch
from interleaved import compare
from scipy.sparse import csr_array
from torch import Tensor

from mlhpc.workloads.open_catalyst.graph import Edges, find_neighbours, join_edges, list_triplets
from mlhpc.workloads.open_catalyst.model import ConstantAngles, ExactAngles
from mlhpc.workloads.open_catalyst.structures import ALL_ADSORBATES, ALL_METALS, Structure, Surfaces, make_trajectory

IN_A_ROW = 16  # structures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    for layers, (cutoff, most) in {(2, 2, 3): (4.5, 20), (3, 3, 4): (6.0, 50), (4, 4, 4): (6.0, 50)}.items():
        one = make_trajectory(Surfaces(ALL_METALS, ALL_ADSORBATES, (layers,), 1), 0, 1)[0]
        neighbour_lists(one, cutoff, most, args)
        edges = find_neighbours(one.position, one.cell, cutoff=cutoff, most=most)
        triplet_lists(edges, len(one.number), args)
    batch = [
        make_trajectory(Surfaces(ALL_METALS, ALL_ADSORBATES, ((2, 2, 3),), 1), 0, number)[0] for number in range(8)
    ]
    parts = [find_neighbours(each.position, each.cell, cutoff=4.5, most=20) for each in batch]
    lengths = [len(each.number) for each in batch]
    triplet_sums(join_edges(parts, lengths), sum(lengths), args)
    for residues, channels, heads in ((24, 16, 2), (64, 64, 4)):
        attention(residues, channels, heads, args)
        triangle_multiplication(residues, channels, args)
    outer_product_mean(24, 16, 8, args)
    sidechain_fape(24, args)


def neighbour_lists(one: Structure, cutoff: float, most: int, args: argparse.Namespace) -> None:
    """All with the cut to the nearest, as sets of (source, target, offset)."""
    position, cell = one.position, one.cell

    def cut(source: np.ndarray, target: np.ndarray, offset: np.ndarray) -> np.ndarray:
        vector = position[source] + offset @ cell - position[target]
        distance = np.einsum("ed,ed->e", vector, vector)
        order = np.lexsort((distance, target))
        first = np.searchsorted(target[order], np.arange(len(position)))
        rank = np.arange(len(order)) - first[target[order]]
        kept = order[rank < most]
        return np.column_stack([source[kept], target[kept], offset[kept]])

    def ours() -> np.ndarray:
        found = find_neighbours(position, cell, cutoff=cutoff, most=most)
        return np.column_stack([found.source, found.target, found.offset])

    def all_pairs() -> np.ndarray:
        heights = 1 / np.linalg.norm(np.linalg.inv(cell), axis=0)
        spread = np.ptp(position @ np.linalg.inv(cell), axis=0)
        reach = np.ceil(cutoff / heights + spread).astype(int)
        offsets = np.stack(np.meshgrid(*(np.arange(-r, r + 1) for r in reach), indexing="ij"), -1).reshape(-1, 3)
        vector = (offsets @ cell)[:, None, None] + position[None, :, None] - position[None, None]
        squared = np.einsum("ostd,ostd->ost", vector, vector)
        image, source, target = np.nonzero((squared <= cutoff**2) & (squared > 1e-12))
        return cut(source, target, offsets[image])

    def matscipy() -> np.ndarray:
        j, i, offset = import_module("matscipy.neighbours").neighbour_list(
            "jiS", positions=position, cell=cell, pbc=np.ones(3, bool), cutoff=cutoff
        )
        return cut(j, i, offset)

    def ase() -> np.ndarray:
        j, i, offset = import_module("ase.neighborlist").primitive_neighbor_list(
            "jiS", np.ones(3, bool), cell, position, cutoff
        )
        return cut(j, i, offset)

    ways: dict[str, Callable[[], np.ndarray]] = {"k-d tree over reachable images": ours, "all pairs, numpy": all_pairs}
    for name, call in (("matscipy", matscipy), ("ASE", ase)):
        try:
            call()
        except ImportError:
            print(f"{name}: not installed")
            continue
        ways[name] = call
    lengths = [_distances(call(), one) for call in ways.values()]  # equal distances may be cut differently
    assert all(np.allclose(lengths[0], other) for other in lengths)
    title = f"neighbours: {len(position)} atoms, {len(ours())} edges"
    compare(title, dict(ways), blocks=args.blocks, repeats=IN_A_ROW * args.repeats)


def _distances(edges: np.ndarray, one: Structure) -> np.ndarray:
    vector = one.position[edges[:, 0]] + edges[:, 2:] @ one.cell - one.position[edges[:, 1]]
    return np.sort(np.linalg.norm(vector, axis=1))


def triplet_lists(edges: Edges, atoms: int, args: argparse.Namespace) -> None:
    count = len(edges)

    def backwards(into: np.ndarray, out: np.ndarray) -> np.ndarray:
        same = edges.source[into] == edges.target[out]
        return same & (edges.offset[into] + edges.offset[out] == 0).all(axis=1)

    def sparse() -> tuple[np.ndarray, np.ndarray]:
        ones, numbers = np.ones(count, np.int8), np.arange(count)
        leaving = csr_array((ones, (numbers, edges.source)), shape=(count, atoms))
        arriving = csr_array((ones, (edges.target, numbers)), shape=(atoms, count))
        pairs = (leaving @ arriving).tocoo()
        kept = ~backwards(pairs.col, pairs.row)
        return pairs.col[kept], pairs.row[kept]

    def dense() -> tuple[np.ndarray, np.ndarray]:
        out, into = np.nonzero(edges.source[:, None] == edges.target[None])
        kept = ~backwards(into, out)
        return into[kept], out[kept]

    ways = {
        "index arithmetic": lambda: list_triplets(edges, atoms),
        "product of incidences": sparse,
        "all pairs": dense,
    }
    found = [np.sort(into.astype(np.int64) * count + out) for into, out in (call() for call in ways.values())]
    assert all(np.array_equal(found[0], other) for other in found)
    compare(
        f"triplets: {count} edges, {len(found[0])} triplets",
        dict(ways),
        blocks=args.blocks,
        repeats=IN_A_ROW * args.repeats,
    )


def triplet_sums(edges: Edges, atoms: int, args: argparse.Namespace) -> None:
    """Sum over triplets of Y_l times a row of 16 channels, its gradient, and the gradient of that: what a step needs."""
    into, out = (torch.from_numpy(each) for each in list_triplets(edges, atoms))
    count, orders, channels = len(edges), 3, 16
    weight = torch.randn(len(into), orders)
    order = torch.argsort(into, stable=True)
    begins = [torch.searchsorted(each, torch.arange(count + 1)) for each in (out, into[order])]
    batch = {"into": into, "out": out, "by_into": order, "source": torch.from_numpy(edges.source)}
    batch |= {"out_begin": begins[0], "into_begin": begins[1]}
    rows = torch.randn(orders, count, channels, requires_grad=True)

    class Dense:
        def __init__(self) -> None:
            self.matrix = torch.zeros(orders, count, count)
            self.matrix[:, out, into] = weight.t()

        def sum(self, per_edge_LEC: Tensor) -> Tensor:
            return (self.matrix @ per_edge_LEC).sum(0)

    def step(make: Callable[[], object]) -> Tensor:
        angles = make()
        total = angles.sum(rows).square().sum()  # type: ignore[attr-defined]
        (force,) = torch.autograd.grad(total, rows, create_graph=True)
        (gradient,) = torch.autograd.grad(force.abs().sum(), rows)
        return gradient

    ways: dict[str, Callable[[], Tensor]] = {
        "sparse product, made once": lambda: step(lambda: ConstantAngles(weight, batch)),
        "gather, multiply, scatter": lambda: step(lambda: ExactAngles(weight, into, out)),
        "dense matrix": lambda: step(Dense),
    }
    _same(ways)
    title = f"sum over {len(into)} triplets of {count} edges"
    compare(title, dict(ways), blocks=args.blocks, repeats=max(1, args.repeats // 2))


def attention(residues: int, channels: int, heads: int, args: argparse.Namespace) -> None:
    """Triangle attention's core: queries of L rows of L residues, a bias by mask and one by the pair map."""
    q, k, v = (torch.randn(2, residues, heads, residues, channels // heads, requires_grad=True) for _ in range(3))
    pair = torch.randn(2, 1, heads, residues, residues, requires_grad=True)
    mask = torch.zeros(2, residues, 1, 1, residues)

    def written_out() -> Tensor:
        scores = (q * (channels // heads) ** -0.5) @ k.transpose(-1, -2)
        return (scores + mask + pair).softmax(-1) @ v

    def fused() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask + pair)

    def einsum() -> Tensor:
        scores = torch.einsum("nrhqc,nrhkc->nrhqk", q * (channels // heads) ** -0.5, k)
        return torch.einsum("nrhqk,nrhkc->nrhqc", (scores + mask + pair).softmax(-1), v)

    ways = {"written out": written_out, "scaled_dot_product_attention": fused, "einsum": einsum}
    _with_backward(f"triangle attention: {residues} residues, {channels} channels", ways, [q, k, v, pair], args)


def triangle_multiplication(residues: int, channels: int, args: argparse.Namespace) -> None:
    a, b = (torch.randn(2, residues, residues, channels, requires_grad=True) for _ in range(2))

    def batched() -> Tensor:
        return (a.permute(0, 3, 1, 2) @ b.permute(0, 3, 1, 2).transpose(-1, -2)).permute(0, 2, 3, 1)

    def einsum() -> Tensor:
        return torch.einsum("nikc,njkc->nijc", a, b)

    def dense() -> Tensor:
        return (a[:, :, None] * b[:, None]).sum(3)

    ways = {"batched product": batched, "einsum": einsum, "broadcast and sum": dense}
    _with_backward(f"triangle multiplication: {residues} residues, {channels} channels", ways, [a, b], args)


def outer_product_mean(residues: int, rows: int, channels: int, args: argparse.Namespace) -> None:
    a, b = (torch.randn(2, rows, residues, channels, requires_grad=True) for _ in range(2))

    def one_product() -> Tensor:
        left = a.permute(0, 2, 3, 1).reshape(2, residues * channels, rows)
        flat = left @ b.reshape(2, rows, residues * channels)
        return flat.reshape(2, residues, channels, residues, channels).permute(0, 1, 3, 2, 4).flatten(-2)

    def einsum() -> Tensor:
        return torch.einsum("nsic,nsjd->nijcd", a, b).flatten(-2)

    def dense() -> Tensor:
        return (a[:, :, :, None, :, None] * b[:, :, None, :, None, :]).sum(1).flatten(-2)

    ways = {"one product of matrices": one_product, "einsum": einsum, "broadcast and sum": dense}
    _with_backward(f"outer product mean: {residues} residues, {rows} rows", ways, [a, b], args)


def sidechain_fape(residues: int, args: argparse.Namespace) -> None:
    """The mean of the clamped distances of all atoms seen from all rigid groups."""
    from mlhpc.workloads.openfold.geometry import Frame
    from mlhpc.workloads.openfold.losses import EPS, FAPE_CLAMP, compute_fape, compute_mean_distance

    frames, points = 6 * residues, 14 * residues
    turns = [torch.linalg.qr(torch.randn(2, frames, 3, 3))[0] for _ in range(2)]
    places = [10 * torch.randn(2, frames, 3) for _ in range(2)]
    x, true_x = (10 * torch.randn(2, points, 3) for _ in range(2))
    inputs = [each.requires_grad_() for each in (turns[0], places[0], x)]

    def one_product() -> Tensor:
        vectors = compute_fape(Frame(turns[0], places[0]), x, Frame(turns[1], places[1]), true_x)
        return compute_mean_distance(vectors, torch.tensor(FAPE_CLAMP), torch.ones(2, frames), torch.ones(2, points))

    def seen_twice() -> Tensor:
        seen = [
            torch.einsum("nfji,nfpj->nfpi", turn, point[:, None] - place[:, :, None])
            for turn, place, point in ((turns[0], places[0], x), (turns[1], places[1], true_x))
        ]
        return ((seen[0] - seen[1]).square().sum(-1) + EPS).sqrt().clamp(max=FAPE_CLAMP).mean((1, 2))

    ways = {"one product of matrices": one_product, "both seen, subtracted": seen_twice}
    _with_backward(f"FAPE: {frames} frames, {points} atoms", ways, inputs, args)


def _with_backward(
    title: str, ways: dict[str, Callable[[], Tensor]], inputs: list[Tensor], args: argparse.Namespace
) -> None:
    _same(ways)

    def both(call: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call().sum(), inputs)

    compare(title, {name: both(call) for name, call in ways.items()}, blocks=args.blocks, repeats=args.repeats)


def _same(ways: dict[str, Callable[[], Tensor]]) -> None:
    first, *others = (call() for call in ways.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
