"""The structure module: invariant point attention moves one frame per residue, torsions determine the atoms. No loss.

Algorithms 20 to 24 of AlphaFold 2's supplement. Inside, translations are in nanometres. Legend: N samples, L (I, J)
residues, S and Z channels, H heads, C channels and P points of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.evoformer import Linear, compute_channels_last, compute_mask_bias
from mlhpc.workloads.openfold.geometry import Frame, compute_atoms, compute_group_frames, keep_tables

ANGSTROM_PER_UNIT = 10.0


class InvariantPointAttention(nn.Module):
    """Attention with scores from channels, the pair map and the distances of points that move with the frames."""

    def __init__(self, config: OpenFoldConfig) -> None:
        super().__init__()
        single, pair, heads = config.single_channels, config.pair_channels, config.ipa_heads
        self.heads, self.channels = heads, config.ipa_channels
        self.query_points, self.value_points = config.ipa_query_points, config.ipa_value_points
        self.linear_q = Linear(single, heads * config.ipa_channels)
        self.linear_kv = Linear(single, 2 * heads * config.ipa_channels)
        self.linear_q_points = Linear(single, heads * self.query_points * 3)
        self.linear_kv_points = Linear(single, heads * (self.query_points + self.value_points) * 3)
        self.linear_b = Linear(pair, heads)
        self.head_weights = nn.Parameter(torch.full((heads,), math.log(math.e - 1)))  # softplus gives 1
        self.linear_out = Linear(heads * (pair + config.ipa_channels + 4 * self.value_points), single, init="final")

    def pair_bias(self, z_NIJZ: Tensor, mask_NL: Tensor) -> Tensor:
        """Return what the pair map and the mask add to the scores, (N, H, I, J).

        It is the same in all iterations.
        """
        bias_NHIJ = math.sqrt(1 / 3) * self.linear_b(z_NIJZ).permute(0, 3, 1, 2)
        return bias_NHIJ + compute_mask_bias(mask_NL)[:, None, None, :]  # type: ignore[no-any-return]

    def forward(self, s_NLS: Tensor, z_NIJZ: Tensor, frame_NL: Frame, bias_NHIJ: Tensor) -> Tensor:
        """Return the update of s."""
        H, Q = self.heads, self.query_points
        layers = (self.linear_q, self.linear_kv, self.linear_q_points, self.linear_kv_points)
        q, kv, flat_q, flat_kv = torch.split(
            compute_channels_last(s_NLS, layers), [len(each.weight) for each in layers], -1
        )
        q_NHLC = torch.unflatten(q, -1, (H, -1)).transpose(1, 2)
        k_NHLC, v_NHLC = torch.unflatten(kv, -1, (H, -1)).transpose(1, 2).tensor_split([self.channels], -1)
        local_NL3 = torch.cat([torch.unflatten(each, -1, (3, -1)) for each in (flat_q, flat_kv)], -1)
        points_NL3 = frame_NL.rotation @ local_NL3 + frame_NL.translation[..., None]  # of q, then of k and v by head
        q_points, kv_points = (
            torch.unflatten(each, -1, (H, -1)).permute(0, 3, 2, 4, 1)  # (N, H, 3, P, L)
            for each in points_NL3.tensor_split([H * Q], -1)
        )
        k_points, v_points = kv_points.tensor_split([Q], dim=-2)
        scores = q_NHLC @ k_NHLC.transpose(-1, -2) * math.sqrt(1 / (3 * self.channels)) + bias_NHIJ
        # algorithm 22: w_L w_C = sqrt(1 / 3) sqrt(2 / (9 Q))
        weight = F.softplus(self.head_weights) * math.sqrt(1 / (3 * Q * 9 / 2))
        squared_NHIJ = _SquaredDistances.apply(  # type: ignore[no-untyped-call]
            q_points.flatten(2, 3), k_points.flatten(2, 3)
        )
        attention_NHIJ = (scores - 0.5 * weight[:, None, None] * squared_NHIJ).softmax(-1)
        channels = (attention_NHIJ @ v_NHLC).transpose(1, 2).flatten(-2)
        moved = attention_NHIJ @ v_points.flatten(2, 3).transpose(-1, -2)  # (N, H, L, 3 P)
        moved_NL3 = moved.unflatten(-1, (3, -1)).permute(0, 2, 3, 1, 4).flatten(-2)
        points = frame_NL.rotation.transpose(-1, -2) @ (moved_NL3 - frame_NL.translation[..., None])
        norm = (points.square().sum(-2) + 1e-8).sqrt()
        pair = (attention_NHIJ.transpose(1, 2) @ z_NIJZ).flatten(-2)
        return self.linear_out(torch.cat([channels, points.flatten(-2), norm, pair], -1))  # type: ignore[no-any-return]


class _SquaredDistances(torch.autograd.Function):
    """Sums of squared differences (..., I, J) of (..., C, I) and (..., C, J).

    Positions are the last dimension: rows of few points are slow.
    """

    @staticmethod
    def forward(context: Any, left: Tensor, right: Tensor) -> Tensor:
        difference = left[..., :, None] - right[..., None, :]
        context.save_for_backward(difference)
        return (difference * difference).sum(-3)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_difference = context.saved_tensors[0] * (2 * gradient)[..., None, :, :]
        return of_difference.sum(-1), -of_difference.sum(-2)


class StructureTransition(nn.Module):
    """Three layers, residual, dropout and layer norm."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = Linear(channels, channels, init="relu"), Linear(channels, channels, init="relu")
        self.linear_3 = Linear(channels, channels, init="final")
        self.layer_norm, self.dropout = nn.LayerNorm(channels), nn.Dropout(dropout)

    def forward(self, s: Tensor) -> Tensor:
        """Return the new s."""
        update = self.linear_3(F.relu(self.linear_2(F.relu(self.linear_1(s)))))
        return self.layer_norm(self.dropout(s + update))  # type: ignore[no-any-return]


