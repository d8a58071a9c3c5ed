"""`mlhpc submit`: creates run folders with job scripts and submits them; --dry-run only prints scripts and costs."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import structs

from mlhpc.suite import MOST_RUNS, NO_SUBMITTER
from mlhpc.suite.card import SizeCard, read_reference_points
from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    IntegerRange,
    choose_config_name,
    convert_plan_to_settings,
    is_config_path,
    output_option,
    plan_options,
    runs_option,
    settings_options,
    strict_option,
)
from mlhpc.suite.commands.status import read_job_status
from mlhpc.suite.compliance.before import judge_statement, print_refusals
from mlhpc.suite.config import RunConfig, choose_default_data_root, load_config
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.documents import convert_to_plain_data, parse_yaml
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import make_folder, print_line, quote_path, write_file_atomically
from mlhpc.suite.launch import estimates
from mlhpc.suite.launch.job import Job, SystemFile, find_system, parse_time_limit_s, read_system
from mlhpc.suite.launch.queue import list_exit_codes, submit_script
from mlhpc.suite.launch.schedulers import load_dialect, render_command
from mlhpc.suite.launch.script import render_script
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import summarise_log
from mlhpc.suite.log.run_folder import (
    SCRIPT,
    JobInfo,
    RunFolder,
    choose_default_folder,
    create_run_folder,
    refuse_existing,
    write_run_info,
)
from mlhpc.suite.plugins import explain_missing_wing, list_missing_wings

if TYPE_CHECKING:  # only --estimate-from reads a log
    from mlhpc.suite.log.record import RunRecord

PREFLIGHT_WING = "fleet"  # has the commands that the job script calls
RUN_OPTIONS = ("config", "runs", "instances", "array", "preflight", "spares", "estimate_from", "mesh", "strict")
WAIT_INTERVAL_S, LOOKS = 5.0, 3  # between two looks of --wait; a job without a trace is looked for so often
PREFLIGHT_S, MIN_PREFLIGHT_S = 60, 18  # a third is for the nodes, whose ranks take seconds to start


class JobName(click.ParamType[str]):
    """The name of one job, as a scheduler prints it."""

    name = "job"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse a list of jobs, and sbatch's ``afterok:4711``."""
        if not value or set(value) & set(" ,;:"):
            self.fail(f"{value!r}: expected one job, such as 4711", param, ctx)
        return str(value)


