"""Idle time of a pipeline's schedules: torch's own order of actions takes as long as the table of docs/plans.md says."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mlhpc.plugins.axes.bubbles import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    list_actions,
    plan_timeline,
    simulate,
)
from mlhpc.suite.training.parallel.plan import PipelinePlan, Schedule


def plan(schedule: Schedule, stages: int = 0) -> PipelinePlan:
    return PipelinePlan(blocks="blocks", between=((),), schedule=schedule, stages=stages)


CASES: list[tuple[Schedule, int]] = [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3)]
CASES += [("LoopedBFS", 2), ("LoopedBFS", 4), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2)]


@pytest.mark.parametrize(("schedule", "stages"), CASES)
def test_the_idle_time_is_that_of_the_papers(schedule: Schedule, stages: int) -> None:
    """arXiv 1811.06965, 2104.04473, 2211.05953, 2401.10241; three equal passes, microbatches a multiple of the ranks."""
    share = 3 if schedule.endswith("ZeroBubble") else 1
    for ranks in (2, 3, 4):
        for microbatches in (2 * ranks, 3 * ranks):
            found = plan_timeline(plan(schedule, stages), ranks, microbatches)
            assert found.bubble == Fraction(ranks - 1, share * microbatches * stages)  # equal, not close
            assert len(set(found.busy)) == 1


def test_each_rank_does_every_pass_once() -> None:
    for schedule, stages in CASES:
        actions = list_actions(plan(schedule, stages), 4, 8)
        done = [(action.kind, action.stage, action.part) for each in actions for action in each]
        assert len(done) == len(set(done))
        forward = {(stage, part) for kind, stage, part in done if kind == FORWARD}
        assert forward == {(stage, part) for stage in range(4 * stages) for part in range(8)}
        back = {(stage, part) for kind, stage, part in done if kind in (INPUT, BACKWARD)}
        assert back == forward
        assert {(s, p) for kind, s, p in done if kind in (WEIGHT, BACKWARD)} == forward


def test_1f1b_holds_as_many_microbatches_as_stages_follow_and_gpipe_all() -> None:
    assert plan_timeline(plan("1F1B"), 4, 8).held == (4, 3, 2, 1)
    assert plan_timeline(plan("GPipe"), 4, 8).held == (8, 8, 8, 8)
    assert plan_timeline(plan("LoopedBFS"), 4, 8).held == (16, 16, 16, 16)  # of two stages
    assert plan_timeline(plan("Interleaved1F1B"), 4, 8).held[0] == 2 * 4 + 3
    assert max(plan_timeline(plan("ZBVZeroBubble"), 4, 8).held) == 2 * 4


def test_a_rank_waits_for_what_it_needs() -> None:
    """Two stages, one microbatch: the second waits for the first, and the first for the gradient."""
    actions = [[Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0)], [Action(FORWARD, 1, 0), Action(BACKWARD, 1, 0)]]
    found = simulate(actions)
    assert found.total == 6
    assert found.bubble == 1
    with pytest.raises(ValueError, match="waits for itself"):
        simulate([list(reversed(each)) for each in actions])
