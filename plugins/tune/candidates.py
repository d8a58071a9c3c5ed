"""Which points of a space can run and may run, and what the suite's closed forms say of their time.

*Feasible*: cores, divisibility, and memory by the prediction of `mlhpc plan`. *Admissible*: the closed division admits
settings that leave the training as it is, and the checker's rules refuse nothing that they do not refuse of the default.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import structs

from mlhpc.plugins.tune.space import (
    RANKS,
    SAME_TRAINING,
    THREADS,
    Point,
    Space,
    Value,
    key_of_point,
    list_settings,
)
from mlhpc.suite.card import ReferencePoint, Tunable, read_reference_points
from mlhpc.suite.compliance.before import judge_statement
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.data.sampling import check_batch
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import render_bytes, render_repr
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import find_plan, read_plan
from mlhpc.suite.workload import load_workload

if TYPE_CHECKING:
    from mlhpc.plugins.axes.predict import Cost  # another wing: without it `mlhpc tune` refuses to begin

STEP_TIME, CPU_TIME, TIME_TO_QUALITY, JOULES = "step-time", "cpu-time", "time-to-quality", "joules"  # objectives
UNPLANNED = "sharded"  # the plan whose data axis alone is data parallelism: its prediction is that of no plan
# Rates of a core, or of a GPU, that nobody has measured. The proxy learns by what factor they are off, because it
# models the ratio of measured and predicted time; only their order of magnitude decides the first trials.
CORE = {"flops": 2e10, "memory": 5e9, "bandwidth": 5e9, "latency_s": 5e-6}
GPU = {"flops": 1e14, "memory": 2e12, "bandwidth": 1e11, "latency_s": 1e-5}


@dataclass(frozen=True)
class Launch:
    """How the processes of a job start: ``threads`` of each of its ``ranks``."""

    ranks: int
    threads: int


@dataclass(frozen=True)
class Limits:
    """What a configuration may take of this machine: threads of all ranks, and bytes of memory of each place.

    ``shared``: the ranks share the bytes, as on processors; else each has a GPU of its own. None: not known.
    """

    cores: int
    memory: int | None
    shared: bool = True


@dataclass
class Candidates:
    """The configurations of a workload at one size, by point. ``overrides`` are the person's ``--set``."""

    descriptor: Descriptor
    name: str
    overrides: Sequence[str]
    space: Space
    limits: Limits
    objective: str
    _costs: dict[str, Cost | str] = field(default_factory=dict)

    def config(self, point: Point) -> RunConfig:
        """Return the configuration of a point. InputError if it is none."""
        return load_config(self.descriptor, self.name, (*self.overrides, *list_settings(point), "instrumentation=true"))

    def launch(self, point: Point) -> Launch:
        """Return how the processes of a point start."""
        ranks = _as_count(point, RANKS, 1)
        return Launch(ranks, _as_count(point, THREADS, max(1, self.limits.cores // ranks)))

    @cached_property
    def standing(self) -> frozenset[str]:
        """What the checker would refuse of the default, which the person was told."""
        config = self.config({})
        return frozenset(judge_statement(self.descriptor, config, self._collect_logged(config)))

    def explain_refused(self, point: Point) -> str:
        """Return why a point cannot run or may not: in one line, empty if it can."""
        launch = self.launch(point)
        if launch.ranks * launch.threads > self.limits.cores and self.limits.shared:
            return f"{launch.ranks} ranks of {launch.threads} threads need more than {self.limits.cores} cores"
        try:
            config = self.config(point)
            parallel = Parallel.of(config, self.descriptor, 0, launch.ranks)
            config = parallel.with_microbatches(config)
            check_batch(config.global_batch_size, parallel.mesh.data_size, config.gradient_accumulation_steps)
            broken = self._explain_broken_rule(config, parallel)
        except InputError as error:
            return str(error)
        if broken := broken or self._explain_unknown_quality(config):
            return broken  # before its cost is predicted, which takes time
        cost = self.cost(point)
        if isinstance(cost, str):
            return cost
        needed = cost.memory * (launch.ranks if self.limits.shared else 1)
        if self.limits.memory is not None and needed > self.limits.memory:
            return f"needs {render_bytes(needed)}; {render_bytes(self.limits.memory)} are there (predicted)"
        return ""

    def fits_twice(self, a: Point, b: Point) -> bool:
        """Return True if two points fit in the memory together, so that one job can hold both. False if not known."""
        if self.limits.memory is None:
            return True
        needed = 0
        for point in (a, b):
            cost = self.cost(point)
            if isinstance(cost, str) or cost.peak is None:
                return False
            needed += cost.memory * (self.launch(point).ranks if self.limits.shared else 1)
        return needed <= self.limits.memory

    def _explain_broken_rule(self, config: RunConfig, parallel: Parallel) -> str:
        """Return why the checker would refuse a result of this configuration; empty if it would not."""
        plan = parallel.logged() if parallel.plan is not None else None
        found = judge_statement(self.descriptor, config, self._collect_logged(config), plan=plan)
        return next((reason for reason in found if reason not in self.standing), "")

    def _collect_logged(self, config: RunConfig) -> Mapping[str, Any]:
        return load_workload(self.descriptor)(config).hyperparameters()

    @cached_property
    def references(self) -> Mapping[int, ReferencePoint]:
        """The reference convergence points of the size, by batch."""
        return read_references(self.descriptor, self.config({}).size)

    def _explain_unknown_quality(self, config: RunConfig) -> str:
        """Return why nobody knows how many epochs a configuration takes; empty if it is known or does not matter."""
        if self.objective != TIME_TO_QUALITY:
            return ""
        reference = self.references.get(config.global_batch_size)
        if reference is None:
            known = ", ".join(map(str, sorted(self.references))) or "none"
            return f"no reference points for a batch of {config.global_batch_size}; there are some for {known}"
        logged = self._collect_logged(config)
        for key, value in reference.hyperparameters.items():
            # Other keys say how a step is computed, which the search changes.
            if key.startswith(("opt_", "scheduler_")) and key in logged and not _is_equal(logged[key], value):
                return (
                    f"{key} = {render_repr(logged[key])}, but the reference points for a batch of "
                    f"{config.global_batch_size} have {render_repr(value)}"
                )
        return ""

    def count_steps(self, point: Point) -> float:
        """Return the steps to the target by the reference points; infinite without one.

        1 unless the objective is time to quality.
        """
        if self.objective != TIME_TO_QUALITY:
            return 1.0
        config = self.config(point)
        reference = self.references.get(config.global_batch_size)
        if reference is None:
            return math.inf
        return reference.mean * self.descriptor.card().size(config.size).train_samples / config.global_batch_size

    def cost(self, point: Point) -> Cost | str:
        """Return the predicted cost of a point, or why there is none: of float32, and the default of unpredicted
        ones.
        """
        ranks = self.launch(point).ranks
        shaping = {name: value for name, value in point.items() if self.space.tunables[name].predicted}
        key = key_of_point({**shaping, RANKS: ranks})
        if key not in self._costs:
            self._costs[key] = self._predict(structs.replace(self.config(shaping), precision="float32"), ranks)
        return self._costs[key]

    def _predict(self, config: RunConfig, ranks: int) -> Cost | str:
        from mlhpc.plugins.axes.predict import predict_largest_cost

        planned = config if config.plan is not None else structs.replace(config, plan=UNPLANNED, mesh=f"data={ranks}")
        # An operator that cannot run without memory writes a traceback to the log before it raises.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        try:
            parallel = Parallel.of(planned, self.descriptor, 0, ranks)
            return predict_largest_cost(self.descriptor, planned, parallel)
        except InputError as error:
            return str(error) if config.plan is not None else _make_unrehearsed_cost(self.descriptor, config, ranks)

    def closed_form_s(self, point: Point) -> float:
        """Return the closed form of the objective in seconds, for rates that nobody measured. Infinite if there
        is none.
        """
        from mlhpc.plugins.axes.step_time import Estimate, Machine, make_uniform_network, predict_time

        cost, launch = self.cost(point), self.launch(point)
        if isinstance(cost, str):
            return math.inf
        rates, busy = (
            (CORE, min(launch.threads, max(1.0, self.limits.cores / launch.ranks)))
            if self.limits.shared
            else (GPU, 1.0)
        )
        machine = Machine(
            flops=Estimate.of(rates["flops"] * busy, rates["flops"] * busy),
            network=make_uniform_network(rates["bandwidth"], rates["latency_s"]),
            memory=Estimate.of(rates["memory"] * busy, rates["memory"] * busy),
        )
        step_s = predict_time(machine, cost).total_s * self.count_steps(point)
        return step_s * launch.ranks * busy if self.objective == CPU_TIME else step_s


def _make_unrehearsed_cost(descriptor: Descriptor, config: RunConfig, ranks: int) -> Cost:
    """Return the cost without a plan by the workload's closed form. Its memory is not known."""
    from mlhpc.plugins.axes.predict import Cost

    work, samples = load_workload(descriptor)(config).work(), config.global_batch_size / ranks
    unknown = Cost("", "", ranks, round(samples), 0, 0, 0, None, None, None, None, None, None, 0.0, 0.0, ())
    return replace(unknown, flops=work.executed_flops * samples, traffic=work.algorithmic_bytes * samples)


def _is_equal(logged: object, stated: object) -> bool:
    """Compare a value with one that went through JSON, where a tuple is a list."""
    return list(logged) == stated if isinstance(logged, tuple) else logged == stated


def _as_count(point: Point, name: str, default: int) -> int:
    value = point.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"tunable {name}: {render_repr(value)}: expected a whole number of at least 1")
    return value


def refuse_inadmissible(tunables: Iterable[str], own: Mapping[str, Tunable], division: str) -> None:
    """Raise InputError for a tunable that may change the training, if the division is closed."""
    allowed = {*SAME_TRAINING, *own}
    for name in tunables:
        if division == "closed" and name not in allowed:
            raise InputError(
                f"tunable {name}: it may change the training, so the closed division has it fixed; tune it with "
                "--set submission.division=open"
            )


def list_plan_values(descriptor: Descriptor, ranks: Sequence[int]) -> list[str]:
    """List the shipped plans with each mesh of as many ranks that uses more axes than data."""
    from mlhpc.plugins.axes.predict import list_meshes, render_mesh

    found: dict[str, Value] = {}
    for path in sorted((descriptor.folder / "plans").glob("*.yaml")):
        plan = read_plan(find_plan(descriptor, path.stem))[0]
        for count in ranks:
            for axes in list_meshes(plan, count):
                if axes:
                    found.setdefault(f"{path.stem} {render_mesh(plan, axes, count)}", None)
    return list(found)


def read_references(descriptor: Descriptor, size: str) -> dict[int, ReferencePoint]:
    """Read the reference convergence points of a size, by global batch."""
    known = read_reference_points(descriptor.folder, size)
    return {point.global_batch_size: point for point in known.points} if known else {}
