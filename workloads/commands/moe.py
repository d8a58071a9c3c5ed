"""The group `mlhpc moe`: benchmarks an MoE layer, sweeps the network, and fits a machine's links to such sweeps.

A benchmark starts its own MPI ranks (``--ranks``) or runs on those of mpiexec, srun or torchrun.
"""

from __future__ import annotations

import json
import statistics
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import ValidationError

from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import (
    JSON,
    FiniteRange,
    IntegerRange,
    device_option,
    format_option,
    output_option,
    ranks_option,
)
from mlhpc.suite.cli.progress import start_progress
from mlhpc.suite.documents import convert, find_mistake
from mlhpc.suite.errors import InputError, is_of_memory
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, print_progress, render_error, write_file_atomically
from mlhpc.suite.launch.local import make_suite_command, run_attached
from mlhpc.suite.launcher import find_world
from mlhpc.suite.plugins import explain_missing_wing, find_plugins

if TYPE_CHECKING:
    import torch

    from mlhpc.suite.world import World
    from mlhpc.workloads.moe.bench import Shape
    from mlhpc.workloads.moe.config import MoEConfig

MIB = 1 << 20
GROUP = "mlhpc.moe"  # the entry points of what analyses sweeps: "fit", a function of paths and the output format


@click.group(
    cls=Subcommands,
    invoke_without_command=True,
    epilog="""\b
Examples:
  mlhpc moe --backend loop --load uniform
  mlhpc moe --ranks 4 --experts 2 --r 2 --degree 2 --algorithm 2dh --ranks-per-node 2
  srun -n 8 mlhpc moe --tokens 32768 --width 4096 --hidden 1024 --experts 128 --top-k 8 --activation swiglu \
--dtype bfloat16
  srun -n 64 mlhpc moe --sweep-network -o sweep.json && mlhpc moe fit sweep.json
""",
)
@ranks_option()
@click.option("--tokens", type=IntegerRange(1), default=4096, show_default=True, help="Number of tokens on each rank.")
@click.option("--width", type=IntegerRange(1), default=256, show_default=True, help="Width of a token (features).")
@click.option("--hidden", type=IntegerRange(1), default=1024, show_default=True, help="Hidden width of one expert.")
@click.option("--experts", type=IntegerRange(1), default=64, show_default=True, help="Number of experts of the layer.")
@click.option(
    "--top-k", type=IntegerRange(1), default=2, show_default=True, help="Number of experts that each token goes to."
)
@click.option(
    "--activation",
    type=click.Choice(["relu", "gelu", "silu", "swiglu"]),
    default="relu",
    show_default=True,
    help="Activation function of an expert.",
)
@click.option(
    "--dispatch",
    type=click.Choice(["dropless", "capacity", "einsum"]),
    default="dropless",
    show_default=True,
    help="How tokens reach experts: dropless keeps all, the others drop tokens above --capacity.",
)
@click.option(
    "--capacity",
    type=FiniteRange(),
    help=(
        "Room of an expert as a multiple of its mean load, such as 1.25; 0: as much as needed; "
        "negative: as needed, up to its absolute value. Only for dispatch capacity and einsum."
    ),
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "loop", "onednn", "bmm", "grouped_mm", "triton"]),
    default="auto",
    show_default=True,
    help=(
        "Kernel that multiplies the experts; auto measures which is fastest. triton fuses gather and product, on a GPU."
    ),
)
@click.option(
    "--load",
    type=click.Choice(["router", "uniform", "skewed"]),
    default="router",
    show_default=True,
    help=(
        "Which experts tokens go to: router lets the layer choose, uniform uses all equally, skewed sends two thirds "
        "of the tokens to one expert."
    ),
)
@click.option(
    "--r",
    "parallel_r",
    type=IntegerRange(0),
    default=1,
    show_default=True,
    help="Copies of a token per expert, for ranks that share the expert; 0 gathers weights instead of sending tokens.",
)
@click.option(
    "--degree",
    type=IntegerRange(1),
    default=1,
    show_default=True,
    help="Number of chunks that a rank sends its tokens in: one is sent while another is computed.",
)
@click.option(
    "--algorithm",
    type=click.Choice(["linear", "2dh"]),
    default="linear",
    show_default=True,
    help="How ranks exchange tokens (all-to-all): linear sends to each rank, 2dh gathers within a node first.",
)
@click.option("--ranks-per-node", type=IntegerRange(1), help="Number of ranks that count as one node. [as launched]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float64"]),
    default="float32",
    show_default=True,
    help="Number format of tokens and weights.",
)
@device_option()
@click.option("--threads", type=IntegerRange(1), default=1, show_default=True, help="Number of CPU threads of a rank.")
@click.option(
    "--repeats",
    type=IntegerRange(1),
    default=10,
    show_default=True,
    help="Number of timings of each thing measured; layer and dense FFN are timed in pairs.",
)
@click.option(
    "--sweep-network", is_flag=True, help="Time all-to-all and layer on 2, 4, … ranks, as input of `mlhpc moe fit`."
)
@click.option(
    "--up-to-mib",
    type=FiniteRange(0, 65536, min_open=True),
    default=16.0,
    show_default=True,
    help="Largest message of a rank in the sweep, in MiB.",
)
@format_option()
@output_option("JSON file for the results.", "none")
@click.pass_context
def moe(  # one parameter per option
    context: click.Context,
    ranks: int,
    tokens: int,
    width: int,
    hidden: int,
    experts: int,
    top_k: int,
    activation: str,
    dispatch: str,
    capacity: float | None,
    backend: str,
    load: str,
    parallel_r: int,
    degree: int,
    algorithm: str,
    ranks_per_node: int | None,
    dtype: str,
    device: str,
    threads: int,
    repeats: int,
    sweep_network: bool,
    up_to_mib: float,
    style: str,
    output: Path | None,
) -> None:
    """Time the phases of a mixture-of-experts layer, and compare it with a dense FFN of equal FLOPs.

    `mlhpc moe fit` predicts the layer on more ranks from sweeps of `--sweep-network`.
    """
    if context.invoked_subcommand is not None:
        return
    config = _make_layer_config(
        {
            "experts": experts,
            "top_k": top_k,
            "hidden": hidden,
            "activation": activation,
            "dispatch": dispatch,
            "capacity_factor": capacity,
            "backend": backend,
            "expert_parallel": True,
            "parallel_r": parallel_r,
            "overlap_degree": degree,
            "all_to_all": algorithm,
            "ranks_per_node": ranks_per_node,
        }
    )
    # not under a launcher yet: this process starts the same command on the ranks, and waits
    if find_world(ranks) is None and ranks > 1:
        sys.exit(run_attached(make_suite_command(*sys.argv[1:]), ranks=ranks))
    world, chosen = _join_world(device, threads)
    with _end_all_on_error(world):
        from mlhpc.workloads.moe import bench

        shape = bench.Shape(tokens, width, config, load, dtype)  # type: ignore[arg-type]
        if world.is_first:
            what = "all-to-all and layer on 2, 4, … ranks" if sweep_network else "the layer and its dense FFN"
            print_progress(
                f"moe: times {what}: {world.size} ranks, {tokens} tokens each, width {width}, {experts} experts, "
                f"{repeats} repeats, {chosen.type}",
                error=True,
            )
        if sweep_network:
            result, render = _sweep(world, chosen, shape, int(up_to_mib * MIB), repeats), _sweep_table
        else:
            measured = bench.measure(shape, world, chosen, repeats)
            if not measured.error <= measured.error_bound:
                raise InputError(
                    f"the layer's output differs from float64 by {measured.error:.2g}, more than the bound of "
                    f"{measured.error_bound:.2g}: its speed does not count; try another --backend"
                )
            result, render = measured.row(), _layer_table
        if world.is_first:
            print_line(json.dumps(result, indent=1) if style == JSON else render(result))
            if output is not None:
                write_file_atomically(output, json.dumps(result, indent=1) + "\n")
        world.barrier()


