"""`mlhpc plan`: what a parallel plan costs each rank, before anything is allocated or run."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import structs

from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    JSON,
    FiniteRange,
    IntegerRange,
    choose_config_name,
    convert_plan_to_settings,
    format_option,
    plan_options,
    settings_options,
)
from mlhpc.suite.cli.progress import start_progress
from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import align_columns, print_line, render_bytes
from mlhpc.suite.plugins import load_offload

if TYPE_CHECKING:
    from mlhpc.plugins.axes.offload import Offload, Rates, Tier
    from mlhpc.plugins.axes.predict import Cost, PredictionCache
    from mlhpc.plugins.axes.step_time import Estimate, Machine, StepTime


DEFAULT_PLANS = ("spatial", "sharded")  # the first that a workload ships
VERSION = 1
LISTED_PLANS = 12  # plans of a sweep that are printed


@click.command(
    epilog="""\b
Examples:
  mlhpc plan cosmoflow --size full --mesh data=512,spatial=2x2x1
  mlhpc plan cosmoflow --size full --nodes 512 --ranks-per-node 4 --sweep --format json
  mlhpc plan deepcam --size mini --mesh data=2,spatial=2x1 --tflops 20 --gigabytes-per-s 10 --latency-us 5
  mlhpc moe fit sweep.json --format json > network.json
  mlhpc plan cosmoflow --size mini --nodes 4 --sweep --ceilings ceilings.json --network network.json --reached 20-50%
  mlhpc plan moe_lm --size full --nodes 8 --ceilings ceilings.json --offload host
  mlhpc plan cosmoflow --plan ./mine.yaml --size small --mesh spatial=2x2x2 --memory 16
