"""Synthetic protein families: a fold, a sequence that determines it, and relatives with the same fold.

A chain is drawn as helices, strands and loops. Each amino acid prefers one of the three; torsions are the mean of the
element plus an offset of the ancestor's amino acid plus noise, so the sequence determines the structure. Relatives have other
residues of the same class or random ones, so the alignment has information that one sequence lacks. Not modelled:
hydrophobic cores, contacts, knots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workloads.openfold import residues
from workloads.openfold.features import Protein
from workloads.openfold.geometry import Frame, atoms_of, backbone_frames, group_frames
from workloads.openfold.shard_form import NO_TEMPLATES

Floats = NDArray[np.floating[Any]]

HELIX, STRAND, LOOP = range(3)
LETTERS_OF = ("AELMQKR", "VIYFWTC", "GPNDSH")
ELEMENT_LENGTHS = ((5, 9), (4, 8))  # helix and strand, half-open
TORSIONS = ((-63.0, -42.0), (-120.0, 130.0))  # phi and psi of helix and strand, degrees
LOOP_TORSIONS = {
    "G": (85.0, 10.0),
    "P": (-65.0, 145.0),
    "N": (55.0, 40.0),
    "D": (-90.0, 0.0),
    "S": (-75.0, 160.0),
    "H": (-140.0, 70.0),
}
OFFSET = 8.0  # degrees, of an amino acid in helix or strand
NOISE = 3.0
CHI_NOISE = 8.0
TEMPLATE_NOISE = 9.0
DRIFT, REEMIT = 0.25, 0.5  # fractions of a relative's residues replaced by any amino acid, by one of the same class
OWN_DRIFT = 0.1  # fraction of the chain's residues replaced by any amino acid, independent of the torsions
GAP_RATE, DELETION_RATE = 0.02, 0.02
PEPTIDE_BENDS = (residues.CA_C_N, residues.C_N_CA, residues.N_CA_C)

_CLASS_SIZES = np.array([len(letters) for letters in LETTERS_OF])
_CLASSES = np.array(
    [[residues.LETTERS.index(x) for x in letters.ljust(7, letters[0])] for letters in LETTERS_OF], np.int8
)
CLASS_OF = np.array(
    [next(k for k, letters in enumerate(LETTERS_OF) if letter in letters) for letter in residues.LETTERS]
)


def _amino_acid_angles() -> tuple[Floats, Floats]:
    """Fixed for all data sets: phi and psi offsets (20, 2) and chis (20, 4) of the amino acids, degrees."""
    rng = np.random.Generator(np.random.Philox(key=[1, 20]))
    offsets = rng.uniform(-OFFSET, OFFSET, (20, 2))
    chi = rng.choice([-60.0, 60.0, 180.0], (20, 4))
    return offsets, chi


_OFFSETS, _CHI = _amino_acid_angles()


@dataclass(frozen=True)
class Families:
    """The distribution of families: chain lengths (inclusive), alignment rows, templates, strands per helix."""

    shortest: int
    longest: int
    rows: int
    templates: int = 0
    strands_per_helix: int = 1


@dataclass(frozen=True)
class Drawn:
    """One family before its geometry is built; torsions in degrees."""

    elements: NDArray[np.int8]  # (L,)
    sequence: NDArray[np.int8]  # (L,): the ancestor's but for some residues
    mean_torsions: Floats  # (L, 2): phi and psi without noise
    torsions: Floats  # (1 + templates, L, 2)
    chi: Floats  # (1 + templates, L, 4)
    msa: NDArray[np.int8]  # (rows, L)
    deletions: NDArray[np.uint8]  # (rows, L)


def families(settings: Families, seed: int, numbers: range) -> list[Protein]:
    """Generate the proteins of these family numbers, each a function of (seed, number)."""
    drawn = [draw(settings, seed, number) for number in numbers]
    copies = 1 + settings.templates
    aatype = [each.sequence for each in drawn for _ in range(copies)]
    torsions = [each.torsions[k] for each in drawn for k in range(copies)]
    chi = [each.chi[k] for each in drawn for k in range(copies)]
    atoms = build_atoms(aatype, torsions, chi)
    return [
        _protein(each, atoms[copies * n : copies * (n + 1)], seed, number)
        for n, (each, number) in enumerate(zip(drawn, numbers, strict=True))
    ]


def draw(settings: Families, seed: int, number: int) -> Drawn:
    """Draw one family."""
    rng = np.random.Generator(np.random.Philox(key=[seed, number]))
    length = int(rng.integers(settings.shortest, settings.longest + 1))
    elements = _elements(length, settings.strands_per_helix, rng)
    ancestor = _emit(elements, rng.random(length))
    mean = _mean_torsions(elements, ancestor)
    copies = 1 + settings.templates
    noise = np.full(copies, TEMPLATE_NOISE)
    noise[0] = NOISE
    torsions = mean + noise[:, None, None] * rng.standard_normal((copies, length, 2))
    sequence = np.where(rng.random(length) < OWN_DRIFT, rng.integers(20, size=length), ancestor).astype(np.int8)
    chi = _CHI[sequence] + CHI_NOISE * rng.standard_normal((copies, length, 4))
    msa, deletions = _relatives(elements, ancestor, settings.rows, rng)
    msa[0], deletions[0] = sequence, 0
    return Drawn(elements, sequence, mean, torsions, chi, msa, deletions)


def _elements(length: int, strands_per_helix: int, rng: np.random.Generator) -> NDArray[np.int8]:
    parts: list[NDArray[np.int8]] = []
    total = 0
    while total < length:
        kind = HELIX if rng.integers(1 + strands_per_helix) == 0 else STRAND
        parts.append(np.full(rng.integers(*ELEMENT_LENGTHS[kind]), kind, np.int8))
        parts.append(np.full(rng.integers(2, 5), LOOP, np.int8))
        total = sum(map(len, parts))
    return np.concatenate(parts)[:length]


def _emit(elements: NDArray[np.int8], pick: Floats) -> NDArray[np.int8]:
    """Choose an amino acid of each element's class by ``pick`` (..., L), from 0 to 1."""
    number = (pick * _CLASS_SIZES[elements]).astype(np.int64)
    chosen: NDArray[np.int8] = _CLASSES[elements, number]
    return chosen