@moe.command(
    epilog="""\b
Examples:
  srun -n 64 mlhpc moe --sweep-network -o sweep.json
  mlhpc moe fit sweep.json
  mlhpc report runs/mine sweep.json
""",
)
@click.argument("sweeps", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@format_option()
def fit(sweeps: tuple[Path, ...], style: str) -> None:
    """Predict all-to-all and MoE layer on more ranks than were measured, from sweeps of `mlhpc moe --sweep-network`.

    Prints bandwidth and latency of the links, the predicted times, and how wrong the prediction may be."""
    if not sweeps:
        raise click.UsageError(
            "no file of a sweep: mlhpc moe fit FILE; `mlhpc moe --ranks 4 --sweep-network -o FILE` makes one"
        )
    if "fit" not in find_plugins(GROUP):
        raise click.ClickException(explain_missing_wing("network"))
    # Loaded only here: the analysis is no part of a benchmark, so no rank imports it
    find_plugins(GROUP)["fit"].point.load()(sweeps, style)


def _make_layer_config(settings: dict[str, Any]) -> MoEConfig:
    """Make the configuration of the layer by the rules that `mlhpc run` has for it. InputError is one line."""
    from mlhpc.workloads.moe.config import MoEConfig

    try:
        return convert(settings, MoEConfig)
    except ValidationError as error:
        raise InputError(find_mistake(settings, MoEConfig, error).text) from None


def _join_world(device: str, threads: int) -> tuple[World, torch.device]:
    """Join the world this process was started in and choose this rank's device."""
    # imported here: it takes 3 s, which --help should not wait for
    import torch

    from mlhpc.suite.world import World

    torch.set_num_threads(threads)
    world = World.create()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device("cpu") if device == "cpu" else torch.device("cuda", world.local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    world.init_torch(chosen)
    return world, chosen


def _sweep(world: World, device: torch.device, shape: Shape, up_to_bytes: int, repeats: int) -> dict[str, Any]:
    """Sweep the network. InputError on one rank: there is nothing to send."""
    from mlhpc.workloads.moe import bench

    if world.size == 1:
        raise InputError(
            "--sweep-network is on 1 rank, expected several: add --ranks 4, or use srun, mpiexec or torchrun"
        )
    ranks_per_node = shape.moe.ranks_per_node or world.local_size
    with start_progress("sweep", shown=world.is_first) as tell:
        return bench.run_network_sweep(world, device, shape, ranks_per_node, up_to_bytes, repeats, tell)


@contextmanager
def _end_all_on_error(world: World) -> Iterator[None]:
    """End every rank if one fails. All ranks make the same user error at once, so only the first one reports it."""
    try:
        yield
    except (ValueError, OSError):
        if world.is_first:
            raise
        sys.exit(ExitCode.USAGE)
    except Exception as error:
        if world.size > 1:  # the other ranks would wait for this one in their next collective, forever
            if is_of_memory(error):
                print_line(
                    f"mlhpc: not enough memory here for this layer: {render_error(error)}; try fewer --tokens",
                    error=True,
                )
            else:
                traceback.print_exc()
            world.transport.abort(1)
        raise


def _layer_table(result: dict[str, Any]) -> str:
    """Render a layer benchmark: the shape, times and ratio to the dense FFN, load, seconds per phase."""
    load, shape = result["load"], result["shape"]
    moe = shape["moe"]
    lines = [
        (
            f"{result['ranks']} ranks, {shape['tokens']} tokens each, d {shape['width']}, h {moe['hidden']}, "
            f"E {moe['experts']}, k {moe['top_k']}, {moe['dispatch']}, {moe['backend']}, {shape['load']} load, "
            f"{shape['dtype']}, {result['device']}"
        ),
        (
            f"layer {1e3 * result['layer_s']:.1f} ms, "
            f"dense FFN of equal FLOPs {1e3 * result['dense_s']:.1f} ms (forward and backward)"
        ),
        (
            f"ratio {result['ratio']:.3f} (median of {len(result['pairs_s'])} pairs, {result['ratio_low']:.3f} to "
            f"{result['ratio_high']:.3f}); useful {result['useful_tflops']:.3f} TFLOP/s, "
            f"executed {result['executed_tflops']:.3f}"
        ),
        f"error against float64 {result['error']:.2g}, bound {result['error_bound']:.2g}",
        (
            f"imbalance {load['imbalance']:.2f}, dropped {100 * load['drop_rate']:.1f} %, "
            f"capacity needed {load['needed_capacity']:.2f}, padding {100 * load['padding_waste']:.1f} %"
        ),
    ]
    total = sum(result["phases_s"].values())
    for name, seconds in result["phases_s"].items():
        if seconds:
            lines.append(f"  {name:24s} {1e3 * seconds:9.2f} ms {100 * seconds / total:5.1f} %")
    return "\n".join(lines)


def _sweep_table(result: dict[str, Any]) -> str:
    """Render a sweep: median microseconds per message size, a column per grid and algorithm."""
    lines = [
        f"{result['ranks']} ranks, {result['ranks_per_node']} per node, {result['cores_per_node']} cores per node, "
        f"{result['backend']}, {result['device']}; all-to-all, median us"
    ]
    times: dict[int, dict[str, float]] = {}
    for grid in result["grids"]:
        for row in grid["all_to_all"]:
            name = f"{row['algorithm']} {grid['ranks']}"
            times.setdefault(row["bytes"], {})[name] = 1e6 * statistics.median(row["seconds"])
    names = list(dict.fromkeys(name for row in times.values() for name in row))
    lines.append("       bytes " + " ".join(f"{name:>11s}" for name in names))
    lines += [
        f"{size:12d} " + " ".join(f"{row.get(n, float('nan')):11.1f}" for n in names) for size, row in times.items()
    ]
    for grid in result["grids"]:
        best = min(grid["layer"]["runs"], key=lambda run: statistics.median(run["seconds"]))
        lines.append(
            f"layer on {grid['ranks']} ranks: fastest r {best['r']}, degree {best['degree']}, {best['algorithm']}: "
            f"{1e3 * statistics.median(best['seconds']):.1f} ms"
        )
    return "\n".join(lines)
