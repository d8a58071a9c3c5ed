"""Loads OpenCatalyst batches: structures from the shards, edges and triplets computed while loading.

A stored structure is 37 times smaller than one with its edges. Computing edges takes less time than reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from mlhpc.suite.config import RunConfig
from mlhpc.suite.data.balance import BalancedShares, EvenShares, split_by_sum
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.workloads.open_catalyst.config import OpenCatalystConfig
from mlhpc.workloads.open_catalyst.graph import Edges, join_edges, list_triplets
from mlhpc.workloads.open_catalyst.structures import PER_ATOM, Neighbourhood

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

READ_AT_ONCE = 1 << 16
TRAINING_ARRAYS = ("atom.offsets", "atom.position", "atom.force", "atom.number", "atom.fixed", "cell", "energy")


class OpenCatalystData:
    """One split. A batch is one graph with a part per sample; ``structure`` is the sample of each atom.

    Per atom: ``position``, ``force`` (A, 3), ``number``, ``structure``, ``free`` (1.0 or 0.0). Per sample: ``energy``.
    Per edge: ``source``, ``target``, ``shift`` (E, 3). Per triplet there are ``into``, ``out`` (edge numbers, sorted by
    ``out``) and ``by_into`` (the order by ``into``). ``out_begin`` and ``into_begin`` hold the first triplet of every
    edge in both orders. ``counts`` holds three numbers: free atoms and triplets of the batch, and free atoms of this
    rank's share. They are counted here so that no step waits for the device.
    """

    def __init__(self, root: Path, split: str, config: RunConfig, settings: OpenCatalystConfig) -> None:
        self._reader = ShardReader(root, split)
        self._path = f"{root / split}"
        self._neighbourhood = Neighbourhood(settings.cutoff_angstrom, settings.max_neighbours)
        self._parts = config.gradient_accumulation_steps
        self._shares: EvenShares | None = None  # needed only where a rank's share is not just what it is given
        if settings.balanced_batches and split == "train":
            triplets_S = _triplets(self._reader)
            self._shares = BalancedShares(
                len(triplets_S),
                config.global_batch_size,
                lambda indices, seed, epoch: triplets_S[indices],
                split_by_sum,
            )
        elif self._parts > 1 and split == "train":
            self._shares = EvenShares(len(self._reader), config.global_batch_size)
        check_data(self._reader)

    def __len__(self) -> int:
        return len(self._reader)

    def load(self, indices: Sequence[int] | NDArray[np.integer], *, seed: int, epoch: int) -> Batch:
        """Load the samples of ``indices``. With ``balanced_batches`` load this rank's share of their global batch."""
        chosen = np.asarray(indices, dtype=np.int64)
        all_parts = None
        if self._shares is not None:
            shares, own = self._shares.shares(chosen, seed=seed, epoch=epoch)
            chosen = shares[own]
            if self._parts > 1:
                # the shares of one accumulation step follow those of the one before: this rank's are `ranks` apart
                ranks = max(len(shares) // self._parts, 1)
                all_parts = self._free_atoms(np.concatenate(shares[own % ranks :: ranks]))
        arrays = self._reader.read(chosen, TRAINING_ARRAYS)
        offsets = arrays["atom.offsets"]
        parts = []
        for position_in_batch, index in enumerate(chosen.tolist()):
            atoms = slice(offsets[position_in_batch], offsets[position_in_batch + 1])
            try:
                position = arrays["atom.position"][atoms].astype(np.float64)
                parts.append(self._neighbourhood.edges(position, arrays["cell"][position_in_batch].astype(np.float64)))
            except (ValueError, np.linalg.LinAlgError) as error:
                raise InputError(f"{self._path}: sample {index}: {error}") from None
        return build_batch(
            position=arrays["atom.position"],
            force=arrays["atom.force"],
            number=arrays["atom.number"],
            fixed=arrays["atom.fixed"],
            energy=arrays["energy"],
            lengths=np.diff(offsets),
            edges=parts,
            all_parts=all_parts,
        )

    def _free_atoms(self, samples: NDArray[np.int64]) -> int:
        fixed = self._reader.read(samples, ["atom.offsets", "atom.fixed"])["atom.fixed"]
        return int((fixed == 0).sum())


def build_batch(
    *,
    position: NDArray[np.floating[Any]],
    force: NDArray[np.floating[Any]],
    number: NDArray[np.integer],
    fixed: NDArray[Any],
    energy: NDArray[np.float64],
    lengths: NDArray[np.int64],
    edges: Sequence[Edges],
    all_parts: int | None = None,
) -> Batch:
    """Build the batch described in `OpenCatalystData` from concatenated atoms and the edges of each structure.

    ``all_parts``: the free atoms of all parts of this rank's share; None if the batch is the whole share.
    """
    whole = join_edges(edges, lengths.tolist())
    into, out = list_triplets(whole, len(position))
    # `out` is sorted, so an edge's triplets lie together
    out_begin = np.searchsorted(out, np.arange(len(whole) + 1))
    by_into, into_begin = _transpose(into, out_begin)
    free = (fixed == 0).astype(np.float32)
    batch: dict[str, NDArray[Any]] = {
        "position": position,
        "force": force,
        "number": number.astype(np.int64),
        "structure": np.repeat(np.arange(len(lengths)), lengths),
        "free": free,
        "energy": energy,
        "source": whole.source,
        "target": whole.target,
        "shift": whole.shift.astype(position.dtype),
        "into": into,
        "out": out,
        "by_into": by_into,
        "into_begin": into_begin,
        "out_begin": out_begin,
        "counts": np.array([free.sum(), len(into), free.sum() if all_parts is None else all_parts], dtype=np.int64),
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def check_data(reader: ShardReader) -> None:
    """Check shapes and types of the arrays. InputError if they are not those this workload trains on."""
    per_atom = {f"atom.{name}": (shape, dtype) for name, (dtype, shape) in PER_ATOM.items()}
    reader.require(per_atom | {"cell": ((3, 3), "float32"), "energy": ((), "float64")})


def _transpose(into: NDArray[np.int64], out_begin: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compute the stable order of triplets by first edge and each edge's begin in it, by transposing, not sorting."""
    edges = len(out_begin) - 1
    by_out = csr_array((np.arange(len(into)), into, out_begin), shape=(edges, edges))
    by_into = by_out.tocsc()
    return by_into.data, by_into.indptr.astype(np.int64)


def _triplets(reader: ShardReader) -> NDArray[np.int64]:
    """Read the number of triplets of every sample."""
    pieces = (np.arange(begin, min(begin + READ_AT_ONCE, len(reader))) for begin in range(0, len(reader), READ_AT_ONCE))
    return np.concatenate([reader.read(piece, ["triplets"])["triplets"] for piece in pieces])