"""
)
@click.argument("workload")
@settings_options
@plan_options
@click.option(
    "--nodes", type=IntegerRange(1, 100_000), help="Number of nodes; times --ranks-per-node it is the number of ranks."
)
@click.option(
    "--ranks-per-node", type=IntegerRange(1, 1024), default=1, show_default=True, help="Number of ranks on a node."
)
@click.option(
    "--ranks", type=IntegerRange(1, 100_000), help="Total number of ranks. [that of --nodes, else of the mesh]"
)
@click.option(
    "--sweep",
    is_flag=True,
    help="Try every mesh of these ranks with --plan, else with each plan of the workload. "
    "The fastest comes first; without rates, the one with the least memory.",
)
@click.option(
    "--memory",
    type=FiniteRange(0, min_open=True),
    metavar="GIB",
    help="Reject plans that need more memory per rank, such as 16.",
)
@click.option(
    "--tflops",
    metavar="N[-N]",
    help="Compute rate of a rank in 10^12 FLOP/s, to predict the time of a step, such as 20 or 15-25.",
)
@click.option(
    "--gigabytes-per-s",
    type=FiniteRange(0, min_open=True),
    help="Bandwidth of a rank's network link in 10^9 B/s, such as 12.5. Needs --tflops.",
)
@click.option(
    "--latency-us",
    type=FiniteRange(0),
    help="Latency of a message between ranks in microseconds, such as 2. Needs --tflops.",
)
@click.option(
    "--ceilings",
    type=click.Path(path_type=Path),
    help="JSON file of `mlhpc ceilings`: its measured compute rates replace --tflops.",
)
@click.option(
    "--network",
    type=click.Path(path_type=Path),
    help="Output of `mlhpc moe fit SWEEP --format json`: its measured bandwidth and latency replace the stated ones.",
)
@click.option(
    "--reached",
    metavar="PERCENT[-PERCENT]",
    help="Share of the rates of --ceilings that a step reaches, such as 30-50%.",
)
@click.option(
    "--offload",
    type=click.Choice(("host", "file")),
    help="Predict what it costs to keep experts and their optimizer states in the host's memory or in files. "
    "Needs --ceilings.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="With --offload file: take steps in the tier of hyperparameters.moe.offload and measure their waits.",
)
@format_option()
def plan(
    workload: str,
    size: str | None,
    config: str | None,
    overrides: tuple[str, ...],
    plan_name: str | None,
    mesh: str | None,
    nodes: int | None,
    ranks_per_node: int,
    ranks: int | None,
    sweep: bool,
    memory: float | None,
    tflops: str | None,
    gigabytes_per_s: float | None,
    latency_us: float | None,
    ceilings: Path | None,
    network: Path | None,
    reached: str | None,
    offload: Tier | None,
    measure: bool,
    style: str,
) -> None:
    """Predict memory, messages and time of a step under a parallel plan; check that the plan is valid.

    A plan states how samples and parameters are divided over ranks. A mesh states how many ranks each axis has.
    Without --plan the first plan of the workload is taken. No memory is allocated and no rank is started.

    Exit code 0: the plan is valid. Exit code 1: no mesh of the sweep is valid. Exit code 2: plan or option is wrong.
    """
    chosen = load_descriptor(workload)
    chosen.code()
    tried = [plan_name] if plan_name else _list_plans(chosen)
    given = (*overrides, *convert_plan_to_settings(tried[0], mesh))
    resolved = load_config(chosen, choose_config_name(size, config) or DEFAULT_SIZE, given).with_stated_precision(
        "mlhpc plan"
    )
    if ranks is not None and nodes is not None:
        raise click.UsageError("--ranks and --nodes both say how many ranks there are: give one of them")
    ranks = ranks if nodes is None else nodes * ranks_per_node
    if measure and offload != "file":
        raise click.UsageError("--measure tries a tier of files: give --offload file with it")
    rates = (
        None if offload is None else _read_offload_rates(offload, ceilings, reached, resolved.precision, sweep=sweep)
    )
    # The time of a step needs the network too, that of an offload does not.
    measured = (None, None, None) if rates and network is None else (ceilings, network, reached)
    machine = _choose_machine((tflops, gigabytes_per_s, latency_us), measured, resolved.precision)
    refused: list[dict[str, str]] = []
    if not sweep:
        with start_progress(f"plan {chosen.name} {resolved.size}: the model, on no memory"):
            costs = [_predict_cost(chosen, resolved, ranks, memory)]
    elif ranks is None or mesh is not None:
        raise click.UsageError("--sweep needs --ranks or --nodes and chooses the mesh itself: leave --mesh out")
    else:
        with start_progress("meshes tried") as tell:
            costs, refused = _sweep(chosen, resolved, tried, ranks, memory, tell)
    rows = _predict_times(machine, costs)
    moved = None if rates is None else _predict_offload(rates, costs[0], resolved, measure=measure)
    if style == JSON:
        print_line(_render_json(rows, refused, moved))
    else:
        lines = [*(_render_sweep(rows, refused) if sweep else _render_cost(*rows[0]))]
        print_line("\n".join(lines if moved is None else [*lines, *moved.render(costs[0])]))
    if not rows:
        sys.exit(ExitCode.FINDINGS)  # no plan of the sweep is legal


StatedOptions = tuple[str | None, float | None, float | None]  # --tflops, --gigabytes-per-s, --latency-us
MeasuredOptions = tuple[Path | None, Path | None, str | None]  # --ceilings, --network, --reached
Row = tuple["Cost", "StepTime | None"]  # the time is None without a machine


def _choose_machine(stated: StatedOptions, measured: MeasuredOptions, precision: str) -> Machine | None:
    """Return the machine that the options state, or the one that was measured; None without any option."""
    if stated == (None, None, None):
        return _read_measured_machine(*measured, precision)
    machine = _make_stated_machine(*stated)
    if measured != (None, None, None):
        raise click.UsageError(
            "give either --tflops, --gigabytes-per-s and --latency-us, or --ceilings and --network, not both groups"
        )
    return machine


def _read_offload_rates(
    tier: Tier, ceilings: Path | None, reached: str | None, precision: str, *, sweep: bool
) -> Rates:
    from mlhpc.plugins.axes.offload import read_rates

    if ceilings is None:
        raise click.UsageError("--offload needs the rates of a file of `mlhpc ceilings`: --ceilings ceilings.json")
    if sweep:
        raise click.UsageError("--offload is of one mesh: give --mesh in place of --sweep")
    return read_rates(ceilings, tier, precision, None if reached is None else _parse_part(reached))


def _predict_offload(rates: Rates, cost: Cost, config: RunConfig, *, measure: bool) -> Offload:
    from mlhpc.plugins.axes.offload import predict_offload

    parts = config.gradient_accumulation_steps
    found = predict_offload(rates, cost, parts)
    if not measure:
        return found
    load_offload("experts", "--measure")
    from mlhpc.plugins.offload.measure import measure_waits

    with start_progress("plan: steps in the tier") as tell:
        idle, computing = measure_waits(config, cost.experts, found.layers[0].compute_s / 3, tell)
    return found.use_waits(idle, computing, parts)


def _make_stated_machine(tflops: str | None, gigabytes_per_s: float | None, latency_us: float | None) -> Machine:
    from mlhpc.plugins.axes.step_time import Estimate, Machine, make_uniform_network

    if tflops is None or gigabytes_per_s is None or latency_us is None:
        raise click.UsageError("--tflops, --gigabytes-per-s and --latency-us belong together: give all or none")
    links = make_uniform_network(gigabytes_per_s * 1e9, latency_us * 1e-6)
    return Machine(_parse_span("--tflops", tflops).times(Estimate(1e12, 1e12, 1e12)), links, sources=("stated",))


def _read_measured_machine(
    ceilings: Path | None, network: Path | None, reached: str | None, precision: str
) -> Machine | None:
    from mlhpc.plugins.axes.step_time import read_machine

    if (ceilings is None) != (network is None) or (reached is not None and ceilings is None):
        raise click.UsageError("--ceilings needs --network, --network needs --ceilings, and --reached needs both")
    if ceilings is None or network is None:
        return None
    return read_machine(ceilings, network, precision, None if reached is None else _parse_part(reached))


def _parse_part(reached: str) -> Estimate:
    """Parse --reached. UsageError outside of 1 to 100 %."""
    from mlhpc.plugins.axes.step_time import Estimate

    part = _parse_span("--reached", reached.replace("%", ""))
    if not 1 <= part.low <= part.high <= 100:
        raise click.UsageError(f"--reached {reached}: expected per cent from 1 to 100, the whole peak rate: 30-50%")
    return part.times(Estimate(0.01, 0.01, 0.01))


def _parse_span(option: str, text: str) -> Estimate:
    """Parse one number or two, ``LOW-HIGH``. UsageError names the option."""
    from mlhpc.plugins.axes.step_time import Estimate

    try:
        low, _, high = text.partition("-")
        ends = float(low), float(high or low)
    except ValueError:
        # Not above zero, so that the check below refuses it and names the option.
        ends = (0.0, 0.0)
    if not 0 < ends[0] <= ends[1] < float("inf"):
        raise click.UsageError(f"{option} {text}: expected a positive number, or two such as 0.3-0.5")
    return Estimate.of(*ends)


def _predict_times(machine: Machine | None, costs: Sequence[Cost]) -> list[Row]:
    """Predict a step's time for each plan. Sort by time, or without a machine by memory."""
    from mlhpc.plugins.axes.step_time import predict_time

    rows = [(cost, None if machine is None else predict_time(machine, cost)) for cost in costs]
    # Without a machine all times are equal, so that memory decides.
    return sorted(rows, key=lambda row: (row[1].total_s if row[1] else 0.0, row[0].memory))


