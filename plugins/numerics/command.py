"""The command `mlhpc numerics`: is a difference rounding, and what does a change of the deployment cost?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from mlhpc.plugins.numerics.results import Numerics, Reproduced
from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    JSON,
    FiniteRange,
    IntegerRange,
    choose_config_name,
    format_option,
    output_option,
    ranks_option,
    render_config_words,
    render_option_words,
    settings_options,
)
from mlhpc.suite.config import RunConfig, choose_default_data_root, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.errors import ExitCode, InputError, explain_unknown_name
from mlhpc.suite.files import print_line, print_progress, render_printable, write_file_atomically
from mlhpc.suite.launch.ranks import run_as_rank, start_ranks
from mlhpc.suite.launcher import find_world

if TYPE_CHECKING:
    from mlhpc.plugins.numerics.reproduce import Reference
    from mlhpc.plugins.numerics.step import Case
    from mlhpc.suite.world import World

_data_option = click.option(
    "--data", type=click.Path(path_type=Path), help="Folder of the data set. [data/<workload>-<size>]"
)


@click.group(cls=Subcommands)
def numerics() -> None:
    """Say whether a difference is rounding or a fault, and what a change of the deployment costs.

    \b
    Examples:
      mlhpc numerics reproduce deepcam --size smoke
      mlhpc numerics deploy swinv2_moe --size mini --jpeg
    """


@numerics.command(
    epilog="""\b
Examples:
  mlhpc numerics reproduce deepcam --size smoke
  mlhpc numerics reproduce moe_lm --size smoke --ranks 2 --change "as set" --change compiled
  mlhpc numerics reproduce cosmoflow --size smoke --record here.npz        on machine A
  mlhpc numerics reproduce cosmoflow --size smoke --against here.npz       on machine B
