"""Defines `tune.json`, the document of a search, which `mlhpc report` draws and a later search begins from."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from mlhpc.suite.documents import NotNegative, Positive
from mlhpc.suite.performance.tune.space import Value, key_of_point
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.bets import MedianRatio

KIND: Literal["tune"] = "tune"
RESULT = "tune.json"  # in the folder of a search


class TunedTrial(Struct, frozen=True, kw_only=True):
    """A measured point: its time over the default's in the same blocks, or why there is none. ``seconds``: it took."""

    point: dict[str, Value]
    ratio: Positive | None
    seconds: NotNegative
    why: str = ""


class TuneResult(Struct, frozen=True, kw_only=True):
    """A search with its answer. ``refused``: points that could not run, with reasons.

    ``ratio``: the median of fresh pairs, best over default. ``importance``: the part of the variance of log time that
    each tunable explains alone. It is empty after few trials.
    """

    version: Literal[1] = 1
    kind: Literal["tune"] = KIND
    workload: str
    size: str
    division: str
    objective: str
    processor: str
    begun: str
    error: Annotated[float, Meta(gt=0, lt=1)]
    default: dict[str, Value]
    configurations: Annotated[int, Meta(ge=1)]
    refused: dict[str, str]
    trials: tuple[TunedTrial, ...]
    search_s: NotNegative
    best: dict[str, Value]
    pairs: Annotated[int, Meta(ge=0)]
    pairs_s: NotNegative
    ratio: MedianRatio | None
    importance: dict[str, float] = {}
    outcome: Outcome

    def list_fastest(self, number: int) -> list[dict[str, Value]]:
        """List the points with the shortest times, the best first: of a point measured twice, the mean counts once."""
        measured: dict[str, list[TunedTrial]] = {}
        for trial in self.trials:
            if trial.ratio is not None:
                measured.setdefault(key_of_point(trial.point), []).append(trial)
        ordered = sorted(measured.values(), key=lambda same: sum(each.ratio or 0.0 for each in same) / len(same))
        return [same[0].point for same in ordered[:number]]
