"""Converts mmCIF structures with A3M alignments to shards. Downloads nothing, runs no code from the files."""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlhpc.suite.data.build import SPLITS, Arrays, DataSetPlan, Progress, ShardPlan, build_data_set
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import make_folder, write_file_atomically
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.clusters import BY_CLUSTER, SAMPLING, group_by_similarity, read_clusters
from mlhpc.workloads.openfold.features import Protein
from mlhpc.workloads.openfold.mmcif import read_a3m, read_chain, read_fasta
from mlhpc.workloads.openfold.public.layout import PublicData, is_public, open_public
from mlhpc.workloads.openfold.public.selection import ChainRecord, Dates
from mlhpc.workloads.openfold.shard_form import NO_TEMPLATES, build_shard_arrays
from mlhpc.workloads.openfold.summary import Summary, compute_attributes, compute_measures, summarise

CONVERTER_VERSION = 2  # raised when the same files give other shards
CHAINS_PER_SHARD = 32  # with deep alignments and 20 templates some 10 MB each
VALIDATION_EVERY = 9  # if a folder has no splits, every ninth group of similar chains
CLUSTERS = "clusters.txt"
CHAIN_IN_NAME = re.compile(r"^[0-9][0-9a-zA-Z]{3}_([0-9a-zA-Z]+)$")  # 1abc_A: the chain of an entry
WHERE_THE_DATA_ARE = (
    "openfold: the public data are not downloaded here, because compute nodes have no internet: structures are at "
    "https://files.rcsb.org (mmCIF), alignments in OpenProteinSet (s3://openfold, A3M), both preprocessed at "
    "https://portal.nersc.gov/cfs/m4291/openfold/. With a file of CAMEO's targets beside them: "
    "mlhpc data convert openfold FOLDER. "
    "Chains of your own: FOLDER/train and FOLDER/validation with <entry>_<chain>.cif and .a3m or .fasta beside it. "
    "For thirteen real structures to try: pip download --no-deps --no-binary :all: biopython==1.88, then "
    "mlhpc data fetch openfold --from biopython-1.88.tar.gz -o FOLDER"
)
SAMPLE_ARCHIVE = "biopython-1.88"
SAMPLE_SHA256 = "9aaa31c0bda4d059f7b2ee00bfdb5cbb73ade3057aa4b737a7cc0187091d071a"
SAMPLES = tuple("1A7G 1A8O 1GBT 1LCD 2BEG 2OFG 2XHE 3JQH 4CUP 4ZHL 6WG6 6WQA 7CFN".split())  # noqa: SIM905  names


def convert(
    source: Path, root: Path, *, world: World, size: str | None = None, progress: Progress | None = None
) -> None:
    """Convert the public data in one of their layouts (`public.layout`), or a folder of structures, to shards.

    A folder of structures has ``*.cif`` files, each with an optional ``.a3m`` or ``.fasta`` of the same name. Without
    one the chain is its only row. ``1abc_A.cif`` means chain A; with any other name the first chain is used.

    Subfolders ``train`` and ``validation`` are the splits; without them every ninth group of similar chains goes to
    validation. ``clusters.txt`` has the names of similar chains on one line; without it sequences are compared.
    """
    make = _plan_public if is_public(source) else _plan_folder
    problem, plan = None, None
    try:
        plan = make(source, size or "full", world)
    except (OSError, ValueError) as error:
        problem = error
    # a rank that went on alone would wait in the next collective for one that has failed
    world.check_together(problem)
    assert plan is not None
    build_data_set(root, plan, world, progress)


