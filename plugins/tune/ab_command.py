"""`mlhpc ab`: is B slower than A? Interleaved blocks of steps of two plans or settings in one job, or of whole runs.

`mlhpc ab runs` compares configurations by whole runs, with equal budgets and a stated error rate.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    JSON,
    FiniteRange,
    IntegerRange,
    PercentRange,
    choose_config_name,
    convert_plan_to_settings,
    format_option,
    output_option,
    ranks_option,
    render_config_words,
    render_option_words,
    settings_options,
    size_option,
)
from mlhpc.suite.config import RunConfig, choose_default_data_root, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import (
    make_folder,
    print_line,
    print_progress,
    quote_path,
    render_duration,
    render_printable,
    write_file_atomically,
    write_file_of_folder,
)
from mlhpc.suite.launch.command_on_ranks import run_as_rank, start_ranks
from mlhpc.suite.launcher import find_world
from mlhpc.suite.log.run_folder import RunFolder, choose_default_folder
from mlhpc.suite.machine.probes.processor import find_machine_root, read_cpu

if TYPE_CHECKING:
    from mlhpc.plugins.tune.contest import RunResult
    from mlhpc.plugins.tune.sides import Schedule, Side
    from mlhpc.plugins.tune.space import StepError
    from mlhpc.suite.world import World


_FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc ab runs new contest moe_lm --size smoke --system my-machine
  mlhpc ab runs enter contest default
  mlhpc ab runs enter contest small-batch --set global_batch_size=8
  mlhpc ab runs run contest
  mlhpc ab runs show contest
""",
)
def runs() -> None:
    """Find the fastest of several configurations by whole runs, with a stated probability of a wrong winner.

    A contest is a comparison of variants in one folder. An entry is one variant: a configuration with a name. Every run
    that starts counts. A contest may end without a winner.
    """


@runs.command()
@_FOLDER
@click.argument("workload")
@size_option()
@click.option("--system", required=True, metavar="NAME", help="Name of the machine, for the logs.")
@click.option("--ranks", type=IntegerRange(1), default=1, show_default=True, help="Number of MPI ranks of every run.")
@click.option(
    "--objective",
    type=click.Choice(["time_to_train", "cpu_seconds"]),
    default="time_to_train",
    show_default=True,
    help="What to compare. cpu_seconds, the CPU time of the ranks, suits a machine that other programs use too.",
)
@click.option(
    "--error",
    type=PercentRange(0.1, 50),
    default="5%",
    metavar="PERCENT",
    show_default=True,
    help="Largest probability of naming a wrong winner.",
)
@click.option(
    "--blocks",
    type=IntegerRange(1, 1000),
    default=16,
    show_default=True,
    help="Largest number of runs of each entry (variant).",
)
@click.option(
    "--run-limit-s",
    type=FiniteRange(0, 1e7, min_open=True),
    default=3600.0,
    show_default=True,
    help="Time budget of a run in seconds, from run_start to run_stop.",
)
@click.option(
    "--seed", type=IntegerRange(0, 2**31 - 1), help="Seed of the runs and of the order in which entries run. [random]"
)
@click.option("--data", type=click.Path(path_type=Path), help="Folder of the data set. [data/<workload>-<size>]")
def new(folder: Path, workload: str, size: str, seed: int | None, data: Path | None, **same_for_all: Any) -> None:
    """Create a contest, a comparison of variants of WORKLOAD, in the new folder FOLDER.

    These options hold for all entries (variants) and cannot be changed later.
    """
    from mlhpc.plugins.tune.contest import ContestSettings, write_settings

    # A card without code, or a size that it lacks, is refused before the folder is made.
    load_descriptor(workload).code()
    load_descriptor(workload).card().size(size)
    seed = secrets.randbelow(2**31) if seed is None else seed
    # Later commands of the contest may run in another working directory.
    root = (data or choose_default_data_root(workload, size)).absolute()
    made = ContestSettings(workload=workload, size=size, seed=seed, data=str(root), **same_for_all)
    write_settings(folder, made)
    print_line(
        f"{folder}: {workload} {size}, a comparison of up to {made.blocks} runs of each variant; "
        f"next: add each variant with: mlhpc ab runs enter {quote_path(folder)} NAME"
    )


