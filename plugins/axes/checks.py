"""Checks what a plan says of the axes whose ranks share samples, in its file and on a mesh. Loads no torch."""

from __future__ import annotations

from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.mesh import AXIAL, PIPELINE, SHARD, TENSOR, Mesh
from mlhpc.suite.training.parallel.plan import (
    OPERAND_WAYS,
    SAMPLE,
    SINGLE_STAGE,
    V_SCHEDULE,
    AxialPlan,
    Cut,
    ParallelPlan,
    PipelinePlan,
    TensorPlan,
)


def check_plan(plan: ParallelPlan, source: YamlSource) -> None:
    """InputError with file and line for an axis that a plan describes wrongly."""
    if plan.tensor is not None:
        _check_tensor(plan.tensor, plan, source)
    if plan.axial is not None:
        _check_axial(plan.axial, source)
    if plan.pipeline is not None:
        _check_pipeline(plan.pipeline, plan, source)


def _check_tensor(tensor: TensorPlan, plan: ParallelPlan, source: YamlSource) -> None:
    """InputError for dimensions that are not described, or another order than sample, then what lies in parts."""
    if not tensor.along:
        named = [path for path, region in tensor.regions.items() if region.dims]
        if tensor.begins or tensor.ends or named:
            raise InputError(f"{source.where('tensor')}: begins, ends and dims need along: add it, or remove them")
        if not plan.inputs:
            raise InputError(
                f"{source.where('tensor')}: a plan without along needs inputs, to count its sums: add inputs"
            )
    elif not (tensor.begins and tensor.ends):
        raise InputError(f"{source.where('tensor')}: along: {tensor.along} needs begins and ends: add them")
    regions = {path: region.dims for path, region in tensor.regions.items()}
    for part, modules in (("begins", tensor.begins), ("regions", regions), ("ends", tensor.ends)):
        for path, dims in modules.items() if tensor.along else ():
            where = source.where("tensor", part, path)
            if dims[:2] != (SAMPLE, tensor.along):
                raise InputError(f"{where}: dims are {', '.join(dims)}: expected {SAMPLE}, {tensor.along} first")
            lacking = [each for each in dims[1:] if each not in plan.extents]
            if lacking:
                raise InputError(f"{where}: dimension {lacking[0]!r} has no entry under extents")
    for path, placement in plan.parameters.items():
        if isinstance(placement, Cut) and placement.units and placement.units not in plan.extents:
            raise InputError(
                f"{source.where('parameters', path)}: units {placement.units!r} have no entry under extents"
            )


def _check_axial(axial: AxialPlan, source: YamlSource) -> None:
    """InputError for an operand with no way or several, or with dimensions that its dims do not name."""
    for path, module in axial.modules.items():
        if not module.inputs and not module.outputs:
            raise InputError(f"{source.where('axial', 'modules', path)}: expected inputs or outputs")
        for part, operands in (("inputs", module.inputs), ("outputs", module.outputs)):
            for number, operand in operands.items():
                where = source.where("axial", "modules", path, part, str(number))
                given = [name for name in OPERAND_WAYS if getattr(operand, name)]
                if len(given) != 1:
                    raise InputError(
                        f"{where}: {', '.join(given) or 'nothing'} given: expected one of {', '.join(OPERAND_WAYS)}"
                    )
                if operand.turn and len(set(operand.turn)) != 2:
                    raise InputError(f"{where}: turn is {', '.join(operand.turn)}: expected two dimensions")
                if len(set(operand.dims)) != len(operand.dims):
                    raise InputError(f"{where}: dims name a dimension twice")
                named = () if operand.first else operand.turn or (operand.along,)
                lacking = [name for name in named if name not in operand.dims]
                if lacking:
                    raise InputError(f"{where}: {lacking[0]!r} is not one of its dims {', '.join(operand.dims)}")
    for path, draw in axial.draws.items():
        if draw.along not in draw.dims:
            raise InputError(f"{source.where('axial', 'draws', path)}: {draw.along!r} is not one of its dims")


def _check_pipeline(pipeline: PipelinePlan, plan: ParallelPlan, source: YamlSource) -> None:
    """InputError for dimensions that are not described, or a number of stages that the schedule does not support."""
    for dims in pipeline.between:
        lacking = [each for each in dims if each != SAMPLE and each not in plan.extents]
        if lacking:
            raise InputError(
                f"{source.where('pipeline', 'between')}: dimension {lacking[0]!r} has no entry under extents"
            )
    schedule, stages = pipeline.schedule, pipeline.stages_per_rank
    fits = stages == 1 if schedule in SINGLE_STAGE else stages == 2 if schedule == V_SCHEDULE else stages > 1
    if not fits:
        expected = "1" if schedule in SINGLE_STAGE else "2" if schedule == V_SCHEDULE else "at least 2"
        raise InputError(f"{source.where('pipeline', 'stages')}: {schedule} needs {expected} per rank, not {stages}")


def check_mesh(plan: ParallelPlan, mesh: Mesh, name: str, descriptor: Descriptor) -> None:
    """InputError if a plan, by its name, does not describe the axis of a mesh, or cannot compress gradients there."""
    if mesh.tensor > 1 and plan.tensor is None:
        raise InputError(f"--mesh {mesh.text()}: plan {name!r} splits no products: leave {TENSOR} out")
    if mesh.axial > 1 and plan.axial is None:
        raise InputError(f"--mesh {mesh.text()}: plan {name!r} splits no rows: leave {AXIAL} out")
    if mesh.pipeline > 1 and descriptor.no_stages:
        raise InputError(
            f"--mesh {mesh.text()}: {descriptor.name} has no stages for a pipeline: {descriptor.no_stages}: "
            f"leave {PIPELINE} out"
        )
    if mesh.pipeline > 1 and plan.pipeline is None:
        raise InputError(f"--mesh {mesh.text()}: plan {name!r} has no stages: leave {PIPELINE} out")
    if (
        mesh.pipeline > 1
        and mesh.shard > 1
        and plan.pipeline is not None
        and plan.pipeline.schedule not in SINGLE_STAGE
    ):
        raise InputError(
            f"plan: schedule {plan.pipeline.schedule} with {SHARD} is not supported: torch 2.13 loses gradients in "
            f"zero-bubble schedules: expected {' or '.join(sorted(SINGLE_STAGE))}, or leave {SHARD} out of --mesh"
        )
    _check_compression(plan, mesh)


def _check_compression(plan: ParallelPlan, mesh: Mesh) -> None:
    """InputError if gradients cannot be compressed on this mesh."""
    if plan.compress is None:
        return
    kind = plan.compress.kind
    if mesh.pipeline > 1 or mesh.tensor > 1:
        axis = PIPELINE if mesh.pipeline > 1 else TENSOR
        raise InputError(
            f"plan: gradients are not compressed under {axis}: leave {axis} out of --mesh, or remove compress"
        )
    if mesh.shard > 1 and kind not in ("fp16", "bf16"):
        raise InputError(
            f"plan: compress: {kind} needs whole gradients, and {SHARD} scatters them: give fp16 or bf16, or leave "
            f"{SHARD} out of --mesh"
        )