@click.command(
    epilog="""\b
Examples:
  mlhpc submit cosmoflow --system mysite --size small --nodes 1,2,4 --runs 10 --dry-run
  mlhpc submit cosmoflow --system ./mysite.yaml --size mini --nodes 2 --runs 5 --seed 1
  mlhpc submit cosmoflow --system mysite --size small --nodes 2 --instances 8     throughput mode, 16 nodes
  mlhpc submit cosmoflow --system mysite --size small --nodes 4 --runs 10 --array
  mlhpc submit cosmoflow --system mysite --size small --nodes 8 --runs 10 --preflight --spares 1
  mlhpc submit data cosmoflow --system mysite --size small --nodes 4 --wait         the data set, made by all ranks
"""
)
@click.argument("workload", metavar="[data] WORKLOAD")
@click.argument("data_of", required=False, metavar="")
@click.option(
    "--system",
    "system_name",
    required=True,
    help="System to run on: a name under submissions/systems, such as slurm-two-node, or a .yaml file.",
)
@settings_options
@plan_options
@click.option(
    "--nodes",
    "node_counts",
    required=True,
    metavar="N[,N...]",
    help="Number of nodes of a run; 1,2,4 submits one job for each number.",
)
@click.option(
    "--ranks-per-node", type=IntegerRange(1), help="Number of MPI ranks on each node. [as in the system file]"
)
@runs_option(text="Number of runs, one after another; mlhpc workload list says how many a score needs.")
@click.option(
    "--instances",
    type=IntegerRange(1, MOST_RUNS),
    default=1,
    help="Throughput mode: start this many runs at once, each on --nodes nodes.",
)
@click.option(
    "--array", is_flag=True, help="Submit each run as a task of a job array, instead of all runs in one allocation."
)
@click.option("--seed", type=IntegerRange(0), help="Seed of run 0; run i has seed + i. [random]")
@click.option(
    "--preflight",
    type=IntegerRange(MIN_PREFLIGHT_S),
    is_flag=False,
    flag_value=PREFLIGHT_S,
    metavar="[SECONDS]",
    help=f"Measure the nodes first, for at most SECONDS, and name the slow ones. [{PREFLIGHT_S} if no number follows]",
)
@click.option(
    "--spares", type=IntegerRange(0), default=0, help="Extra nodes to allocate; --preflight chooses the good ones. [0]"
)
@output_option(
    "New run folder; with several node counts, the folder of all run folders.", "runs/<workload>-<size>-<time>"
)
@click.option(
    "--time-limit",
    help="Time limit, such as 30 (minutes), 2:00:00 or 1-12. [as in the system file]",
)
@click.option(
    "--estimate-from",
    type=click.Path(path_type=Path),
    help="Earlier run folder whose time per epoch predicts the time of these runs, in proportion to ranks.",
)
@click.option(
    "--after", type=JobName(), metavar="JOB", help="Start when this job has succeeded, such as one of `submit data`."
)
@click.option("--wait", is_flag=True, help="Wait until the jobs have ended; the exit code is that of the worst one.")
@strict_option()
@click.option("--dry-run", is_flag=True, help="Print the job scripts and the predicted cost; submit nothing.")
def submit(
    workload: str,
    data_of: str | None,
    system_name: str,
    size: str | None,
    config: str | None,
    plan_name: str | None,
    mesh: str | None,
    node_counts: str,
    ranks_per_node: int | None,
    runs: int,
    instances: int,
    array: bool,
    overrides: tuple[str, ...],
    seed: int | None,
    preflight: int | None,
    spares: int,
    output: Path | None,
    time_limit: str | None,
    estimate_from: Path | None,
    after: str | None,
    wait: bool,
    strict: bool,
    dry_run: bool,
) -> None:
    """Submit runs of a workload to a scheduler: one job and one run folder per node count.

    Prints the predicted time, node-hours and disk use of each job first. --dry-run prints them and submits nothing.

    With `data` before the workload the job makes the data set of a size, and trains nothing.
    """
    workload, makes_data = _parse_words(workload, data_of)
    if preflight and PREFLIGHT_WING in list_missing_wings():
        raise InputError(f"--preflight: {explain_missing_wing(PREFLIGHT_WING)}")
    chosen = load_descriptor(workload)
    chosen.code()
    overrides += convert_plan_to_settings(plan_name, mesh)
    name = choose_config_name(size, config) or DEFAULT_SIZE
    system = read_system(find_system(system_name))
    if site_data := system.site.data:
        os.environ.setdefault("MLHPC_DATA", os.path.expandvars(site_data))
    resolved = load_config(chosen, name, overrides, submitter=system.submitter)
    template = _make_template(chosen, resolved, system, ranks_per_node, time_limit)
    under = os.path.expandvars(system.site.runs or "runs")
    if makes_data:
        root = output or choose_default_folder(f"data-{chosen.name}", resolved.size, datetime.now(UTC), under)
        job = replace(template, makes_data=True, nodes=parse_nodes(node_counts)[0], seed=seed, config=resolved.size)
        _submit_data(job, root.absolute(), after, wait=wait, dry_run=dry_run)
        return
    template = replace(
        template, runs=runs, instances=instances, array=array, seed=seed, preflight=preflight or 0, spares=spares
    )
    root = output or choose_default_folder(resolved.workload, resolved.size, datetime.now(UTC), under)
    folders = _choose_folders(root.absolute(), parse_nodes(node_counts))
    # A dry run shows the node counts that are possible; a real one submits all or none.
    planned, impossible = _plan_all(template, resolved, folders, tolerant=dry_run)
    many, mode = (instances, "weak") if instances > 1 else (runs, "strong")
    plan = _describe_plan(resolved, planned[0].ranks) if planned else None
    print_refusals(judge_statement(chosen, resolved, runs=many, mode=mode, plan=plan), resolved, strict=strict)
    size_card = chosen.card().size(resolved.size)
    earlier = _read_earlier_run(estimate_from) if estimate_from else None
    for job in planned:
        _print_cost(job, _estimate_cost(job, chosen, resolved, size_card, earlier), size_card)
        if dry_run:
            stated = (*_render_submitter_setting(resolved), *overrides)
            print_line(
                render_script(_make_script_template(job, choose_config_name(size, config), stated, output)),
                end="",
            )
    for text in impossible:
        print_line(f"not possible: {text}", error=True)
    if impossible:  # only of a dry run: else the first one is an error
        sys.exit(ExitCode.FINDINGS)
    if not dry_run:
        for folder, job in zip(folders.values(), planned, strict=True):
            ids = _submit_job(folder, job, resolved, after)
            print_line(f"job {', '.join(ids)}: {_render_title(job)}: {folder}")
        print_line(f"state: mlhpc status {quote_path(root)}")
        if wait:
            sys.exit(wait_for_jobs(folders.values()))


