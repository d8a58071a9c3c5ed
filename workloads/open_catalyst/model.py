"""DimeNet++ with forces, and the closed forms of its work. No data, no schedule.

Shapes: N structures, A atoms, E edges, T triplets; H hidden, C triplet channels, L x K basis functions. Gasteiger et
al., "Fast and uncertainty-aware directional message passing", arXiv:2011.14115. Layers, initialisation and angle
convention are those of the MLPerf HPC reference (ocp models/dimenet_plus_plus.py), without its dependencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.suite.workload import GRADIENT_BYTES, UPDATE_FLOPS, Work
from mlhpc.workloads.open_catalyst.basis import (
    Envelope,
    RadialBasis,
    SphericalRadialBasis,
    compute_angular_basis,
    count_waves,
)
from mlhpc.workloads.open_catalyst.config import ELEMENTS, OpenCatalystConfig

SparseMatrix = tuple[Tensor, Tensor, Tensor]

FORCE_PASSES = 2  # passes of a prediction: the energy and its derivative
# passes of training: energy, its backward (forces), and the loss's backward through both, by inputs and by weights
DIFFERENTIATIONS = 6


class DimeNetPlusPlus(nn.Module):
    """Predicts energies and forces of structures with edges and triplets, in units of the targets' deviation."""

    def __init__(self, config: OpenCatalystConfig) -> None:
        super().__init__()
        self.config = config
        envelope = Envelope(config.envelope_exponent)
        self.radial = RadialBasis(config.num_radial, envelope)
        self.spherical = SphericalRadialBasis(config.num_spherical, config.num_radial, envelope)
        self.embedding = EmbeddingBlock(config)
        self.outputs = nn.ModuleList(OutputBlock(config) for _ in range(config.blocks + 1))
        self.interactions = nn.ModuleList(InteractionBlock(config) for _ in range(config.blocks))

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute energy (N,) and forces (A, 3) = -dE/dx; in training the forces are differentiable."""
        # forces are a gradient, so evaluation needs one too
        with torch.enable_grad():
            position_A3 = batch["position"].detach().requires_grad_()
            energy_N = self.energy(batch, position_A3)
            # the loss of forces differentiates once more; evaluation does not
            (gradient_A3,) = torch.autograd.grad(energy_N.sum(), position_A3, create_graph=self.training)
        if not self.training:
            energy_N = energy_N.detach()
        return energy_N, -gradient_A3

    def energy(self, batch: Mapping[str, Tensor], position_A3: Tensor) -> Tensor:
        """Compute the energy of each structure (N,) from the positions of all atoms."""
        source_E, target_E = batch["source"], batch["target"]
        with torch.autocast(position_A3.device.type, enabled=False):  # geometry needs full precision and costs little
            vector_E3 = position_A3.index_select(0, source_E) + batch["shift"] - position_A3.index_select(0, target_E)
            distance_E = vector_E3.square().sum(dim=1).sqrt()
            x_E = distance_E / self.config.cutoff_angstrom
            rbf_EK, bessel_ELK = self.radial(x_E), self.spherical(x_E)
            angles = self._angles(vector_E3 / distance_E[:, None], batch)
        atoms = len(position_A3)
        x_EH = self.embedding(batch["number"], rbf_EK, source_E, target_E)
        energy_A = self.outputs[0](x_EH, rbf_EK, target_E, atoms).to(position_A3.dtype)
        for block, output in zip(self.interactions, list(self.outputs)[1:], strict=True):
            x_EH = block(x_EH, rbf_EK, bessel_ELK, angles)
            energy_A = energy_A + output(x_EH, rbf_EK, target_E, atoms)
        structures = len(batch["energy"])
        energy_N: Tensor = energy_A.new_zeros(structures).index_add(0, batch["structure"], energy_A)
        return energy_N

    def _angles(self, unit_E3: Tensor, batch: Mapping[str, Tensor]) -> Angles:
        into_T, out_T = batch["into"], batch["out"]
        if not self.config.exact_angles:
            unit_E3 = unit_E3.detach()
        cosine_T = (unit_E3.index_select(0, into_T) * unit_E3.index_select(0, out_T)).sum(dim=1)
        weight_TL = compute_angular_basis(cosine_T, self.config.num_spherical)
        if self.config.exact_angles:
            return ExactAngles(weight_TL, into_T, out_T)
        return ConstantAngles(weight_TL, batch)


class Angles(Protocol):
    """The sums over triplets that an interaction block needs."""

    def sum(self, per_edge_LEC: Tensor) -> Tensor:
        """Sum Y_l(angle) times row (l, k->j) over l and over the triplets of each edge j->i; shape (E, C)."""
        ...


class ExactAngles:
    """Angles with gradients: gather, multiply, scatter."""

    def __init__(self, weight_TL: Tensor, into_T: Tensor, out_T: Tensor) -> None:
        self._weight_TL, self._into_T, self._out_T = weight_TL, into_T, out_T

    def sum(self, per_edge_LEC: Tensor) -> Tensor:
        """See `Angles`."""
        rows_LEC = per_edge_LEC.to(self._weight_TL.dtype)
        sum_EC = torch.zeros_like(rows_LEC[0])
        for row_EC, weight_T in zip(rows_LEC, self._weight_TL.unbind(1), strict=True):
            message_TC = row_EC.index_select(0, self._into_T) * weight_T[:, None]
            sum_EC = sum_EC.index_add(0, self._out_T, message_TC)
        return sum_EC


class ConstantAngles:
    """Constant angles: the sum is a product with a sparse matrix, which all blocks share.

    No tensor of triplets times channels is stored, and every row is summed in a fixed order.
    """

    def __init__(self, weight_TL: Tensor, batch: Mapping[str, Tensor]) -> None:
        into_T, out_T, order_T = batch["into"], batch["out"], batch["by_into"]
        edges, orders = len(batch["source"]), weight_TL.shape[1]
        # the operand lies as (l, edge): row l * edges + edge
        row = torch.arange(orders, device=into_T.device) * edges
        rows = (into_T[:, None] + row).view(-1)
        self._matrix = (rows, batch["out_begin"] * orders, weight_TL.reshape(-1))
        by_order_LT = weight_TL.index_select(0, order_T).t().contiguous()
        begin = batch["into_begin"]
        # transposed: all entries of l = 0 in the order of the first edge, then those of l = 1, and so on
        begins = (begin[:-1] + len(into_T) * torch.arange(orders, device=begin.device)[:, None]).view(-1)
        begins = torch.cat([begins, begins.new_full((1,), orders * len(into_T))])
        self._transposed = (out_T.index_select(0, order_T).repeat(orders), begins, by_order_LT.view(-1))

    def sum(self, per_edge_LEC: Tensor) -> Tensor:
        """See `Angles`."""
        rows = per_edge_LEC.to(self._matrix[2].dtype).flatten(0, 1)
        summed: Tensor = _SparseProduct.apply(rows, self._matrix, self._transposed)  # type: ignore[no-untyped-call]
        return summed


class _SparseProduct(torch.autograd.Function):
    """Multiplies a constant sparse matrix (columns, row offsets, values) by rows.

    Differentiable any number of times.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: SparseMatrix, transposed: SparseMatrix) -> Tensor:
        """The product."""
        ctx.matrix, ctx.transposed = matrix, transposed
        columns, begins, values = matrix
        return F.embedding_bag(columns, rows, begins, mode="sum", per_sample_weights=values, include_last_offset=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient's product with the transposed matrix."""
        product = _SparseProduct.apply(  # type: ignore[no-untyped-call]
            gradient.contiguous(), ctx.transposed, ctx.matrix
        )
        return product, None, None


class _Silu(torch.autograd.Function):
    """x sigmoid(x). Its derivatives take fewer operations than torch records for double differentiation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x times its sigmoid."""
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient times the first derivative."""
        slope: Tensor = _SiluBackward.apply(gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return slope


class _SiluBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the gradient times the first derivative at x."""
        ctx.save_for_backward(gradient, x)
        slope: Tensor = torch.ops.aten.silu_backward(gradient, x)
        return slope

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives by the gradient and by x.

        With s the sigmoid, the second derivative is s (1 - s) (2 + x (1 - 2 s)).
        """
        gradient, x = ctx.saved_tensors
        s = torch.sigmoid(x)
        second = (x * (1 - 2 * s)).add_(2).mul_(s).mul_(1 - s)
        return torch.ops.aten.silu_backward(outer, x), second.mul_(gradient).mul_(outer)


def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x), differentiable twice."""
    result: Tensor = _Silu.apply(x)  # type: ignore[no-untyped-call]
    return result


class EmbeddingBlock(nn.Module):
    """Computes the first message of an edge from its two elements and its length."""

    def __init__(self, config: OpenCatalystConfig) -> None:
        super().__init__()
        hidden = config.hidden_channels
        self.emb = nn.Embedding(ELEMENTS, hidden)
        nn.init.uniform_(self.emb.weight, -math.sqrt(3), math.sqrt(3))
        self.lin_rbf = nn.Linear(config.num_radial, hidden)
        self.lin = nn.Linear(3 * hidden, hidden)

    def forward(self, number_A: Tensor, rbf_EK: Tensor, source_E: Tensor, target_E: Tensor) -> Tensor:
        """Compute messages (E, H).

        Of the dense layer of [target, source, radial] two parts run per atom, not per edge.
        """
        to_target, to_source, to_rbf = self.lin.weight.chunk(3, dim=1)
        x_AH = self.emb(number_A)
        per_edge = F.linear(silu(self.lin_rbf(rbf_EK)), to_rbf, self.lin.bias)
        at_target = F.linear(x_AH, to_target).index_select(0, target_E)
        return silu(per_edge + at_target + F.linear(x_AH, to_source).index_select(0, source_E))


class InteractionBlock(nn.Module):
    """One round of messages: every edge sums the edges that end where it begins, weighted by length and angle."""

    def __init__(self, config: OpenCatalystConfig) -> None:
        super().__init__()
        hidden, triplet, basis = config.hidden_channels, config.triplet_channels, config.basis_channels
        self.lin_rbf1 = _dense(config.num_radial, basis, bias=False)
        self.lin_rbf2 = _dense(basis, hidden, bias=False)
        self.lin_sbf1 = _dense(config.num_spherical * config.num_radial, basis, bias=False)
        self.lin_sbf2 = _dense(basis, triplet, bias=False)
        self.lin_kj = _dense(hidden, hidden)
        self.lin_ji = _dense(hidden, hidden)
        self.lin_down = _dense(hidden, triplet, bias=False)
        self.lin_up = _dense(triplet, hidden, bias=False)
        self.before_skip = nn.Sequential(*(Residual(hidden) for _ in range(config.before_skip)))
        self.lin = _dense(hidden, hidden)
        self.after_skip = nn.Sequential(*(Residual(hidden) for _ in range(config.after_skip)))

    def forward(self, x_EH: Tensor, rbf_EK: Tensor, bessel_ELK: Tensor, angles: Angles) -> Tensor:
        """Compute messages (E, H).

        The published form multiplies message and projected basis per triplet. Only the angle depends on the triplet.
        Lengths, both projections and the product with the message depend on the first edge, so they run per edge.
        """
        x_ji_EH = silu(self.lin_ji(x_EH))
        x_kj_EH = silu(self.lin_kj(x_EH)) * self.lin_rbf2(self.lin_rbf1(rbf_EK))
        x_EC = silu(self.lin_down(x_kj_EH))
        by_order_LKB = self.lin_sbf1.weight.view(-1, *bessel_ELK.shape[1:]).permute(1, 2, 0)
        weighted_LEC = bessel_ELK.transpose(0, 1) @ (by_order_LKB @ self.lin_sbf2.weight.t()) * x_EC
        h_EH = self.before_skip(x_ji_EH + silu(self.lin_up(angles.sum(weighted_LEC))))
        x_EH = self.after_skip(silu(self.lin(h_EH)) + x_EH)
        return x_EH


class OutputBlock(nn.Module):
    """Computes the contribution of every atom to the energy from the edges that end at it."""

    def __init__(self, config: OpenCatalystConfig) -> None:
        super().__init__()
        hidden, out = config.hidden_channels, config.output_channels
        self.lin_rbf = _dense(config.num_radial, hidden, bias=False)
        self.lin_up = nn.Linear(hidden, out)  # its bias keeps torch's initialisation, as in the reference
        glorot_orthogonal(self.lin_up.weight)
        self.lins = nn.ModuleList(_dense(out, out) for _ in range(config.output_layers))
        self.lin = nn.Linear(out, 1, bias=False)
        nn.init.zeros_(self.lin.weight)

    def forward(self, x_EH: Tensor, rbf_EK: Tensor, target_E: Tensor, atoms: int) -> Tensor:
        """Return (A,)."""
        weighted_EH = self.lin_rbf(rbf_EK) * x_EH
        x_A = weighted_EH.new_zeros(atoms, weighted_EH.shape[1]).index_add(0, target_E, weighted_EH)
        x_A = self.lin_up(x_A)
        for dense in self.lins:
            x_A = silu(dense(x_A))
        energy_A: Tensor = self.lin(x_A).squeeze(1)
        return energy_A


class Residual(nn.Module):
    """x + two dense layers of x."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = _dense(hidden, hidden), _dense(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The shape of x."""
        return x + silu(self.lin2(silu(self.lin1(x))))


def glorot_orthogonal(weight: Tensor, scale: float = 2.0) -> None:
    """Initialise with an orthogonal matrix scaled to the variance of Glorot and Bengio."""
    with torch.no_grad():
        # no values, so no variance to scale by
        if weight.is_meta:
            return
        nn.init.orthogonal_(weight)
        weight *= math.sqrt(scale / (sum(weight.shape) * float(weight.var())))


def _dense(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    glorot_orthogonal(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def compute_work(config: OpenCatalystConfig, *, global_batch_size: int, element_bytes: int) -> Work:
    """Compute FLOPs and compulsory bytes of training on a sample of mean size (docs/open_catalyst.md lists what
    counts).

    Model FLOPs are of the published formulation; executed FLOPs and bytes are of ours. Bytes: every dense layer reads
    its inputs and writes its outputs once in each pass. The sum over triplets reads the angular functions once and
    writes its result. Its gathered rows are counted once per edge, because a cache can hold them.
    """
    c = config
    # our form computes per edge what the published one computes per triplet
    layers = [layer for layer in _layers(c) if layer[0] != c.mean_triplets]
    by_triplet = c.num_spherical * c.triplet_channels
    activations = sum(rows * (inputs + outputs) for rows, inputs, outputs in layers)
    sums = c.blocks * (2 * c.mean_edges * by_triplet + c.mean_triplets * (c.num_spherical + 1))
    parameters = parameter_count(c)
    optimizer = parameters * 4 * (2 + 4 + 3)  # read w, g, m, v, w; write w, m, v
    traffic = DIFFERENTIATIONS * (element_bytes * activations + 4 * sums)
    return Work(
        model_flops=DIFFERENTIATIONS * forward_flops(c),
        executed_flops=compute_executed_flops(c, structures_per_step=global_batch_size),
        algorithmic_bytes=traffic + optimizer / global_batch_size,
        forward_flops=FORCE_PASSES * forward_flops(c),
        forward_bytes=FORCE_PASSES / DIFFERENTIATIONS * traffic,
        optimizer_flops_per_step=UPDATE_FLOPS["AdamW"] * parameters,
        optimizer_bytes_per_step=optimizer,
        all_reduce_bytes_per_step=GRADIENT_BYTES * parameters,
        forward_extra_flops=count_executed_forward_flops(c, structures_per_step=global_batch_size)
        - FORCE_PASSES * forward_flops(c),
    )


def count_executed_forward_flops(config: OpenCatalystConfig, *, structures_per_step: float) -> float:
    """Compute the FLOPs of our formulation for energy and forces of a sample of mean size.

    A test counts them.

    The terms are those of `compute_executed_flops`. A product runs once for the energy and once for the force. It runs
    only once if it does not depend on positions.
    """
    c = config
    edges, spherical = c.mean_edges, c.num_spherical * c.num_radial
    products = FORCE_PASSES * sum(
        rows * inputs * outputs for rows, inputs, outputs in _layers(c) if rows != c.mean_triplets
    )
    products += c.hidden_channels**2 * (2 * c.mean_atoms) - FORCE_PASSES * 2 * c.hidden_channels**2 * edges
    products += FORCE_PASSES * edges * 2 * count_waves(c.num_spherical, c.num_radial) * spherical
    products += FORCE_PASSES * c.blocks * edges * spherical * c.triplet_channels
    products += FORCE_PASSES * c.blocks * c.mean_triplets * c.num_spherical * c.triplet_channels
    products += c.blocks * spherical * c.basis_channels * c.triplet_channels / structures_per_step
    return 2 * products


def compute_executed_flops(config: OpenCatalystConfig, *, structures_per_step: float) -> float:
    """Compute the FLOPs of our formulation for training on a sample of mean size; a test counts them.

    Not every product runs six times. Constants (waves, angles) have no gradient. What does not depend on positions has
    no force. An energy without loss is only differentiated for its force.
    """
    c = config
    edges, spherical = c.mean_edges, c.num_spherical * c.num_radial
    split = c.hidden_channels**2 * (2 * c.mean_atoms)  # the embedding's dense layer: element parts per atom
    last = (c.blocks + 1) * c.mean_atoms * c.output_channels
    products = DIFFERENTIATIONS * sum(
        rows * inputs * outputs for rows, inputs, outputs in _layers(c) if rows != c.mean_triplets
    )
    products += 3 * split - DIFFERENTIATIONS * 2 * c.hidden_channels**2 * edges
    products += ((5 if c.energy_coefficient else 3) - DIFFERENTIATIONS) * last
    products += 4 * edges * 2 * count_waves(c.num_spherical, c.num_radial) * spherical
    products += DIFFERENTIATIONS * c.blocks * edges * spherical * c.triplet_channels
    products += 4 * c.blocks * c.mean_triplets * c.num_spherical * c.triplet_channels
    products += 3 * c.blocks * spherical * c.basis_channels * c.triplet_channels / structures_per_step
    return 2 * products


def forward_flops(config: OpenCatalystConfig) -> float:
    """Compute the FLOPs of the energy of a sample of mean size, 2 per multiply-add of the dense layers."""
    return sum(2 * rows * inputs * outputs for rows, inputs, outputs in _layers(config))


def parameter_count(config: OpenCatalystConfig) -> int:
    """Count trainable parameters from the shapes alone."""
    c = config
    hidden, out, basis, triplet = c.hidden_channels, c.output_channels, c.basis_channels, c.triplet_channels
    square = hidden * hidden + hidden
    embedding = ELEMENTS * hidden + (c.num_radial + 1) * hidden + (3 * hidden + 1) * hidden
    output = c.num_radial * hidden + (hidden + 1) * out + c.output_layers * (out + 1) * out + out
    bases = (c.num_radial + hidden) * basis + (c.num_spherical * c.num_radial + triplet) * basis
    interaction = bases + 2 * hidden * triplet + (3 + 2 * c.before_skip + 2 * c.after_skip) * square
    return c.num_radial + embedding + (c.blocks + 1) * output + c.blocks * interaction


def _layers(config: OpenCatalystConfig) -> Iterator[tuple[float, int, int]]:
    """Yield (rows per sample, inputs, outputs) of every dense layer of the published formulation."""
    c = config
    atoms, edges, triplets = c.mean_atoms, c.mean_edges, c.mean_triplets
    hidden, out = c.hidden_channels, c.output_channels
    yield edges, c.num_radial, hidden
    yield edges, 3 * hidden, hidden
    for _ in range(c.blocks + 1):
        yield edges, c.num_radial, hidden
        yield atoms, hidden, out
        for _ in range(c.output_layers):
            yield atoms, out, out
        yield atoms, out, 1
    for _ in range(c.blocks):
        yield edges, c.num_radial, c.basis_channels
        yield edges, c.basis_channels, hidden
        yield triplets, c.num_spherical * c.num_radial, c.basis_channels
        yield triplets, c.basis_channels, c.triplet_channels
        yield edges, hidden, c.triplet_channels
        yield edges, c.triplet_channels, hidden
        for _ in range(3 + 2 * c.before_skip + 2 * c.after_skip):
            yield edges, hidden, hidden
