"""Computes the idle time of a pipeline's schedule, by running torch's own order of actions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import count

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from mlhpc.suite.training.parallel.plan import SINGLE_STAGE, PipelinePlan

FORWARD, INPUT, WEIGHT, BACKWARD = "F", "I", "W", "B"  # torch's letters; B is I and W together
LENGTHS = {FORWARD: 1, INPUT: 1, WEIGHT: 1, BACKWARD: 2}  # the three passes of a stage take equally long


@dataclass(frozen=True)
class Action:
    """One piece of work of a rank: of one stage and one microbatch."""

    kind: str
    stage: int
    part: int


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline, in passes of a stage. ``busy``: the working time of each rank.

    ``held``: of each rank, the most microbatches of a stage with activations at one time.
    """

    total: int
    busy: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def bubble(self) -> Fraction:
        """Idle time of the busiest rank over its working time."""
        return Fraction(self.total, max(self.busy)) - 1


def list_actions(plan: PipelinePlan, ranks: int, microbatches: int) -> list[list[Action]]:
    """List the actions of each rank in torch's order. ValueError if the schedule does not take the microbatches."""
    stages = None if plan.schedule in SINGLE_STAGE else plan.stages_per_rank
    found: list[list[Action]] = []
    for each in get_schedule_ops(plan.schedule, ranks, microbatches, stages):
        mine = [action for action in each if action is not None and action.computation_type.value in LENGTHS]
        found.append([Action(a.computation_type.value, a.stage_index, a.microbatch_index or 0) for a in mine])
    if plan.schedule == "1F1B":  # torch 2.13 numbers the forward passes of the last rank from 1 (docs/engines.md)
        found = [_number_forward_passes(each) for each in found]
    return found


def _number_forward_passes(actions: list[Action]) -> list[Action]:
    parts = count()
    return [replace(each, part=next(parts)) if each.kind == FORWARD else each for each in actions]


def simulate(actions: list[list[Action]]) -> Timeline:
    """Run each rank's actions in order. An action begins when its rank is free and what it needs has arrived."""
    stages = 1 + max(action.stage for each in actions for action in each)
    ends: dict[tuple[str, int, int], int] = {}
    free, held, most, done = ([0] * len(actions) for _ in range(4))
    while any(done[rank] < len(actions[rank]) for rank in range(len(actions))):
        before = sum(done)
        for rank, mine in enumerate(actions):
            while done[rank] < len(mine) and all(each in ends for each in _needs(mine[done[rank]], stages)):
                action = mine[done[rank]]
                free[rank] = max([free[rank], *(ends[each] for each in _needs(action, stages))]) + LENGTHS[action.kind]
                held[rank] += (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT))
                most[rank] = max(most[rank], held[rank])
                kinds = (INPUT, WEIGHT) if action.kind == BACKWARD else (action.kind,)
                ends |= {(kind, action.stage, action.part): free[rank] for kind in kinds}
                done[rank] += 1
        if sum(done) == before:
            raise ValueError("the schedule waits for itself")
    busy = tuple(sum(LENGTHS[each.kind] for each in mine) for mine in actions)
    return Timeline(max(free), busy, tuple(most))


def _needs(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """Return what must have ended before an action begins: kind, stage and microbatch."""
    kind, stage, part = action.kind, action.stage, action.part
    if kind == FORWARD:
        return [(FORWARD, stage - 1, part)] if stage > 0 else []
    if kind == WEIGHT:
        return [(INPUT, stage, part)]
    return [(FORWARD, stage, part)] + ([(INPUT, stage + 1, part)] if stage < stages - 1 else [])


@cache  # each rank of a prediction asks
def plan_timeline(plan: PipelinePlan, ranks: int, microbatches: int) -> Timeline:
    """Run a schedule of torch."""
    return simulate(list_actions(plan, ranks, microbatches))