def _render_json(rows: Sequence[Row], refused: list[dict[str, str]], moved: Offload | None) -> str:
    plans = []
    for cost, time in rows:
        derived = {"memory": cost.memory, "lacks": cost.lacks, "time": None if time is None else time.row()}
        plans.append(asdict(cost) | derived)
    offload = {} if moved is None else {"offload": moved.row()}
    return json.dumps({"version": VERSION, "plans": plans, "refused": refused} | offload, indent=1)


def _list_plans(chosen: Descriptor) -> list[str]:
    """List the names of a workload's plans, `DEFAULT_PLANS` first. Without any, return the first default."""
    shipped = sorted(path.stem for path in (chosen.folder / "plans").glob("*.yaml"))
    defaults = [name for name in DEFAULT_PLANS if name in shipped]
    return [*defaults, *(name for name in shipped if name not in defaults)] or [DEFAULT_PLANS[0]]


def _predict_cost(
    chosen: Descriptor,
    config: RunConfig,
    ranks: int | None,
    memory: float | None,
    common: PredictionCache | None = None,
) -> Cost:
    """Predict the cost of one mesh. InputError if it is not legal, has too few samples, or needs too much memory.

    ``memory`` is the limit in GiB. ``common`` caches what the meshes of a sweep share.
    """
    from mlhpc.plugins.axes.predict import NotLegalError, predict_largest_cost
    from mlhpc.suite.data.sampling import check_batch
    from mlhpc.suite.training.parallel.mesh import ranks_of
    from mlhpc.suite.training.parallel.parallel_dims import Parallel
    from mlhpc.suite.training.parallel.plan import find_plan, read_plan

    assert config.plan is not None
    text = config.mesh or read_plan(find_plan(chosen, config.plan))[0].mesh
    count = ranks or ranks_of(text, rest=1)
    parallel = Parallel.of(config, chosen, 0, count)
    config = parallel.with_microbatches(config)
    check_batch(config.global_batch_size, parallel.mesh.data_size, config.gradient_accumulation_steps)
    try:
        cost = predict_largest_cost(chosen, config, parallel, common)
    except InputError as error:
        # A sweep lists what is not legal and goes on; any other error ends it.
        raise NotLegalError(str(error)) from None
    if memory is not None and cost.memory > memory * 2**30:
        raise InputError(
            f"plan {parallel.name} with {cost.mesh}: a rank needs {render_bytes(cost.memory)}, "
            f"--memory is {memory:g} GiB: split samples over more ranks, or set gradient_accumulation_steps"
        )
    return cost


