"""Predicts what a rank holds, sends and reads in one training step under a plan, by a dry run.

The dry run executes the workload's own loss on the model with the plan applied, on fake tensors and axes that send
nothing. It allocates nothing and needs no ranks; its counts are those of a real run. The all-reduce of gradients is a
closed form: their size.

Tries a workload's plans on every mesh of N ranks: which are legal, what each costs, why others fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from msgspec import structs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mlhpc.plugins.axes.apply import SpatialAxis, explained, make_batch, trace_unsplit
from mlhpc.plugins.axes.dry_run import (
    Passes,
    Update,
    count_gathered_bytes,
    note_sharded_exchanges,
    pretended_ranks,
    run_passes,
    run_update,
    scatter_parameters,
)
from mlhpc.plugins.axes.spatial import Trace
from mlhpc.suite.config import RunConfig
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.batch_loading import count_prefetched_batches
from mlhpc.suite.training.instrument import count_functional_collectives
from mlhpc.suite.training.parallel.apply import apply
from mlhpc.suite.training.parallel.exchange import Note
from mlhpc.suite.training.parallel.fsdp import local, states_of
from mlhpc.suite.training.parallel.layout import slices, stages_of
from mlhpc.suite.training.parallel.mesh import AXIAL, EXPERT, PIPELINE, SHARD, SPATIAL, TENSOR
from mlhpc.suite.training.parallel.meta_init import build_on_meta, build_without_memory
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from mlhpc.suite.training.parallel.plan import ParallelPlan, is_spread
from mlhpc.suite.workload import ExpertLayer, ExpertSpread, Work, Workload, load_workload

GRADIENTS = "gradients"
MANY_STAGES = 8
Updated = tuple["Update | None", tuple["Exchange", ...]]


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in one step. ``bytes`` is what this rank gives in all its ``calls``."""

    axis: str
    kind: str
    ranks: int
    calls: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """One rank's bytes and FLOPs in one step. ``reads``: of its samples; ``activations``: kept for the backward pass.

    ``ahead``: the most that batches which the loader holds on the host may take; on a CPU they share memory with all
    else. ``gathered``: whole parameters that exist at once if states are in pieces. ``optimizer``: its state, and the
    moving average of the weights. ``peak``: the largest sum of activations, gathered parameters, gradients and
    temporary tensors in a step. ``traffic``: compulsory bytes of the workload's closed form, divided evenly over the
    ranks of a sample.

    ``bubble``: the idle time of a pipeline's ranks over the time in which they compute. ``experts``: its layers of
    experts, with the tokens of one part of a step.

    None: not known. Either the loss or the optimizer cannot run on tensors without memory, or the plan names no inputs.
    ``flops`` are then those of the workload's closed form.
    """

    plan: str
    mesh: str
    ranks: int
    samples: int
    parameters: int
    gradients: int
    gathered: int
    optimizer: int | None
    activations: int | None
    peak: int | None
    inputs: int | None
    ahead: int | None
    reads: int | None
    flops: float
    traffic: float
    exchanges: tuple[Exchange, ...]
    bubble: float = 0.0
    experts: tuple[ExpertLayer, ...] = ()

    @property
    def memory(self) -> int:
        """Bytes at the peak of live memory, without `lacks` and batches that are loaded ahead."""
        beside = max(self.gathered, self.gradients) if self.peak is None else self.peak
        return self.parameters + (self.optimizer or 0) + (self.inputs or 0) + beside

    @property
    def lacks(self) -> tuple[str, ...]:
        """The unknown parts, which are not in `memory`."""
        parts = {"activations": self.peak, "optimizer state": self.optimizer, "inputs": self.inputs}
        return tuple(name for name, size in parts.items() if size is None)

    def exchanged(self) -> dict[str, float]:
        """Return ``<kind>_calls`` and ``<kind>_bytes`` of all exchanges except the gradients', as a run counts them."""
        found: Counter[str] = Counter()
        for each in self.exchanges:
            if each.axis != GRADIENTS:
                found[f"{each.kind}_calls"] += each.calls
                found[f"{each.kind}_bytes"] += each.bytes
        return {name: float(value) for name, value in found.items()}


