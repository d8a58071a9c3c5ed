"""Rigid frames, torsion angles and the atoms they determine, in torch. Distances in angstrom.

Legend: ... any leading dimensions, L residues, 8 rigid groups, 14 atoms, 7 torsions (pre-omega, phi, psi, chi 1 to 4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mlhpc.workloads.openfold import residues

EPS = 1e-8


class Frame(NamedTuple):
    """x -> rotation x + translation."""

    rotation: Tensor  # (..., 3, 3)
    translation: Tensor  # (..., 3)

    def apply(self, points: Tensor) -> Tensor:
        """Convert points (..., 3) of this frame to the outer frame."""
        return (self.rotation @ points[..., None])[..., 0] + self.translation

    def compose(self, inner: Frame) -> Frame:
        """Compose: apply ``inner`` first, then this frame."""
        return Frame(self.rotation @ inner.rotation, self.apply(inner.translation))

    def __getitem__(self, index: Any) -> Frame:  # type: ignore[override]
        """Return the frames at an index of the leading dimensions, which must keep the last ones."""
        return Frame(self.rotation[index], self.translation[index])


def compute_frame_of_points(x_negative: Tensor, origin: Tensor, xy: Tensor) -> Frame:
    """Compute frames (Gram-Schmidt): ``x_negative`` on the negative first axis, ``xy`` in the first two's plane."""
    first = _compute_unit_vectors(origin - x_negative)
    second = xy - origin
    second = _compute_unit_vectors(second - (second * first).sum(-1, keepdim=True) * first)
    return Frame(torch.stack([first, second, torch.linalg.cross(first, second)], -1), origin)


def compute_backbone_frames(atom14: Tensor) -> Frame:
    """Compute backbone frames (..., L) from atoms (..., L, 14, 3).

    CA is the origin, C lies on the first axis, N in the plane of the first two.
    """
    n, ca, c = atom14[..., residues.N, :], atom14[..., residues.CA, :], atom14[..., residues.C, :]
    return compute_frame_of_points(2 * ca - c, ca, n)