def _parse_words(first: str, second: str | None) -> tuple[str, bool]:
    """Return the workload, and whether its data set is to be made. UsageError for other words, or options of runs."""
    if (first == "data") != (second is not None):
        words = first if second is None else f"{first} {second}"
        raise click.UsageError(f"{words}: expected the name of a workload, or data and that name")
    if second is not None:
        context = click.get_current_context()
        given = [name for name in RUN_OPTIONS if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} is of runs; leave it out to make a data set")
    return second or first, second is not None


def _describe_plan(config: RunConfig, ranks: int) -> dict[str, Any] | None:
    """Return the plan as the log will have it. None without a plan."""
    if config.plan is None:
        return None
    from mlhpc.suite.training.parallel.parallel_dims import Parallel

    return Parallel.of(config, load_descriptor(config.workload), 0, ranks).logged()


def _choose_folders(root: Path, counts: Sequence[int]) -> dict[int, Path]:
    """Return the run folder of each node count; those of a sweep lie in one folder."""
    if len(counts) == 1:
        return {counts[0]: root}
    return {count: root / f"nodes-{count}" for count in counts}


def _print_cost(job: Job, estimate: estimates.Cost, size_card: SizeCard) -> None:
    """Print what a job will cost and what will keep it from a score. On stderr: the scripts of --dry-run are stdout."""
    limit_s = parse_time_limit_s(job.time_limit)
    print_line(f"{_render_title(job)}:", error=True)
    for line in estimates.render_cost(estimate, limit_s):
        print_line(f"  {line}", error=True)
    for text in estimates.find_obstacles(
        estimate, limit_s, trials=job.trials, required=size_card.required_runs, array=job.array
    ):
        print_line(f"  cannot score     {text}", error=True)


def _render_submitter_setting(config: RunConfig) -> tuple[str, ...]:
    """Return the setting that names a known submitter: a compute node may not have this person's default."""
    org = config.submission.org
    return () if org == NO_SUBMITTER or parse_yaml(org) != org else (f"submission.org={org}",)


def _make_script_template(job: Job, chosen: str | None, overrides: Sequence[str], output: Path | None) -> Job:
    """Return the job of a printed script. It has no run folder: its output lies where it is submitted."""
    name = chosen or DEFAULT_SIZE
    return replace(
        job,
        config=str(Path(name).absolute()) if is_config_path(name) else name,
        overrides=tuple(overrides),
        run=job.run if output is not None else None,
        output=None,
    )