"""
)
@click.argument("workload")
@settings_options
@_data_option
@click.option(
    "--change",
    "names",
    multiple=True,
    metavar="NAME",
    help="Try only this change of the system, such as compiled; repeatable. [all that can act here, but compiled]",
)
@ranks_option()
@click.option("--samples", type=IntegerRange(1, 4096), default=4, show_default=True, help="Samples of the step.")
@click.option(
    "--runs", type=IntegerRange(20, 10_000), default=24, show_default=True, help="Perturbed runs behind each bound."
)
@click.option(
    "--error",
    "rate",
    type=FiniteRange(1e-9, 0.1),
    default=0.001,
    show_default=True,
    help="Chance that rounding is called not rounding, over all tensors of a step.",
)
@click.option("--seed", type=IntegerRange(0, 2**31), default=0, show_default=True, help="Seed of the weights.")
@click.option("--record", type=click.Path(path_type=Path), help="Write float64, bounds, weights and data to this file.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Judge this machine by the file that --record wrote on another one.",
)
@output_option("JSON file for the results, which `mlhpc report` reads.", "none")
@format_option()
def reproduce(
    workload: str,
    size: str | None,
    config: str | None,
    overrides: tuple[str, ...],
    data: Path | None,
    names: tuple[str, ...],
    ranks: int,
    samples: int,
    runs: int,
    rate: float,
    seed: int,
    record: Path | None,
    against: Path | None,
    output: Path | None,
    style: str,
) -> None:
    """Judge one training step under changes of the system: does it differ from float64 by rounding alone?

    Compares outputs of all modules, loss, gradients, buffers, schedule and optimizer. The bound of each comes from runs
    whose weights and inputs differ by one unit in the last place. Later steps are not compared: training amplifies
    rounding.

    Exit code 0: rounding. Exit code 1: not rounding; the first module that differs is named. Exit code 2: usage. Exit
    code 4: inconclusive.
    """
    chosen = load_descriptor(workload)
    chosen.code()
    name = choose_config_name(size, config) or DEFAULT_SIZE
    resolved = load_config(chosen, name, (*overrides, "instrumentation=false", "device=cpu"))
    if samples % ranks:
        raise click.UsageError(f"--samples {samples}: expected a multiple of the {ranks} ranks")
    root = data or choose_default_data_root(resolved.workload, resolved.size)
    launch = find_world(ranks)
    if launch is None and ranks > 1:
        words = render_option_words(
            {
                **{"--data": root, "--change": names, "--samples": samples, "--runs": runs, "--error": rate},
                **{"--seed": seed, "--record": record, "--against": against, "-o": output, "--format": style},
            }
        )
        words = ["numerics", "reproduce", workload, *render_config_words(name, overrides), *words]
        sys.exit(start_ranks(words, ranks))
    codes: list[int] = []

    def body(world: World) -> None:
        import torch

        world.init_torch(torch.device("cpu"))
        result = _reproduce(world, chosen, resolved, root, names, samples, runs, rate, seed, record, against)
        if world.is_first:
            _print_result(result, output, style)
            codes.append(_choose_code(result.reproduced))

    code = run_as_rank(launch, lambda: None, body)
    sys.exit(code or (codes or [0])[0])


def _reproduce(
    world: World,
    chosen: Descriptor,
    config: RunConfig,
    root: Path,
    names: tuple[str, ...],
    samples: int,
    runs: int,
    rate: float,
    seed: int,
    record: Path | None,
    against: Path | None,
) -> Numerics:
    from mlhpc.plugins.numerics import reproduce as work

    unknown = next((name for name in names if name not in work.CHANGES), None)
    if unknown:
        raise InputError(f"--change: {explain_unknown_name('change', unknown, work.CHANGES)}")
    tried = names or tuple(name for name in work.CHANGES if name != "compiled")
    own = _open_case(world, chosen, config, root, samples, seed)
    about = {"workload": config.workload, "size": config.size}
    able = [work.CHANGES[name] for name in tried if not work.CHANGES[name].explain(own)]
    precisions = list(dict.fromkeys(["float32", *(change.precision for change in able)]))
    reference: Reference
    if against is not None:
        reference = work.read_reference(against, own, about)
        tried = tuple(name for name in tried if work.CHANGES[name].precision in reference.bounds)
    else:
        # Every rank has the step in float64; the first one alone has the bounds
        reference = work.make_reference(own, runs if world.is_first else 0, precisions if world.is_first else ())
    if record is not None and world.is_first:
        work.write_reference(record, reference, about)
    rows = [work.run_ranks(reference, world, rate)] if world.size > 1 else []
    if world.is_first:
        for name in tried:
            print_progress(name)
            rows.append(work.run_change(reference, name, rate, own))
    return Numerics(
        question="reproduce",
        workload=config.workload,
        size=config.size,
        device="cpu",
        error_rate=rate,
        runs=runs,
        reproduced=tuple(rows),
    )


def _open_case(world: World, chosen: Descriptor, config: RunConfig, root: Path, samples: int, seed: int) -> Case:
    """Build the step on samples of the data set or, without one, on made-up ones."""
    from mlhpc.plugins.numerics.step import make_case
    from mlhpc.suite.data.build import MANIFEST_NAME
    from mlhpc.suite.workload import load_workload

    workload = load_workload(chosen)(config)
    if (root / MANIFEST_NAME).exists():
        batch = workload.dataset("train", root).load(range(samples), seed=0, epoch=1)
    else:
        made = workload.example(samples)
        if made is None:
            raise InputError(
                f"{root}: no data set here; make it with: mlhpc data generate {config.workload} --size {config.size}"
            )
        batch = made
    return make_case(workload, world, batch, parts=world.size, seed=seed)


def _choose_code(rows: tuple[Reproduced, ...]) -> ExitCode:
    outcomes = {row.outcome for row in rows}
    if "not rounding" in outcomes:
        return ExitCode.FINDINGS
    return ExitCode.INCONCLUSIVE if "inconclusive" in outcomes or outcomes <= {""} else ExitCode.OK


def _print_result(result: Numerics, output: Path | None, style: str) -> None:
    document = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    if output is not None:
        write_file_atomically(output, document + "\n")
    lines = _render_deployed(result) if result.deployed else [row.render() for row in result.reproduced]
    print_line(document if style == JSON else "\n".join(map(render_printable, lines)))


@numerics.command(
    epilog="""\b
