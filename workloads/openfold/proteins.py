"""Synthetic protein families whose fold is written in pairs of alignment columns, as coevolution writes it.

A chain is helices and hairpins joined by links. Residues that touch (four apart in a helix, opposite in a hairpin) are
coupled. In every relative the second's letter is of the kind that fits the first's: donor to acceptor, large to small.
Relatives descend from one root by a tree: the root, the ancestors of clades, the relatives. A couple mutates as one.
No letter and no rate of mutation prefers an element or a position, so a column alone says nothing of the fold.
Pairs of columns show it: they vary together, and conserved letters fit. Not modelled: hydrophobic cores, contacts
between elements, clashes, columns that mutate at their own rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.features import Protein
from mlhpc.workloads.openfold.geometry import Frame, compute_atoms, compute_backbone_frames, compute_group_frames
from mlhpc.workloads.openfold.shard_form import NO_TEMPLATES

Floats = NDArray[np.floating[Any]]

HELIX, STRAND, TURN, AFTER_TURN, LINK = range(5)
TORSIONS = np.array(  # phi and psi of each element, degrees; a turn has two residues (type II')
    [(-63.0, -42.0), (-108.0, 114.0), (81.0, -119.0), (-101.0, 15.0), (-75.0, 145.0)]
)
HELIX_LENGTHS, ARM_LENGTHS, LINK_LENGTHS = (6, 13), (3, 7), (1, 4)  # residues, half-open; a hairpin has two arms
LEADING = 4  # a chain begins with fewer free residues than this
HELIX_STEP = 4  # residues from one end of a helix' hydrogen bond to the other
KINDS = ("KRHNQ", "DESTY", "FWLMI", "AGPVC")  # donors fit acceptors, large residues fit small ones
NOISE = 3.0  # degrees
CHI_NOISE = 8.0
TEMPLATE_NOISE = 9.0
CLADES = 4  # of a family
CLADE_KEEPS = 0.8  # fraction of the root's letters that a clade's ancestor keeps
RELATIVE_KEEPS = (0.3, 0.7)  # lowest and highest fraction of its clade's ancestor's letters that a relative keeps
DRIFT_RATE = 0.02  # fraction of residues replaced by any amino acid, whatever they are coupled with
GAP_RATE, DELETION_RATE = 0.02, 0.02
DECIMALS = 3  # of coordinates in angstrom, as mmCIF files have them
PEPTIDE_BENDS = (residues.CA_C_N, residues.C_N_CA, residues.N_CA_C)

_LETTERS = np.array([[residues.LETTERS.index(letter) for letter in kind] for kind in KINDS], np.int8)


def _amino_acid_chis() -> Floats:
    """Fixed for all data sets: chis (20, 4) of the amino acids, degrees."""
    return np.random.Generator(np.random.Philox(key=[1, 20])).choice([-60.0, 60.0, 180.0], (20, 4))


_CHI = _amino_acid_chis()


@dataclass(frozen=True)
class Families:
    """The distribution of families: chain lengths (inclusive), alignment rows, templates, hairpins per helix."""

    shortest: int
    longest: int
    rows: int
    templates: int = 0
    hairpins_per_helix: int = 1


@dataclass(frozen=True)
class Family:
    """One family before its geometry is built; torsions in degrees."""

    elements: NDArray[np.int8]  # (L,)
    partner: NDArray[np.int64]  # (L,): the residue it is coupled with, itself if there is none
    sequence: NDArray[np.int8]  # (L,)
    mean_torsions: Floats  # (L, 2): phi and psi without noise
    torsions: Floats  # (1 + templates, L, 2)
    chi: Floats  # (1 + templates, L, 4)
    msa: NDArray[np.int8]  # (rows, L)
    deletions: NDArray[np.uint8]  # (rows, L)


def make_proteins(settings: Families, seed: int, numbers: range) -> list[Protein]:
    """Generate the proteins of the family numbers, each a function of (seed, number)."""
    drawn = [make_family(settings, seed, number) for number in numbers]
    copies = 1 + settings.templates
    aatype = [each.sequence for each in drawn for _ in range(copies)]
    torsions = [each.torsions[k] for each in drawn for k in range(copies)]
    chi = [each.chi[k] for each in drawn for k in range(copies)]
    atoms = build_atoms(aatype, torsions, chi)
    return [
        _protein(each, atoms[copies * n : copies * (n + 1)], seed, number)
        for n, (each, number) in enumerate(zip(drawn, numbers, strict=True))
    ]


def make_family(settings: Families, seed: int, number: int) -> Family:
    """Draw one family."""
    rng = np.random.Generator(np.random.Philox(key=[seed, number]))
    length = int(rng.integers(settings.shortest, settings.longest + 1))
    elements, partner = _fold(length, settings.hairpins_per_helix, rng)
    mean = TORSIONS[elements]
    copies = 1 + settings.templates
    noise = np.full(copies, TEMPLATE_NOISE)
    noise[0] = NOISE
    torsions = mean + noise[:, None, None] * rng.standard_normal((copies, length, 2))
    msa, deletions = _alignment(partner, settings.rows, rng)
    sequence = msa[0].copy()
    chi = _CHI[sequence] + CHI_NOISE * rng.standard_normal((copies, length, 4))
    return Family(elements, partner, sequence, mean, torsions, chi, msa, deletions)


def _fold(length: int, hairpins_per_helix: int, rng: np.random.Generator) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Draw the element of each residue and the residue that it is coupled with."""
    elements = np.full(length, LINK, np.int8)
    partner = np.arange(length)
    at = int(rng.integers(LEADING))
    while length - at >= HELIX_LENGTHS[0]:
        room = length - at
        arm = int(rng.integers(ARM_LENGTHS[0], max(min(ARM_LENGTHS[1], room // 2), ARM_LENGTHS[0] + 1)))
        helix = int(rng.integers(HELIX_LENGTHS[0], min(HELIX_LENGTHS[1], room + 1)))
        hairpin = rng.integers(1 + hairpins_per_helix) > 0 and 2 * arm + 2 <= room
        size = 2 * arm + 2 if hairpin else helix
        if hairpin:
            elements[at : at + size] = STRAND
            elements[at + arm : at + arm + 2] = TURN, AFTER_TURN
            first = np.arange(arm)
            second = size - 1 - first
        else:
            elements[at : at + size] = HELIX
            # four residues are coupled with the next four, so that none has two partners
            first = np.flatnonzero(np.arange(size - HELIX_STEP) % (2 * HELIX_STEP) < HELIX_STEP)
            second = first + HELIX_STEP
        partner[at + first], partner[at + second] = at + second, at + first
        at += size + int(rng.integers(*LINK_LENGTHS))
    return elements, partner


def _alignment(
    partner: NDArray[np.int64], rows: int, rng: np.random.Generator
) -> tuple[NDArray[np.int8], NDArray[np.uint8]]:
    """Draw the alignment and its deletions (rows, L), the chain first. All columns have the same distribution."""
    length = len(partner)
    shape = (rows, length)
    kinds, members = _LETTERS.shape
    nodes = (1 + CLADES + rows, length)  # the root, the clades' ancestors, the rows
    first = np.minimum(np.arange(length), partner)  # what happens to both is chosen where a couple begins
    # KINDS come in pairs that fit: the partner's kind is the other one of the pair
    kind = rng.integers(kinds, size=nodes)[:, first] ^ (first < np.arange(length))
    new = _LETTERS[kind, rng.integers(members, size=nodes)]
    # the chain stands where its clade begins
    keeps = np.concatenate([np.full(1 + CLADES, CLADE_KEEPS), [1.0], rng.uniform(*RELATIVE_KEEPS, rows - 1)])
    kept = (rng.random(nodes) < keeps[:, None])[:, first]
    ancestors = np.where(kept[1 : 1 + CLADES], new[0], new[1 : 1 + CLADES])
    msa = np.where(kept[1 + CLADES :], ancestors[rng.integers(CLADES, size=rows)], new[1 + CLADES :])
    msa = np.where(rng.random(shape) < DRIFT_RATE, rng.integers(20, size=shape).astype(np.int8), msa)
    gaps = rng.random(shape) < GAP_RATE
    deletions = np.where(rng.random(shape) < DELETION_RATE, rng.integers(1, 5, shape), 0).astype(np.uint8)
    # the first row is the chain itself
    gaps[0], deletions[0] = False, 0
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
    frames = compute_backbone_frames(torch.nn.functional.pad(backbone, (0, 0, 0, residues.ATOMS - 3)))
    degrees = np.concatenate([np.full((count, longest, 1), 180.0), turns, chis], -1)
    angle = torch.from_numpy(np.stack([np.sin(np.radians(degrees)), np.cos(np.radians(degrees))], -1))
    kinds = torch.from_numpy(types)
    atoms = compute_atoms(kinds, compute_group_frames(kinds, Frame(*frames), angle)).numpy()
    out = []
    for n, each in enumerate(aatype):
        centred = atoms[n, : len(each)]
        centred = (centred - centred[:, residues.CA].mean(0)).round(DECIMALS)
        out.append((centred * residues.ATOM_MASK[each][..., None]).astype(np.float32))
    return out


def build_backbone(torsions: Floats) -> Floats:
    """Build N, CA, C (B, L, 3, 3) of chains with phi and psi (B, L, 2) in degrees. All peptide bonds are trans."""
    batch, length = torsions.shape[:2]
    angle = np.radians(residues.N_CA_C)
    out = np.empty((batch, 3 * length, 3))
    out[:, 0] = residues.N_CA * np.array([np.cos(angle), np.sin(angle), 0])
    out[:, 1], out[:, 2] = 0, (residues.CA_C, 0, 0)
    for place in range(1, length):
        turns = (torsions[:, place - 1, 1], np.full(batch, 180.0), torsions[:, place, 0])
        for k, (bond, bend) in enumerate(zip((residues.C_N, residues.N_CA, residues.CA_C), PEPTIDE_BENDS, strict=True)):
            at = 3 * place + k
            out[:, at] = residues.compute_position(out[:, at - 3], out[:, at - 2], out[:, at - 1], bond, bend, turns[k])
    return out.reshape(batch, length, 3, 3)


def _protein(drawn: Family, atoms: list[NDArray[np.float32]], seed: int, number: int) -> Protein:
    length = len(drawn.sequence)
    mask = residues.ATOM_MASK[drawn.sequence].astype(np.int8)
    templates = NO_TEMPLATES
    if len(atoms) > 1:
        # far ahead in the family's random numbers, where `make_family` never comes
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
