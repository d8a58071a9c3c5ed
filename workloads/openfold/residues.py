"""The twenty amino acids: names, heavy atoms, torsions, ideal geometry as arrays. Numpy only.

Side chains are built from bond lengths, angles and dihedrals (mean values of Engh & Huber 1991, Acta Cryst. A47, 392)
with every chi at zero. Atoms belong to eight rigid groups of AlphaFold 2 (Jumper et al. 2021, supplement table 2):
backbone, pre-omega, phi, psi, chi 1 to 4. Arrays are indexed by residue type. Type 20 is unknown. It has the backbone
and a CB, as most types do.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError

Floats = NDArray[np.floating[Any]]

LETTERS: Final = "ARNDCQEGHILKMFPSTWYV"
NAMES: Final = (  # in the order of LETTERS
    "ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE",
    "LEU", "LYS", "MET", "PHE", "PRO", "SER", "THR", "TRP", "TYR", "VAL",
)  # fmt: skip
GLYCINE: Final = LETTERS.index("G")
UNKNOWN: Final = 20
GAP: Final = 21
MASKED: Final = 22
RESIDUE_CLASSES: Final = 21
MSA_CLASSES: Final = 23
ATOMS: Final = 14  # most heavy atoms a residue has
GROUPS: Final = 8
N, CA, C, OXYGEN, CB = range(5)

N_CA, CA_C, N_CA_C = 1.459, 1.525, 111.0
C_N, CA_C_N, C_N_CA = 1.329, 116.6, 121.7  # the peptide bond
C_O, CA_C_O = 1.231, 120.5
CA_CB, C_CA_CB, N_C_CA_CB = 1.530, 110.1, 122.8

# per atom: name, bonded atom, the two before it, length (angstrom), angle, dihedral (degrees); *: a chi turns it
_SIDE_CHAINS: Final = {
    "ARG": """CG* CB CA N 1.520 113.9 0; CD* CG CB CA 1.520 111.7 0; NE* CD CG CB 1.460 111.7 0;
              CZ* NE CD CG 1.330 124.7 0; NH1 CZ NE CD 1.328 120.0 0; NH2 CZ NE CD 1.328 119.7 180""",
    "ASN": "CG* CB CA N 1.516 112.7 0; OD1* CG CB CA 1.231 120.8 0; ND2 CG CB CA 1.328 116.5 180",
    "ASP": "CG* CB CA N 1.518 113.0 0; OD1* CG CB CA 1.250 119.2 0; OD2 CG CB CA 1.250 118.2 180",
    "CYS": "SG* CB CA N 1.806 113.8 0",
    "GLN": """CG* CB CA N 1.522 113.8 0; CD* CG CB CA 1.517 112.8 0; OE1* CD CG CB 1.235 120.9 0;
              NE2 CD CG CB 1.328 116.5 180""",
    "GLU": """CG* CB CA N 1.522 113.8 0; CD* CG CB CA 1.521 113.3 0; OE1* CD CG CB 1.251 119.0 0;
              OE2 CD CG CB 1.251 118.1 180""",
    "HIS": """CG* CB CA N 1.497 113.7 0; ND1* CG CB CA 1.378 122.7 0; CD2 CG CB CA 1.354 131.0 180;
              CE1 ND1 CG CB 1.321 109.0 180; NE2 CD2 CG CB 1.373 107.2 180""",
    "ILE": "CG1* CB CA N 1.533 110.4 0; CG2 CB CA N 1.531 110.6 -123.2; CD1* CG1 CB CA 1.521 114.0 0",
    "LEU": "CG* CB CA N 1.532 116.3 0; CD1* CG CB CA 1.525 110.3 0; CD2 CG CB CA 1.525 110.5 122.8",
    "LYS": """CG* CB CA N 1.522 114.0 0; CD* CG CB CA 1.522 111.5 0; CE* CD CG CB 1.522 111.6 0;
              NZ* CE CD CG 1.493 111.8 0""",
    "MET": "CG* CB CA N 1.521 113.8 0; SD* CG CB CA 1.833 112.5 0; CE* SD CG CB 1.813 100.2 0",
    "PHE": """CG* CB CA N 1.505 113.8 0; CD1* CG CB CA 1.389 120.7 0; CD2 CG CB CA 1.389 120.6 180;
              CE1 CD1 CG CB 1.392 120.7 180; CE2 CD2 CG CB 1.392 120.7 180; CZ CE1 CD1 CG 1.383 120.0 0""",
    "PRO": "CG* CB CA N 1.495 104.8 0; CD* CG CB CA 1.502 108.5 0",
    "SER": "OG* CB CA N 1.417 110.8 0",
    "THR": "OG1* CB CA N 1.433 109.2 0; CG2 CB CA N 1.525 111.1 -120.3",
    "TRP": """CG* CB CA N 1.499 113.9 0; CD1* CG CB CA 1.367 127.1 0; CD2 CG CB CA 1.431 126.6 180;
              NE1 CD1 CG CB 1.375 110.2 180; CE2 CD2 CG CB 1.412 107.1 180; CE3 CD2 CG CB 1.401 133.9 0;
              CZ2 CE2 CD2 CG 1.398 122.4 180; CZ3 CE3 CD2 CG 1.389 118.7 180; CH2 CZ2 CE2 CD2 1.371 117.5 0""",
    "TYR": """CG* CB CA N 1.510 113.8 0; CD1* CG CB CA 1.393 120.9 0; CD2 CG CB CA 1.390 120.8 180;
              CE1 CD1 CG CB 1.391 121.0 180; CE2 CD2 CG CB 1.391 121.0 180; CZ CE1 CD1 CG 1.384 119.6 0;
              OH CZ CE1 CD1 1.377 119.8 180""",
    "VAL": "CG1* CB CA N 1.527 110.7 0; CG2 CB CA N 1.527 110.4 122.8",
}  # fmt: skip
_CB_OF: Final = {"PRO": (1.531, 110.9, 115.3)}  # the ring changes its angles
# the 0-based chi that a half turn leaves unchanged
_PI_PERIODIC: Final = {"ASP": 1, "GLU": 2, "PHE": 1, "TYR": 1}
# pairs of chemically equivalent atoms, by the names that a file may exchange
_SWAPS: Final = {
    "ASP": (("OD1", "OD2"),),
    "GLU": (("OE1", "OE2"),),
    "PHE": (("CD1", "CD2"), ("CE1", "CE2")),
    "TYR": (("CD1", "CD2"), ("CE1", "CE2")),
}


def compute_position(
    a: Floats, b: Floats, c: Floats, length: float, angle: Floats | float, dihedral: Floats | float
) -> Floats:
    """Compute the position of an atom bonded to ``c`` (..., 3): angle b-c-atom, dihedral a-b-c-atom in degrees."""
    theta, phi = np.radians(angle), np.radians(dihedral)
    axis = c - b
    axis = axis / np.linalg.norm(axis, axis=-1, keepdims=True)
    normal = np.cross(b - a, axis)
    normal = normal / np.linalg.norm(normal, axis=-1, keepdims=True)
    inward = np.cross(normal, axis)
    along, across, up = -np.cos(theta), np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi)
    return np.asarray(
        c + length * (along * axis + np.expand_dims(across, -1) * inward + np.expand_dims(up, -1) * normal)
    )


def _frame(x_axis: Floats, xy: Floats, origin: Floats) -> Floats:
    """Build a 4 x 4 frame: the first axis along ``x_axis``, the second towards ``xy``."""
    first = x_axis / np.linalg.norm(x_axis)
    second = xy - (xy @ first) * first
    second /= np.linalg.norm(second)
    out = np.eye(4)
    out[:3, 0], out[:3, 1], out[:3, 2], out[:3, 3] = first, second, np.cross(first, second), origin
    return out


class _ResidueArrays:
    """The arrays of this module, filled residue type by residue type."""

    def __init__(self) -> None:
        self.atom_names: list[tuple[str, ...]] = [("",) * ATOMS for _ in range(RESIDUE_CLASSES)]
        self.atom_mask = np.zeros((RESIDUE_CLASSES, ATOMS), np.float32)
        self.atom_group = np.zeros((RESIDUE_CLASSES, ATOMS), np.int64)
        self.atom_position = np.zeros((RESIDUE_CLASSES, ATOMS, 3), np.float32)
        self.group_frame = np.tile(np.eye(4, dtype=np.float32), (RESIDUE_CLASSES, GROUPS, 1, 1))
        self.chi_atoms = np.zeros((RESIDUE_CLASSES, 4, 4), np.int64)
        self.chi_mask = np.zeros((RESIDUE_CLASSES, 4), np.float32)
        self.chi_periodic = np.zeros((RESIDUE_CLASSES, 4), np.float32)
        self.swap = np.tile(np.arange(ATOMS), (RESIDUE_CLASSES, 1))
        for residue in range(RESIDUE_CLASSES):
            self._fill(residue, NAMES[residue] if residue < UNKNOWN else "UNK")

    def _fill(self, residue: int, name: str) -> None:
        atoms, group, chis = _residue(name)
        names = list(atoms)
        self.atom_names[residue] = tuple(names + [""] * (ATOMS - len(names)))
        # pre-omega (1) has no atoms, and its frame stays the backbone's
        frames: list[Floats] = [np.eye(4)] * GROUPS
        frames[2] = _frame(atoms["N"] - atoms["CA"], np.array([1.0, 0, 0]), atoms["N"])
        frames[3] = _frame(atoms["C"] - atoms["CA"], atoms["CA"] - atoms["N"], atoms["C"])
        for number, (first, second, third, _) in enumerate(chis):
            frames[4 + number] = _frame(atoms[third] - atoms[second], atoms[first] - atoms[second], atoms[third])
            self.chi_atoms[residue, number] = [names.index(each) for each in chis[number]]
            self.chi_mask[residue, number] = 1
        for number, atom in enumerate(names):
            frame = frames[group[atom]]
            self.atom_mask[residue, number] = 1
            self.atom_group[residue, number] = group[atom]
            self.atom_position[residue, number] = frame[:3, :3].T @ (atoms[atom] - frame[:3, 3])
        for number in range(GROUPS):  # chi 2 to 4 are attached to the group before them, all others to the backbone
            before = frames[number - 1] if number > 4 else np.eye(4)
            self.group_frame[residue, number] = np.linalg.inv(before) @ frames[number]
        if name in _PI_PERIODIC:
            self.chi_periodic[residue, _PI_PERIODIC[name]] = 1
        for one, other in _SWAPS.get(name, ()):
            i, j = names.index(one), names.index(other)
            self.swap[residue, [i, j]] = [j, i]


def _residue(name: str) -> tuple[dict[str, Floats], dict[str, int], list[tuple[str, str, str, str]]]:
    """Compute the atoms in the backbone frame with every torsion at zero, each atom's group, and each chi's atoms."""
    angle = np.radians(N_CA_C)
    atoms: dict[str, Floats] = {
        "N": N_CA * np.array([np.cos(angle), np.sin(angle), 0.0]),
        "CA": np.zeros(3),
        "C": np.array([CA_C, 0.0, 0.0]),
    }
    atoms["O"] = compute_position(atoms["N"], atoms["CA"], atoms["C"], C_O, CA_C_O, 180.0)
    group = dict.fromkeys(atoms, 0) | {"O": 3}
    chis: list[tuple[str, str, str, str]] = []
    if name == "GLY":
        return atoms, group, chis
    to_cb = _CB_OF.get(name, (CA_CB, C_CA_CB, N_C_CA_CB))
    atoms["CB"], group["CB"] = compute_position(atoms["N"], atoms["C"], atoms["CA"], *to_cb), 0
    for line in filter(None, _SIDE_CHAINS.get(name, "").split(";")):
        label, third, second, first, *numbers = line.split()
        atom = label.rstrip("*")
        if label.endswith("*"):
            chis.append((first, second, third, atom))
        length, bend, turn = map(float, numbers)
        atoms[atom], group[atom] = (
            compute_position(atoms[first], atoms[second], atoms[third], length, bend, turn),
            3 + len(chis),
        )
    return atoms, group, chis


_table = _ResidueArrays()
ATOM_NAMES = tuple(_table.atom_names)
ATOM_MASK = _table.atom_mask  # (21, 14)
ATOM_GROUP = _table.atom_group  # (21, 14)
ATOM_POSITION = _table.atom_position  # (21, 14, 3) in the frame of the atom's group
GROUP_FRAME = _table.group_frame  # (21, 8, 4, 4) to the group it hangs on, torsion zero
CHI_ATOMS = _table.chi_atoms  # (21, 4, 4)
CHI_MASK = _table.chi_mask  # (21, 4)
# (21, 5, 3): of psi's and the chis' groups the atoms behind, at and beside the origin of the frame
FRAME_ATOMS = np.concatenate([np.tile([CA, C, OXYGEN], (RESIDUE_CLASSES, 1, 1)), CHI_ATOMS[:, :, 1:]], 1)
CHI_PERIODIC = _table.chi_periodic  # (21, 4)
TORSION_SIGN = np.array([1, 1, -1, 1, 1, 1, 1], np.float32)  # psi's oxygen is opposite to the next nitrogen
SWAP = _table.swap  # (21, 14) the other naming of the same atoms
_AMBIGUOUS = np.flatnonzero((np.arange(ATOMS) != SWAP).any(0))
SWAPPED = (int(_AMBIGUOUS[0]), int(_AMBIGUOUS[-1]) + 1)  # half-open range of the atom slots with two names


def encode(sequence: str) -> NDArray[np.int8]:
    """Convert a chain's letters to residue types; B, J, O, U, X, Z are unknown, '-' is a gap.

    InputError names another letter.
    """
    return _encode(sequence.encode("utf-8"), _CODES)


def encode_aligned(columns: bytes) -> NDArray[np.int8]:
    """Convert a row of an alignment as HHblits does. B is D, U is C, Z is E; J, O, X are unknown."""
    return _encode(columns, _ALIGNED_CODES)


def decode(types: NDArray[np.integer[Any]]) -> str:
    """Convert residue types to letters."""
    return "".join((LETTERS + "X-")[each] for each in types.tolist())


def _encode(letters: bytes, codes: NDArray[np.int8]) -> NDArray[np.int8]:
    out = codes[np.frombuffer(letters, np.uint8)]
    if (out < 0).any():
        place_of = int(np.argmax(out < 0))
        letter = letters[place_of : place_of + 1].decode("ascii", errors="backslashreplace")
        raise InputError(f"column {place_of + 1}: {letter!r} is not an amino acid")
    return out


def _codes(other: dict[str, int]) -> NDArray[np.int8]:
    """Tabulate the residue type of each byte; -1: none."""
    table = np.full(256, -1, np.int8)
    for letter, number in ({letter: number for number, letter in enumerate(LETTERS)} | other | {"-": GAP}).items():
        table[ord(letter)] = number
    return table


_CODES = _codes(dict.fromkeys("BJOUXZ", UNKNOWN))
_ALIGNED_CODES = _codes(
    dict.fromkeys("JOX", UNKNOWN) | {letter: LETTERS.index(of) for letter, of in ("BD", "UC", "ZE")}
)
