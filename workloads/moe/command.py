"""`mlhpc moe-bench`: the layer benchmark and the all-to-all sweep, on one process or under mpiexec, srun or torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

    from suite.distributed import World

MIB = 1 << 20


@click.command(
    "moe-bench",
    epilog="""\b
Examples:
  mlhpc moe-bench --backend loop --load uniform
  mpiexec -n 4 mlhpc moe-bench --experts 2 --r 2 --degree 2 --algorithm 2dh --ranks-per-node 2
  srun -n 8 mlhpc moe-bench --tokens 32768 --width 4096 --hidden 1024 --experts 128 --top-k 8 --activation swiglu --dtype bfloat16
  mpiexec -n 4 mlhpc moe-bench --sweep-network --json sweep.json
""",
)
@click.option("--tokens", default=4096, show_default=True, help="Tokens per rank.")
@click.option("--width", default=256, show_default=True)
@click.option("--hidden", default=1024, show_default=True, help="Hidden width of one expert.")
@click.option("--experts", default=64, show_default=True)
@click.option("--top-k", default=2, show_default=True)
@click.option("--activation", type=click.Choice(["relu", "gelu", "silu", "swiglu"]), default="relu", show_default=True)
@click.option("--mode", type=click.Choice(["dropless", "capacity", "einsum"]), default="dropless", show_default=True)
@click.option(
    "--capacity", type=float, help="Capacity factor: > 0, 0 (what is needed) or < 0; modes capacity and einsum."
)
@click.option("--backend", type=click.Choice(["auto", "loop", "bmm", "grouped_mm"]), default="auto", show_default=True)
@click.option("--load", type=click.Choice(["router", "uniform", "skewed"]), default="router", show_default=True)
@click.option(
    "--r", "parallel_r", default=1, show_default=True, help="0: gather weights; else token copies per expert."
)
@click.option("--degree", default=1, show_default=True, help="Chunks that overlap.")
@click.option("--algorithm", type=click.Choice(["linear", "2dh"]), default="linear", show_default=True)
@click.option("--ranks-per-node", type=int, help="Ranks counted as one node. [what the launch says]")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float64"]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--threads", default=1, show_default=True, help="CPU threads per rank.")
@click.option("--repeats", default=10, show_default=True, help="Pairs of layer and dense FFN.")
@click.option("--sweep-network", is_flag=True, help="Time all-to-alls over message sizes instead of the layer.")
@click.option("--up-to-mib", default=16, show_default=True, help="Largest message of the sweep, per rank.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the results.")
def moe_bench(  # one option each
    tokens: int,
    width: int,
    hidden: int,
    experts: int,
    top_k: int,
    activation: str,
    mode: str,
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
    up_to_mib: int,
    json_path: Path | None,
) -> None:
    """Time a mixture-of-experts layer, phase by phase, beside a dense FFN of equal FLOPs in the same run."""
    from workloads.moe import bench
    from workloads.moe.config import MoEConfig

    config = MoEConfig.model_validate(
        {
            "experts": experts,
            "top_k": top_k,
            "hidden": hidden,
            "activation": activation,
            "dispatch": mode,
            "capacity_factor": capacity,
            "backend": backend,
            "expert_parallel": True,
            "parallel_r": parallel_r,
            "overlap_degree": degree,
            "all_to_all": algorithm,
            "ranks_per_node": ranks_per_node,
        }
    )
    world, chosen = _start(device, threads)
    if sweep_network:
        if world.size == 1:
            raise ValueError(
                "moe-bench --sweep-network: start several ranks: mpiexec -n 4 mlhpc moe-bench --sweep-network"
            )
        per_node = ranks_per_node or world.local_size
        result: dict[str, Any] = bench.sweep_network(world, chosen, per_node, up_to_mib * MIB, repeats)
        text = _sweep_table(result)
    else:
        shape = bench.Shape(tokens, width, config, load, dtype)  # type: ignore[arg-type]
        result = bench.measure(shape, world, chosen, repeats).row()
        text = _layer_table(result)
    if world.is_first:
        click.echo(text)
        if json_path is not None:
            part = json_path.with_name(json_path.name + ".part")
            part.write_text(json.dumps(result, indent=1) + "\n")
            part.replace(json_path)
    world.barrier()


def _start(device: str, threads: int) -> tuple[World, torch.device]:
    import torch

    from suite.distributed import World

    torch.set_num_threads(threads)
    world = World.create()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device("cpu") if device == "cpu" else torch.device("cuda", world.local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    world.init_torch(chosen)
    return world, chosen


def _layer_table(result: dict[str, Any]) -> str:
    load, shape = result["load"], result["shape"]
    moe = shape["moe"]
    lines = [
        f"{result['ranks']} ranks, {shape['tokens']} tokens each, d {shape['width']}, h {moe['hidden']}, E {moe['experts']}, "
        f"k {moe['top_k']}, {moe['dispatch']}, {moe['backend']}, {shape['load']} load, {shape['dtype']}, {result['device']}",
        f"layer {1e3 * result['layer_s']:.1f} ms, dense FFN of equal FLOPs {1e3 * result['dense_s']:.1f} ms (forward and backward)",
        f"ratio {result['ratio']:.3f}; useful {result['useful_tflops']:.3f} TFLOP/s, executed {result['executed_tflops']:.3f}",
        f"imbalance {load['imbalance']:.2f}, dropped {100 * load['drop_rate']:.1f} %, "
        f"capacity needed {load['needed_capacity']:.2f}, padding {100 * load['padding_waste']:.1f} %",
    ]
    total = sum(result["phases_s"].values())
    for name, seconds in result["phases_s"].items():
        if seconds:
            lines.append(f"  {name:24s} {1e3 * seconds:9.2f} ms {100 * seconds / total:5.1f} %")
    return "\n".join(lines)


def _sweep_table(result: dict[str, Any]) -> str:
    import statistics

    lines = [
        f"{result['ranks']} ranks, {result['ranks_per_node']} per node, {result['backend']}",
        "       bytes   linear us      2dh us",
    ]
    times: dict[int, dict[str, float]] = {}
    for row in result["all_to_all"]:
        times.setdefault(row["bytes"], {})[row["algorithm"]] = 1e6 * statistics.median(row["seconds"])
    lines += [f"{size:12d} {by['linear']:11.1f} {by['2dh']:11.1f}" for size, by in times.items()]
    return "\n".join(lines)