@runs.command()
@_FOLDER
@click.argument("name")
@settings_options
def enter(folder: Path, name: str, size: str | None, config: str | None, overrides: tuple[str, ...]) -> None:
    """Add a variant NAME to the contest in FOLDER: the settings of a size or a file.

    --config may name the config.yaml of a package. The configuration is copied, and no code in it is run.
    """
    from mlhpc.plugins.tune.contest import read_config, read_contest, write_entry

    contest = read_contest(folder)
    chosen = choose_config_name(size, config) or contest.settings.size
    made = write_entry(contest, name, read_config(chosen, overrides, contest.settings))
    number = len(contest.entries) + 1
    print_line(f"{made}: entered; the contest has {number} variant{'s' * (number != 1)}")


@runs.command()
@_FOLDER
def run(folder: Path) -> None:
    """Run the contest in FOLDER to its end, or continue it.

    In each block every remaining entry runs once, in random order and with the same seed. A run that misses the target
    within its time budget counts as slower than all others. Ctrl-C stops the contest after the current run.

    Exit code 0: the contest is finished. Exit code 1: it was stopped and can be continued. Exit code 2: usage, or a run
    could not start.
    """
    from mlhpc.plugins.tune.contest import run_contest

    race, count = run_contest(folder, _print_run)
    if race is None:
        way_on = f"mlhpc ab runs run {quote_path(folder)}"
        print_line(f"{folder}: stopped after {count} run{'s' * (count != 1)}; to go on: {way_on}")
        raise click.exceptions.Exit(ExitCode.FAILED)
    print_line(f"{folder}: over after {len(race.blocks)} blocks; next: mlhpc ab runs show {quote_path(folder)}")


def _print_run(done: RunResult) -> None:
    result = render_duration(done.value) if done.finished else f"did not finish: {done.why}"
    print_progress(f"block {done.turn.block}: {done.turn.entry}: {result}")


@runs.command()
@_FOLDER
@output_option("File for the ranking, which `mlhpc report` reads.", "none")
@format_option()
def show(folder: Path, output: Path | None, style: str) -> None:
    """Show which entry (variant) is fastest in the contest in FOLDER, with intervals; also before its end.

    First the log of every run is checked: it must exist, be unchanged and be compliant. If a log fails, there is no
    verdict.

    Exit code 0: a winner, no winner, or not finished. Exit code 1: findings. Exit code 2: usage.
    """
    import msgspec

    from mlhpc.plugins.tune.ranking import read_ranking, render_ranking

    ranking = read_ranking(folder)
    document = msgspec.json.format(msgspec.json.encode(ranking), indent=1).decode()
    if output is not None:
        write_file_atomically(output, document + "\n")
    print_line(document if style == JSON else "\n".join(map(render_printable, render_ranking(ranking))))
    if ranking.findings:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


VERSION = 2
NO_PLAN = "none"  # as a plan: no plan
SHARED_SETTINGS = {
    "workload",
    "size",
    "data",
    "device",
    "global_batch_size",
}  # the same samples on the same machine for both


@click.group(cls=Subcommands)
def ab() -> None:
    """Compare plans or settings by running them in turn: steps in one job, or whole runs.

    \b
    Examples:
      mlhpc ab steps moe_lm --size smoke --ranks 2 --b sharded
      mlhpc ab runs show contest
    """


ab.add_command(runs)


