"""Predicts a measured step for other ceilings, another batch or other ranks. Pure: no files.

Each phase keeps its efficiency: its time changes by the same factor as the times Q / C of its resources. The interval
covers what else the measurement allows. Only the slowest- or only the fastest-changing resource may matter. The time
that the roofs do not explain may stay. New communication may be hidden, or as inefficient as the rest. MODEL_ERROR is
added for what no roof knows (slower ranks, other libraries).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlhpc.analysis.roofline.bounds import Resource, Roof

PHASE_RESOURCES: Mapping[str, tuple[str, ...]] = {  # the resources that can bound each phase
    "data_wait": ("storage",),
    "forward_backward": ("compute", "memory"),
    "exposed_communication": ("all_reduce", "all_to_all"),
    "optimizer": ("update",),
    # Not explained by any roof, so it stays as measured
    "other": (),
}
UPDATE_PHASE = "update"  # the optimizer's memory traffic: the same whatever the batch
COMMUNICATION = ("all_reduce", "all_to_all")
MODEL_ERROR = 0.10  # median error of predicted steps on published pairs of one machine: docs/roofline.md


@dataclass(frozen=True)
class Prediction:
    """Holds predicted seconds and the interval around them."""

    seconds: float
    low_s: float
    high_s: float

    def __add__(self, other: Prediction) -> Prediction:
        """Return the sum of all three numbers, as if both predictions erred in the same direction."""
        return Prediction(self.seconds + other.seconds, self.low_s + other.low_s, self.high_s + other.high_s)

    def times(self, factor: float) -> Prediction:
        """Return all three numbers multiplied by a factor."""
        return Prediction(self.seconds * factor, self.low_s * factor, self.high_s * factor)

    def error(self, seen_s: float) -> float:
        """Return the relative error of the prediction against a measured time."""
        return self.seconds / seen_s - 1.0

    def holds(self, seen_s: float) -> bool:
        """Return True if the measured time lies in the interval."""
        return self.low_s <= seen_s <= self.high_s


@dataclass(frozen=True)
class Phase:
    """Holds one phase of a step, measured here and predicted elsewhere.

    ``because`` names the resources of the prediction.
    """

    name: str
    measured_s: float
    predicted: Prediction
    because: str


def make_exact_prediction(seconds: float) -> Prediction:
    """Return a prediction of a time that does not change."""
    return Prediction(seconds, seconds, seconds)


def predict(phases: Mapping[str, float], here: Mapping[str, float], there: Mapping[str, float]) -> list[Phase]:
    """Predict a step's phases. ``here`` and ``there`` are the known seconds Q / C of each resource in both places.

    A phase without a resource that is known in both places keeps its time, and ``because`` says so. If the exposed
    communication was not measured, all of it may be hidden in one place and exposed in the other.
    """
    explained = sum(here.get(name, 0.0) for name in PHASE_RESOURCES["forward_backward"])
    efficiency = min(1.0, explained / phases["forward_backward"]) if phases.get("forward_backward") else 1.0
    predicted = []
    for name, seconds in phases.items():
        resources = PHASE_RESOURCES.get(name, ())
        if set(resources) & set(COMMUNICATION):
            predicted.append(_communication(name, seconds, here, there, efficiency or 1.0))
        else:
            predicted.append(_predict_phase(name, seconds, resources, here, there))
    # DDP hides communication behind the backward pass. How much is hidden was not measured and may differ there
    if "exposed_communication" not in phases:
        before, after = (sum(place.get(name, 0.0) for name in COMMUNICATION) for place in (here, there))
        predicted.append(
            Phase("overlap of communication", 0.0, Prediction(0.0, -before, after), "unknown: all or nothing")
        )
    return predicted


def sum_phases(phases: Sequence[Phase]) -> Prediction:
    """Return the prediction of the whole step."""
    return sum((phase.predicted for phase in phases), make_exact_prediction(0.0))


def predict_solution(
    step: Prediction, steps: float, *, evaluation: Prediction, staging_s: float = 0.0, other_s: float = 0.0
) -> Prediction:
    """Predict the time to solution: ``steps`` training steps and all evaluations. Staging and the rest do not
    change.
    """
    return step.times(steps) + evaluation + make_exact_prediction(staging_s + other_s)


def compute_phase_factor(phases: Sequence[Phase], name: str) -> Prediction:
    """Return the factor by which a phase changes, for similar work without phases of its own.

    Evaluation is such work: forward passes.
    """
    phase = next((p for p in phases if p.name == name and p.measured_s > 0), None)
    return make_exact_prediction(1.0) if phase is None else phase.predicted.times(1 / phase.measured_s)


def compute_resource_seconds(
    demands: Mapping[Resource, float], roofs: Mapping[Resource, Roof | str]
) -> dict[str, float]:
    """Return the seconds Q / C of every resource that has a roof."""
    return {name: amount / roof.per_s for name, amount in demands.items() if isinstance(roof := roofs[name], Roof)}


def _predict_phase(
    name: str, seconds: float, resources: Sequence[str], here: Mapping[str, float], there: Mapping[str, float]
) -> Phase:
    known = [r for r in resources if here.get(r, 0.0) > 0 and there.get(r, 0.0) > 0]
    if not known:
        return Phase(name, seconds, make_exact_prediction(seconds), "kept")
    before, after = (sum(place[r] for r in known) for place in (here, there))
    # If one resource alone decides, the phase changes by that resource's ratio
    ratios = [there[r] / here[r] for r in known]
    candidates = [seconds * ratio for ratio in ratios]
    if before < seconds:
        # Only if the roofs explain less than the measured time: otherwise nothing is left to stay
        candidates.append(seconds - before + after)  # the time that the roofs do not explain stays
    low, high = min(candidates) * (1 - MODEL_ERROR), max(candidates) * (1 + MODEL_ERROR)
    return Phase(name, seconds, Prediction(seconds * after / before, low, high), " and ".join(known))


def _communication(
    name: str, seconds: float, here: Mapping[str, float], there: Mapping[str, float], efficiency: float
) -> Phase:
    """Predict exposed communication. New communication is exposed as a prediction, hidden at best."""
    before, after = (sum(place.get(r, 0.0) for r in COMMUNICATION) for place in (here, there))
    # One rank there: communication vanishes, or it was never known and is kept
    if after == 0.0:
        return Phase(
            name,
            seconds,
            make_exact_prediction(0.0 if before else seconds),
            "nothing to communicate" if before else "kept",
        )
    # The lower end: what was hidden here stays hidden, and only the difference is added
    if before > 0.0:
        ratio = after / before
        candidates = [seconds * ratio, max(0.0, seconds + after - before)]
        return Phase(
            name, seconds, Prediction(seconds * ratio, min(candidates), max(candidates)), "all-reduce and all-to-all"
        )
    return Phase(name, seconds, Prediction(seconds + after, seconds, seconds + after / efficiency), "new communication")
