"""`mlhpc run`: the local launcher of N trials, and with --trial the worker that is one trial in its world."""

from __future__ import annotations

import time

_FIRST_LINE = time.perf_counter()

import sys  # noqa: E402
from datetime import UTC, datetime  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

import click  # noqa: E402

from suite.config import default_data_root, load_config  # noqa: E402
from suite.descriptor import descriptor  # noqa: E402
from suite.log import mllog  # noqa: E402
from suite.log.run_folder import RunFolder, create, default_folder, refuse_existing, write_run_info  # noqa: E402

if TYPE_CHECKING:
    from suite.training.plan import TrialPlan


HELP_GROUP = "Run"
HELP_ORDER = 5


@click.command(
    epilog="""\b
Examples:
  mlhpc run cosmoflow --config smoke --ranks 2 --runs 2
  mlhpc run cosmoflow --config mini --ranks 2 --runs 5 --seed 1 -o runs/mine
  mlhpc run cosmoflow --config mini --set hyperparameters.dropout=0.1 --set submission.org=ACME
  mlhpc run cosmoflow --output runs/mine --trial 3 --ranks 2 --resume
  srun python -P -m suite run cosmoflow --config mini --output runs/mine --trial 0
"""
)
@click.argument("workload")
@click.option(
    "--config", "config_name", help="Shipped config (mlhpc list) or a YAML file; with --resume the run's own."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a config key; repeatable.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="MPI ranks on this machine.")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Scored runs.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="New run folder. [runs/<workload>-<size>-<time>]")
@click.option("--seed", type=click.IntRange(0), help="Seed of run 0; run i has seed + i. Default: from the system.")
@click.option("--trial", type=click.IntRange(0), help="Be one trial; inside srun, mpiexec or torchrun: in that world.")
@click.option(
    "--mode", type=click.Choice(["strong", "weak"]), default="strong", help="weak: one of many instances at once."
)
@click.option("--resume", is_flag=True, help="Continue a stopped trial from its checkpoint; such a run is not scored.")
def run(
    workload: str,
    config_name: str | None,
    overrides: tuple[str, ...],
    ranks: int,
    runs: int,
    output: Path | None,
    seed: int | None,
    trial: int | None,
    mode: str,
    resume: bool,
) -> None:
    """Train a workload to its target, N times, and log each run.

    Exit codes: 0 every run reached the target, 1 one did not or failed, 2 usage, 3 stopped with a checkpoint left.
    """
    chosen = descriptor(workload)
    if resume and (trial is None or output is None):
        raise click.UsageError("--resume needs --output RUN and --trial I: the run folder and the trial to continue")
    if resume and config_name is None and output is not None:
        config_name = str(RunFolder(output).config_path)
    config = load_config(chosen, config_name or "mini", overrides)

    from suite.training.plan import TrialPlan
    from suite.world import detect

    if trial is not None and output is None:
        raise click.UsageError("--trial needs --output RUN: the run folder all trials share")
    root = output or default_folder(config.workload, config.size, datetime.now(UTC))
    plan = TrialPlan(chosen, config, RunFolder(root), trial or 0, runs, mode, seed, resume)
    launch = detect()
    if trial is not None and (launch is not None or ranks == 1):
        from suite.training.worker import work

        sys.exit(work(plan, first_line=_FIRST_LINE))
    if launch is not None:
        raise click.UsageError(f"inside {launch.launcher} a run needs --trial I: the world is one trial")
    if trial is None:
        refuse_existing(root)
    _check_before_launch(plan, ranks)
    sys.exit(_launch_all(plan, ranks) if trial is None else _launch_one(plan, ranks, overrides))


def _check_before_launch(plan: TrialPlan, ranks: int) -> None:
    """ValueError for what every trial would fail at: the batch, the data."""
    from suite.data.build import find_data
    from suite.data.sampling import check_batch

    config = plan.config
    check_batch(config.global_batch_size, ranks, config.gradient_accumulation_steps)
    find_data(config.data or default_data_root(config.workload, config.size), config.workload, config.size)


def _launch_all(plan: TrialPlan, ranks: int) -> int:
    """All trials of a new run folder, one after the other."""
    from suite.launch.trials import run_trials
    from suite.log.reader import read_events

    root, runs = plan.folder.root, plan.runs
    folder = create(root, plan.config, mode=plan.mode, runs=runs, ranks=ranks)
    code = run_trials(plan.config.workload, folder, range(runs), ranks=ranks, seed=plan.base_seed)
    begun = sum(read_events(path).first(mllog.RUN_START) is not None for path in folder.results())
    text = f"{begun} of {runs} run{'s' if runs > 1 else ''} began"
    click.echo(f"{root}: {text}" + (f"; next: mlhpc score {root} --explain" if begun else ""))
    return code


def _launch_one(plan: TrialPlan, ranks: int, overrides: tuple[str, ...]) -> int:
    """One trial of a run folder that may exist."""
    from suite.launch.trials import run_trials

    plan.folder.root.mkdir(parents=True, exist_ok=True)
    folder = write_run_info(plan.folder.root, plan.config, mode=plan.mode, runs=plan.runs, ranks=ranks)
    name = plan.config.workload
    return run_trials(
        name, folder, [plan.trial], ranks=ranks, seed=plan.base_seed, overrides=overrides, resume=plan.resume
    )
