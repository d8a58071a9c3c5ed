"""Selects training and validation chains by the rules of the MLPerf HPC benchmark (AlphaFold 2's supplement 1.2.5).

Training: released by a day, in a sequence cluster, no residue more frequent than 80 %. The resolution is better than 9
angstrom or not known. Validation: CAMEO's targets of some months, up to 700 residues.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlhpc.suite.errors import InputError
from mlhpc.workloads.openfold.alignment_files import read_text
from mlhpc.workloads.openfold.public.chains import NO_CLUSTER, ChainRecord

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
