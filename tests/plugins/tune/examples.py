"""Made-up documents of a search and of a contest, for tests and for the gallery (docs/pages/gallery.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlhpc.plugins.tune.race import MedianRatio
from mlhpc.plugins.tune.ranking import UNITS, RankedEntry, Ranking
from mlhpc.plugins.tune.space import TunedTrial, TuneResult
from mlhpc.suite.documents import render_json
from mlhpc.suite.statistics import Outcome

DEFAULT = {"ranks": 1, "precision": "float32", "hyperparameters.moe.backend": "loop"}
TRIALS = (
    ({"ranks": 2, "precision": "float32", "hyperparameters.moe.backend": "loop"}, 0.9),
    ({"ranks": 1, "precision": "bfloat16", "hyperparameters.moe.backend": "bmm"}, None),
    ({"ranks": 2, "precision": "bfloat16", "hyperparameters.moe.backend": "bmm"}, 0.5),
    ({"ranks": 4, "precision": "bfloat16", "hyperparameters.moe.backend": "bmm"}, 1.5),
    ({"ranks": 2, "precision": "bfloat16", "hyperparameters.moe.backend": "bmm"}, 0.6),
)
ENTRIES = (  # name, verdict, block after which it was dropped, mean, ratio to the leader
    ("default", Outcome.FASTER, None, 40.0, None),
    ("small-batch", Outcome.INCONCLUSIVE, None, 42.0, MedianRatio(1.05, 0.98, 1.2, 9)),
    ("bfloat16", Outcome.SLOWER, 7, 61.0, MedianRatio(1.5, 1.3, None, 7)),
)


def make_search(**changes: Any) -> TuneResult:
    best = dict(TRIALS[2][0])
    stated: dict[str, Any] = {
        "workload": "moe_lm",
        "size": "smoke",
        "division": "closed",
        "objective": "step-time",
        "processor": "EPYC",
        "begun": "2026-11-28T00:00:00+00:00",
        "error": 0.05,
        "default": DEFAULT,
        "configurations": 12,
        "refused": {},
        "trials": tuple(
            TunedTrial(point=point, ratio=ratio, seconds=10.0, why="" if ratio else "no memory")
            for point, ratio in TRIALS
        ),
        "search_s": 50.0,
        "best": best,
        "pairs": 9,
        "pairs_s": 30.0,
        "ratio": MedianRatio(0.55, 0.5, 0.61, 9),
        "importance": {"ranks": 0.7, "precision": 0.2},
        "outcome": Outcome.FASTER,
    }
    return TuneResult(**(stated | changes))


def make_ranking(**changes: Any) -> Ranking:
    entries = [
        RankedEntry(
            entry=name,
            verdict=verdict,
            dropped_after_block=block,
            dropped_p=0.01 if block else None,
            runs=block or 9,
            finished=block or 9,
            mean=mean,
            spread_factor=1.04,
            score=mean,
            score_to_leader=mean / 40.0 if ratio else None,
            ratio_to_leader=ratio,
        )
        for name, verdict, block, mean, ratio in ENTRIES
    ]
    stated: dict[str, Any] = {
        "name": "contest",
        "settings": {"workload": "moe_lm", "size": "smoke", "system": "laptop"},
        "objective": UNITS["time_to_train"],
        "verdict": "default wins; the chance that the best entry was dropped is at most 5 %",
        "by_score": "",
        "winner": "default",
        "over": True,
        "error": 0.05,
        "blocks": 9,
        "runs": 25,
        "findings": [],
        "entries": entries,
    }
    return Ranking(**(stated | changes))


def write_examples(folder: Path) -> list[Path]:
    """Write a document of each kind; return their paths."""
    written = {folder / "tune.json": make_search(), folder / "ranking.json": make_ranking()}
    for path, document in written.items():
        path.write_text(render_json(document))
    return list(written)