def compute_dihedral(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Compute sine and cosine (..., 2) of the dihedral angle a-b-c-d.

    They come from d's position in the frame of a, b and c.

    The order of the operations is the reference's. Unknown atoms are all at the origin, so their angle is only rounding
    errors. The network of a template sees them.
    """
    first = _normalise(_subtract(c, b))
    across = _subtract(a, c)
    along = _dot(first, across)
    second = _normalise([value - axis * along for axis, value in zip(first, across, strict=True)])
    third = [
        first[1] * second[2] - first[2] * second[1],
        first[2] * second[0] - first[0] * second[2],
        first[0] * second[1] - first[1] * second[0],
    ]
    origin, end = list(c.unbind(-1)), list(d.unbind(-1))
    sine, cosine = (_dot(axis, end) - _dot(axis, origin) for axis in (third, second))
    length = (sine * sine + cosine * cosine + EPS).sqrt()
    return torch.stack([sine / length, cosine / length], -1)


def _subtract(left: Tensor, right: Tensor) -> list[Tensor]:
    return [x - y for x, y in zip(left.unbind(-1), right.unbind(-1), strict=True)]


def _dot(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]


def _normalise(vector: list[Tensor]) -> list[Tensor]:
    length = (_dot(vector, vector) + EPS).sqrt()
    return [each / length for each in vector]


class Torsions(NamedTuple):
    """Seven torsions per residue: sine and cosine, these with the alternative atom names, and a mask of known ones.

    Where the mask is 0 the angle is what unknown atoms at the origin give.
    """

    angle: Tensor  # (..., L, 7, 2)
    alternative: Tensor  # (..., L, 7, 2)
    mask: Tensor  # (..., L, 7)


def compute_torsions_of(aatype: Tensor, atom14: Tensor, mask14: Tensor) -> Torsions:
    """Compute torsions of known structures from aatype (..., L), atoms (..., L, 14, 3) and the mask of known atoms."""
    before, before_mask = _shift(atom14), _shift(mask14)
    n, ca, c, o = (atom14[..., number, :] for number in (residues.N, residues.CA, residues.C, residues.OXYGEN))
    # four neighbours each make omega, phi and psi
    chain = torch.stack([before[..., residues.CA, :], before[..., residues.C, :], n, ca, c, o], -2)
    index = load_residue_table("CHI_ATOMS", atom14.device)[aatype]  # (..., L, 4, 4)
    flat = index.flatten(-2)
    chosen = torch.unflatten(atom14.gather(-2, flat[..., None].expand(*flat.shape, 3)), -2, (4, 4))
    chosen_mask = torch.unflatten(mask14.gather(-1, flat), -1, (4, 4)).amin(-1)
    backbone_known = mask14[..., : residues.OXYGEN].amin(-1)
    both = before_mask[..., residues.CA] * before_mask[..., residues.C]
    mask = torch.stack(
        [
            both * mask14[..., residues.N] * mask14[..., residues.CA],
            before_mask[..., residues.C] * backbone_known,
            backbone_known * mask14[..., residues.OXYGEN],
        ],
        -1,
    )
    mask = torch.cat([mask, chosen_mask * load_residue_table("CHI_MASK", atom14.device)[aatype]], -1)
    angle = compute_dihedral(*(torch.cat([chain[..., at : at + 3, :], chosen[..., at, :]], -2) for at in range(4)))
    angle = angle * load_residue_table("TORSION_SIGN", atom14.device)[:, None]
    return Torsions(angle, rename_torsions(aatype, angle), mask)


def rename_torsions(aatype: Tensor, angle: Tensor) -> Tensor:
    """Compute torsions (..., L, 7, 2) with the atoms of symmetric side chains renamed.

    Renaming turns such a chi by 180 degrees.
    """
    flip = 1 - 2 * load_residue_table("CHI_PERIODIC", angle.device)[aatype]
    return torch.cat([angle[..., :3, :], angle[..., 3:, :] * flip[..., None]], -2)


def compute_group_frames(aatype: Tensor, backbone: Frame, angle: Tensor) -> Frame:
    """Compute frames (..., L, 8) of the rigid groups from backbone frames (..., L) and torsions (..., L, 7, 2)."""
    default = load_residue_table("GROUP_FRAME", angle.device)[aatype].to(angle.dtype)  # (..., L, 8, 4, 4)
    one_of_each = angle[..., :1, :1]
    no_turn = torch.cat([torch.zeros_like(one_of_each), torch.ones_like(one_of_each)], -1)
    sine, cosine = torch.cat([no_turn, angle], -2).unbind(-1)
    zero, one = torch.zeros_like(sine), torch.ones_like(sine)
    # each group turns about its first axis
    turn = torch.unflatten(torch.stack([one, zero, zero, zero, cosine, -sine, zero, sine, cosine], -1), -1, (3, 3))
    local = Frame(default[..., :3, :3] @ turn, default[..., :3, 3])
    # the first five groups hang on the backbone, chi 2 to 4 each on the chi before
    parts = [Frame(local.rotation[..., :5, :, :], local.translation[..., :5, :])]
    last = Frame(local.rotation[..., 4, :, :], local.translation[..., 4, :])
    for number in range(5, residues.GROUPS):
        last = last.compose(Frame(local.rotation[..., number, :, :], local.translation[..., number, :]))
        parts.append(Frame(last.rotation[..., None, :, :], last.translation[..., None, :]))
    inner = Frame(torch.cat([part.rotation for part in parts], -3), torch.cat([part.translation for part in parts], -2))
    return Frame(backbone.rotation[..., None, :, :], backbone.translation[..., None, :]).compose(inner)


def compute_atoms(aatype: Tensor, groups: Frame) -> Tensor:
    """Compute ideal atoms (..., L, 14, 3) from frames (..., L, 8) of the rigid groups. Absent atoms are zero."""
    group = load_residue_table("ATOM_GROUP", aatype.device)[aatype]  # (..., L, 14)
    rotation = groups.rotation.gather(-3, group[..., None, None].expand(*group.shape, 3, 3))
    translation = groups.translation.gather(-2, group[..., None].expand(*group.shape, 3))
    local = load_residue_table("ATOM_POSITION", aatype.device)[aatype].to(rotation.dtype)
    return Frame(rotation, translation).apply(local) * load_residue_table("ATOM_MASK", aatype.device)[aatype][..., None]


def compute_known_groups(aatype: Tensor, atom14: Tensor, mask14: Tensor, swapped: Tensor) -> tuple[Frame, Tensor]:
    """Compute frames (..., L, 6) of a known structure's groups that have atoms. Returns also the mask of groups with
    known atoms.

    The groups are the backbone, psi's and the four chis'. In ``swapped`` residues (..., L) a symmetric side chain has
    its other atom names. There the last group is turned by 180 degrees.
    """
    index = load_residue_table("FRAME_ATOMS", atom14.device)[aatype]  # (..., L, 5, 3)
    flat = index.flatten(-2)
    chosen = torch.unflatten(atom14.gather(-2, flat[..., None].expand(*flat.shape, 3)), -2, index.shape[-2:])
    known = torch.unflatten(mask14.gather(-1, flat), -1, index.shape[-2:]).amin(-1)
    chis = load_residue_table("CHI_MASK", atom14.device)[aatype].to(known.dtype)
    groups, backbone = compute_frame_of_points(*chosen.unbind(-2)), compute_backbone_frames(atom14)
    turned = load_residue_table("CHI_PERIODIC", atom14.device)[aatype].to(atom14.dtype) * swapped[..., None].to(
        atom14.dtype
    )
    sign = torch.nn.functional.pad(1 - 2 * turned, (1, 0), value=1.0)  # psi's group is never turned
    # half a turn about the first axis reverses the other two
    about_x = torch.stack([torch.ones_like(sign), sign, sign], -1)
    rotation = torch.cat([backbone.rotation[..., None, :, :], groups.rotation * about_x[..., None, :]], -3)
    translation = torch.cat([backbone.translation[..., None, :], groups.translation], -2)
    mask = torch.cat([mask14[..., : residues.OXYGEN].amin(-1, keepdim=True), known[..., :1], known[..., 1:] * chis], -1)
    return Frame(rotation, translation), mask


def select_pseudo_beta(aatype: Tensor, atom14: Tensor, mask14: Tensor) -> tuple[Tensor, Tensor]:
    """Select CB, or CA of glycine, (..., L, 3), and the mask of known ones. ``aatype`` may have gaps."""
    glycine = aatype == residues.GLYCINE
    position = torch.where(glycine[..., None], atom14[..., residues.CA, :], atom14[..., residues.CB, :])
    return position, torch.where(glycine, mask14[..., residues.CA], mask14[..., residues.CB])


def keep_tables(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache a function that makes constant tensors. A fake one, of a prediction, is not kept: it has no values."""
    kept = cache(make)

    @wraps(make)
    def find(*key: Any) -> Tensor:
        return make(*key) if isinstance(torch.empty(0), FakeTensor) else kept(*key)

    return find


@keep_tables
def load_residue_table(name: str, device: torch.device) -> Tensor:
    """Copy an array of `residues` to a device."""
    values: NDArray[Any] = getattr(residues, name)
    return torch.from_numpy(values).to(device)


def _compute_unit_vectors(vector: Tensor) -> Tensor:
    return vector / vector.square().sum(-1, keepdim=True).clamp_min(EPS).sqrt()


def _shift(values: Tensor) -> Tensor:
    """Shift values by one residue, so that each gets its predecessor's; the first gets zeros."""
    dim = values.dim() - (2 if values.shape[-1] == residues.ATOMS else 3)
    return torch.cat([torch.zeros_like(values.narrow(dim, 0, 1)), values.narrow(dim, 0, values.shape[dim] - 1)], dim)