def _mean_torsions(elements: NDArray[np.int8], ancestor: NDArray[np.int8]) -> Floats:
    torsions = np.empty((len(elements), 2))
    for kind in (HELIX, STRAND):
        torsions[elements == kind] = TORSIONS[kind]
    torsions += np.where((elements != LOOP)[:, None], _OFFSETS[ancestor], 0)
    for place in np.flatnonzero(elements == LOOP):
        torsions[place] = LOOP_TORSIONS[residues.LETTERS[ancestor[place]]]
    return torsions


def _relatives(
    elements: NDArray[np.int8], ancestor: NDArray[np.int8], rows: int, rng: np.random.Generator
) -> tuple[NDArray[np.int8], NDArray[np.uint8]]:
    shape = (rows, len(ancestor))
    choice = rng.random(shape)
    same_class = _emit(elements, rng.random(shape))
    anything = rng.integers(20, size=shape).astype(np.int8)
    # in loops each letter has its own torsions, so it changes only by drift
    reemitted = np.where((choice < DRIFT + REEMIT) & (elements != LOOP), same_class, np.broadcast_to(ancestor, shape))
    msa = np.where(choice < DRIFT, anything, reemitted)
    gaps = rng.random(shape) < GAP_RATE
    deletions = np.where(rng.random(shape) < DELETION_RATE, rng.integers(1, 5, shape), 0).astype(np.uint8)
    msa[gaps] = residues.GAP
    return msa, deletions


def build_atoms(aatype: list[NDArray[np.int8]], torsions: list[Floats], chi: list[Floats]) -> list[NDArray[np.float32]]:
    """Build the heavy atoms (L, 14, 3) of each chain in ideal geometry, centred at the origin. Torsions in degrees."""
    longest = max(map(len, aatype))
    count = len(aatype)
    types = np.zeros((count, longest), np.int64)
    turns = np.zeros((count, longest, 2))
    chis = np.zeros((count, longest, 4))
    for n, (t, a, c) in enumerate(zip(aatype, torsions, chi, strict=True)):
        types[n, : len(t)], turns[n, : len(t)], chis[n, : len(t)] = t, a, c
    backbone = torch.from_numpy(build_backbone(turns))
    frames = backbone_frames(torch.nn.functional.pad(backbone, (0, 0, 0, residues.ATOMS - 3)))
    degrees = np.concatenate([np.full((count, longest, 1), 180.0), turns, chis], -1)
    angle = torch.from_numpy(np.stack([np.sin(np.radians(degrees)), np.cos(np.radians(degrees))], -1))
    kinds = torch.from_numpy(types)
    atoms = atoms_of(kinds, group_frames(kinds, Frame(*frames), angle)).numpy()
    out = []
    for n, each in enumerate(aatype):
        centred = atoms[n, : len(each)]
        centred = centred - centred[:, residues.CA].mean(0)
        out.append((centred * residues.ATOM_MASK[each][..., None]).astype(np.float32))
    return out


def build_backbone(torsions: Floats) -> Floats:
    """Build N, CA, C (B, L, 3, 3) of chains with phi and psi (B, L, 2) in degrees; all peptide bonds are trans."""
    batch, length = torsions.shape[:2]
    angle = np.radians(residues.N_CA_C)
    out = np.empty((batch, 3 * length, 3))
    out[:, 0] = residues.N_CA * np.array([np.cos(angle), np.sin(angle), 0])
    out[:, 1], out[:, 2] = 0, (residues.CA_C, 0, 0)
    for place in range(1, length):
        turns = (torsions[:, place - 1, 1], np.full(batch, 180.0), torsions[:, place, 0])
        for k, (bond, bend) in enumerate(zip((residues.C_N, residues.N_CA, residues.CA_C), PEPTIDE_BENDS, strict=True)):
            at = 3 * place + k
            out[:, at] = residues.place(out[:, at - 3], out[:, at - 2], out[:, at - 1], bond, bend, turns[k])
    return out.reshape(batch, length, 3, 3)


def _protein(drawn: Drawn, atoms: list[NDArray[np.float32]], seed: int, number: int) -> Protein:
    length = len(drawn.sequence)
    mask = residues.ATOM_MASK[drawn.sequence].astype(np.int8)
    templates = NO_TEMPLATES
    if len(atoms) > 1:
        rng = np.random.Generator(np.random.Philox(key=[seed, number]).jumped())
        covered = [_coverage(length, rng) for _ in atoms[1:]]
        kinds = np.stack([np.where(keep, drawn.sequence, residues.GAP) for keep in covered]).astype(np.int8)
        masks = np.stack([mask * keep[:, None] for keep in covered]).astype(np.int8)
        templates = (kinds, np.stack(atoms[1:]) * masks[..., None], masks)
    return Protein(
        drawn.sequence, np.arange(length, dtype=np.int32), atoms[0], mask, drawn.msa, drawn.deletions, *templates
    )


def _coverage(length: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw the stretch that a template covers, at least half the chain."""
    span = int(rng.integers(length // 2, length + 1))
    begin = int(rng.integers(length - span + 1))
    index = np.arange(length)
    return (index >= begin) & (index < begin + span)
