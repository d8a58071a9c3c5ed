"""The command `mlhpc numerics`: is a difference rounding, and what does a change of the deployment cost?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from mlhpc.plugins.numerics.results import Numerics, Reproduced
from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    JSON,
    IntegerRange,
    PercentRange,
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
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, render_printable, write_file_atomically
from mlhpc.suite.launch.command_on_ranks import run_as_rank, start_ranks
from mlhpc.suite.launcher import find_world

if TYPE_CHECKING:
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
  mlhpc numerics reproduce moe_lm --size smoke --change "as set" --change compiled
  mlhpc numerics reproduce cosmoflow --size smoke --record here.npz        on machine A
  mlhpc numerics reproduce cosmoflow --size smoke --against here.npz       on machine B
"""
)
@click.argument("workload")
@settings_options
@_data_option
@click.option(
    "--change",
    multiple=True,
    metavar="NAME",
    help="Try only this change of the system, such as compiled; repeatable. [all but compiled]",
)
@ranks_option()
@click.option("--samples", type=IntegerRange(1, 4096), default=4, show_default=True, help="Samples of the step.")
@click.option(
    "--runs", type=IntegerRange(20, 10_000), default=24, show_default=True, help="Perturbed runs behind each bound."
)
@click.option(
    "--error",
    type=PercentRange(1e-7, 10),
    default="0.1%",
    metavar="PERCENT",
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
    ranks: int,
    output: Path | None,
    style: str,
    **options: Any,
) -> None:
    """Judge one training step under changes of the system: does it differ from float64 by rounding alone?

    Compares outputs of all modules, loss, gradients, buffers, schedule and optimizer. The bound of each comes from runs
    whose weights and inputs differ by one unit in the last place. Later steps are not compared: training amplifies
    rounding.

    Exit code 0: rounding. Exit code 1: not rounding; the first module that differs is named. Exit code 2: usage. Exit
    code 4: inconclusive.
    """
    name, chosen, resolved, root = _open(workload, size, config, overrides, data)
    if options["samples"] % ranks:
        raise click.UsageError(f"--samples {options['samples']}: expected a multiple of the {ranks} ranks")
    launch, rows = find_world(ranks), list[Reproduced]()
    if launch is None and ranks > 1:
        given = {"--data": root, "-o": output, "--format": style}
        words = render_option_words(given | {f"--{key}": value for key, value in options.items()})
        words = ["numerics", "reproduce", workload, *render_config_words(name, overrides), *words]
        sys.exit(start_ranks(words, ranks))

    def body(world: World) -> None:
        from mlhpc.plugins.numerics.reproduce import reproduce_all

        rows.extend(reproduce_all(world, chosen, resolved, root, **options))
        if world.is_first:
            about = {"error_rate": options["error"], "runs": options["runs"], "reproduced": tuple(rows)}
            _print_result("reproduce", resolved, about, output, style)

    code = run_as_rank(launch, lambda: None, body)
    outcomes = {row.outcome for row in rows}
    if not code and "not rounding" in outcomes:
        code = ExitCode.FINDINGS
    elif not code and rows and ("inconclusive" in outcomes or outcomes == {""}):
        code = ExitCode.INCONCLUSIVE
    sys.exit(code)


def _open(
    workload: str, size: str | None, config: str | None, overrides: tuple[str, ...], data: Path | None
) -> tuple[str, Descriptor, RunConfig, Path]:
    """Return the name of the settings, the workload's descriptor, its settings, and the folder of the data."""
    chosen, name = load_descriptor(workload), choose_config_name(size, config) or DEFAULT_SIZE
    chosen.code()
    resolved = load_config(
        chosen, name, (*overrides, "instrumentation=false", "device=cpu", "checkpoint.interval_s=null")
    )
    return name, chosen, resolved, data or choose_default_data_root(resolved.workload, resolved.size)


def _print_result(question: str, config: RunConfig, about: dict[str, Any], output: Path | None, style: str) -> None:
    result = Numerics(question=question, workload=config.workload, size=config.size, **about)  # type: ignore[arg-type]
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
    _, chosen, resolved, root = _open(workload, size, config, overrides, data)

    def body(world: World) -> None:
        from mlhpc.plugins.numerics.deploy import deploy_all

        about = deploy_all(world, chosen, resolved, root, range(seed, seed + seeds), jpeg=jpeg)
        _print_result("deploy", resolved, about, output, style)

    sys.exit(run_as_rank(find_world(1), lambda: None, body))


def _render_deployed(result: Numerics) -> list[str]:
    """Render a table of changes, the largest loss first, with spreads over seeds and over variants apart."""
    import statistics

    rows = result.measured
    lines = [
        f"{result.workload} {result.size}: {result.metric} {statistics.fmean(result.values):.4g} ± "
        f"{statistics.stdev(result.values):.2g} over {len(result.values)} seeds",
        f"{'change':<26} {'difference':>10} {'interval of the mean':>24}",
    ]
    for row in rows:
        lines.append(f"{row.change:<26} {row.mean:>+10.2g} {f'[{row.low:+.2g}, {row.high:+.2g}]':>24}")
    for group in dict.fromkeys(row.group for row in rows):
        means = [row.mean for row in rows if row.group == group]
        if len(means) > 1:
            lines.append(
                f"{group}: {statistics.fmean(means):+.2g} ± {statistics.stdev(means):.2g} over {len(means)} variants"
            )
    lines += [f"{row.change}: does not apply: {row.why}" for row in result.deployed if row.why]
    return lines
