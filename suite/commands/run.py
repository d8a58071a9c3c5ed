"""`mlhpc run`: launches N trials on this machine. With --trial it is a rank of one trial."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from mlhpc.suite.card import read_reference_points
from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    Duration,
    FiniteRange,
    IntegerRange,
    PercentRange,
    choose_config_name,
    convert_plan_to_settings,
    output_option,
    plan_options,
    ranks_option,
    runs_option,
    settings_options,
    strict_option,
)
from mlhpc.suite.compliance.before import judge_statement, print_refusals
from mlhpc.suite.config import RunConfig, choose_default_data_root, list_outer_settings, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.errors import InputError, explain_near_names
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import TrackedFolder, make_folder, print_line, print_progress, quote_path
from mlhpc.suite.launch.quiet import wait_for_quiet
from mlhpc.suite.launch.trials import run_trials
from mlhpc.suite.launcher import explain_steering, find_world, refuse_several_ranks
from mlhpc.suite.log.checkpoint_index import find_damage_quickly
from mlhpc.suite.log.lost_time import render_losses
from mlhpc.suite.log.other_work import render_busy_warning
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.run_folder import (
    REPLACE,
    RunFolder,
    choose_default_folder,
    create_run_folder,
    find_continue_command,
    find_newest_run_log,
    has_run_start,
    plan_resume,
    refuse_existing,
    write_run_info,
)
from mlhpc.suite.log.spread import find_known_spread
from mlhpc.suite.machine.probes.allowance import find_usable_resources

if TYPE_CHECKING:
    from mlhpc.suite.training.statement import TrialPlan

WAIT_MINUTES = 60.0  # of --wait-for-quiet, before each run


@click.command(
    epilog="""\b
Examples:
  mlhpc run cosmoflow --size smoke --ranks 2 --runs 2
  mlhpc run cosmoflow --size mini --ranks 2 --runs 5 --seed 1 -o runs/mine
  mlhpc run cosmoflow --size mini --set hyperparameters.dropout=0.1 --set submission.org=ACME
  mlhpc run cosmoflow --size mini --ranks 4 --plan spatial --mesh data=2,spatial=2x1x1
  mlhpc run cosmoflow --output runs/mine --resume               continue what is unfinished; --trial 3: only run 3
  mlhpc run cosmoflow --size mini --detect 5%                   how many runs show 5 %; runs nothing
  srun python -P -m mlhpc run cosmoflow --size mini --output runs/mine --trial 0
