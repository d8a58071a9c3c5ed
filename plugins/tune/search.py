"""Searches a pool of points and decides whether the best one is faster than the default. Measuring is passed in.

The history is an Optuna study in a file: a killed search goes on from it, and the dashboard of Optuna shows it. A point
is proposed by expected improvement of the proxy. The decision is the race of `mlhpc ab runs` on fresh blocks, so what
was measured in the search, the best of many, does not count in it.

The proxy predicts the time of points that were not measured: log(measured / closed form) as a Gaussian process of
scikit-learn. The closed form is the prior mean, so the first trial needs no measurement. A wide smooth kernel learns
what each value costs, a narrow rough one what values cost together, and a white one the noise of a measurement. From
earlier searches it predicts alone (`mlhpc tune --predict`).
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from msgspec import Struct
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from mlhpc.plugins.tune.candidates import Candidates
from mlhpc.plugins.tune.job import DEFAULT, TUNED
from mlhpc.plugins.tune.race import (
    MedianRatio,
    PairPower,
    Race,
    RaceRules,
    Turn,
    compute_median_ratio,
    estimate_spread,
    run_race,
)
from mlhpc.plugins.tune.space import Point, Space, TunedTrial, TuneResult, Value, key_of, key_of_point
from mlhpc.suite.errors import InputError
from mlhpc.suite.statistics import Outcome

if TYPE_CHECKING:
    import numpy as np


NOISE = 0.03  # of log time, before it was learned
FEWEST = 4  # measured points from which the kernel's parameters are learned


def encode(space: Space, points: Sequence[Point]) -> np.ndarray:
    """Return a row per point: a column for each value of a tunable, and one for the logarithm of numbers.

    An inactive tunable has zeros.
    """
    import numpy as np

    columns = [np.zeros(len(points))]
    for name, tunable in space.tunables.items():
        if len(tunable.values) > 1:
            keys = [key_of(point[name]) if name in point else "" for point in points]
            columns += [np.array([float(key == key_of(value)) for key in keys]) for value in tunable.values]
            if is_numeric(tunable.values):
                columns.append(_scale_numbers(name, tunable.values, points))
    return np.stack(columns, axis=1)


def _scale_numbers(name: str, values: Sequence[Value], points: Sequence[Point]) -> np.ndarray:
    """Return the logarithms of numbers, from -1 to 1 over their values."""
    import numpy as np

    logs = [math.log(float(value)) for value in values]  # type: ignore[arg-type]
    middle, half = (max(logs) + min(logs)) / 2, (max(logs) - min(logs)) / 2
    known = ((math.log(float(point[name])) - middle) / half if name in point else 0.0 for point in points)  # type: ignore[arg-type]
    return np.array(list(known))


def is_numeric(values: Sequence[Value]) -> bool:
    """Return True if values are positive numbers, not flags."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)


@dataclass(frozen=True)
class Prediction:
    """Of each point, mean and standard deviation of log(time / default's time). ``noise``: what a measurement adds."""

    mean: np.ndarray
    std: np.ndarray
    noise: float


