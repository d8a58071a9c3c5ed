"""Benchmark suite for AI on supercomputers. This module is its Python API: the names in `__all__` are stable, all else
may change.

Importing it loads nothing heavy; a name loads what it needs when it is first used. docs/api.md describes every name.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from analysis.loaded import Results as Results
    from suite.compliance.check import Verdict as Verdict
    from suite.config import Hyperparameters as Hyperparameters
    from suite.config import RunConfig as RunConfig
    from suite.data.build import SPLITS as SPLITS
    from suite.data.generate import Generator as Generator
    from suite.data.generate import Synthetic as Synthetic
    from suite.data.sampling import draws as draws
    from suite.data.shards import ShardReader as ShardReader
    from suite.descriptor import Descriptor as Descriptor
    from suite.errors import InputError as InputError
    from suite.training.own.run import Run as Run
    from suite.workload import UPDATE_FLOPS as UPDATE_FLOPS
    from suite.workload import Dataset as Dataset
    from suite.workload import Optimization as Optimization
    from suite.workload import Work as Work
    from suite.workload import Workload as Workload
    from suite.world import World as World

Place = str | Path

_ELSEWHERE = {  # name: the module that has it
    "__version__": "suite:VERSION",
    # results
    "Results": "analysis.loaded",
    "Verdict": "suite.compliance.check",
    "InputError": "suite.errors",
    # a loop of one's own
    "Run": "suite.training.own.run",
    # a workload of one's own
    "Descriptor": "suite.descriptor",
    "Hyperparameters": "suite.config",
    "Workload": "suite.workload",
    "Dataset": "suite.workload",
    "Optimization": "suite.workload",
    "Work": "suite.workload",
    "UPDATE_FLOPS": "suite.workload",
    "RunConfig": "suite.config",
    "World": "suite.world",
    "Generator": "suite.data.generate",
    "Synthetic": "suite.data.generate",
    "ShardReader": "suite.data.shards",
    "SPLITS": "suite.data.build",
    "draws": "suite.data.sampling",
}
__all__ = ["check", "compare", "load", "published", "score", *_ELSEWHERE]


def load(*paths: Place, cards: Sequence[Place] = ()) -> Results:
    """Load results: run folders, packages, rounds, logs, or patterns such as ``"runs/*"``; ceilings and sweeps beside
    them.

    ``cards`` are the files of card-only benchmarks. InputError for a path that does not exist, or if there is no log.
    """
    from analysis.loaded import Results

    return Results(paths, cards)


def check(*paths: Place, ruleset: str | None = None, cards: Sequence[Place] = ()) -> Verdict:
    """Check logs, run folders, packages or rounds, as ``mlhpc check`` does. Reads only.

    Of the verdict, ``compliant`` is a bool, ``findings`` have rule, severity, file, line and message, and ``rulesets``
    names what they were judged by. ``ruleset`` is for all paths; by default each is judged by that of its round.
    InputError for a path that does not exist.
    """
    from suite.compliance.check import check
    from suite.descriptor import use_cards

    with use_cards(map(Path, cards)):
        return check(_existing(paths), _known(ruleset))


def score(*paths: Place, ruleset: str | None = None, cards: Sequence[Place] = ()) -> list[dict[str, Any]]:
    """Score every result at the paths: for each the fields of ``mlhpc score --format json``, times in minutes.

    ``valid`` is true for the score of a compliant result; ``reason`` says why it is not. InputError for a path that
    does not exist.
    """
    from suite.compliance.check import check
    from suite.compliance.exchange.result_document import build_result_documents
    from suite.descriptor import use_cards

    with use_cards(map(Path, cards)):
        return build_result_documents(check(_existing(paths), _known(ruleset)).results)


def compare(
    a: Place, *others: Place, tolerance: float = 0.0, any_runs: bool = False, cards: Sequence[Place] = ()
) -> list[dict[str, Any]]:
    """Compare the results at ``others`` with those at ``a``: for each pair the fields of ``mlhpc compare --format
    json``.

    ``verdict`` is faster, slower, equivalent or inconclusive; ``ratio`` is the time of the other over that of ``a``,
    with its ``interval``. ``tolerance`` is in percent; ``any_runs`` compares runs that are no score too. InputError if
    they have no benchmark and size in common.
    """
    from suite.commands.compare import compare_results, convert_to_data
    from suite.descriptor import use_cards
    from suite.errors import InputError

    if not others:
        raise InputError("mlhpc.compare(a, b): give at least two results")
    first, *rest = _existing((a, *others))
    with use_cards(map(Path, cards)):
        return [convert_to_data(item) for item in compare_results(first, rest, tolerance, any_runs=any_runs)[0]]


def published() -> pd.DataFrame:
    """The published MLPerf HPC results that ship with the suite, one row per result; times in seconds (docs/tables.md)."""
    from analysis.published.scores import read_scores

    return read_scores().copy()


def _known(ruleset: str | None) -> str | None:
    """A name of a ruleset; InputError for an unknown one."""
    from suite.compliance.ruleset import read_ruleset as read

    return ruleset if ruleset is None else read(ruleset).name


def _existing(paths: Sequence[Place]) -> list[Path]:
    from suite.errors import InputError
    from suite.files import convert_to_path

    if not paths:
        raise InputError("expected at least one path: a log, a run folder, a package or a round")
    found = [convert_to_path(path) for path in paths]
    missing = next((path for path in found if not path.exists()), None)
    if missing is not None:
        raise InputError(f"{missing}: does not exist; expected a log, a run folder, a package or a round")
    return found


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'mlhpc' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = _ELSEWHERE[name].partition(":")
    found = globals()[name] = getattr(importlib.import_module(module), attribute or name)
    return found


def __dir__() -> list[str]:
    return __all__
