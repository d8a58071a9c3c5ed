"""The rules for what a log of this suite must state. Omitting a value must not switch a comparison off."""
# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from mlhpc.suite.compliance.rules.base import OURS, LogBreach, LogContext, log_rule
from mlhpc.suite.files import render_repr
from mlhpc.suite.log import mllog
from mlhpc.suite.log.values import convert_to_float

_REQUIRED_SETTINGS = (
    *("workload", "size", "global_batch_size", "gradient_accumulation_steps", "max_epochs"),
    *("instrumentation", "submission", "hyperparameters"),
)


@log_rule("config-stated", "run_config holds what other events are compared with", OURS)
def check_config_stated(context: LogContext) -> Iterator[LogBreach]:
    event = context.log.first(mllog.RUN_CONFIG)
    if event is None:
        return
    config = event.value if isinstance(event.value, dict) else {}
    missing = [name for name in _REQUIRED_SETTINGS if name not in config]
    if missing:
        yield event.line, f"run_config has no {', '.join(missing)}"
    for name in ("submission", "hyperparameters"):
        if name in config and not isinstance(config[name], dict):
            yield event.line, f"run_config has {name} = {render_repr(config[name])}: expected a mapping"


@log_rule("eval-stated", "an evaluation states its samples, its duration and, beside its value, all metrics", OURS)
def check_eval_stated(context: LogContext) -> Iterator[LogBreach]:
    metric = context.benchmark.metric if context.benchmark else None
    keys = (mllog.EVAL_START, mllog.EVAL_STOP, *((metric,) if metric else ()))
    for event in context.run.every(*keys):
        if convert_to_float(event.metadata.get("samples_count")) is None:
            yield event.line, f"{event.key} without a number samples_count"
            return
        if event.key == mllog.EVAL_STOP and convert_to_float(event.metadata.get("duration_s")) is None:
            yield event.line, "eval_stop without a number duration_s"
            return
        metrics = event.metadata.get("metrics")
        if event.key == metric and not (isinstance(metrics, dict) and metric in metrics):
            yield event.line, f"{metric} without metrics that hold it"
            return


@log_rule("trial-stated", "a run states which trial of its series it is", OURS)
def check_trial_stated(context: LogContext) -> Iterator[LogBreach]:
    event = context.log.first(mllog.RUN_MODE)
    if event is not None and context.record.trial is None:
        yield event.line, f"run_mode has trial = {render_repr(event.metadata.get('trial'))}: expected a number"


PLACEMENT_NAMES = {"replicate", "shard", "expert"}  # those that leave the mathematics as they are
AXES = ("shard", "tensor", "axial", "expert", "pipeline")  # of a mesh, beside data and spatial


def _is_placement(value: object) -> bool:
    """True for a known name, a split of one dimension, or the result of a sum (Cut of mlhpc.suite.training.parallel.plan)."""
    if not isinstance(value, dict):
        return isinstance(value, str) and value in PLACEMENT_NAMES
    # type() instead of isinstance here and below: in Python True is an int.
    if type(value.get("expert", False)) is not bool:
        return False
    if "after" in value:
        return value["after"] == "sum" and value.keys() <= {"after", "expert"}
    if not value.keys() <= {"split", "groups", "units", "expert"}:
        return False
    return all(type(number) is int and number >= 0 for number in (value.get("split"), value.get("groups", 1)))


@log_rule(
    "plan-stated",
    "a plan by which ranks share samples is that of the ranks, and leaves the mathematics as they are",
    OURS,
)
def check_plan_stated(context: LogContext) -> Iterator[LogBreach]:
    config, event = context.log.first(mllog.RUN_CONFIG), context.log.first(mllog.PARALLEL_PLAN)
    named = config.value.get("plan") if config is not None and isinstance(config.value, dict) else None
    if event is None:
        if config is not None and named is not None:
            yield config.line, f"run_config names the plan {render_repr(named)}, and there is no parallel_plan"
        return
    if named is None:
        yield event.line, "parallel_plan without a plan in run_config"
    plan = event.value if isinstance(event.value, dict) else {}
    problem = _find_mesh_problem(plan.get("mesh"), context.record.ranks)
    if problem is not None:
        yield event.line, problem
    if plan.get("compress") is not None and context.division == "closed":
        how = render_repr(plan["compress"])
        yield event.line, f"parallel_plan compresses gradients ({how}), which the closed division does not admit"
    placements = plan.get("parameters")
    if not isinstance(placements, dict) or not placements or not all(map(_is_placement, placements.values())):
        expected = "expected replicate, shard, expert, split or after for each"
        yield event.line, f"parallel_plan has parameters = {render_repr(placements)}: {expected}"


def _find_mesh_problem(mesh: object, ranks: int | None) -> str | None:
    """Return what is wrong with the mesh of a plan. The product of its dimensions must be the number of ranks."""
    stated = mesh if isinstance(mesh, dict) else {}
    parts = stated.get("spatial")  # a list: one number for each dimension of space
    numbers = [stated.get("data"), *(stated.get(name, 1) for name in AXES)]
    numbers += parts if isinstance(parts, list) else [None]
    if not all(type(number) is int and number > 0 for number in numbers):
        expected = f"expected data, {', '.join(AXES)} and spatial, positive numbers"
        return f"parallel_plan has mesh = {render_repr(mesh)}: {expected}"
    if ranks is not None and prod(numbers) != ranks:
        return f"the mesh of parallel_plan has {prod(numbers)} ranks, number_of_ranks is {ranks}"
    return None
