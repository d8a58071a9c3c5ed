"""`mlhpc profile`: runs a few training steps under the torch profiler, to find the layers that take the time."""

from __future__ import annotations

import csv
import io
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    IntegerRange,
    choose_config_name,
    output_option,
    ranks_option,
    render_config_words,
    render_option_words,
    settings_options,
)
from mlhpc.suite.config import RunConfig, choose_default_data_root, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import (
    align_columns,
    encode_csv_cell,
    make_folder,
    print_line,
    print_progress,
    refuse_link,
    write_file_of_folder,
)
from mlhpc.suite.launch.command_on_ranks import run_as_rank, start_ranks
from mlhpc.suite.launcher import find_world
from mlhpc.suite.log.run_folder import choose_default_folder
from mlhpc.suite.workload import load_workload

if TYPE_CHECKING:
    from mlhpc.suite.performance.profiling import Profile
    from mlhpc.suite.world import World

VERSION = 1
LISTED_LAYERS = 25  # layers in the table on the screen; the file has all


@click.command(
    epilog="""\b
Examples:
  mlhpc profile cosmoflow --size smoke
  mlhpc profile moe_lm --size mini --ranks 2 --steps 50 -o profiles/moe
  srun --ntasks=8 mlhpc profile deepcam --size full -o profiles/deepcam

\b
OUTPUT gets trace.json (rank 0; open it in chrome://tracing or ui.perfetto.dev), layers.csv and profile.json.
"""
)
@click.argument("workload")
@settings_options
@ranks_option()
@click.option(
    "--steps",
    type=IntegerRange(2),
    default=20,
    show_default=True,
    help="Number of steps to time without the profiler, which slows steps; the phases and ranks come from these.",
)
@click.option(
    "--profiled-steps",
    type=IntegerRange(1),
    default=3,
    show_default=True,
    help="Number of steps to profile and to write to the trace.",
)
@output_option("New folder.", "profiles/<workload>-<size>-<time>")
def profile(
    workload: str,
    size: str | None,
    config: str | None,
    overrides: tuple[str, ...],
    ranks: int,
    steps: int,
    profiled_steps: int,
    output: Path | None,
) -> None:
    """Profile a few training steps with torch: time by layer and phase, and the slowest rank.

    The data set must exist (mlhpc data generate).
    """
    chosen = load_descriptor(workload)
    name = choose_config_name(size, config) or DEFAULT_SIZE
    resolved = load_config(chosen, name, overrides).with_stated_precision("mlhpc profile")
    if resolved.plan is not None:
        raise InputError(
            "--set plan: mlhpc profile does not support parallel plans; mlhpc plan predicts what a plan costs"
        )
    root = resolved.data or choose_default_data_root(resolved.workload, resolved.size)
    folder = output or choose_default_folder(resolved.workload, resolved.size, datetime.now(UTC), under="profiles")

    def check() -> None:
        if folder.exists():
            raise InputError(f"{folder}: exists already; choose another folder with -o")
        from mlhpc.suite.data.build import find_data

        find_data(root, resolved.workload, resolved.size)

    launch = find_world(ranks)
    # The ranks check too, but only after they have started, which takes seconds.
    if launch is None and ranks > 1:
        check()
        words = render_option_words({"--steps": steps, "--profiled-steps": profiled_steps, "-o": folder})
        sys.exit(start_ranks(["profile", workload, *render_config_words(name, overrides), *words], ranks))

    def body(world: World) -> None:
        _profile(world, chosen, resolved, root, steps, profiled_steps, folder)

    sys.exit(run_as_rank(launch, check, body))


def _profile(
    world: World, chosen: Descriptor, config: RunConfig, root: Path, steps: int, profiled_steps: int, output: Path
) -> None:
    """Train and profile on all ranks; rank 0 writes the files and prints the table."""
    from mlhpc.suite.data.sampling import check_batch
    from mlhpc.suite.performance import profiling
    from mlhpc.suite.training.devices import set_up_rank

    check_batch(config.global_batch_size, world.size)
    device, _ = set_up_rank(config, world)
    workload = load_workload(chosen)(config)
    result = profiling.run_profile(
        workload,
        config,
        workload.dataset("train", root),
        world,
        device,
        steps=steps,
        profiled_steps=profiled_steps,
        say=lambda text: print_progress(text, error=True) if world.is_first else None,
    )
    if world.is_first:
        _write_profile(output, _build_document(result, config, world, steps, profiled_steps), result)