class AngleResnet(nn.Module):
    """Predicts seven torsions from the current and the initial single representation."""

    def __init__(self, single: int, hidden: int) -> None:
        super().__init__()
        self.linear_in, self.linear_initial = Linear(single, hidden), Linear(single, hidden)
        self.layers = nn.ModuleList(
            nn.ModuleList([Linear(hidden, hidden, init="relu"), Linear(hidden, hidden, init="final")]) for _ in range(2)
        )
        self.linear_out = Linear(hidden, 14)

    def forward(self, s: Tensor, s_initial: Tensor) -> tuple[Tensor, Tensor]:
        """Return unnormalised and unit (sine, cosine), (T, N, L, 7, 2). Inputs are s (T, N, L, S) and the initial one
        (N, L, S).
        """
        x = self.linear_in(F.relu(s)) + self.linear_initial(F.relu(s_initial))
        for layer in self.layers:
            first, second = cast(nn.ModuleList, layer)
            x = x + second(F.relu(first(F.relu(x))))
        raw = self.linear_out(F.relu(x)).unflatten(-1, (7, 2))
        return raw, raw / (raw.square().sum(-1, keepdim=True) + 1e-12).sqrt()


@dataclass(frozen=True)
class Structure:
    """The results of the T iterations; positions in angstrom."""

    frames: Frame  # (T, N, L): backbone
    raw_angles: Tensor  # (T, N, L, 7, 2)
    angles: Tensor  # (T, N, L, 7, 2)
    groups: Frame  # (N, L, 8): of the last iteration
    atoms: Tensor  # (N, L, 14, 3): of the last iteration
    single: Tensor  # (N, L, S)


class StructureModule(nn.Module):
    """Iterations with shared weights, from all frames at the origin."""

    def __init__(self, config: OpenFoldConfig) -> None:
        super().__init__()
        single = config.single_channels
        self.iterations = config.structure_iterations
        self.layer_norm_s, self.layer_norm_z = nn.LayerNorm(single), nn.LayerNorm(config.pair_channels)
        self.linear_in = Linear(single, single)
        self.ipa = InvariantPointAttention(config)
        self.ipa_dropout, self.layer_norm_ipa = nn.Dropout(config.structure_dropout), nn.LayerNorm(single)
        self.transition = StructureTransition(single, config.structure_dropout)
        # "final" is zero: the first update leaves all frames where they are
        self.bb_update = Linear(single, 6, init="final")
        self.angle_resnet = AngleResnet(single, config.angle_channels)

    def forward(self, s_NLS: Tensor, z_NIJZ: Tensor, aatype_NL: Tensor, mask_NL: Tensor) -> Structure:
        """Predict the structure from the single representation and the pair map."""
        s_initial = self.layer_norm_s(s_NLS)
        z = self.layer_norm_z(z_NIJZ)
        s = self.linear_in(s_initial)
        frame = Frame(
            torch.eye(3, dtype=s.dtype, device=s.device).expand(*s.shape[:2], 3, 3), s.new_zeros(*s.shape[:2], 3)
        )
        bias = self.ipa.pair_bias(z, mask_NL)
        rotations, translations, singles = [], [], []
        for iteration in range(self.iterations):
            s = self.layer_norm_ipa(self.ipa_dropout(s + self.ipa(s, z, frame, bias)))
            s = self.transition(s)
            frame = frame.compose(compute_frame_update(self.bb_update(s)))
            rotations.append(frame.rotation)
            translations.append(frame.translation * ANGSTROM_PER_UNIT)
            singles.append(s)
            if iteration < self.iterations - 1:
                # as in AlphaFold 2, rotations pass no gradient to the previous iteration
                frame = Frame(frame.rotation.detach(), frame.translation)
        raw, angles = self.angle_resnet(torch.stack(singles), s_initial)
        backbone = Frame(torch.stack(rotations), torch.stack(translations))
        groups = compute_group_frames(aatype_NL, Frame(rotations[-1], translations[-1]), angles[-1])
        atoms = compute_atoms(aatype_NL, groups)
        return Structure(backbone, raw, angles, groups, atoms, s)


def compute_frame_update(update: Tensor) -> Frame:
    """Return (..., 6): the vector part of a quaternion with real part 1, and a translation."""
    quaternion = F.pad(update[..., :3], (1, 0), value=1.0)
    quaternion = quaternion * quaternion.square().sum(-1, keepdim=True).rsqrt()
    products = (quaternion[..., :, None] * quaternion[..., None, :]).flatten(-2)  # (..., 16)
    rotation = torch.unflatten(products @ _make_rotation_table(update.dtype, update.device), -1, (3, 3))
    return Frame(rotation, update[..., 3:])


@keep_tables
def _make_rotation_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Tabulate what each product of two parts of a unit quaternion adds to its rotation's elements, (16, 9)."""
    signs = torch.zeros(4, 4, 3, 3, dtype=dtype)
    for axis in range(3):
        signs[0, 0, axis, axis] = 1
        for part in range(3):
            signs[part + 1, part + 1, axis, axis] = 1 if part == axis else -1
        row, column = (axis + 1) % 3, (axis + 2) % 3
        signs[row + 1, column + 1, row, column] = signs[row + 1, column + 1, column, row] = 2
        signs[0, axis + 1, row, column], signs[0, axis + 1, column, row] = -2, 2
    return signs.reshape(16, 9).to(device)
