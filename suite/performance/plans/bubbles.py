"""Computes the idle time of a pipeline's schedule: by a closed form, and by running torch's own order of actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import count

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from mlhpc.suite.training.parallel.plan import SINGLE_STAGE, PipelinePlan

FORWARD, INPUT, WEIGHT, BACKWARD = "F", "I", "W", "B"  # torch's letters; B is I and W together
KINDS = (FORWARD, INPUT, WEIGHT, BACKWARD)


@dataclass(frozen=True)
class Action:
    """One piece of work of a rank: of one stage and one microbatch."""

    kind: str
    stage: int
    part: int


@dataclass(frozen=True)
class Span:
    """When a rank does an action."""

    begin: Fraction
    end: Fraction
    action: Action


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline. ``held``: of each rank, the most microbatches of a stage with activations at one time.

    ``spans``: what each rank does, in order.
    """

    total: Fraction
    busy: tuple[Fraction, ...]
    held: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def bubble(self) -> Fraction:
        """Idle time of the busiest rank over its working time."""
        return self.total / max(self.busy) - 1


def list_actions(plan: PipelinePlan, ranks: int, microbatches: int) -> list[list[Action]]:
    """List the actions of each rank in torch's order. ValueError if the schedule does not take the microbatches."""
    stages = None if plan.schedule in SINGLE_STAGE else plan.stages_per_rank
    found: list[list[Action]] = []
    for each in get_schedule_ops(plan.schedule, ranks, microbatches, stages):
        mine = [action for action in each if action is not None and action.computation_type.value in KINDS]
        found.append([Action(a.computation_type.value, a.stage_index, a.microbatch_index or 0) for a in mine])
    if plan.schedule == "1F1B":  # torch 2.13 numbers the forward passes of the last rank from 1 (docs/engines.md)
        found = [_number_forward_passes(each) for each in found]
    return found


def _number_forward_passes(actions: list[Action]) -> list[Action]:
    parts = count()
    return [replace(each, part=next(parts)) if each.kind == FORWARD else each for each in actions]


def simulate(actions: list[list[Action]], seconds: Mapping[str, Fraction]) -> Timeline:
    """Run each rank's actions in order. An action begins when its rank is free and what it needs has arrived."""
    stages = 1 + max(action.stage for each in actions for action in each)
    ends: dict[tuple[str, int, int], Fraction] = {}
    spans: list[list[Span]] = [[] for _ in actions]
    held, most, done = [0] * len(actions), [0] * len(actions), [0] * len(actions)
    while any(done[rank] < len(actions[rank]) for rank in range(len(actions))):
        before = sum(done)
        for rank, mine in enumerate(actions):
            while done[rank] < len(mine) and all(each in ends for each in _needs(mine[done[rank]], stages)):
                action = mine[done[rank]]
                free = spans[rank][-1].end if spans[rank] else Fraction(0)
                begin = max([free, *(ends[each] for each in _needs(action, stages))])
                end = begin + seconds[action.kind]
                spans[rank].append(Span(begin, end, action))
                held[rank] += (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT))
                most[rank] = max(most[rank], held[rank])
                kinds = (INPUT, WEIGHT) if action.kind == BACKWARD else (action.kind,)
                ends |= {(kind, action.stage, action.part): end for kind in kinds}
                done[rank] += 1
        if sum(done) == before:
            raise ValueError("the schedule waits for itself")
    total = max(each.end for mine in spans for each in mine)
    busy = [sum((each.end - each.begin for each in mine), Fraction(0)) for mine in spans]
    return Timeline(total, tuple(busy), tuple(most), tuple(map(tuple, spans)))


def _needs(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """Return what must have ended before an action begins: kind, stage and microbatch."""
    kind, stage, part = action.kind, action.stage, action.part
    if kind == FORWARD:
        return [(FORWARD, stage - 1, part)] if stage > 0 else []
    if kind == WEIGHT:
        return [(INPUT, stage, part)]
    return [(FORWARD, stage, part)] + ([(INPUT, stage + 1, part)] if stage < stages - 1 else [])


@cache  # each rank of a prediction asks
def plan_timeline(plan: PipelinePlan, ranks: int, microbatches: int, work: Fraction = Fraction(1)) -> Timeline:
    """Run a schedule in which forward pass, gradients of inputs and gradients of weights take equally long.

    ``work``: the time of all stages of a rank for one microbatch.
    """
    third = work / (3 * plan.stages_per_rank)
    seconds = {FORWARD: third, INPUT: third, WEIGHT: third, BACKWARD: 2 * third}
    return simulate(list_actions(plan, ranks, microbatches), seconds)


def compute_bubble(plan: PipelinePlan, ranks: int, microbatches: int, seconds: Mapping[str, Fraction]) -> Fraction:
    """Compute idle time over working time in closed form (arXiv 1811.06965, 2104.04473, 2211.05953, 2401.10241).

    ``seconds``: of each kind of action of a stage. All stages take equally long. The microbatches are a multiple of
    ``ranks``, or the schedule has one stage per rank. In zero-bubble schedules W takes no longer than F, and no longer
    than I; ZBV needs at least 2 ``ranks`` microbatches.
    """
    forward, back, weight = (seconds[kind] for kind in (FORWARD, INPUT, WEIGHT))
    idle, work = forward + back + weight, forward + back + weight
    if plan.schedule.endswith("ZeroBubble"):
        idle -= 2 * weight  # one W fills a gap, and is not waited for
    return (ranks - 1) * idle / (microbatches * plan.stages_per_rank * work)