def parse_nodes(text: str) -> tuple[int, ...]:
    """Parse node counts such as ``1,2,4``. InputError if one is repeated or not a positive number."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--nodes {text!r}: expected positive numbers separated by commas, for example 1,2,4")
    counts = tuple(int(part) for part in parts)
    if len(set(counts)) < len(counts):
        raise InputError(f"--nodes {text!r}: each node count can be given once")
    return counts


def _plan_all(
    template: Job, config: RunConfig, folders: Mapping[int, Path], *, tolerant: bool
) -> tuple[list[Job], list[str]]:
    """Plan the jobs of a sweep. With ``tolerant`` also return why others are impossible. InputError if all are."""
    planned, impossible = [], []
    for count, folder in folders.items():
        try:
            planned.append(plan_job(template, config, count, folder))
        except InputError as error:
            if not tolerant or len(folders) == 1:
                raise
            impossible.append(str(error))
    if not planned:
        raise InputError(f"no node count of --nodes is possible: {'; '.join(impossible)}")
    return planned, impossible


def plan_job(template: Job, config: RunConfig, nodes: int, folder: Path) -> Job:
    """Make the job for one node count. InputError if its ranks cannot share the batch evenly or its folder exists."""
    config_path = str(RunFolder(folder).config_path)
    job = replace(template, nodes=nodes, run=str(folder), config=config_path, output=str(folder / "output"))
    accumulation = config.gradient_accumulation_steps
    # Without a plan every rank has samples of its own.
    groups = job.ranks
    if config.plan is not None or config.mesh is not None:
        from mlhpc.suite.training.parallel.parallel_dims import Parallel

        groups = Parallel.of(config, load_descriptor(config.workload), 0, job.ranks).mesh.data_size
    if config.global_batch_size % (groups * accumulation):
        from mlhpc.suite.data.sampling import check_batch  # numpy is imported only for its message

        try:
            check_batch(config.global_batch_size, groups, accumulation)
        except ValueError as error:
            raise InputError(f"--nodes {nodes} x {job.ranks_per_node} ranks per node: {error}") from None
    refuse_existing(folder)
    return job


def _make_template(
    chosen: Descriptor, config: RunConfig, system: SystemFile, ranks_per_node: int | None, time_limit: str | None
) -> Job:
    site, resources = system.site, system.resources
    if config.staging.directory is not None:  # the user's choice: in the script, the site's default would override it
        site = structs.replace(site, staging_directory=None)
    if config.cache_drop_command is not None:
        site = structs.replace(site, cache_drop_command=None)
    limit = time_limit or resources.time_limit
    # A wrong limit is refused before anything is written.
    if parse_time_limit_s(limit) <= resources.signal_margin_s:
        raise InputError(
            f"time limit {limit!r}: ranks are to save and stop {resources.signal_margin_s} s before it"
            " (resources.signal_margin_s); ask for more"
        )
    in_container = system.container.runtime != "none"
    return Job(
        workload=chosen.name,
        size=config.size,
        config="",
        system=structs.replace(system, site=site),
        nodes=1,
        ranks_per_node=ranks_per_node or resources.ranks_per_node,
        # The path of this interpreter does not exist in a container.
        python=site.python or ("python3" if in_container else sys.executable),
        time_limit=limit,
    )


def _render_title(job: Job) -> str:
    nodes = f"{job.nodes} node{'s' if job.nodes > 1 else ''} x {job.ranks_per_node} rank"
    nodes += "s" if job.ranks_per_node > 1 else ""
    if job.mode == "weak":
        return f"{job.workload} {job.size}, {job.instances} instances of {nodes} at once"
    return f"{job.workload} {job.size}, {nodes}, {job.runs} run{'s' if job.runs > 1 else ''}"


def _estimate_cost(
    job: Job, chosen: Descriptor, config: RunConfig, size_card: SizeCard, earlier: RunRecord | None
) -> estimates.Cost:
    pace, rate = None, job.system.resources.flops_per_s_per_rank
    if earlier is not None:
        pace = estimates.compute_pace_from_record(earlier, job.ranks)
    elif rate is not None:
        pace = estimates.compute_pace_from_rate(size_card, job.ranks, rate)
    data = _find_data_size(config, size_card)
    staged = job.system.site.staging_directory is not None or config.staging.directory is not None
    points = read_reference_points(chosen.folder, config.size)
    return estimates.Cost(
        epochs=estimates.estimate_epochs(points, config.global_batch_size, config.max_epochs),
        pace=pace,
        trials_in_sequence=job.runs,
        nodes=job.total_nodes,
        data=data,
        # Every node stages the whole data set.
        staged_bytes=data.bytes * job.total_nodes if staged else 0,
        files_written=estimates.FILES_PER_RUN + estimates.FILES_PER_TRIAL * job.trials + job.total_nodes,
    )


def _find_data_size(config: RunConfig, size_card: SizeCard) -> estimates.DataSize:
    """Return the size of the data set, from its manifest or, without one, from the card."""
    root = config.data or choose_default_data_root(config.workload, config.size)
    try:
        shards = [
            entry for split in json.loads((root / "manifest.json").read_text())["splits"].values() for entry in split
        ]
        return estimates.DataSize(sum(int(entry["bytes"]) for entry in shards), len(shards) + 1, f"counted in {root}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        samples = size_card.train_samples + size_card.eval_samples
        return estimates.DataSize(samples * size_card.sample_bytes, None, f"from the card; {root} is not there yet")


def _read_earlier_run(folder: Path) -> RunRecord:
    """Read the first log of a run folder that has a complete epoch. InputError if none has."""
    RunFolder(folder).read_info()
    for path in RunFolder(folder).results():
        record = summarise_log(read_events(path))
        if any(epoch.complete for epoch in record.epochs):
            return record
    raise InputError(f"{folder}: no log has a complete epoch to estimate from; give another run folder")


def _submit_job(folder: Path, job: Job, config: RunConfig, after: str | None) -> tuple[str, ...]:
    """Create the run folder, submit its jobs and return their ids. If they are refused, the folder is removed."""
    create_run_folder(folder)
    run = write_run_info(
        folder, config, mode=job.mode, runs=job.trials, ranks=job.ranks, seed=job.seed, same_allocation=not job.array
    )
    try:
        return _give_to_scheduler(folder, job, after)
    except ValueError:
        shutil.rmtree(run.root)  # a folder without a job would stay "queued" for ever
        raise


def _submit_data(job: Job, folder: Path, after: str | None, *, wait: bool, dry_run: bool) -> None:
    """Submit the job that makes a data set. Its folder has its script and its output."""
    refuse_existing(folder)
    if dry_run:
        print_line(render_script(job), end="")
        return
    create_run_folder(folder)
    try:
        ids = _give_to_scheduler(folder, replace(job, run=str(folder), output=str(folder / "output")), after)
    except ValueError:
        shutil.rmtree(folder)
        raise
    where = choose_default_data_root(job.workload, job.size)
    print_line(f"job {', '.join(ids)}: data set {job.workload} {job.size} in {where}: {folder}")
    if wait:
        sys.exit(wait_for_jobs([folder]))


def _give_to_scheduler(folder: Path, job: Job, after: str | None) -> tuple[str, ...]:
    """Write the script and job.json, submit the jobs and return their ids."""
    dialect = load_dialect(job.system.kind)
    make_folder(folder / "output")
    script = folder / SCRIPT
    write_file_atomically(script, render_script(job))
    ids: list[str] = []
    # Without arrays of its own, the scheduler gets a job for each run, which waits for the one before.
    for index in range(job.runs) if job.array and not tuple(dialect.render_array(job)) else (None,):
        first = dialect.render_dependency(after, succeeded=True) if after else ()
        options = dialect.render_dependency(ids[-1], succeeded=False) if ids else first
        ids.append(submit_script(script, dialect, *options, index=index))
    submitted = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    info = JobInfo(kind=job.system.kind, command=render_command(dialect), job_ids=tuple(ids), submitted=submitted)
    write_file_atomically(folder / "job.json", json.dumps(convert_to_plain_data(info), indent=2) + "\n")
    return tuple(ids)


def wait_for_jobs(folders: Iterable[Path], pause: Callable[[float], object] = time.sleep) -> int:
    """Wait until the jobs of all folders have ended, say how each changes, and return the worst of their exit codes.

    A job that left none failed.
    """
    worst = 0
    for folder in folders:
        said, missed = "", 0
        while True:
            job = read_job_status(folder)
            if (text := f"job {', '.join(job.ids)}: {job.state}") != said:
                print_line(text, error=True)
                said = text
            codes = [code for each in job.ids for code in list_exit_codes(folder, each).values()]
            # A job that the scheduler does not list yet, and one whose exit file another node has just written, look gone.
            missed = missed + 1 if job.ended and not codes else 0
            if job.ended and (codes or missed == LOOKS):
                worst = max(worst, *codes, ExitCode.OK if codes else ExitCode.FAILED)
                break
            pause(WAIT_INTERVAL_S)
    return worst
