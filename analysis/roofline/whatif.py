"""What if the run were elsewhere: a measured step carried to other ceilings, another batch or other ranks. Pure; reads no file.

A measured phase keeps its efficiency: it becomes longer or shorter by the factor by which its resources' times Q / C change.
The band is what else the same measurement allows: that only the slowest-changing or the fastest-changing resource mattered,
that what the roofs do not explain stays as it is, that new communication is hidden entirely or as inefficient as the rest;
and MODEL_ERROR on top for what no roof knows (slower ranks, other libraries).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.roofline.bounds import Resource, Roof

PHASES: Mapping[str, tuple[str, ...]] = {  # what a phase can be bound by
    "data_wait": ("storage",),
    "forward_backward": ("compute", "memory"),
    "exposed_communication": ("all_reduce", "all_to_all"),
    "optimizer": ("update",),
    "other": (),
}
UPDATE = "update"  # the optimizer's memory traffic: the same whatever the batch
COMMUNICATION = ("all_reduce", "all_to_all")
MODEL_ERROR = 0.10  # median error of predicted steps on published pairs of one machine: docs/roofline.md


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and their band."""

    seconds: float
    low_s: float
    high_s: float

    def __add__(self, other: Prediction) -> Prediction:
        """Sums of all three: the bands are taken to be wrong in the same direction."""
        return Prediction(self.seconds + other.seconds, self.low_s + other.low_s, self.high_s + other.high_s)

    def times(self, factor: float) -> Prediction:
        """That many of it."""
        return Prediction(self.seconds * factor, self.low_s * factor, self.high_s * factor)

    def error(self, seen_s: float) -> float:
        """Relative error of the prediction against what was measured."""
        return self.seconds / seen_s - 1.0

    def holds(self, seen_s: float) -> bool:
        """True if the measured time lies in the band."""
        return self.low_s <= seen_s <= self.high_s


@dataclass(frozen=True)
class Phase:
    """One phase of a step, here and as predicted; ``because`` says by what it was carried over."""

    name: str
    measured_s: float
    predicted: Prediction
    because: str


def exactly(seconds: float) -> Prediction:
    """A time that stays as it is."""
    return Prediction(seconds, seconds, seconds)


def predict(phases: Mapping[str, float], here: Mapping[str, float], there: Mapping[str, float]) -> list[Phase]:
    """A step's phases elsewhere. ``here`` and ``there``: seconds Q / C per resource in both places, those that are known.

    Whatever is known in one place only cannot carry a phase over; the phase is then kept, and says so. Without a phase of
    exposed communication, all of it may be hidden here and exposed there, or the other way round.
    """
    explained = sum(here.get(name, 0.0) for name in PHASES["forward_backward"])
    efficiency = min(1.0, explained / phases["forward_backward"]) if phases.get("forward_backward") else 1.0
    found = []
    for name, seconds in phases.items():
        resources = PHASES.get(name, ())
        if set(resources) & set(COMMUNICATION):
            found.append(_communication(name, seconds, here, there, efficiency or 1.0))
        else:
            found.append(_scaled(name, seconds, resources, here, there))
    if "exposed_communication" not in phases:
        before, after = (sum(place.get(name, 0.0) for name in COMMUNICATION) for place in (here, there))
        found.append(Phase("overlap of communication", 0.0, Prediction(0.0, -before, after), "unknown: all or nothing"))
    return found


def total(phases: Sequence[Phase]) -> Prediction:
    """The step."""
    return sum((phase.predicted for phase in phases), exactly(0.0))


def solution(
    step: Prediction, steps: float, *, evaluation: Prediction, staging_s: float = 0.0, other_s: float = 0.0
) -> Prediction:
    """Time to solution: ``steps`` of training, all evaluations, staging and the rest as they were."""
    return step.times(steps) + evaluation + exactly(staging_s + other_s)


def scaled_work(phases: Sequence[Phase], name: str) -> Prediction:
    """By what factor a phase changed, for work like it that has no phases of its own (evaluation: forward passes)."""
    phase = next((p for p in phases if p.name == name and p.measured_s > 0), None)
    return exactly(1.0) if phase is None else phase.predicted.times(1 / phase.measured_s)


def seconds_at(demands: Mapping[Resource, float], roofs: Mapping[Resource, Roof | str]) -> dict[str, float]:
    """Q / C of every resource that has a roof."""
    return {name: amount / roof.per_s for name, amount in demands.items() if isinstance(roof := roofs[name], Roof)}


def _scaled(
    name: str, seconds: float, resources: Sequence[str], here: Mapping[str, float], there: Mapping[str, float]
) -> Phase:
    known = [r for r in resources if here.get(r, 0.0) > 0 and there.get(r, 0.0) > 0]
    if not known:
        return Phase(name, seconds, exactly(seconds), "kept")
    before, after = (sum(place[r] for r in known) for place in (here, there))
    ratios = [there[r] / here[r] for r in known]
    candidates = [seconds * ratio for ratio in ratios]
    if before < seconds:
        candidates.append(seconds - before + after)  # what the roofs do not explain stays
    low, high = min(candidates) * (1 - MODEL_ERROR), max(candidates) * (1 + MODEL_ERROR)
    return Phase(name, seconds, Prediction(seconds * after / before, low, high), " and ".join(known))


def _communication(
    name: str, seconds: float, here: Mapping[str, float], there: Mapping[str, float], efficiency: float
) -> Phase:
    """Exposed communication grows with what there is to communicate; where there was none, hidden at best."""
    before, after = (sum(place.get(r, 0.0) for r in COMMUNICATION) for place in (here, there))
    if after == 0.0:
        return Phase(name, seconds, exactly(0.0 if before else seconds), "nothing to communicate" if before else "kept")
    if before > 0.0:
        ratio = after / before
        candidates = [seconds * ratio, max(0.0, seconds + after - before)]
        return Phase(
            name, seconds, Prediction(seconds * ratio, min(candidates), max(candidates)), "all-reduce and all-to-all"
        )
    return Phase(name, seconds, Prediction(seconds + after, seconds, seconds + after / efficiency), "new communication")