def _sweep(
    chosen: Descriptor,
    config: RunConfig,
    plans: list[str],
    ranks: int,
    memory: float | None,
    tell: Callable[[int, int], None],
) -> tuple[list[Cost], list[dict[str, str]]]:
    """Find the legal plans and meshes of this many ranks. Also return why the others are not legal."""
    from mlhpc.plugins.axes.predict import PredictionCache, list_meshes, list_plan_costs
    from mlhpc.suite.training.parallel.meta_init import build_on_meta
    from mlhpc.suite.training.parallel.parallel_dims import placements
    from mlhpc.suite.training.parallel.plan import find_plan, read_plan

    found = {name: read_plan(find_plan(chosen, name))[0] for name in plans}
    common = PredictionCache()
    # On the meta device parameters have names and shapes but no memory.
    names = [name for name, _ in build_on_meta(chosen, config)[1].named_parameters()]
    meshes = sum(1 for plan in found.values() for _ in list_meshes(plan, ranks))
    looked = itertools.count(1)

    def predict(plan: str, mesh: str) -> Cost:
        tell(next(looked), meshes)
        return _predict_cost(chosen, structs.replace(config, plan=plan, mesh=mesh), ranks, memory, common)

    return list_plan_costs(found, ranks, lambda plan: placements(found[plan], names), predict)


def _render_cost(cost: Cost, time: StepTime | None) -> Iterator[str]:
    yield (
        f"mesh {cost.mesh}: {cost.ranks} ranks, {cost.samples} samples per group and part of a step; "
        "memory of the fullest rank, collectives of the rank that sends most"
    )
    # What a rank holds, then what it reads and computes.
    for name, text in (
        ("parameters, buffers", render_bytes(cost.parameters)),
        ("gradients", render_bytes(cost.gradients)),
        ("gathered parameters", render_bytes(cost.gathered)),
        ("optimizer state", _render_bytes_or_unknown(cost.optimizer)),
        ("activations", _render_bytes_or_unknown(cost.activations)),
        ("at most in a step", _render_bytes_or_unknown(cost.peak)),
        ("inputs", _render_bytes_or_unknown(cost.inputs)),
        ("all of these", _render_memory(cost)),
        ("loaded ahead, host", _render_bytes_or_unknown(cost.ahead)),
        ("read per step", _render_bytes_or_unknown(cost.reads)),
        ("FLOPs per step", f"{cost.flops:.4g}"),
    ):
        yield f"  {name:<20} {text:>12}"
    if cost.bubble:
        yield f"  {'idle / computing':<20} {cost.bubble:>12.4g}"
    if cost.lacks:
        yield f"  not known, and not in all of these: {', '.join(cost.lacks)}"
    yield f"  {'collective':<20} {'axis':<12} {'ranks':>6} {'calls':>6} {'bytes given per step':>22}"
    for each in cost.exchanges:
        yield f"  {each.kind:<20} {each.axis:<12} {each.ranks:>6} {each.calls:>6} {each.bytes:>22,}"
    if not cost.exchanges:
        yield "  none"
    if time is not None:
        yield f"  predicted step: {time.text()}"


def _render_bytes_or_unknown(size: int | None) -> str:
    return "not known" if size is None else render_bytes(size)


def _render_memory(cost: Cost) -> str:
    """Render all memory of a rank, after ">" if some of it is not known."""
    return ("> " if cost.lacks else "") + render_bytes(cost.memory)


def _render_sweep(rows: Sequence[Row], refused: list[dict[str, str]]) -> Iterator[str]:
    table = [("plan", "mesh", "memory", "read", "exchanged", "gradients", "predicted step")]
    for cost, time in rows[:LISTED_PLANS]:
        split = sum(each.bytes for each in cost.exchanges if each.axis != "gradients")
        predicted = time.text() if time else "not known: give --ceilings and --network"
        sizes = _render_bytes_or_unknown(cost.reads), render_bytes(split), render_bytes(cost.gradients)
        table.append((cost.plan or "", cost.mesh, _render_memory(cost), *sizes, predicted))
    yield from align_columns(table, right=range(2, 6))
    if len(rows) > LISTED_PLANS:
        yield f"{len(rows) - LISTED_PLANS} more (--format json has all)"
    if refused:
        first = refused[0]
        yield f"{len(refused)} are not legal; the first: {first['plan']}, {first['mesh']}: {first['reason']}"