class Proxy:
    """The proxy of a pool of points. ``prior``: log of each point's closed form over the default's."""

    def __init__(self, space: Space, pool: Sequence[Point], prior: Sequence[float]) -> None:
        import numpy as np

        self.rows, self.prior = encode(space, pool), np.array(prior)

    def predict(self, measured: Mapping[int, Sequence[float]]) -> Prediction:
        """Predict every point of the pool. ``measured``: logs of the measured ratios by position in the pool."""
        import numpy as np
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        places = [place for place, values in measured.items() for _ in values]
        logs = np.array([value for values in measured.values() for value in values])
        if not places:
            return Prediction(self.prior, np.full(len(self.prior), 0.5), NOISE)
        rest = logs - self.prior[places]
        kernel = (
            ConstantKernel(0.1, (1e-3, 10.0)) * Matern(10.0, (3.0, 50.0), nu=2.5)
            + ConstantKernel(0.02, (1e-4, 10.0)) * Matern(2.0, (0.5, 10.0), nu=0.5)
            + WhiteKernel(NOISE**2, (1e-5, 0.1))
        )
        process = GaussianProcessRegressor(
            kernel,
            optimizer="fmin_l_bfgs_b" if len(measured) >= FEWEST else None,
            random_state=0,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a parameter at its bound is as good
            process.fit(self.rows[places], rest)
        mean, std = process.predict(self.rows, return_std=True)
        noise = float(process.kernel_.k2.noise_level)
        return Prediction(mean + self.prior, np.sqrt(np.maximum(std**2 - noise, 0.0)), math.sqrt(noise))


def choose_expected_improvement(found: Prediction, best: float, allowed: Sequence[int]) -> tuple[int, float]:
    """Return the allowed position with the largest expected improvement of the logarithm below ``best``, and that."""
    import numpy as np
    from scipy import stats

    places = np.array(allowed)
    gap, spread = best - found.mean[places], np.maximum(found.std[places], 1e-9)
    gain = gap * stats.norm.cdf(gap / spread) + spread * stats.norm.pdf(gap / spread)
    return int(places[int(np.argmax(gain))]), float(np.max(gain))


NORMAL_90 = 1.6449  # standard deviations on each side of 90 % of a normal distribution


class PredictedPoint(Struct, frozen=True, kw_only=True):
    """A point with its time over the default's, and the 90 % interval of a measurement. ``measured``: how often
    it was.
    """

    point: dict[str, Value]
    ratio: float
    low: float
    high: float
    measured: int


@dataclass
class Known:
    """The points that are predicted or measured, without doubles, and logs of measured ratios by position."""

    points: list[Point]
    logs: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._places = {key_of_point(point): place for place, point in enumerate(self.points)}

    def add(self, point: Point, ratio: float | None, offset: float, candidates: Candidates) -> None:
        """Add a measured ratio, if there is one and the point has a closed form here."""
        restricted = candidates.space.restrict(point)
        if ratio is not None and math.isfinite(candidates.closed_form_s(restricted)):
            self.logs.setdefault(self.find(restricted), []).append(math.log(ratio) + offset)

    def find(self, point: Point) -> int:
        """Return the position of a point, which is added if it is new."""
        place = self._places.setdefault(key_of_point(point), len(self.points))
        if place == len(self.points):
            self.points.append(point)
        return place


def predict_points(
    candidates: Candidates, pool: Sequence[Point], default: Point, results: Sequence[TuneResult]
) -> list[PredictedPoint]:
    """Predict every point of the pool, the fastest first. What ``results`` measured is learned from.

    A result with another default is tied to this one by the ratio of their closed forms.
    """
    known = Known(list(pool))
    own_s = candidates.closed_form_s(default)
    for result in results:
        their_s = candidates.closed_form_s(candidates.space.restrict(result.default))
        offset = math.log(their_s / own_s)
        if not math.isfinite(offset):
            continue  # its default cannot run here, so that nothing ties its times to this default
        known.add(result.default, 1.0, offset, candidates)
        for trial in result.trials:
            known.add(trial.point, trial.ratio, offset, candidates)
    prior = [math.log(candidates.closed_form_s(point) / own_s) for point in known.points]
    found = Proxy(candidates.space, known.points, prior).predict(known.logs)
    base = float(found.mean[known.find(default)])
    predicted = []
    for place, point in enumerate(pool):
        middle = float(found.mean[place]) - base
        half = NORMAL_90 * math.hypot(float(found.std[place]), found.noise)
        low, high = math.exp(middle - half), math.exp(middle + half)
        measured = len(known.logs.get(place, ()))
        predicted.append(
            PredictedPoint(point=dict(point), ratio=math.exp(middle), low=low, high=high, measured=measured)
        )
    return sorted(predicted, key=lambda each: each.ratio)


STUDY = "tune"
LITTLE_GAIN, LEAST_GAIN = 0.003, 1e-4  # expected improvement of log time: below the second a search ends
FEWEST_TRIALS = 8  # that say what a tunable is worth
FEWEST_PAIRS = 7  # that a race of two needs, for which a search leaves time


@dataclass(frozen=True)
class SearchRules:
    """``budget_s`` and ``evaluations``: at most. ``pairs``: the most of the race. ``error``: chance of a wrong
    answer.
    """

    budget_s: float
    evaluations: int
    pairs: int
    error: float
    seed: int


@dataclass(frozen=True)
class Decision:
    """The answer: outcome of the best point against the default, with the median ratio of fresh pairs.

    ``power``: what the race could have found; None if it was won by the best point, or its noise is not known.
    """

    point: Point
    outcome: Outcome
    ratio: MedianRatio | None
    pairs: int
    seconds: float
    power: PairPower | None = None


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
                        error=trial.user_attrs.get("error"),
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
        trial.set_user_attr("error", measured.error)
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
            # No pair says how noisy a pair is; a measurement has as many blocks
            noise = self.proxy.predict(self._known(self.history.trials())).noise
            power = PairPower(noise, self.rules.pairs, self.rules.error)
            return Decision(point, Outcome.EQUIVALENT, None, 0, 0.0, power)
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
        pairs = [(times[TUNED], times[DEFAULT]) for times in race.blocks]
        took = math.fsum(pair["took"] for pair in self.history.pairs())
        spread = None if race.winner == TUNED else estimate_spread(pairs)
        power = None if spread is None else PairPower(spread, self.rules.pairs, self.rules.error)
        return Decision(point, outcomes[race.winner], compute_median_ratio(pairs), len(pairs), took, power)