Examples:
  mlhpc numerics deploy cosmoflow --size smoke --seeds 5 -o deploy.json
  mlhpc numerics deploy swinv2_moe --size mini --jpeg
"""
)
@click.argument("workload")
@settings_options
@_data_option
@click.option("--seeds", type=IntegerRange(2, 1000), default=5, show_default=True, help="Number of models to train.")
@click.option("--seed", type=IntegerRange(0, 2**31), default=0, show_default=True, help="Seed of the first model.")
@click.option(
    "--jpeg", is_flag=True, help="Train on the JPEG form of the images, and change decoders, filters and quality."
)
@output_option("JSON file for the results, which `mlhpc report` reads.", "none")
@format_option()
def deploy(
    workload: str,
    size: str | None,
    config: str | None,
    overrides: tuple[str, ...],
    data: Path | None,
    seeds: int,
    seed: int,
    jpeg: bool,
    output: Path | None,
    style: str,
) -> None:
    """Train models as set, evaluate them under changes of the deployment, and say what each change costs.

    The changes are precision, quantised weights, type of the stored data, constants of normalisation, padding, epsilon,
    upsampling and, with --jpeg, decoders and resize filters. A change that leaves every bit does not apply.

    Exit code 0: evaluated. Exit code 2: usage.
    """
    chosen = load_descriptor(workload)
    chosen.code()
    name = choose_config_name(size, config) or DEFAULT_SIZE
    resolved = load_config(
        chosen, name, (*overrides, "instrumentation=false", "device=cpu", "checkpoint.interval_s=null")
    )
    root = data or choose_default_data_root(resolved.workload, resolved.size)

    def body(world: World) -> None:
        _print_result(_deploy(world, chosen, resolved, root, range(seed, seed + seeds), jpeg), output, style)

    sys.exit(run_as_rank(find_world(1), lambda: None, body))


def _deploy(world: World, chosen: Descriptor, config: RunConfig, root: Path, seeds: range, jpeg: bool) -> Numerics:
    from mlhpc.plugins.numerics.deploy import DEPLOYMENTS, list_rows, train
    from mlhpc.suite.data.build import find_data

    find_data(root, config.workload, config.size)
    changes, form = dict(DEPLOYMENTS), {}
    if jpeg:
        from mlhpc.plugins.numerics.images import convert, list_image_deployments

        changes |= dict(list_image_deployments())
        form = {"form": convert}
    trained = []
    for seed in seeds:
        print_progress(f"training with seed {seed}")
        trained.append(train(chosen, config, world, root, seed, **form))
    return Numerics(
        question="deploy",
        workload=config.workload,
        size=config.size,
        device="cpu",
        metric=trained[0].trainer.target.metric,
        values=tuple(each.value for each in trained),
        deployed=tuple(list_rows(trained, changes, print_progress)),
    )


def _render_deployed(result: Numerics) -> list[str]:
    """Render a table of changes, the largest loss first, with spreads over seeds and over variants apart."""
    import statistics

    rows = [row for row in result.deployed if row.mean is not None]
    lines = [
        f"{result.workload} {result.size}: {result.metric} {statistics.fmean(result.values):.4g} ± "
        f"{statistics.stdev(result.values):.2g} over {len(result.values)} seeds",
        f"{'change':<26} {'difference':>10} {'interval of the mean':>24}",
    ]
    for row in sorted(rows, key=lambda row: row.mean or 0.0):
        lines.append(f"{row.change:<26} {row.mean:>+10.2g} {f'[{row.low:+.2g}, {row.high:+.2g}]':>24}")
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row.mean or 0.0)
    for group, means in groups.items():
        if len(means) > 1:
            lines.append(
                f"{group}: {statistics.fmean(means):+.2g} ± {statistics.stdev(means):.2g} over {len(means)} variants"
            )
    lines += [f"{row.change}: does not apply: {row.why}" for row in result.deployed if row.why]
    return lines
