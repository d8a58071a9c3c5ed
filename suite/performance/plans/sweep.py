"""Tries a workload's plans on every mesh of N ranks: which are legal, what each costs, why others fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.mesh import AXIAL, EXPERT, PIPELINE, SHARD, SPATIAL, TENSOR
from mlhpc.suite.training.parallel.plan import ParallelPlan, is_spread

MAX_AXIS_RANKS = 64  # ranks of a sample, and ranks that share experts
Found = TypeVar("Found")
Axes = Mapping[str, int]  # ranks of each axis but data, and parts of each split dimension; those of 1 left out


class NotLegalError(InputError):
    """A plan does not fit these axes, whatever the other axes are."""


def list_plan_costs(
    plans: Mapping[str, ParallelPlan],
    ranks: int,
    fits: Callable[[str], object],
    cost: Callable[[str, str], Found],
) -> tuple[list[Found], list[dict[str, str]]]:
    """Return ``cost`` of plan and mesh for each legal mesh, and the refused plans and meshes with the reason.

    ``fits`` refuses a plan on every mesh. Axes that two plans have are taken from the first. A `NotLegalError` refuses
    every mesh that has these axes and others.
    """
    found: list[Found] = []
    refused: list[dict[str, str]] = []
    known: set[frozenset[tuple[str, int]]] = set()  # axes that were tried by an earlier plan
    for name, plan in plans.items():
        blocked: dict[frozenset[tuple[str, int]], str] = {}
        try:
            fits(name)
        except InputError as error:
            refused.append({"plan": name, "mesh": "any", "reason": str(error)})
            continue
        for axes in list_meshes(plan, ranks):
            key, text = frozenset(axes.items()), render_mesh(plan, axes, ranks)
            if key in known:
                continue
            reason = next((why for part, why in blocked.items() if part <= key), None)
            if reason is None:
                try:
                    found.append(cost(name, text))
                    known.add(key)
                    continue
                except NotLegalError as error:
                    reason = str(error)
                    if axes:  # the mesh without axes is part of every other one
                        blocked[key] = reason
                except InputError as error:
                    reason = str(error)
            refused.append({"plan": name, "mesh": text, "reason": reason})
    return found, refused


def list_meshes(plan: ParallelPlan, ranks: int) -> Iterator[Axes]:
    """Yield the axes of every mesh to try: none, each axis alone, parts of several dimensions, tensor with expert.

    Meshes with fewer axes come first. ``shard`` is tried alone.
    """
    yield {}
    if SHARD in plan.parameters.values():
        for n in _list_divisors(ranks):
            yield {SHARD: n}
    yield from sorted(_list_shapes(plan.split, ranks, MAX_AXIS_RANKS), key=len)
    sizes = [n for n in _list_divisors(ranks) if n <= MAX_AXIS_RANKS]
    axial = sizes if plan.axial is not None else []
    expert = sizes if any(map(is_spread, plan.parameters.values())) else []
    tensor = sizes if plan.tensor is not None else []
    stages = sizes if plan.pipeline is not None else []
    for name, tried in ((AXIAL, axial), (EXPERT, expert), (TENSOR, tensor), (PIPELINE, stages)):
        yield from ({name: n} for n in tried)
    for t in tensor:
        yield from ({EXPERT: e, TENSOR: t} for e in expert if ranks % (e * t) == 0)


def render_mesh(plan: ParallelPlan, axes: Axes, ranks: int) -> str:
    """Return the mesh in the form of `--mesh`. With ``tensor``, experts that are not spread are on every rank."""
    parts = 1
    for n in axes.values():
        parts *= n
    named = {name: str(axes[name]) for name in (SHARD, EXPERT, PIPELINE, TENSOR, AXIAL) if name in axes}
    if TENSOR in axes and EXPERT not in axes and any(map(is_spread, plan.parameters.values())):
        named = {EXPERT: "1", **named}
    if any(name in axes for name in plan.split):
        named[SPATIAL] = "x".join(str(axes.get(name, 1)) for name in plan.split)
    return ",".join([f"data={ranks // parts}", *(f"{name}={n}" for name, n in named.items())])


def _list_divisors(n: int) -> list[int]:
    return [each for each in range(2, n + 1) if n % each == 0]


def _list_shapes(dimensions: Sequence[str], ranks: int, most: int) -> Iterator[Axes]:
    """List the splits into at most N parts in one or more dimensions. Splits differ in shape: order counts."""
    for number, name in enumerate(dimensions):
        for n in (each for each in _list_divisors(ranks) if each <= most):
            yield {name: n}
            for rest in _list_shapes(dimensions[number + 1 :], ranks // n, most // n):
                yield {name: n, **rest}