def _plan_public(source: Path, size: str, world: World) -> DataSetPlan[Summary]:
    data = open_public(source, Dates(), world)
    recipe = {"name": "public", "version": CONVERTER_VERSION, "source": str(source), **data.stated, **data.facts}
    pieces = []
    for split in SPLITS:
        records, families = data.chains[split], data.families(split)
        for shard, begin in enumerate(range(0, len(records), CHAINS_PER_SHARD)):
            part = slice(begin, begin + CHAINS_PER_SHARD)
            pieces.append(ShardPlan(split, shard, partial(_public_shard, data, records[part], families[part])))

    def described(splits: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
        return compute_measures(splits) | data.stated | data.facts | {SAMPLING: BY_CLUSTER}

    return DataSetPlan("openfold", size, 0, recipe, pieces, summarise, described)


def _public_shard(data: PublicData, records: Sequence[ChainRecord], families: Sequence[int]) -> Arrays:
    return build_shard_arrays([data.protein(record) for record in records], families, measured=True)


def _plan_folder(source: Path, size: str, world: World) -> DataSetPlan[Summary]:
    files: dict[str, list[tuple[Path, int]]] = world.compute_on_first(
        partial(_list_files, source), dict[str, list[tuple[Path, int]]]
    )
    recipe: dict[str, Any] = {
        "name": "converted",
        "version": CONVERTER_VERSION,
        "source": str(source),
        "files": {split: len(paths) for split, paths in files.items()},
    }
    pieces = []
    for split in SPLITS:
        for shard, begin in enumerate(range(0, len(files[split]), CHAINS_PER_SHARD)):
            chosen = files[split][begin : begin + CHAINS_PER_SHARD]
            pieces.append(ShardPlan(split, shard, partial(_shard, chosen)))
    return DataSetPlan("openfold", size, 0, recipe, pieces, summarise, compute_attributes)


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Extract real structures to try the reader on: mmCIF files in Biopython's source archive, whose sha256 is pinned.

    ``source`` is that archive on this machine. InputError without it, or for a URL; it says where to get the data.
    """
    if source is None or "://" in source:
        raise InputError(WHERE_THE_DATA_ARE)
    archive = Path(source)
    try:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{archive}: cannot be read: {error.strerror}") from None
    if digest != SAMPLE_SHA256:
        raise InputError(f"{archive}: sha256 is {digest}, expected {SAMPLE_SHA256} of {SAMPLE_ARCHIVE}.tar.gz")
    make_folder(destination)
    with tarfile.open(archive) as tar:
        for name in SAMPLES:
            member = tar.extractfile(f"{SAMPLE_ARCHIVE}/Tests/PDB/{name}.cif")
            # the archive's sha256 is pinned, so it has all of them
            assert member is not None
            write_file_atomically(destination / f"{name}.cif", member.read())


def read_protein(path: Path) -> Protein:
    """Read one mmCIF file and its alignment, if any. InputError names file, line and what was expected."""
    match = CHAIN_IN_NAME.match(path.stem)
    entry, chain = read_chain(path, match.group(1) if match else None)
    msa, deletions = chain.aatype[None], np.zeros((1, len(chain.aatype)), np.uint8)
    a3m, fasta = path.with_suffix(".a3m"), path.with_suffix(".fasta")
    if a3m.exists():
        msa, deletions = read_a3m(a3m)
        _same_sequence(a3m, msa[0], path, chain.aatype)
    elif fasta.exists():
        _, text = read_fasta(fasta)[0]
        try:
            _same_sequence(fasta, residues.encode(text), path, chain.aatype)
        except ValueError as error:
            # `_same_sequence` names the file in its error, `residues.encode` does not
            raise InputError(f"{error}" if str(error).startswith(str(fasta)) else f"{fasta}: line 1: {error}") from None
    known = chain.residue_index, chain.atoms, chain.atom_mask
    return Protein(chain.aatype, *known, msa, deletions, *NO_TEMPLATES, resolution=entry.resolution)


def _same_sequence(path: Path, sequence: Any, structure: Path, aatype: Any) -> None:
    if len(sequence) != len(aatype):
        raise InputError(f"{path}: line 1: {len(sequence)} residues, but {len(aatype)} in {structure.name}")
    different = np.flatnonzero((sequence != aatype) & (sequence < residues.UNKNOWN) & (aatype < residues.UNKNOWN))
    if len(different):
        index = int(different[0])
        letters = residues.LETTERS
        raise InputError(
            f"{path}: line 1: residue {index + 1} is {letters[sequence[index]]}, "
            f"but {letters[aatype[index]]} in {structure.name}"
        )


def _list_files(source: Path) -> dict[str, list[tuple[Path, int]]]:
    """List the files of each split, each with the number of its family."""
    if not source.is_dir():
        raise InputError(f"{source}: expected a folder of *.cif files")
    files = {split: sorted((source / split).glob("*.cif")) for split in SPLITS}
    if any(files.values()):
        families = _families(source, [path for paths in files.values() for path in paths])
    else:
        families = _families(source, sorted(source.glob("*.cif")))
        files = _split_files(families)
    for split in SPLITS:
        if not files[split]:
            raise InputError(f"{source}: no *.cif file for the {split} split")
    return {split: [(path, families[path]) for path in paths] for split, paths in files.items()}


def _split_files(families: Mapping[Path, int]) -> dict[str, list[Path]]:
    """Divide files by family: every ninth family is held out for validation, or the last one of a few."""
    groups = list(dict.fromkeys(families.values()))
    held_out = set(groups[VALIDATION_EVERY - 1 :: VALIDATION_EVERY] or groups[-1:])
    files: dict[str, list[Path]] = {"train": [], "validation": []}
    for path, family in families.items():
        files["validation" if family in held_out else "train"].append(path)
    return files


def _families(source: Path, files: Sequence[Path]) -> dict[Path, int]:
    """Number the groups of similar chains, by ``clusters.txt`` if it is there, which then names every file."""
    listed = source / CLUSTERS
    if not listed.exists():
        return dict(zip(files, group_by_similarity([read_protein(path).aatype for path in files]), strict=True))
    lines = read_clusters(listed)
    missing = [path.stem for path in files if path.stem.upper() not in lines]
    if missing:
        raise InputError(
            f"{listed}: {missing[0]} is on no line, nor are {len(missing) - 1} more; expected every *.cif file's name"
        )
    return {path: lines[path.stem.upper()] for path in files}


def _shard(files: Sequence[tuple[Path, int]]) -> Arrays:
    proteins, families = [read_protein(path) for path, _ in files], [family for _, family in files]
    return build_shard_arrays(proteins, families, measured=True)