def _build_document(
    result: Profile, config: RunConfig, world: World, steps: int, profiled_steps: int
) -> dict[str, Any]:
    ranks = result.ranks
    return {
        "version": VERSION,
        "kind": "profile",
        "workload": config.workload,
        "size": config.size,
        "precision": config.precision,
        "ranks": world.size,
        "nodes": world.nodes,
        "steps": steps,
        "profiled_steps": profiled_steps,
        "samples_per_rank_and_step": result.samples,
        "phases_s": dict(result.phases),
        "profiled_phases_s": dict(result.profiled_phases),
        "counted_flops_per_step": result.counted.flops,
        "stated_flops_per_step": result.stated_flops * result.samples,
        "flops_by_operator": dict(result.counted.by_operator),
        "operators_without_formula": dict(result.counted.uncovered),
        "layers": [vars(layer) for layer in result.layers],
        "stragglers": None
        if ranks is None
        else {
            "own_s": ranks.own_s.tolist(),
            "wait_s": ranks.wait_s.tolist(),
            "step_s": ranks.step_s,
            "slow_rank": ranks.slow,
            "is_slow": ranks.is_slow,
            "gap_s": ranks.gap_s,
            "gap_by_luck_s": ranks.luck_s,
            "excess_s": ranks.excess_s,
            "p": ranks.p,
        },
    }


def _write_profile(output: Path, document: dict[str, Any], result: Profile) -> None:
    make_folder(output)
    refuse_link(output / "trace.json")
    result.trace.export_chrome_trace(str(output / "trace.json"))
    rows = document["layers"]
    # csv writes the line ends itself.
    table = io.StringIO(newline="")
    # Names of layers come from the workload's code and may look like formulas to a spreadsheet.
    lines = [list(rows[0]), *(list(map(encode_csv_cell, row.values())) for row in rows)] if rows else []
    csv.writer(table, lineterminator="\n").writerows(lines)
    write_file_of_folder(output / "layers.csv", table.getvalue())
    write_file_of_folder(output / "profile.json", json.dumps(document, indent=1) + "\n")
    for line in render_profile(document):
        print_line(line)
    print_line(f"{output}: trace.json (chrome://tracing, ui.perfetto.dev), layers.csv, profile.json")


def render_profile(document: dict[str, Any]) -> list[str]:
    """Render the profile as lines: phases, layers, FLOPs, ranks."""
    step, profiled_step = document["phases_s"]["step"], document["profiled_phases_s"]["step"]
    phases = [
        f"{name} {value / step:.0%}"
        for name, value in document["phases_s"].items()
        if value and name not in ("step", "other")
    ]
    text = [
        f"step {step * 1e3:.2f} ms ({', '.join(phases)}); {profiled_step * 1e3:.2f} ms under the profiler",
        *_render_layers(document["layers"]),
    ]
    counted, stated = document["counted_flops_per_step"], document["stated_flops_per_step"]
    text.append(
        f"FLOPs of a step on this rank: {counted:.4g} counted, "
        f"{stated:.4g} by the workload's closed form ({counted / stated:.4f})"
    )
    missing = [f"{name} ({calls} calls)" for name, calls in document["operators_without_formula"].items()]
    text.append(f"operators without a formula: {', '.join(missing) or 'none'}")
    return text + _render_ranks(document["stragglers"])


def _render_layers(layers: list[dict[str, Any]]) -> list[str]:
    """Render the layers with the most time of their own, without the layers inside them."""
    whole = sum(layer["own_s"] for layer in layers) or 1.0  # own times do not overlap: they sum to the step
    # Time of its own: a layer's whole time would count the layers inside it twice.
    busiest = sorted(layers, key=lambda layer: -layer["own_s"])[:LISTED_LAYERS]
    table = [("layer", "kind", "own", "forward ms", "backward ms", "forward GFLOP", "GFLOP/s")]
    for layer in busiest:
        rate = layer["forward_flops"] / layer["forward_s"] / 1e9 if layer["forward_s"] else 0.0
        times = (f"{1e3 * layer[name]:.3f}" for name in ("forward_s", "backward_s"))
        flops = f"{layer['forward_flops'] / 1e9:.3f}", f"{rate:.1f}"
        table.append((layer["path"][-44:], layer["kind"][:20], f"{layer['own_s'] / whole:.1%}", *times, *flops))
    text = align_columns(table, right=range(2, 7))
    if len(layers) > len(busiest):
        rest = sum(layer["own_s"] for layer in layers) - sum(layer["own_s"] for layer in busiest)
        text.append(f"{len(layers) - len(busiest)} more layers: {rest / whole:.1%} (layers.csv)")
    return text


def _render_ranks(ranks: dict[str, Any] | None) -> list[str]:
    if ranks is None:
        return []
    text = [f"rank {'own ms':>9} {'wait ms':>9}   per step, without the profiler"]
    for rank, (own, wait) in enumerate(zip(ranks["own_s"], ranks["wait_s"], strict=True)):
        text.append(f"{rank:>4} {own * 1e3:>9.2f} {wait * 1e3:>9.2f}")
    slow, excess = ranks["slow_rank"], ranks["excess_s"] / ranks["step_s"]
    verdict = "was slow" if ranks["is_slow"] else "waits least, but is not clearly slow"
    gap, luck = ranks["gap_s"] * 1e3, ranks["gap_by_luck_s"] * 1e3
    text.append(
        f"rank {slow} {verdict}: slowest over median {gap:.2f} ms, by jitter alone {luck:.2f} ms, "
        f"excess {excess:.1%} of the step (p = {ranks['p']:.3g})"
    )
    return text
