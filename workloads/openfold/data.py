"""Loads OpenFold batches: proteins from the shards, features computed while loading, padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.suite.data.balance import BalancedShares, split_by_padding
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold.clusters import BY_CLUSTER, SAMPLING, ClusterSampling, compute_weights
from mlhpc.workloads.openfold.config import OpenFoldConfig
from mlhpc.workloads.openfold.features import SLOT_ARRAYS, Arrays, build_sample, choose_recycles
from mlhpc.workloads.openfold.shard_form import ARRAYS, MEASURED_ARRAYS, TEMPLATE_ARRAYS, convert_to_proteins
from mlhpc.workloads.openfold.work import count_forward

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

READ_AT_ONCE = 1 << 16  # samples whose lengths are read by one call


class OpenFoldData:
    """One split: training samples of ``crop_size`` residues, or whole validation chains padded to the batch's longest.

    Names and shapes are those of `features.build_sample` with the sample as first dimension. A batch has as many slots
    as the sample with most recycles. With ``balanced_batches`` training batches are padded to their longest crop only.
    If the data set's `SAMPLING` is `BY_CLUSTER`, an index stands for a chain drawn with replacement
    (`cluster_sampling`).
    """

    def __init__(self, root: Path, split: str, config: OpenFoldConfig, global_batch_size: int) -> None:
        self._reader = ShardReader(root, split)
        self._config, self._split, self._path = config, split, f"{root / split}"
        _check(self._reader, root, split, config)
        self._balance: BalancedShares | None = None
        self._sampling: ClusterSampling | None = None
        weighted = self._reader.manifest.attributes.get(SAMPLING) == BY_CLUSTER
        if split == "train" and (config.balanced_batches or weighted):
            lengths, families = _lengths_and_families(self._reader)
            if weighted:
                self._sampling = ClusterSampling(compute_weights(lengths, families), global_batch_size)
            if config.balanced_batches:
                cost = partial(self._cost, np.minimum(lengths, config.crop_size))
                self._balance = BalancedShares(len(self._reader), global_batch_size, cost, split_by_padding)

    def __len__(self) -> int:
        return len(self._reader)

    def load(self, indices: Sequence[int] | NDArray[np.integer[Any]], *, seed: int, epoch: int) -> Batch:
        """Load the samples of ``indices``. With ``balanced_batches`` load this rank's share of their global batch.

        Every random choice is a function of (seed, epoch, index); epoch 0 is evaluation.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        training = self._split == "train" and epoch > 0
        if training and self._balance is not None:
            chosen = self._balance.share(chosen, seed=seed, epoch=epoch)
        chains = self._drawn(chosen, seed, epoch) if training else chosen
        try:
            proteins = list(convert_to_proteins(self._reader.read(chains)))
        except ValueError as error:
            raise InputError(f"{self._path}: samples {chains.tolist()}: {error}") from None
        length = max(map(len, proteins))
        if training:
            length = self._config.crop_size if self._balance is None else min(length, self._config.crop_size)
        return _collate(
            [
                # random choices follow from the index, whichever chain stands for it
                build_sample(each, self._config, make_generator(seed, epoch, index), length=length, training=training)
                for each, index in zip(proteins, chosen.tolist(), strict=True)
            ]
        )

    def _drawn(self, indices: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the chains that stand for these indices in an epoch: themselves, unless chains are drawn with
        replacement.
        """
        return indices if self._sampling is None else self._sampling.chains(indices, seed=seed, epoch=epoch)

    def _cost(
        self, lengths: NDArray[np.int64], indices: NDArray[np.int64], seed: int, epoch: int
    ) -> NDArray[np.float64]:
        """Compute the work of training on each sample, alone in a batch."""
        config = self._config
        recycles = [choose_recycles(config, make_generator(seed, epoch, index)) for index in indices.tolist()]
        cropped = lengths[self._drawn(indices, seed, epoch)].tolist()
        return np.array([compute_batch_work(config, 1, *each) for each in zip(cropped, recycles, strict=True)])


def make_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Create the random generator of one sample in one epoch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, index])))


def _lengths_and_families(reader: ShardReader) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Read the number of residues and the family of every sample."""
    lengths, families = [], []
    for begin in range(0, len(reader), READ_AT_ONCE):
        piece = np.arange(begin, min(begin + READ_AT_ONCE, len(reader)))
        read = reader.read(piece, ["residue.offsets", "family"])
        lengths.append(np.diff(read["residue.offsets"]))
        families.append(read["family"])
    return np.concatenate(lengths), np.concatenate(families)


def compute_batch_work(config: OpenFoldConfig, samples: int, residues: int, recycles: int) -> float:
    """Compute the multiply-adds of a training batch: recycles, then forward, then backward (twice forward)."""
    return samples * _multiply_adds(config, residues) * (recycles + 3)


@cache
def _multiply_adds(config: OpenFoldConfig, residues: int) -> float:
    return count_forward(config, residues=residues).multiply_adds


def _collate(samples: Sequence[Arrays]) -> Batch:
    """Stack the samples of a batch, each padded to the slots of the sample with most recycles."""
    slots = 1 + max(int(each["recycles"]) for each in samples)
    batch = {}
    for name in samples[0]:
        batch[name] = torch.from_numpy(np.stack([_pad_to_slots(each, name, slots) for each in samples]))
    return batch


def _pad_to_slots(arrays: Arrays, name: str, slots: int) -> NDArray[Any]:
    """Pad a sample's array at the front to its batch's slots.

    All samples of a batch end with the same iteration.
    """
    array = arrays[name]
    if name not in SLOT_ARRAYS or len(array) == slots:
        return array
    return np.concatenate([np.repeat(array[:1], slots - len(array), 0), array])


def _check(reader: ShardReader, root: Path, split: str, config: OpenFoldConfig) -> None:
    """Check the arrays and the longest validation chain. InputError if this workload cannot train on them."""
    reader.require(ARRAYS)
    reader.require(TEMPLATE_ARRAYS if "template.offsets" in reader.names else {})
    reader.require(MEASURED_ARRAYS if "resolution" in reader.names else {})
    longest = int(reader.manifest.attributes.get(f"{split}_longest", 0))
    if split == "validation" and longest > config.val_max_sequence_length:
        raise InputError(
            f"{root}: a validation chain has {longest} residues, "
            f"more than val_max_sequence_length {config.val_max_sequence_length}"
        )
