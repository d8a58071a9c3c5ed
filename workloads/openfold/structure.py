"""The structure module: invariant point attention moves one frame per residue, torsions determine the atoms. No loss.

Algorithms 20 to 24 of AlphaFold 2's supplement. Inside, translations are in nanometres. Legend: N samples, L (I, J)
residues, S and Z channels, H heads, C channels and P points of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.openfold.config import OpenFoldConfig
from workloads.openfold.geometry import Frame, atoms_of, group_frames
from workloads.openfold.primitives import Linear, mask_bias

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

    def forward(self, s_NLS: Tensor, z_NIJZ: Tensor, frame_NL: Frame, mask_NL: Tensor) -> Tensor:
        """The update of s."""
        q_NHLC = self.linear_q(s_NLS).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_NHLC, v_NHLC = (
            self.linear_kv(s_NLS).unflatten(-1, (self.heads, -1)).transpose(1, 2).split(self.channels, dim=-1)
        )
        q_points = self._points(self.linear_q_points(s_NLS), frame_NL)
        kv_points = self._points(self.linear_kv_points(s_NLS), frame_NL)
        k_points, v_points = kv_points.tensor_split([self.query_points], dim=-2)  # (N, H, L, P, 3)
        scores = q_NHLC @ k_NHLC.transpose(-1, -2) * math.sqrt(1 / (3 * self.channels))
        scores = scores + math.sqrt(1 / 3) * self.linear_b(z_NIJZ).permute(0, 3, 1, 2)
        weight = F.softplus(self.head_weights) * math.sqrt(1 / (3 * self.query_points * 9 / 2))
        squared = (q_points[:, :, :, None] - k_points[:, :, None]).square().sum((-1, -2))  # (N, H, I, J)
        scores = scores - 0.5 * weight[:, None, None] * squared
        attention_NHIJ = (scores + mask_bias(mask_NL)[:, None, None, :]).softmax(-1)
        channels = (attention_NHIJ @ v_NHLC).transpose(1, 2).flatten(-2)
        moved = (attention_NHIJ @ v_points.flatten(-2)).unflatten(-1, (-1, 3)).transpose(1, 2)  # (N, L, H, P, 3)
        points = Frame(frame_NL.rotation[:, :, None, None], frame_NL.translation[:, :, None, None]).invert(moved)
        norm = (points.square().sum(-1) + 1e-8).sqrt()
        pair = (attention_NHIJ.transpose(1, 2) @ z_NIJZ).flatten(-2)
        flat = [each.flatten(-2) for each in points.unbind(-1)]
        return self.linear_out(torch.cat([channels, *flat, norm.flatten(-2), pair], -1))  # type: ignore[no-any-return]

    def _points(self, flat: Tensor, frame_NL: Frame) -> Tensor:
        """Compute points (N, H, L, P, 3) in the outer frame."""
        local = torch.stack(flat.chunk(3, dim=-1), -1)  # (N, L, H P, 3)
        outer = Frame(frame_NL.rotation[:, :, None], frame_NL.translation[:, :, None]).apply(local)
        return torch.unflatten(outer, 2, (self.heads, -1)).transpose(1, 2)


class StructureTransition(nn.Module):
    """Three layers, residual, dropout and layer norm."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = Linear(channels, channels, init="relu"), Linear(channels, channels, init="relu")
        self.linear_3 = Linear(channels, channels, init="final")
        self.layer_norm, self.dropout = nn.LayerNorm(channels), nn.Dropout(dropout)

    def forward(self, s: Tensor) -> Tensor:
        """The new s."""
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
        """Unnormalised and unit (sine, cosine), (N, L, 7, 2)."""
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
        rotations, translations, raws, angles = [], [], [], []
        for iteration in range(self.iterations):
            s = self.layer_norm_ipa(self.ipa_dropout(s + self.ipa(s, z, frame, mask_NL)))
            s = self.transition(s)
            frame = frame.compose(frame_update(self.bb_update(s)))
            raw, angle = self.angle_resnet(s, s_initial)
            rotations.append(frame.rotation)
            translations.append(frame.translation * ANGSTROM_PER_UNIT)
            raws.append(raw)
            angles.append(angle)
            if (
                iteration < self.iterations - 1
            ):  # as in AlphaFold 2, rotations pass no gradient to the previous iteration
                frame = Frame(frame.rotation.detach(), frame.translation)
        backbone = Frame(torch.stack(rotations), torch.stack(translations))
        groups = group_frames(aatype_NL, Frame(rotations[-1], translations[-1]), angles[-1])
        atoms = atoms_of(aatype_NL, groups)
        return Structure(backbone, torch.stack(raws), torch.stack(angles), groups, atoms, s)


def frame_update(update: Tensor) -> Frame:
    """(..., 6): the vector part of a quaternion with real part 1, and a translation."""
    b, c, d = update[..., :3].unbind(-1)
    norm = (1 + b * b + c * c + d * d).rsqrt()
    a, b, c, d = norm, b * norm, c * norm, d * norm
    rows = (
        (a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)),
        (2 * (b * c + a * d), a * a - b * b + c * c - d * d, 2 * (c * d - a * b)),
        (2 * (b * d - a * c), 2 * (c * d + a * b), a * a - b * b - c * c + d * d),
    )
    return Frame(torch.stack([torch.stack(row, -1) for row in rows], -2), update[..., 3:])
