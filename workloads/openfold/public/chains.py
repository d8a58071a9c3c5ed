"""The table of all protein chains: the benchmark's ``chains.csv``, or made from mmCIF files and a file of clusters."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.alignment_files import read_text
from mlhpc.workloads.openfold.clusters import group_by_similarity
from mlhpc.workloads.openfold.mmcif import read_entry

NO_CLUSTER = -1


@dataclass(frozen=True, slots=True)
class ChainRecord:
    """What is known of a chain before its structure is read."""

    entry: str
    chain: str  # the author's name
    labels: tuple[str, ...]  # of all in the file that the author calls so
    release_date: str  # YYYY-MM-DD
    resolution: float  # angstrom; nan: none
    cluster: int  # -1: in none
    sequence: str

    @property
    def name(self) -> str:
        """Return the identifier and author's name of the chain."""
        return f"{self.entry}_{self.chain}"


def read_chains(path: Path) -> list[ChainRecord]:
    """Read ``chains.csv``. InputError names the line."""
    records = []
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    for row in reader:
        try:
            date.fromisoformat(row["release_date"])
            records.append(
                ChainRecord(
                    row["pdb_id"],
                    row["author_chain_id"],
                    tuple(row["mmcif_chain_ids"].split(";")),
                    row["release_date"],
                    float(row["resolution"] or "nan"),
                    int(row["pdb_cluster_id"]),
                    row["sequence"],
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{path}: line {reader.line_num}: not a chain of the benchmark's table: {error!r}"
            ) from None
    if not records:
        raise InputError(f"{path}: line 1: no chains in it")
    return records


@dataclass(frozen=True)
class ChainTable:
    """The chains of a folder of mmCIF files.

    ``unreadable`` counts the files that could not be read and were left out.
    """

    chains: list[ChainRecord]
    unreadable: int
    first_problem: str


def build_chain_table(paths: Sequence[Path], clusters: Mapping[str, int] | None, world: World) -> ChainTable:
    """Make the table from mmCIF files, each read by one rank. All ranks call it and get it whole.

    ``clusters`` are lines of a cluster file by ``<ID>_<ENTITY>``; without them chains are grouped by sequence identity.
    """
    mine: list[tuple[int, list[ChainRecord], str]] = []
    for number in range(world.rank, len(paths), world.size):
        try:
            mine.append((number, _records(paths[number], clusters), ""))
        except InputError as error:
            mine.append((number, [], str(error)))
    parts = world.gather(mine, list[tuple[int, list[ChainRecord], str]])
    # in the order of the files, whatever the number of ranks
    found = sorted(part for rank_parts in parts for part in rank_parts) if parts is not None else []
    result = None
    if world.is_first:
        records = [record for _, each, _ in found for record in each]
        problems = [problem for _, _, problem in found if problem]
        result = ChainTable(
            records if clusters is not None else _add_clusters(records), len(problems), next(iter(problems), "")
        )
    whole: ChainTable = world.broadcast(result, ChainTable)
    return whole


def _records(path: Path, clusters: Mapping[str, int] | None) -> list[ChainRecord]:
    entry = read_entry(path)
    if entry.release_date is None:
        raise InputError(f"{path}: line 1: no revision_date: the day of its release is unknown")
    return [
        ChainRecord(
            entry.name,
            chain.name,
            chain.labels,
            entry.release_date,
            entry.resolution,
            NO_CLUSTER if clusters is None else clusters.get(f"{entry.name}_{chain.entity}".upper(), NO_CLUSTER),
            residues.decode(chain.aatype),
        )
        for chain in entry.chains
    ]


def _add_clusters(records: Sequence[ChainRecord]) -> list[ChainRecord]:
    """Give each record the number of its group of similar sequences."""
    groups = group_by_similarity([residues.encode(record.sequence) for record in records])
    return [replace(record, cluster=group) for record, group in zip(records, groups, strict=True)]