class CollectiveRecorder:
    """Counts the collectives that a step would call, by axis, kind, bytes and ranks."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, int, int]] = Counter()

    def __call__(self, axis: str, kind: str, given: int, ranks: int) -> None:
        """Count one call."""
        self.found[axis, kind, given, ranks] += 1


def _take_exchanges(notes: CollectiveRecorder, times: int) -> list[Exchange]:
    """Return the notes, multiplied by ``times``, by axis, kind and ranks. Resets them."""
    found: dict[tuple[str, str, int], list[int]] = {}
    for (axis, kind, given, ranks), calls in notes.found.items():
        entry = found.setdefault((axis, kind, ranks), [0, 0])
        entry[0] += calls
        entry[1] += calls * given
    notes.found.clear()
    return [
        Exchange(axis, kind, ranks, calls * times, given * times)
        for (axis, kind, ranks), (calls, given) in found.items()
    ]


class PredictionCache:
    """Shares what predictions of one configuration have in common under any plan and mesh."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._updates: dict[tuple[object, ...], Updated] = {}
        self._traces: dict[str, Trace | None] = {}
        self._work: Work | None = None

    def trace(self, descriptor: Descriptor, config: RunConfig, parallel: Parallel) -> Trace | None:
        """Return the layers' extents in the unsplit model, equal on every mesh. None if a plan does not fit it."""
        if parallel.name not in self._traces:
            try:
                with explained():
                    self._traces[parallel.name] = trace_unsplit(parallel, build_on_meta(descriptor, config)[1])
            except (InputError, KeyError):  # what does not fit, a boundary too, is said when the plan is applied
                self._traces[parallel.name] = None
        return self._traces[parallel.name]

    def update(self, parallel: Parallel, run: Callable[[], Updated]) -> Updated:
        """Return the optimizer's step and what it sends. Ranks with the same parts of parameters share one."""
        mesh = parallel.mesh
        part = mesh.part if mesh.tensor > 1 or mesh.pipeline > 1 else 0
        place = parallel.name, mesh.size, mesh.shard, mesh.piece, mesh.tensor, part, mesh.expert, mesh.pipeline
        if place not in self._updates:
            self._updates[place] = run()
        return self._updates[place]

    def work(self, workload: Workload) -> Work:
        """Return the workload's closed form."""
        self._work = self._work or workload.work()
        return self._work


def predict(
    descriptor: Descriptor, config: RunConfig, parallel: Parallel, common: PredictionCache | None = None
) -> Cost:
    """Predict one step of the rank of ``parallel``, in torch's default precision. InputError if the plan does not fit.

    ``common``: shared by predictions of the same configuration, also with other plans and meshes.
    """
    common = common or PredictionCache()
    # Without channels_last the bytes are the same, and fake parameters cannot change their layout.
    config = structs.replace(config, channels_last=False)
    config = parallel.with_microbatches(config)
    plan = parallel.plan
    assert plan is not None
    parts, size = config.gradient_accumulation_steps, parallel.mesh.size
    samples = config.global_batch_size // parallel.mesh.data_size // parts
    note = CollectiveRecorder()
    workload: Workload = load_workload(descriptor)(config)
    # Experts learn their ranks before the model is built.
    workload.spread = ExpertSpread(parallel.mesh.expert, size, parallel.mesh.tensor, note)
    work, unsplit, traced = common.work(workload), None, None
    if math.prod(parallel.mesh.spatial) > 1:
        traced = common.trace(descriptor, config, parallel)
        if not traced:
            _, unsplit = build_on_meta(descriptor, config)  # outside of fake tensors
    mesh = parallel.mesh
    counted = count_functional_collectives(lambda kind, given: note(TENSOR, kind, given, mesh.tensor))
    with pretended_ranks(mesh), counted, common.mode:
        model = build_without_memory(workload)
        apply(
            parallel,
            model,
            workload,
            lambda: cast(nn.Module, unsplit),
            note=note,
            axis=SpatialAxis(traced) if traced else None,
        )
        batch = make_batch(parallel, samples, split=True)
        with explained():
            kept = _list_kept_gradients(parallel, workload, model, parts)
            passes = None
            if batch and mesh.pipeline > 1:
                passes = _run_stages(parallel, model, workload, batch, config, kept)
            elif batch:
                passes = run_passes(model, workload, batch, config, kept_gradients=kept)
        if passes is None:  # the loss cannot run without memory: closed forms where there are any
            note.found.clear()
            states = states_of(model)
            gathered = 0 if states is None else count_gathered_bytes(states)
            if states is not None:
                note_sharded_exchanges(states, {})
            passes = Passes(None, gathered, None, work.executed_flops * samples / parallel.mesh.tensor)
            _record_unrun_exchanges(parallel, config, model, samples, note)
        exchanges = [*_take_exchanges(note, parts), *_list_loss_exchanges(plan, size, parts)]
        states = states_of(model)
        if mesh.pipeline > 1 and states is not None:
            note_sharded_exchanges(states, {}, microbatches=parts)
            exchanges += _take_exchanges(note, 1)
        rows = scatter_parameters(model)
        update, sent = common.update(parallel, lambda: (run_update(workload, model), tuple(_take_exchanges(note, 1))))
        exchanges += sent
    gradients = _sum_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    exchanges += _list_gradient_exchanges(parallel, workload, model, update)
    updating = gradients + (0 if update is None else update.temporary)
    inputs = ahead = reads = None
    if batch:
        inputs = _sum_bytes(batch.values())
        ahead, reads = inputs * count_prefetched_batches(config.loader_threads), inputs * parts
    return Cost(
        plan=parallel.name,
        mesh=parallel.mesh.text(),
        ranks=size,
        samples=samples,
        parameters=_sum_bytes(model.parameters()) + _sum_bytes(model.buffers()),
        gradients=gradients,
        gathered=passes.gathered,
        optimizer=None if update is None else update.state,
        activations=passes.activations,
        peak=None if passes.peak is None else max(passes.peak + (rows if parts > 1 else 0), updating),
        inputs=inputs,
        ahead=ahead,
        reads=reads,
        flops=passes.flops * parts,
        traffic=work.algorithmic_bytes * samples * parts / parallel.mesh.parts,
        exchanges=tuple(exchanges),
        bubble=_compute_bubble(parallel, parts),
        # A stage of a pipeline holds some of the layers only, and its workload does not know which.
        experts=tuple(workload.expert_layers(model)) if mesh.pipeline == 1 else (),
    )


