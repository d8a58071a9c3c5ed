"""Benchmark suite for AI on supercomputers. This module is its Python API: the names in `__all__` are stable, all else
may change.

Importing it loads nothing: a name loads what it needs when it is first used. docs/api.md describes every name. The
folders `suite`, `workloads`, `analysis` and `submissions` beside this file are links to those of the checkout.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own could be hidden by PYTHONPATH, which the command line explains
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any, TypeVar

    import pandas as pd

    from mlhpc.analysis.api import Results as Results
    from mlhpc.suite.compliance.check import Verdict as Verdict
    from mlhpc.suite.config import Hyperparameters as Hyperparameters
    from mlhpc.suite.config import RunConfig as RunConfig
    from mlhpc.suite.data.build import SPLITS as SPLITS
    from mlhpc.suite.data.build import Generator as Generator
    from mlhpc.suite.data.build import Synthetic as Synthetic
    from mlhpc.suite.data.sampling import draws as draws
    from mlhpc.suite.data.shards import ShardReader as ShardReader
    from mlhpc.suite.descriptor import Descriptor as Descriptor
    from mlhpc.suite.errors import InputError as InputError
    from mlhpc.suite.training.own.run import Run as Run
    from mlhpc.suite.workload import UPDATE_FLOPS as UPDATE_FLOPS
    from mlhpc.suite.workload import Dataset as Dataset
    from mlhpc.suite.workload import Optimization as Optimization
    from mlhpc.suite.workload import Work as Work
    from mlhpc.suite.workload import Workload as Workload
    from mlhpc.suite.world import World as World

    Place = str | Path
    Call = TypeVar("Call", bound=Callable[..., Any])

_ELSEWHERE = {  # name: the module that has it
    "__version__": "mlhpc.suite:VERSION",
    # results
    "Results": "mlhpc.analysis.api",
    "Verdict": "mlhpc.suite.compliance.check",
    "InputError": "mlhpc.suite.errors",
    # a loop of one's own
    "Run": "mlhpc.suite.training.own.run",
    # a workload of one's own
    "Descriptor": "mlhpc.suite.descriptor",
    "Hyperparameters": "mlhpc.suite.config",
    "Workload": "mlhpc.suite.workload",
    "Dataset": "mlhpc.suite.workload",
    "Optimization": "mlhpc.suite.workload",
    "Work": "mlhpc.suite.workload",
    "UPDATE_FLOPS": "mlhpc.suite.workload",
    "RunConfig": "mlhpc.suite.config",
    "World": "mlhpc.suite.world",
    "Generator": "mlhpc.suite.data.build",
    "Synthetic": "mlhpc.suite.data.build",
    "ShardReader": "mlhpc.suite.data.shards",
    "SPLITS": "mlhpc.suite.data.build",
    "draws": "mlhpc.suite.data.sampling",
}
__all__ = ["check", "compare", "load", "published", "report", "score", *_ELSEWHERE]


def _explained(function: Call, name: str = "") -> Call:
    """Make a function whose call with other arguments than its own is an InputError that says how it is called."""

    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # of its inside
                raise
            from mlhpc.suite.errors import InputError, explain_call

            raise InputError(explain_call(function, name or f"mlhpc.{function.__name__}", error)) from None

    call.__name__, call.__doc__, call.__wrapped__ = function.__name__, function.__doc__, function  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


@_explained
def load(*paths: Place, cards: Sequence[Place] = ()) -> Results:
    """Load results: run folders, packages, rounds, logs, or patterns such as ``"runs/*"``; ceilings and sweeps beside
    them.

    ``cards`` are the files of card-only benchmarks. InputError for a path that does not exist, or if there is no log.
    """
    from mlhpc.analysis.api import Results

    return Results(paths, cards)


@_explained
def report(*paths: Place, folder: Place = "report", force: bool = False, cards: Sequence[Place] = ()) -> Path:
    """Write what ``mlhpc report`` writes for the paths, and return the path of the page, which a notebook shows.

    InputError if the folder holds a report already, unless ``force``.
    """
    return load(*paths, cards=cards).report(folder, force=force)


@_explained
def check(*paths: Place, ruleset: str | None = None, cards: Sequence[Place] = ()) -> Verdict:
    """Check logs, run folders, packages or rounds, as ``mlhpc check`` does. Reads only.

    Of the verdict, ``compliant`` is a bool, ``findings`` have rule, severity, file, line and message, and ``rulesets``
    names what they were judged by. ``ruleset`` is for all paths; by default each is judged by that of its round.
    InputError for a path that does not exist.
    """
    from mlhpc.suite.compliance.check import check
    from mlhpc.suite.descriptor import use_cards

    with use_cards(cards):
        return check(_existing(paths), _known(ruleset))


@_explained
def score(*paths: Place, ruleset: str | None = None, cards: Sequence[Place] = ()) -> list[dict[str, Any]]:
    """Score every result at the paths: for each the fields of ``mlhpc score --format json``, times in minutes.

    ``valid`` is true for the score of a compliant result; ``reason`` says why it is not. InputError for a path that
    does not exist.
    """
    from mlhpc.suite.compliance.check import check
    from mlhpc.suite.compliance.exchange.figures_of_merit import build_result_documents
    from mlhpc.suite.descriptor import use_cards

    with use_cards(cards):
        return build_result_documents(check(_existing(paths), _known(ruleset)).results)


@_explained
def compare(
    a: Place, *others: Place, tolerance: float = 0.0, any_runs: bool = False, cards: Sequence[Place] = ()
) -> list[dict[str, Any]]:
    """Compare the results at ``others`` with those at ``a``: for each pair the fields of ``mlhpc compare --format
    json``.

    ``verdict`` is faster, slower, equivalent or inconclusive; ``ratio`` is the time of the other over that of ``a``,
    with its ``interval``. ``tolerance`` is in percent; ``any_runs`` compares runs that are no score too. InputError if
    they have no benchmark and size in common.
    """
    from mlhpc.suite.commands.compare import compare_results, convert_to_data
    from mlhpc.suite.descriptor import use_cards
    from mlhpc.suite.errors import InputError

    if not others:
        raise InputError("mlhpc.compare(a, b): give at least two results")
    first, *rest = _existing((a, *others))
    with use_cards(cards):
        return [convert_to_data(item) for item in compare_results(first, rest, tolerance, any_runs=any_runs)[0]]


@_explained
def published() -> pd.DataFrame:
    """The published MLPerf HPC results that ship with the suite, one row per result; times in seconds
    (docs/tables.md).
    """
    from mlhpc.analysis.published.scores import read_scores

    return read_scores().copy()


def _known(ruleset: str | None) -> str | None:
    """A name of a ruleset; InputError for an unknown one."""
    from mlhpc.suite.compliance.ruleset import read_ruleset as read

    return ruleset if ruleset is None else read(ruleset).name


def _existing(paths: Sequence[Place]) -> list[Path]:
    from mlhpc.suite.errors import InputError
    from mlhpc.suite.files import convert_to_path

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
    import importlib

    module, _, attribute = _ELSEWHERE[name].partition(":")
    found = globals()[name] = getattr(importlib.import_module(module), attribute or name)
    if name == "Run":
        found.__init__ = _explained(found.__init__, "mlhpc.Run")
        for method in ("start", "epoch", "batches", "step", "evaluation"):
            setattr(found, method, _explained(getattr(found, method), f"run.{method}"))
    return found


def __dir__() -> list[str]:
    return __all__