@ab.command(
    epilog="""\b
Examples:
  mlhpc ab steps moe_lm --size smoke --ranks 2 --b sharded
  mlhpc ab steps deepcam --size mini --set-b precision=bfloat16
  mlhpc ab steps cosmoflow --size mini --ranks 4 --b spatial --mesh-b data=2,spatial=2x1x1 --pairs 20
  mlhpc ab steps moe_lm --size smoke --b ./recompute.yaml --format json
  srun --ntasks=8 mlhpc ab steps cosmoflow --size full --a spatial --b sharded -o ab/spatial-sharded
"""
)
@click.argument("workload")
@settings_options
@click.option(
    "--a",
    "plan_a",
    metavar="PLAN",
    help="Parallel plan of side A: a name, a YAML file, or none (data parallel). [none]",
)
@click.option("--b", "plan_b", metavar="PLAN", help="Parallel plan of side B, which is compared with A. [none]")
@click.option("--set-a", "own_a", multiple=True, metavar="KEY=VALUE", help="Change a setting of A; repeatable.")
@click.option(
    "--set-b",
    "own_b",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a setting of B, such as precision=bfloat16; repeatable.",
)
@click.option(
    "--mesh-a", metavar="AXES", help="Ranks on each axis of A's plan, such as data=2,spatial=2x1x1. [the plan's]"
)
@click.option("--mesh-b", metavar="AXES", help="Ranks on each axis of B's plan. [the plan's]")
@ranks_option()
@click.option(
    "--pairs",
    type=IntegerRange(2, 10_000),
    default=10,
    show_default=True,
    help="Number of blocks (groups of timed steps) of A and of B; more make the intervals narrower.",
)
@click.option(
    "--steps",
    "timed",
    type=IntegerRange(1, 100_000),
    default=5,
    show_default=True,
    help="Number of timed steps in a block.",
)
@click.option(
    "--warmup",
    type=IntegerRange(1, 100_000),
    default=2,
    show_default=True,
    help="Number of untimed steps before the checkpoint that both sides start from.",
)
@click.option(
    "--seed",
    type=IntegerRange(0, 2**31),
    default=0,
    show_default=True,
    help="Seed of weights, sample order and dropout.",
)
@output_option("New folder.", "ab/<workload>-<size>-<time>")
@format_option()
def steps(
    workload: str,
    size: str | None,
    config: str | None,
    overrides: tuple[str, ...],
    plan_a: str | None,
    plan_b: str | None,
    own_a: tuple[str, ...],
    own_b: tuple[str, ...],
    mesh_a: str | None,
    mesh_b: str | None,
    ranks: int,
    pairs: int,
    timed: int,
    warmup: int,
    seed: int,
    output: Path | None,
    style: str,
) -> None:
    """Compare two plans or settings in one job: A and B train in turn, in blocks of steps on the same data.

    Which side begins is drawn, so that no disturbance of the machine is in step with one of them.
    Compares step time, CPU time, peak memory of tensors, executed FLOPs, bytes sent and loss. Each gets an interval and
    a verdict: faster, slower, equivalent or inconclusive. All intervals together hold with 95 %. The new folder gets
    ab.json with every block. Of each side, the gradient of a step is compared with float64.

    Exit code 0: compared. Exit code 1: refused, since rounding does not explain the gradient of a side. Exit code 2:
    usage.
    """
    if plan_b is None and not own_a and not own_b:
        raise click.UsageError("A and B are the same: give --b PLAN, --set-b KEY=VALUE or --set-a KEY=VALUE")
    chosen = load_descriptor(workload)
    chosen.code()
    name = choose_config_name(size, config) or DEFAULT_SIZE
    plan_a, plan_b = plan_a or NO_PLAN, plan_b or NO_PLAN
    sides = [
        _load_side_config(chosen, name, overrides, "a", plan_a, mesh_a, own_a),
        _load_side_config(chosen, name, overrides, "b", plan_b, mesh_b, own_b),
    ]
    folder = output or choose_default_folder(sides[0].workload, sides[0].size, datetime.now(UTC), under="ab")

    launch = find_world(ranks)

    def check() -> None:
        _check_sides(chosen, sides, folder, ranks if launch is None else launch.size)

    # The ranks check too, but only after they have started, which takes seconds.
    if launch is None and ranks > 1:
        check()
        words = render_option_words(
            {
                **{"--a": plan_a, "--mesh-a": mesh_a, "--set-a": own_a},
                **{"--b": plan_b, "--mesh-b": mesh_b, "--set-b": own_b},
                **{"--pairs": pairs, "--steps": timed, "--warmup": warmup, "--seed": seed},
                **{"--format": style, "-o": folder},
            }
        )
        sys.exit(start_ranks(["ab", "steps", workload, *render_config_words(name, overrides), *words], ranks))
    from mlhpc.plugins.tune.sides import Schedule

    schedule = Schedule(pairs, timed, warmup)
    stated = own_a, own_b

    wrong: list[StepError] = []

    def body(world: World) -> None:
        errors = _run_sides(world, chosen, sides, stated, schedule, seed, folder, style)
        wrong.extend(error for error in errors if error.is_wrong)

    code = run_as_rank(launch, check, body)
    sys.exit(ExitCode.FINDINGS if wrong and not code else code)