def _compute_bubble(parallel: Parallel, parts: int) -> float:
    """Return the idle time of a pipeline over its computing time; 0 without one."""
    if parallel.mesh.pipeline == 1 or parallel.plan is None or parallel.plan.pipeline is None:
        return 0.0
    from mlhpc.plugins.axes.bubbles import plan_timeline  # loads torch's pipelines, in seconds

    return float(plan_timeline(parallel.plan.pipeline, parallel.mesh.pipeline, parts).bubble)


def _run_stages(
    parallel: Parallel,
    model: nn.Module,
    workload: Workload,
    batch: dict[str, Tensor],
    config: RunConfig,
    kept: list[nn.Parameter],
) -> Passes | None:
    """Run one microbatch through the stages of this rank; count activations of as many as the schedule holds at
    once.
    """
    from mlhpc.plugins.axes.bubbles import plan_timeline
    from mlhpc.plugins.axes.pipeline import Rehearsed

    stages, samples, parts = stages_of(model), len(next(iter(batch.values()))), config.gradient_accumulation_steps
    assert stages is not None
    alone = Rehearsed(workload, stages, samples)
    passes = run_passes(model, cast(Workload, alone), batch, config, kept_gradients=kept, in_stages=True)
    stages.note_sends(samples)
    if passes is None or passes.activations is None or passes.peak is None:
        return passes
    held = plan_timeline(stages.plan, parallel.mesh.pipeline, parts).held[parallel.mesh.part]
    activations = passes.activations * held // len(stages.modules)
    peak = passes.peak - passes.activations + activations + stages.buffer_bytes(samples, parts)
    return replace(passes, activations=activations, peak=peak)


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def _list_gradient_exchanges(
    parallel: Parallel, workload: Workload, model: nn.Module, update: Update | None
) -> Iterator[Exchange]:
    """Yield what is sent for gradients outside the passes: the norm of shares for clipping, and DDP's mean of
    all others.
    """
    size, shares = parallel.mesh.size, workload.sharded_parameters(model)
    if shares and update is not None and update.clips:
        yield Exchange("all", "all_reduce", size, 1, shares[0].itemsize)
    given = _sum_bytes(each for each in _list_unsharded_parameters(model, workload) if each.requires_grad)
    replicas = parallel.mesh.data_size if parallel.mesh.pipeline > 1 else size
    compress = parallel.plan.compress if parallel.plan is not None else None
    if replicas > 1 and given and compress is not None:
        from mlhpc.plugins.axes.compression import count_bytes  # loads torch's hooks

        whole = [each for each in _list_unsharded_parameters(model, workload) if each.requires_grad]
        for kind, sent in count_bytes(compress, whole).items():
            yield Exchange(GRADIENTS, kind, replicas, 1, sent)
    elif replicas > 1 and given:
        # those of a pipeline's stages are summed after the passes, where the run counts them
        axis = GRADIENTS if parallel.mesh.pipeline == 1 else "replicas"
        yield Exchange(axis, "all_reduce", replicas, len(parallel.stages), given)


