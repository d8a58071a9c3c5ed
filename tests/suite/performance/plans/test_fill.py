"""K-FAC's work in the gaps of a pipeline: judged by rules written anew here, which share nothing with the planner."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.plans.bubbles import Timeline, list_actions, simulate
from mlhpc.suite.performance.plans.fill import Filled, Layer, Placed, place_jobs, predict_fill
from mlhpc.suite.training.parallel.plan import PipelinePlan, Schedule
from mlhpc.suite.training.parallel.sharing import Parallel
from tests.fixtures.cli import mlhpc

MOE_LM = load_descriptor("moe_lm")
SCHEDULES: list[Schedule] = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]


def judge(timeline: Timeline, rank: int, placed: tuple[Placed, ...]) -> list[str]:
    """What is wrong with a rank's jobs: two things at once, a factor too early, an inverse before its factors."""
    wrong = []
    last = max((each.end for each in placed), default=Fraction(0))
    steps = int(last / timeline.total) + 1
    busy = [
        (span.begin + step * timeline.total, span.end + step * timeline.total)
        for step in range(steps)
        for span in timeline.spans[rank]
    ]
    busy += [(each.begin, each.begin + each.job.length) for each in placed]
    busy.sort()
    wrong += [f"two at {begin}" for (_, end), (begin, _) in pairwise(busy) if begin < end]
    for each in placed:
        if each.job.part is not None:
            kinds = "F" if each.job.factor == "A" else "IB"
            made = [
                span.end
                for span in timeline.spans[rank]
                if span.action.kind in kinds
                and (span.action.stage, span.action.part) == (each.job.stage, each.job.part)
            ]
            if not made or each.begin < max(made):
                wrong.append(f"{each.job} at {each.begin}: what it needs ends at {made}")
        else:
            needed = [
                other.end
                for other in placed
                if other.job.part is not None
                and (other.job.layer, other.job.factor) == (each.job.layer, each.job.factor)
            ]
            if not needed or each.begin < max(needed):
                wrong.append(f"{each.job} at {each.begin}: its factors end at {needed}")
    return wrong


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_jobs_overlap_nothing_and_follow_what_they_need(schedule: Schedule) -> None:
    plan = PipelinePlan(blocks="blocks", between=((),), schedule=schedule)
    for ranks, parts in ((2, 4), (4, 8)):
        third = Fraction(600, plan.stages_per_rank)
        seconds = {"F": third, "I": third, "W": third, "B": 2 * third}
        timeline = simulate(list_actions(plan, ranks, parts), seconds)
        for rank in range(ranks):
            stages = sorted({span.action.stage for span in timeline.spans[rank]})
            layers = {
                stage: [Layer(f"{stage}.{name}", 3, 4, n) for name, n in (("a", 5), ("b", 2))] for stage in stages
            }
            placed, left = place_jobs(timeline, rank, layers, parts)
            assert not left
            assert judge(timeline, rank, placed) == []
            assert len({each.job for each in placed}) == len(placed) == len(stages) * 2 * 2 * (parts + 1)
            # By hand: A of 3 vectors of 4 values is 3 * 4 * 5 FLOPs; the inverse of 4 x 4 is 64.
            found = sum(each.job.length for each in placed)
            assert found == len(stages) * sum(parts * 3 * n * (n + 1) + n**3 for n in (4, 5, 4, 2))


def test_the_judge_finds_planted_faults() -> None:
    plan = PipelinePlan(blocks="blocks", between=((),), schedule="1F1B")
    seconds = {kind: Fraction(600) for kind in "FIW"} | {"B": Fraction(1200)}
    timeline = simulate(list_actions(plan, 2, 4), seconds)
    placed, _ = place_jobs(timeline, 1, {1: [Layer("a", 3, 4, 5)]}, 4)
    assert judge(timeline, 1, placed) == []
    early = [Placed(each.job, Fraction(0)) for each in placed]
    assert judge(timeline, 1, tuple(early))
    shifted = [Placed(each.job, each.begin + 1500) for each in placed]  # into the rank's own passes
    assert any("two at" in each for each in judge(timeline, 1, tuple(shifted)))
    late = [Placed(each.job, each.begin + 99 * timeline.total) if each.job.part == 0 else each for each in placed]
    assert any("its factors" in each for each in judge(timeline, 1, tuple(late)))


def test_a_job_longer_than_every_gap_is_left_and_so_is_what_needs_it() -> None:
    plan = PipelinePlan(blocks="blocks", between=((),), schedule="GPipe")
    timeline = simulate(list_actions(plan, 2, 2), {"F": Fraction(1), "B": Fraction(2)})  # gaps of at most 3
    placed, left = place_jobs(timeline, 0, {0: [Layer("a", 1, 1, 2)]}, 2)
    assert {(job.factor, job.part) for job in left} == {("B", 0), ("B", 1), ("B", None)}  # 1 * 2 * 3 FLOPs each
    assert {(each.job.factor, each.job.part) for each in placed} == {("A", 0), ("A", 1), ("A", None)}


def config(*settings: str) -> RunConfig:
    return load_config(MOE_LM, "smoke", ["plan=pipeline", *settings])


def test_the_language_model_is_filled_and_the_utilisation_is_that_of_the_spans() -> None:
    resolved = config("mesh=pipeline=2")
    found: Filled = predict_fill(MOE_LM, resolved, Parallel.of(resolved, MOE_LM, 0, 2), 4e8)
    timeline = found.timeline
    for rank, placed in enumerate(found.placed):
        assert judge(timeline, rank, placed) == []
    spent = [span.end - span.begin for mine in timeline.spans for span in mine] * found.steps
    spent += [each.end - each.begin for mine in found.placed for each in mine]
    assert found.utilisation == sum(spent) / (2 * found.steps * timeline.total)
    assert found.utilisation_before == 1 / (1 + timeline.bubble)
    layers = {each.job.layer for mine in found.placed for each in mine}
    assert {"head", "blocks.0.attention.qkv"} <= layers
    assert not {each.job.layer for each in found.placed[0]} & {each.job.layer for each in found.placed[1]}


def test_fill_says_what_it_needs() -> None:
    resolved = load_config(MOE_LM, "smoke", ["plan=sharded"])
    with pytest.raises(InputError, match="the plan has no pipeline, so no gaps"):
        predict_fill(MOE_LM, resolved, Parallel.of(resolved, MOE_LM, 0, 2), 1e9)


def test_the_command_prints_one_line() -> None:
    command = ["plan", "moe_lm", "--size", "smoke", "--plan", "pipeline", "--mesh", "pipeline=2", "--fill", "kfac"]
    lines = mlhpc(*command).stdout.splitlines()
    assert lines[-1].startswith("  K-FAC in the gaps: inverses every 3 steps; ranks compute 80.0% of the time without")
    assert "leave --sweep and --format json out" in mlhpc(*command, "--format", "json").stderr