def _load_side_config(
    chosen: Descriptor,
    name: str,
    overrides: tuple[str, ...],
    side: str,
    plan: str,
    mesh: str | None,
    own: tuple[str, ...],
) -> RunConfig:
    """Load the configuration of one side. InputError names the side's option."""
    if plan == NO_PLAN and mesh is not None:
        raise InputError(f"--mesh-{side} {mesh}: a mesh needs a plan: give --{side} NAME too")
    # null overrides a plan that the size's own file may state.
    given = ("plan=null", "mesh=null") if plan == NO_PLAN else convert_plan_to_settings(plan, mesh)
    named = {override.partition("=")[0] for override in (*overrides, *own)} & {"plan", "mesh"}
    if named:
        raise InputError(f"--set {named.pop()}: give plans and meshes with --a, --b, --mesh-a and --mesh-b")
    common = {setting.partition("=")[0] for setting in own} & SHARED_SETTINGS
    if common:
        key = common.pop()
        raise InputError(f"--set-{side} {key}: both sides must have the same {key}: give --set {key}=VALUE")
    # Without instrumentation bytes and memory, which are compared, are not counted.
    resolved = load_config(chosen, name, (*overrides, *own, *given, "instrumentation=true"))
    if resolved.compile:
        raise InputError(f"--set-{side} compile: the FLOPs of compiled code cannot be counted: leave compile false")
    if resolved.graphs is True:
        raise InputError(f"--set-{side} graphs: the FLOPs of a replayed graph cannot be counted: leave graphs false")
    return resolved.with_stated_precision("mlhpc ab steps")


def _check_sides(chosen: Descriptor, sides: list[RunConfig], folder: Path, ranks: int) -> None:
    """Raise InputError for what would fail on the ranks: an existing folder, the data, plans that do not fit."""
    from mlhpc.suite.data.build import find_data
    from mlhpc.suite.data.sampling import check_batch
    from mlhpc.suite.training.parallel.parallel_dims import Parallel

    if folder.exists():
        raise InputError(f"{folder}: exists already; choose another folder with -o")
    for label, config in zip("ab", sides, strict=True):
        try:
            groups = Parallel.of(config, chosen, 0, ranks).mesh.data_size
            check_batch(config.global_batch_size, groups, config.gradient_accumulation_steps)
        except InputError as error:
            raise InputError(f"--{label}: {error}") from None
    find_data(_find_data_root(sides[0]), sides[0].workload, sides[0].size)
    # Two models are built for the check, which takes seconds; only hyperparameters change the shapes.
    if sides[0].hyperparameters != sides[1].hyperparameters:
        _check_parameters(chosen, sides)


def _check_parameters(chosen: Descriptor, sides: list[RunConfig]) -> None:
    """Raise InputError if the sides' parameters have different shapes. Both begin at one checkpoint."""
    from mlhpc.suite.training.parallel.meta_init import build_on_meta

    def shapes(side: RunConfig) -> dict[str, tuple[int, ...]]:
        _, model = build_on_meta(chosen, side)
        return {name: tuple(each.shape) for name, each in model.named_parameters()}

    a, b = map(shapes, sides)
    other = next((name for name in (*b, *a) if a.get(name) != b.get(name)), None)
    if other is not None:
        raise InputError(
            f"--set-b: {other} has shape {b.get(other)}, in A {a.get(other)}: "
            "both sides start from one checkpoint, so change no setting that changes the shape of a parameter"
        )


def _find_data_root(config: RunConfig) -> Path:
    return config.data or choose_default_data_root(config.workload, config.size)