"""
)
@click.argument("workload")
@settings_options
@plan_options
@ranks_option(None, "Number of MPI ranks to start on this machine. [1; with --resume as many as before]")
@runs_option(
    None, "Number of runs; mlhpc workload list says how many a score needs. With --resume also of more than before. [1]"
)
@output_option("New run folder.", "runs/<workload>-<size>-<time>")
@click.option("--seed", type=IntegerRange(0), help="Seed of run 0; run i has seed + i. [random]")
@click.option(
    "--trial",
    type=IntegerRange(0),
    help="Do only run number N of the folder; job scripts use this inside srun, mpiexec or torchrun.",
)
@click.option(
    "--mode",
    type=click.Choice(["strong", "weak"]),
    default="strong",
    help=(
        "strong: runs are scored by time to train. weak: one of many instances at once, scored by throughput. [strong]"
    ),
)
@strict_option()
@click.option(
    "--detect",
    type=PercentRange(0.1, 100),
    metavar="PERCENT",
    help="Say how many runs show such a difference on this machine, by earlier runs or reference points; run nothing.",
)
@click.option(
    "--within",
    type=Duration(),
    metavar="TIME",
    help="Say how many runs fit into a time such as 2h, and which difference they show; run nothing.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue a run folder: runs with a checkpoint go on from it (unscored), runs that never began start.",
)
@click.option(
    "--replace-failed",
    is_flag=True,
    help="With --resume: also repeat runs that began and failed. The new log states it, and the checker reports it.",
)
@click.option(
    "--wait-for-quiet",
    "quiet_first",
    is_flag=True,
    help="Before each run wait until other programs leave the CPUs idle, so that they do not slow it.",
)
@click.option(
    "--wait-minutes",
    type=FiniteRange(0, 10_080, min_open=True),
    help=f"With --wait-for-quiet: give up after this many minutes. [{WAIT_MINUTES:g}]",
)
def run(
    workload: str,
    size: str | None,
    config: str | None,
    overrides: tuple[str, ...],
    plan_name: str | None,
    mesh: str | None,
    ranks: int | None,
    runs: int | None,
    output: Path | None,
    seed: int | None,
    trial: int | None,
    mode: str,
    strict: bool,
    detect: float | None,
    within: float | None,
    resume: bool,
    replace_failed: bool,
    quiet_first: bool,
    wait_minutes: float | None,
) -> None:
    """Train a workload to its target, N times, and write a log of each run.

    Exit code 0: every run reached the target. Exit code 1: a run failed or missed it. Exit code 2: usage. Exit code 3:
    stopped by a signal, a checkpoint is left.
    """
    chosen = load_descriptor(workload)
    # A card without code is refused before a folder is made.
    chosen.code()
    overrides += convert_plan_to_settings(plan_name, mesh)
    _refuse_lone_options(output, trial, resume=resume, replace_failed=replace_failed)
    if wait_minutes is not None and not quiet_first:
        raise click.UsageError("--wait-minutes belongs to --wait-for-quiet: give both")
    wait_s = 60 * (wait_minutes or WAIT_MINUTES) if quiet_first else None
    name = choose_config_name(size, config)
    if resume and output is not None and (trial is None or name is None):
        # Job scripts pass --resume with --trial and --config for new runs too.
        _require_run_folder(output)
    if name is None:
        # What is continued keeps its settings; a new run has those of the default size.
        name = str(RunFolder(output).config_path) if resume and output is not None else DEFAULT_SIZE
    resolved = load_config(chosen, name, overrides)
    if resume and output is not None and trial is None:
        mode = _find_resumed_mode(output, resolved)
        _refuse_outer_reach(output, Path(name), overrides)

    from mlhpc.suite.training.statement import TrialPlan

    if detect is not None or within is not None:
        _print_power(chosen, resolved, ranks or 1, detect, within)
        return
    root = output or choose_default_folder(resolved.workload, resolved.size, datetime.now(UTC))
    plan = TrialPlan(
        chosen,
        resolved,
        RunFolder(root),
        trial=trial or 0,
        runs=runs or 1,
        mode=mode,
        base_seed=seed,
        resume=resume,
        replace_failed=replace_failed,
    )
    if resume and runs is not None and trial is None:
        _add_runs(plan.folder, runs)
    sys.exit(_start_trials(plan, trial, ranks, overrides, wait_s, strict=strict))


def _print_power(chosen: Descriptor, config: RunConfig, ranks: int, detect: float | None, within: float | None) -> None:
    """Print what how many runs can show. InputError if nothing tells how much runs differ."""
    places = [Path(choose_default_folder(config.workload, config.size, datetime.now(UTC))).parent]
    known = find_known_spread(config, ranks, places, read_reference_points(chosen.folder, config.size))
    begin = f"mlhpc run {config.workload} --size {config.size} --ranks {ranks}"
    if known is None:
        raise InputError(
            f"how much runs differ here is not known: {places[0]} has no three of {config.workload} {config.size} on "
            f"{ranks} rank{'s' * (ranks > 1)} with a batch of {config.global_batch_size}, and reference points say "
            f"nothing; first {begin} --runs 3"
        )
    if detect is not None:
        print_line(known.explain_difference(detect))
    if within is not None:
        print_line(known.explain_time(within))
    print_line(f"begin: {begin} --runs N; then mlhpc compare A B --any")


def _refuse_lone_options(output: Path | None, trial: int | None, *, resume: bool, replace_failed: bool) -> None:
    """Raise UsageError for options without the option that they need."""
    if resume and output is None:
        raise click.UsageError("--resume needs --output RUN: the run folder to continue")
    if replace_failed and not resume:
        raise click.UsageError("--replace-failed needs --resume: it says what to do with the runs of an earlier folder")
    if trial is not None and output is None:
        raise click.UsageError("--trial needs --output RUN: the run folder all trials share")


def _require_run_folder(root: Path) -> None:
    """Raise InputError if --resume names no run folder. The message has the nearest name."""
    if RunFolder(root).info_path.exists():
        return
    beside = [path.parent.name for path in root.absolute().parent.glob("*/run.json")]
    what = "no run folder (no run.json)" if root.exists() else "does not exist"
    near = explain_near_names(root.name, beside) or ";"
    raise InputError(f"{root}: {what}{near} --resume continues a run folder; without it a new run begins")


def _refuse_outer_reach(root: Path, config: Path, overrides: tuple[str, ...]) -> None:
    """Raise InputError if a run folder reaches out of itself: by a link, or by a setting of its own that is not
    repeated on the command line.
    """
    if link := next((path for path in (*root.glob("*"), *root.glob("*/*")) if path.is_symlink()), None):
        raise InputError(
            f"{link}: is a link to {link.readlink()}; runs write and remove files of their folder, which may be a "
            "stranger's; put what it leads to in its place, or remove it"
        )
    if config != RunFolder(root).config_path:
        return
    left = [each for each in list_outer_settings(config) if each not in overrides]
    if left:
        raise InputError(
            f"{config}: {left[0].partition('=')[0]} acts outside of the run folder, which may be a stranger's; if "
            f"you want it, repeat it: {find_continue_command(root, left=True)}"
        )


def _find_resumed_mode(root: Path, config: RunConfig) -> str:
    """Return the mode of a run folder. InputError if it is of another workload or size: before data are asked for."""
    info = RunFolder(root).read_info()
    if (info.workload, info.size) != (config.workload, config.size):
        raise InputError(
            f"{root}: holds runs of {info.workload} {info.size}, not of {config.workload} {config.size}; continue it with "
            f"mlhpc run {info.workload} --output {quote_path(root)} --resume, or begin another folder"
        )
    return info.mode


def _add_runs(folder: RunFolder, runs: int) -> None:
    """Let a series that was begun with fewer runs have that many. InputError for one with more."""
    info = folder.read_info()
    if runs < info.runs:
        raise InputError(f"{folder.root}: it was begun with {info.runs} runs; --runs {runs} cannot take any away")
    if runs > info.runs:
        folder.write_info(replace(info, runs=runs))
        print_line(f"{folder.root}: begun with {info.runs} run{'s' * (info.runs > 1)}, now has {runs}")


def _start_trials(
    plan: TrialPlan,
    trial: int | None,
    ranks: int | None,
    overrides: tuple[str, ...],
    wait_s: float | None,
    *,
    strict: bool,
) -> int:
    """Run as a rank of one trial, or start the ranks of one or all trials. Return the exit code.

    ``wait_s``: seconds to wait at most until other programs leave the CPUs idle. None: do not wait.
    """
    launch = find_world(ranks)
    # One rank needs no launcher: this process is the trial, as it is inside srun, mpiexec or torchrun.
    if trial is not None and (launch is not None or ranks in (None, 1)):
        from mlhpc.suite.training.worker import run_worker

        if wait_s is not None and launch is not None:
            raise click.UsageError(
                f"--wait-for-quiet: inside {launch.launcher} each rank would wait for the others; leave it out"
            )
        _wait_for_quiet(wait_s, print_progress)
        return run_worker(plan)
    refuse_several_ranks(
        "a run of several ranks needs --output RUN --trial I: they are one trial, I is 0 for the first"
    )
    if trial is not None:
        return _launch_trial(plan, trial, ranks or 1, overrides, wait_s, strict=strict)
    # Only a whole series makes the run folder new; single trials share one.
    return _launch_all(plan, ranks, overrides, wait_s, strict=strict)


def _check_before_launch(plan: TrialPlan, ranks: int, *, runs: int | None, strict: bool) -> list[str]:
    """Raise ValueError if every trial would fail: by its batch size or its data. Return what the checker would
    refuse.
    """
    from mlhpc.suite.data.build import find_data
    from mlhpc.suite.data.sampling import check_batch
    from mlhpc.suite.training.parallel.parallel_dims import Parallel

    config = plan.config
    parallel = Parallel.of(config, plan.descriptor, 0, ranks)
    check_batch(config.global_batch_size, parallel.mesh.data_size, config.gradient_accumulation_steps)
    root = config.data or choose_default_data_root(config.workload, config.size)
    data = find_data(root, config.workload, config.size)
    stated = parallel.logged() if parallel.plan is not None else None
    found = judge_statement(plan.descriptor, config, runs=runs, mode=plan.mode, data=data, plan=stated)
    if strict:
        print_refusals(found, config, strict=True)
    return found


def _launch_trial(
    plan: TrialPlan, trial: int, ranks: int, overrides: tuple[str, ...], wait_s: float | None, *, strict: bool
) -> int:
    """Run one trial on ranks of this machine. Its run folder is made, or is shared with other trials."""
    reasons = _check_before_launch(plan, ranks, runs=None, strict=strict)
    make_folder(plan.folder.root)
    print_refusals(reasons, plan.config, strict=False)
    _write_info(plan, ranks)
    return _run_trials(plan, [trial], ranks, plan.base_seed, overrides, wait_s)


def _launch_all(
    plan: TrialPlan, ranks: int | None, overrides: tuple[str, ...], wait_s: float | None, *, strict: bool
) -> int:
    """Run all trials of a new run folder, or with --resume the trials left in an old one."""
    folder = plan.folder
    if plan.resume:
        info = folder.read_info()
        runs, ranks = info.runs, ranks or info.ranks or 1
        seed = info.seed if plan.base_seed is None else plan.base_seed
        if info.seed not in (None, seed):
            raise InputError(f"{folder.root}: its runs have the seed {info.seed} (run.json): leave --seed out")
        reasons = _check_before_launch(plan, ranks, runs=runs, strict=strict)
    else:
        runs, ranks, seed = plan.runs, ranks or 1, plan.base_seed
        # The folder is made last, so that a mistake in batch or data leaves none behind.
        refuse_existing(folder.root)
        reasons = _check_before_launch(plan, ranks, runs=runs, strict=strict)
        create_run_folder(folder.root)
        _write_info(plan, ranks)
    # After all mistakes: of these each is one line.
    print_refusals(reasons, plan.config, strict=False)
    place = TrackedFolder(folder.root)
    code = _run_trials(plan, range(runs), ranks, seed, overrides, wait_s)
    if not folder.root.exists():
        now = place.find()
        way = find_continue_command(now, left=True) if now is not None else None
        print_line(f"{folder.root}: {place.describe_loss()}{f'; to go on there: {way}' if way else ''}")
        return code
    place.close()
    if code > 128 and not any(
        map(has_run_start, folder.results())
    ):  # one line, of the trial that was stopped, is enough
        return code
    records = [summarise_log(read_events(path, steps=False)) for path in folder.results()]
    for line in render_losses(records, find_usable_resources().cores):
        print_line(line)
    if told := render_busy_warning([each.company for each in records]):
        print_line(f"{folder.root}: {told}")
    refused = plan.resume and code == ExitCode.USAGE
    # A rank that a signal ended could not say it
    way = explain_steering() if ranks > 1 and code == ExitCode.FAILED else ""
    steered = f"; {way}" if way else ""
    print_line(f"{folder.root}: {_render_summary(folder, runs, refused=refused, not_begun=steered)}")
    return code


def _write_info(plan: TrialPlan, ranks: int) -> None:
    write_run_info(plan.folder.root, plan.config, mode=plan.mode, runs=plan.runs, ranks=ranks, seed=plan.base_seed)


def _wait_for_quiet(wait_s: float | None, tell: Callable[[str], None]) -> None:
    if wait_s is not None:
        wait_for_quiet(tell, wait_s)


def _run_trials(
    plan: TrialPlan,
    trials: Sequence[int],
    ranks: int,
    seed: int | None,
    overrides: tuple[str, ...],
    wait_s: float | None,
) -> int:
    return run_trials(
        plan.config.workload,
        plan.folder,
        trials,
        ranks=ranks,
        mode=plan.mode,
        seed=seed,
        overrides=overrides,
        resume=plan.resume,
        replace_failed=plan.replace_failed,
        before_each=partial(_wait_for_quiet, wait_s),
    )


def _render_summary(folder: RunFolder, runs: int, *, refused: bool, not_begun: str = "") -> str:
    """Say how many runs reached the target, and which command comes next. ``refused``: --resume ended in a mistake.

    ``not_begun``: what to do if none began.
    """
    noun = "runs" if runs > 1 else "run"
    if not any(has_run_start(path) for path in folder.results()):
        return f"0 of {runs} {noun} began{not_begun}"
    # None: --resume runs it
    codes = [
        plan_resume(folder, trial, damage=find_damage_quickly(folder.checkpoint(trial))).code for trial in range(runs)
    ]
    reached, left = f"{codes.count(0)} of {runs} {noun} reached the target", codes.count(None)
    if left:
        first = "first mend what is said above, then" if refused else "to go on"
        return f"{reached}, {left} not finished; {first}: {find_continue_command(folder.root, left=True)}"
    if again := find_continue_command(folder.root, left=True) if _was_ended_outside(folder, runs) else None:
        return f"{reached}; after mending what ended a rank: {again} {REPLACE}"
    return f"{reached}; next: mlhpc score {quote_path(folder.root)} --explain"


def _was_ended_outside(folder: RunFolder, runs: int) -> bool:
    """Return whether a run was ended from outside, as by the kernel: its newest log has no end."""
    logs = filter(None, (find_newest_run_log(folder, trial) for trial in range(runs)))
    return any(summarise_log(read_events(log, steps=False)).run_stop_s is None for log in logs)
