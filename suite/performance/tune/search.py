"""Searches a pool of points and decides whether the best one is faster than the default. Measuring is passed in.

The history is an Optuna study in a file: a killed search goes on from it, and the dashboard of Optuna shows it. A point is
proposed by expected improvement of the proxy. The decision is the race of `mlhpc ab runs` on fresh blocks, so what was
measured in the search, the best of many, does not count in it.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.tune.proxy import Proxy, choose_expected_improvement
from mlhpc.suite.performance.tune.result import TunedTrial
from mlhpc.suite.performance.tune.space import Point, Space, key_of_point
from mlhpc.suite.statistics import Outcome
from mlhpc.suite.statistics.bets import MedianRatio, compute_median_ratio
from mlhpc.suite.statistics.blocks import Turn
from mlhpc.suite.statistics.race import Race, RaceRules, run_race

TUNED, DEFAULT = "tuned", "default"  # the entries of the last race
STUDY = "tune"
LITTLE_GAIN, LEAST_GAIN = 0.003, 1e-4  # expected improvement of log time: below the second a search ends
FEWEST_TRIALS = 8  # that say what a tunable is worth
FEWEST_PAIRS = 7  # that a race of two needs, for which a search leaves time


@dataclass(frozen=True)
class SearchRules:
    """``budget_s`` and ``evaluations``: at most. ``pairs``: the most of the race. ``error``: chance of a wrong answer."""

    budget_s: float
    evaluations: int
    pairs: int
    error: float
    seed: int


@dataclass(frozen=True)
class Decision:
    """The answer: outcome of the best point against the default, with the median ratio of fresh pairs."""

    point: Point
    outcome: Outcome
    ratio: MedianRatio | None
    pairs: int
    seconds: float


class History:
    """The trials and pairs of a search, in a study of Optuna. ``path`` None: in memory."""

    def __init__(self, path: Path | None, space: Space, request: str) -> None:
        optuna.logging.set_verbosity(logging.ERROR)
        storage: Any = InMemoryStorage() if path is None else JournalStorage(JournalFileBackend(str(path)))
        self.space = space
        self.study = optuna.create_study(storage=storage, study_name=STUDY, load_if_exists=True)
        known = self.study.user_attrs.setdefault("request", None)
        if known is None:
            self.study.set_user_attr("request", request)
        elif known != request:
            raise InputError(
                f"{path}: was begun with other settings or another space; repeat its command, or choose a new folder"
            )
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            self.study.tell(trial.number, state=TrialState.FAIL)  # the search was killed: it is measured anew

    def trials(self) -> list[TunedTrial]:
        """List the finished trials in order."""
        found = []
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)):
            if "seconds" in trial.user_attrs:
                found.append(
                    TunedTrial(
                        point=dict(self.space.restrict(trial.params)),
                        ratio=trial.value,
                        seconds=trial.user_attrs["seconds"],
                        why=trial.user_attrs.get("why", ""),
                    )
                )
        return found

    def run(self, point: Point, measure: Callable[[Point], TunedTrial]) -> TunedTrial:
        """Measure a point as a trial."""
        self.study.enqueue_trial(dict(point))
        trial = self.study.ask({name: CategoricalDistribution(self.space.tunables[name].values) for name in point})
        measured = measure(point)
        if measured.why:
            trial.set_user_attr("why", measured.why)
        trial.set_user_attr("seconds", measured.seconds)
        if measured.ratio is None:
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, measured.ratio)
        return measured

    def measure_importance(self) -> dict[str, float]:
        """Return the part of the variance of log time that each tunable explains, by fANOVA, the largest first.

        Empty after fewer than `FEWEST_TRIALS`. A tunable that is not in every trial, because it counts only beside
        others, has none.
        """
        done = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(done) < FEWEST_TRIALS or len({trial.value for trial in done}) < 2:
            return {}
        judge = FanovaImportanceEvaluator(seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # of normalize
            return get_param_importances(
                self.study, evaluator=judge, target=lambda trial: math.log(trial.value or math.nan), normalize=False
            )

    def pairs(self) -> list[dict[str, float]]:
        """List the pairs of the race: seconds of each entry, infinite for none, and what the pair took."""
        return list(self.study.user_attrs.get("pairs", ()))

    def add_pair(self, pair: Mapping[str, float]) -> None:
        """Add a pair of the race."""
        self.study.set_user_attr("pairs", [*self.pairs(), dict(pair)])


@dataclass
class Search:
    """A search of a ``pool`` whose proxy knows each point's closed form. ``default`` is a position in the pool.

    Those of the points ``first`` that the pool has are measured first.
    """

    history: History
    pool: Sequence[Point]
    default: int
    proxy: Proxy
    rules: SearchRules
    first: Sequence[Point] = ()

    def __post_init__(self) -> None:
        self.places = {key_of_point(point): place for place, point in enumerate(self.pool)}

    def run(self, measure: Callable[[Point], TunedTrial]) -> Iterator[TunedTrial]:
        """Measure points until the budget, the evaluations or the hope of a better one ends. Yield each trial."""
        while (place := self.propose()) is not None:
            yield self.history.run(self.pool[place], measure)

    def propose(self) -> int | None:
        """Return the next point's position in the pool. None if the search is over."""
        trials = self.history.trials()
        spent = math.fsum(trial.seconds for trial in trials)
        each = spent / len(trials) if trials else 0.0
        tried = {self.places[key_of_point(trial.point)] for trial in trials}
        left = [place for place in range(len(self.pool)) if place not in tried and place != self.default]
        # Time for the race is set apart: without it there is no answer.
        if len(trials) >= self.rules.evaluations or spent + (FEWEST_PAIRS + 1) * each > self.rules.budget_s:
            return None
        for point in self.first:
            place = self.places.get(key_of_point(point), self.default)
            if place in left:
                return place
        known = self._known(trials)
        found = self.proxy.predict(known)
        best = float(min(found.mean[place] for place in known))
        new, again = (
            choose_expected_improvement(found, best, allowed) if allowed else (0, 0.0)
            for allowed in (left, [place for place in known if place != self.default])
        )
        # Where new points promise little, a measured one may be noisy enough to be measured again.
        place, gain = again if new[1] < LITTLE_GAIN <= again[1] else new
        return place if gain >= LEAST_GAIN else None

    def choose_best(self) -> int:
        """Return the measured point with the lowest prediction, which is less noisy than its measurement."""
        known = self._known(self.history.trials())
        mean = self.proxy.predict(known).mean
        return min(known, key=lambda place: float(mean[place]))

    def _known(self, trials: Sequence[TunedTrial]) -> dict[int, list[float]]:
        """Return logs of measured ratios by position; the default's is 0."""
        known: dict[int, list[float]] = {self.default: [0.0]}
        for trial in trials:
            if trial.ratio is not None:
                known.setdefault(self.places[key_of_point(trial.point)], []).append(math.log(trial.ratio))
        return known

    def decide(self, compare: Callable[[Point, Sequence[str]], Mapping[str, float]]) -> Decision:
        """Race the best point against the default in fresh pairs. ``compare`` runs one pair in an order of entries.

        It returns seconds of each entry (infinite: it failed), and under "took" what the pair took.
        """
        best = self.choose_best()
        point = self.pool[best]
        if best == self.default:
            return Decision(point, Outcome.EQUIVALENT, None, 0, 0.0)
        rules = RaceRules((DEFAULT, TUNED), self.rules.error, self.rules.pairs, self.rules.seed)
        pairs = self.history.pairs()
        known = {Turn(block, name): pair[name] for block, pair in enumerate(pairs, 1) for name in (DEFAULT, TUNED)}
        fresh: dict[Turn, float] = {}

        def run(turn: Turn) -> float:
            if turn not in fresh:
                rest = DEFAULT if turn.entry == TUNED else TUNED  # a job runs both, the first of the drawn order first
                pair = compare(point, (turn.entry, rest))
                self.history.add_pair(pair)
                fresh.update({Turn(turn.block, name): pair[name] for name in (DEFAULT, TUNED)})
            return fresh[turn]

        return self._judge(point, run_race(rules, known, run))

    def _judge(self, point: Point, race: Race) -> Decision:
        outcomes = {TUNED: Outcome.FASTER, DEFAULT: Outcome.SLOWER, None: Outcome.INCONCLUSIVE}
        ratio = compute_median_ratio([(times[TUNED], times[DEFAULT]) for times in race.blocks])
        took = math.fsum(pair["took"] for pair in self.history.pairs())
        return Decision(point, outcomes[race.winner], ratio, len(race.blocks), took)