def _run_sides(
    world: World,
    chosen: Descriptor,
    configs: list[RunConfig],
    settings: tuple[tuple[str, ...], ...],
    schedule: Schedule,
    seed: int,
    folder: Path,
    style: str,
) -> list[StepError]:
    """Run both sides on all ranks; rank 0 writes and prints. Returns the errors of both."""
    from mlhpc.plugins.tune.error import measure_error
    from mlhpc.plugins.tune.sides import Side, run_block_pairs
    from mlhpc.suite.data.build import find_data
    from mlhpc.suite.training.devices import set_up_rank, use_precision
    from mlhpc.suite.training.statement import TrialPlan

    config = configs[0]
    device, _ = set_up_rank(config, world)
    use_precision(configs[1].precision, device)  # an error of B before A runs
    world.init_torch(device)
    root, run = _find_data_root(config), RunFolder(folder)
    manifest = find_data(root, config.workload, config.size)
    # Drawn by rank 0: a fixed order may be in step with what disturbs the machine
    schedule = replace(schedule, order_seed=world.allgather(secrets.randbelow(2**31))[0])
    begun, load = datetime.now(UTC), os.getloadavg()[0]  # before the ranks' own load
    place = run.checkpoint(0)
    if world.is_first:
        make_folder(place.parent)
    # No rank may write its part of the checkpoint before the folder is there.
    world.barrier()
    try:
        plans = [TrialPlan(chosen, each, run, 0, base_seed=seed) for each in configs]
        choosing = all(each.plan is None for each in configs)
        sides = [
            Side.create(plan, world, device, root, place, manifest.sha256, own, choosing=choosing)
            for plan, own in zip(plans, settings, strict=True)
        ]
        found = run_block_pairs(sides[0], sides[1], schedule)
        errors = [
            measure_error(side, schedule.warmup, max(block.memory for block in blocks))
            for side, blocks in zip(sides, found, strict=True)
        ]
    finally:
        if world.is_first:
            # The checkpoint serves only the blocks of this command.
            shutil.rmtree(place.parent, ignore_errors=True)
    if not world.is_first:
        return errors
    values = [
        {name: [block.by_quantity()[name] for block in blocks] for name in blocks[0].by_quantity()} for blocks in found
    ]
    shown = {
        "workload": config.workload,
        "size": config.size,
        "seed": seed,
        "manifest": manifest.sha256,
        "ranks": world.size,
        "nodes": world.nodes,
        "device": device.type,
        "processor": read_cpu(find_machine_root(os.environ)).model,
        "begun": begun.isoformat(timespec="seconds"),
        "load": load,
        **asdict(schedule),
    }
    _write_and_print(shown, sides, values, errors, folder, style)
    return errors


def _write_and_print(
    shown: dict[str, Any],
    sides: list[Side],
    values: list[dict[str, list[float]]],
    errors: list[StepError],
    folder: Path,
    style: str,
) -> None:
    """Write what was measured and print it. What computes something else is not called faster or slower."""
    from mlhpc.plugins.tune.sides import REFUSED, find_visible_step_time, judge, render_rows

    rows, visible = judge(*values), find_visible_step_time(*(side["step time"] for side in values))
    if any(error.is_wrong for error in errors):
        rows = [replace(row, verdict=REFUSED) for row in rows]
    stated = [
        {
            "name": side.name,
            "plan": None if side.trainer.shared.plan is None else side.trainer.shared.logged(),
            "settings": list(side.settings),
            "precision": side.trainer.config.precision,
            "choices": side.choices,
            "collectives_of_rank_0": side.collectives,
            "gradient_error": structs.asdict(error),
            "blocks": blocks,
        }
        for side, blocks, error in zip(sides, values, errors, strict=True)
    ]
    document = {"version": VERSION, "kind": "ab", **shown, "sides": stated, "rows": [asdict(row) for row in rows]}
    document["visible_step_time"] = visible
    write_file_of_folder(folder / "ab.json", json.dumps(document, indent=1) + "\n")
    if style == JSON:
        print_line(json.dumps(document, indent=1))
        return
    for label, side, error in zip("AB", sides, errors, strict=True):
        print_line(f"{label}: {side.name}; {error.render()}")
    ranks = f"{shown['ranks']} rank{'s' * (shown['ranks'] > 1)}"
    print_line(
        f"{shown['pairs']} pairs of blocks of {shown['steps']} timed steps on {ranks}, "
        f"in drawn order (seed {shown['order_seed']}); "
        f"{shown['processor']}, load {shown['load']:.1f}; intervals hold together with 95 %"
    )
    for line in render_rows(rows):
        print_line(line)
    least = "not even 11 times the time" if visible is None else f"a step time that differs by {100 * visible:.2g} %"
    print_line(f"{shown['pairs']} such pairs show {least} in 8 of 10 cases")
    print_line(f"{folder / 'ab.json'}: every block")