def _list_kept_gradients(parallel: Parallel, workload: Workload, model: nn.Module, parts: int) -> list[nn.Parameter]:
    """Return the parameters whose gradients always exist: in a step's earlier parts, or in DDP's buckets."""
    if parallel.mesh.pipeline > 1:
        return list(model.parameters())
    if parts > 1:
        states = states_of(model)
        split = states.shapes if states is not None else {}
        return [parameter for name, parameter in model.named_parameters() if name not in split]
    return _list_unsharded_parameters(model, workload) if parallel.mesh.size > 1 else []


def _list_unsharded_parameters(model: nn.Module, workload: Workload) -> list[nn.Parameter]:
    """Return the parameters that DDP averages: those that every rank has whole."""
    alone = {id(share) for share in workload.sharded_parameters(model)} | {id(part) for _, part, _ in slices(model)}
    states = states_of(model)
    split = states.shapes if states is not None else {}
    return [each for name, each in model.named_parameters() if id(each) not in alone and name not in split]


def _record_unrun_exchanges(parallel: Parallel, config: RunConfig, model: nn.Module, samples: int, note: Note) -> None:
    """Note what regions exchange in a part of a step that cannot run. InputError if only a run could show it."""
    plan = parallel.plan
    assert plan is not None
    for axis, ranks in (("axial", parallel.mesh.axial), ("expert", parallel.mesh.expert)):
        if ranks > 1:
            raise InputError(
                f"plan: the bytes sent on the {axis} axis cannot be counted: the loss depends on values, or the plan"
                " lacks inputs"
            )
    if parallel.mesh.tensor == 1:
        return
    assert plan.tensor is not None
    if config.precision == "bfloat16":
        raise InputError(
            "plan: the bytes sent on the tensor axis are counted for float32 only: give --set precision=float32"
        )
    from mlhpc.plugins.axes.tensor_parallel import note_exchanges  # loads torch's DTensors, in a second

    note_exchanges(model, plan.tensor, parallel.extents, samples, parallel.mesh.tensor, note)


def _list_loss_exchanges(plan: ParallelPlan, ranks: int, parts: int) -> Iterator[Exchange]:
    """Yield what the workload's loss exchanges itself, as the plan states it."""
    for kind, own in plan.exchanges.items() if ranks > 1 else ():
        yield Exchange("loss", kind, ranks, own.calls * parts, own.bytes_per_rank * ranks * parts)


def predict_largest_cost(
    descriptor: Descriptor, config: RunConfig, parallel: Parallel, common: PredictionCache | None = None
) -> Cost:
    """Predict the memory of the rank that holds most, with the collectives of the rank that sends most.

    Inside a sample a part has two neighbours; the last part may be the largest. Of two parts the first may send more:
    strided layers need other borders of it. Where all parts of every layer are equal, the middle holds as much as any.
    ``common``: see `predict`.
    """
    common = common or PredictionCache()
    mesh = parallel.mesh
    places = {tuple(parts // 2 for parts in mesh.spatial)}
    places.add(tuple(0 if parts == 2 else parts // 2 for parts in mesh.spatial))
    if max(mesh.spatial, default=1) > 2 and not _has_equal_parts(
        common.trace(descriptor, config, parallel), mesh.spatial
    ):
        places.add(tuple(parts - 1 for parts in mesh.spatial))
    ranks = {_compute_rank(place, mesh.spatial) for place in places} if mesh.axial == 1 else {mesh.axial - 1}
    if mesh.pipeline > 1:  # of a long pipeline its ends and two in the middle
        last = mesh.pipeline - 1
        ranks = set(range(mesh.pipeline)) if last < MANY_STAGES else {0, 1, last // 2, last // 2 + 1, last}
    costs = [
        predict(descriptor, config, replace(parallel, mesh=replace(mesh, rank=rank)), common) for rank in sorted(ranks)
    ]
    fullest = max(costs, key=lambda cost: cost.memory)
    fullest = replace(fullest, flops=max(cost.flops for cost in costs))  # of the slowest stage of a pipeline
    return replace(fullest, exchanges=max((cost.exchanges for cost in costs), key=_sum_sent_bytes))


def _sum_sent_bytes(exchanges: Iterable[Exchange]) -> int:
    return sum(each.bytes for each in exchanges)


def _has_equal_parts(found: Trace | None, spatial: tuple[int, ...]) -> bool:
    """Return True if a sample's ranks have equal parts of each tensor, apart from tensors that all have whole."""
    calls = found.calls if found is not None else []
    extents = [each for call in calls for each in (call.before, call.after) if set(each) != {1}]
    return found is not None and all(n % parts == 0 for each in extents for n, parts in zip(each, spatial, strict=True))


def _compute_rank(place: tuple[int, ...], parts: tuple[int, ...]) -> int:
    return sum(at * math.prod(parts[d + 1 :]) for d, at in enumerate(place))


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
