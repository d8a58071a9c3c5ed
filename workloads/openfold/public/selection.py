"""Selects training and validation chains by the rules of the MLPerf HPC benchmark (AlphaFold 2's supplement 1.2.5).

Training: released by a day, in a sequence cluster, no residue more frequent than 80 %. The resolution is better than 9
angstrom or not known. Validation: CAMEO's targets of some months, up to 700 residues.

The table of all protein chains: the benchmark's ``chains.csv``, or made from mmCIF files and a file of clusters.
"""

from __future__ import annotations

import ast
import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.openfold import residues
from mlhpc.workloads.openfold.clusters import group_by_similarity
from mlhpc.workloads.openfold.mmcif import read_entry, read_text

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


WORST_RESOLUTION = 9.0  # angstrom
LARGEST_RESIDUE_SHARE = 0.8
LONGEST_VALIDATION_CHAIN = 700


@dataclass(frozen=True)
class Dates:
    """Days, YYYY-MM-DD, both ends included. The names are those of the log."""

    train_max_pdb_release_date: str = "2021-09-16"
    val_min_cameo_submission_date: str = "2021-09-17"
    val_max_cameo_submission_date: str = "2021-12-11"

    def stated(self) -> dict[str, Any]:
        """Return what a run on these data may log: the days, and the PyTorch loader's order of training chains."""
        return asdict(self) | {"initial_training_dataloader_type": "InitialTrainingDataloaderPT"}


def select_training_chains(records: Sequence[ChainRecord], dates: Dates) -> list[ChainRecord]:
    """Select the chains to train on, in their order."""
    return [
        record
        for record in records
        if record.release_date <= dates.train_max_pdb_release_date
        and not record.resolution >= WORST_RESOLUTION  # nan passes
        and _is_varied(record.sequence)
        and record.cluster != NO_CLUSTER
    ]


def select_validation_chains(
    records: Sequence[ChainRecord], targets: Mapping[str, Sequence[str]], dates: Dates
) -> list[ChainRecord]:
    """Select the chains that are CAMEO's targets of the days, in their order.

    A target names a label of the file, else an author's chain.
    """
    chain_of = {f"{record.entry}_{label}": record.name for record in records for label in record.labels}
    # labels win: an author's name is used only where no label is spelt the same
    for record in records:
        chain_of.setdefault(record.name, record.name)
    wanted = {
        chain_of.get(target)
        for day, names in targets.items()
        if dates.val_min_cameo_submission_date <= day <= dates.val_max_cameo_submission_date
        for target in names
    }
    return [r for r in records if r.name in wanted and len(r.sequence) <= LONGEST_VALIDATION_CHAIN]


def read_targets(path: Path) -> dict[str, list[str]]:
    """Read CAMEO's targets by day of submission: ``{"YYYY-MM-DD": ["7bgg [A]", ...], ...}``.

    Only the text between the first and the last brace is read, as data. So a JSON file and the reference's
    ``cameo_targets.py`` both work. A target is returned as ``7bgg_A``.
    """
    text = read_text(path)
    begin, end = text.find("{"), text.rfind("}")
    try:
        days = ast.literal_eval(text[begin : end + 1])
        return {str(day): [_target(name) for name in names] for day, names in days.items()}
    except (SyntaxError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: expected days with lists of targets like '7bgg [A]': {error}") from None


def _target(text: str) -> str:
    entry, chain = text.split()
    return f"{entry.lower()}_{chain.strip('[]')}"


def _is_varied(sequence: str) -> bool:
    return bool(sequence) and Counter(sequence).most_common(1)[0][1] / len(sequence) <= LARGEST_RESIDUE_SHARE
