"""DimeNet++ with forces, and the closed forms of its work. Knows no data form and no schedule.

Shapes: N structures, A atoms, E edges, T triplets; H hidden, C triplet channels, L x K basis functions.
Gasteiger et al., "Fast and uncertainty-aware directional message passing", arXiv:2011.14115; layers, initialisation and
angle convention of the MLPerf HPC reference (ocp models/dimenet_plus_plus.py), without its dependencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suite.workload import Work
from workloads.open_catalyst.basis import Envelope, RadialBasis, SphericalRadialBasis, angular_basis
from workloads.open_catalyst.config import ELEMENTS, OpenCatalystConfig

DIFFERENTIATIONS = 6  # energy; forces: its backward; the loss's backward through both, by inputs and by weights


class DimeNetPlusPlus(nn.Module):
    """Energies and forces in units of the target's standard deviation, from structures with edges and triplets."""

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
        """Energy (N,) and forces (A, 3) = -dE/dx; during training differentiable once more."""
        with torch.enable_grad():
            position_A3 = batch["position"].detach().requires_grad_()
            energy_N = self.energy(batch, position_A3)
            (gradient_A3,) = torch.autograd.grad(energy_N.sum(), position_A3, create_graph=self.training)
        if not self.training:
            energy_N = energy_N.detach()
        return energy_N, -gradient_A3

    def energy(self, batch: Mapping[str, Tensor], position_A3: Tensor) -> Tensor:
        """Energy of each structure (N,) as a function of the positions of all atoms."""
        source_E, target_E = batch["source"], batch["target"]
        into_T, out_T = batch["into"], batch["out"]
        with torch.autocast(position_A3.device.type, enabled=False):  # geometry is cheap and must not lose digits
            rbf_EK, sbf_TB = self._bases(position_A3, batch["shift"], source_E, target_E, into_T, out_T)
        atoms = len(position_A3)
        x_EH = self.embedding(batch["number"], rbf_EK, source_E, target_E)
        energy_A = self.outputs[0](x_EH, rbf_EK, target_E, atoms)
        angular_weights = torch.cat([block.lin_sbf1.weight for block in self.interactions])
        sbf_projected = F.linear(sbf_TB, angular_weights).chunk(len(self.interactions), dim=1)  # one read of sbf
        for block, output, sbf_T in zip(self.interactions, list(self.outputs)[1:], sbf_projected, strict=True):
            x_EH = block(x_EH, rbf_EK, sbf_T, into_T, out_T)
            energy_A = energy_A + output(x_EH, rbf_EK, target_E, atoms)
        structures = len(batch["energy"])
        return energy_A.new_zeros(structures).index_add(0, batch["structure"], energy_A).float()

    def _bases(
        self, position_A3: Tensor, shift_E3: Tensor, source_E: Tensor, target_E: Tensor, into_T: Tensor, out_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        vector_E3 = position_A3.index_select(0, source_E) + shift_E3 - position_A3.index_select(0, target_E)
        distance_E = vector_E3.square().sum(dim=1).sqrt()
        unit_E3 = vector_E3 / distance_E[:, None]
        if not self.config.exact_angles:
            unit_E3 = unit_E3.detach()
        cosine_T = (unit_E3.index_select(0, into_T) * unit_E3.index_select(0, out_T)).sum(dim=1)
        x_E = distance_E / self.config.cutoff_angstrom
        angular, radial = self.config.num_spherical, self.config.num_radial
        bessel_TLK = self.spherical(x_E).index_select(0, into_T).view(-1, angular, radial)
        sbf_TB = (bessel_TLK * angular_basis(cosine_T, angular)[:, :, None]).view(-1, angular * radial)
        return self.radial(x_E), sbf_TB


class EmbeddingBlock(nn.Module):
    """First message of an edge from its two elements and its length."""

    def __init__(self, config: OpenCatalystConfig) -> None:
        super().__init__()
        hidden = config.hidden_channels
        self.emb = nn.Embedding(ELEMENTS, hidden)
        nn.init.uniform_(self.emb.weight, -math.sqrt(3), math.sqrt(3))
        self.lin_rbf = nn.Linear(config.num_radial, hidden)
        self.lin = nn.Linear(3 * hidden, hidden)

    def forward(self, number_A: Tensor, rbf_EK: Tensor, source_E: Tensor, target_E: Tensor) -> Tensor:
        """(E, H). The dense layer of [target, source, radial] is split: its first two parts run per atom, not per edge."""
        to_target, to_source, to_rbf = self.lin.weight.chunk(3, dim=1)
        x_AH = self.emb(number_A)
        per_edge = F.linear(F.silu(self.lin_rbf(rbf_EK)), to_rbf, self.lin.bias)
        at_target = F.linear(x_AH, to_target).index_select(0, target_E)
        return F.silu(per_edge + at_target + F.linear(x_AH, to_source).index_select(0, source_E))


class InteractionBlock(nn.Module):
    """One round of messages: every edge hears the edges that end where it begins, weighted by length and angle."""

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

    def forward(self, x_EH: Tensor, rbf_EK: Tensor, sbf_T: Tensor, into_T: Tensor, out_T: Tensor) -> Tensor:
        """(E, H). ``sbf_T`` has been through ``lin_sbf1`` already."""
        x_ji_EH = F.silu(self.lin_ji(x_EH))
        x_kj_EH = F.silu(self.lin_kj(x_EH)) * self.lin_rbf2(self.lin_rbf1(rbf_EK))
        x_EC = F.silu(self.lin_down(x_kj_EH))
        message_TC = x_EC.index_select(0, into_T) * self.lin_sbf2(sbf_T)
        heard_EC = torch.zeros_like(x_EC, dtype=message_TC.dtype).index_add(0, out_T, message_TC)
        h_EH = self.before_skip(x_ji_EH + F.silu(self.lin_up(heard_EC)))
        return self.after_skip(F.silu(self.lin(h_EH)) + x_EH)


class OutputBlock(nn.Module):
    """Contribution of every atom to the energy, from the edges that end at it."""

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
        """(A,)."""
        weighted_EH = self.lin_rbf(rbf_EK) * x_EH
        x_A = weighted_EH.new_zeros(atoms, weighted_EH.shape[1]).index_add(0, target_E, weighted_EH)
        x_A = self.lin_up(x_A)
        for dense in self.lins:
            x_A = F.silu(dense(x_A))
        energy_A: Tensor = self.lin(x_A).squeeze(1).float()
        return energy_A


class Residual(nn.Module):
    """x + two dense layers of x."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = _dense(hidden, hidden), _dense(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The shape of x."""
        return x + F.silu(self.lin2(F.silu(self.lin1(x))))


def glorot_orthogonal(weight: Tensor, scale: float = 2.0) -> None:
    """An orthogonal matrix scaled to the variance of Glorot and Bengio."""
    with torch.no_grad():
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


def work(config: OpenCatalystConfig, *, global_batch_size: int, element_bytes: int) -> Work:
    """FLOPs and compulsory bytes of training on one sample of mean size (docs/open_catalyst.md says what is counted).

    The model's FLOPs are those of the published formulation; ours runs the embedding's dense layer partly per atom.
    """
    forward = forward_flops(config)
    saved = 4 * config.hidden_channels**2 * (config.mean_edges - config.mean_atoms)
    activations = sum(rows * (inputs + outputs) for rows, inputs, outputs in _layers(config))
    gathered = config.mean_triplets * config.triplet_channels * 3 * config.blocks  # gather, product, sum
    bases = config.mean_triplets * config.num_spherical * config.num_radial * 2
    optimizer = parameter_count(config) * 4 * (2 + 4 + 3) / global_batch_size  # read w, g, m, v, w; write w, m, v
    traffic = DIFFERENTIATIONS * element_bytes * (activations + gathered) + DIFFERENTIATIONS * 4 * bases
    return Work(DIFFERENTIATIONS * forward, DIFFERENTIATIONS * (forward - saved), traffic + optimizer)


def forward_flops(config: OpenCatalystConfig) -> float:
    """FLOPs of the energy of one sample of mean size, 2 per multiply-add of the dense layers."""
    return sum(2 * rows * inputs * outputs for rows, inputs, outputs in _layers(config))


def parameter_count(config: OpenCatalystConfig) -> int:
    """Trainable parameters, from the shapes alone."""
    c = config
    hidden, out, basis, triplet = c.hidden_channels, c.output_channels, c.basis_channels, c.triplet_channels
    square = hidden * hidden + hidden
    embedding = ELEMENTS * hidden + (c.num_radial + 1) * hidden + (3 * hidden + 1) * hidden
    output = c.num_radial * hidden + (hidden + 1) * out + c.output_layers * (out + 1) * out + out
    bases = (c.num_radial + hidden) * basis + (c.num_spherical * c.num_radial + triplet) * basis
    interaction = bases + 2 * hidden * triplet + (3 + 2 * c.before_skip + 2 * c.after_skip) * square
    return c.num_radial + embedding + (c.blocks + 1) * output + c.blocks * interaction


def _layers(config: OpenCatalystConfig) -> Iterator[tuple[float, int, int]]:
    """(rows per sample, inputs, outputs) of every dense layer of the published formulation."""
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
