"""`mlhpc tune`: finds the fastest setting of a workload on this machine, in a space of settings."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from msgspec import structs

from mlhpc.plugins.tune.space import RESULT
from mlhpc.suite import VERSION as SUITE_VERSION
from mlhpc.suite.cli.options import (
    DEFAULT_SIZE,
    JSON,
    FiniteRange,
    IntegerRange,
    choose_config_name,
    format_option,
    output_option,
    ranks_option,
    settings_options,
    strict_option,
)
from mlhpc.suite.compliance.before import explain_refusals, judge_statement
from mlhpc.suite.config import Tuned, choose_default_data_root, load_config
from mlhpc.suite.data.lock import create_lock
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.documents import convert_to_plain_data, render_json
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import (
    make_folder,
    print_line,
    print_progress,
    quote_path,
    render_duration,
    write_file_of_folder,
)
from mlhpc.suite.launch.command_on_ranks import run_as_rank
from mlhpc.suite.launcher import find_world, refuse_several_ranks
from mlhpc.suite.log.run_folder import choose_default_folder
from mlhpc.suite.machine.probes.allowance import find_usable_resources
from mlhpc.suite.machine.probes.processor import find_machine_root, read_cpu
from mlhpc.suite.plugins import AXES, explain_missing_wing, list_missing_wings
from mlhpc.suite.statistics import Outcome

if TYPE_CHECKING:
    from mlhpc.plugins.tune.candidates import Candidates
    from mlhpc.plugins.tune.search import Decision, Search
    from mlhpc.plugins.tune.space import Point, TunedTrial, TuneResult
    from mlhpc.suite.world import World


LEAST_STEPS = 5  # of a block
MOST_PREDICTED = 20  # configurations that are printed
ERROR = 0.05  # chance that a setting is called faster which is not
HISTORY, BEST, LOCK = "history.log", "best.yaml", "tune.lock"  # files of the new folder, beside the result
UNITS = {"s": 1, "m": 60, "h": 3600}


class Duration(click.ParamType[float]):
    """A time such as 90s, 30m or 2h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert a text to seconds. The command ends with a usage error if it is no time above zero."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is no time; expected a number with a unit, such as 90s, 30m or 2h.", param, ctx)
        return float(match[1]) * UNITS[match[2]]


@click.command(
    epilog="""\b
Examples:
  mlhpc tune cosmoflow --size mini --budget 20m
  mlhpc tune moe_lm --size smoke --objective cpu-time --only ranks --only precision
  mlhpc tune deepcam --size full --fix ranks=4 --space mine.yaml -o tune/deepcam
"""
)
@click.argument("workload")
@settings_options
@strict_option()
@ranks_option(text="Number of MPI ranks of the default, with which all is compared.")
@click.option(
    "--budget",
    type=Duration(),
    default="30m",
    show_default=True,
    metavar="TIME",
    help="Time to search, such as 90s or 2h.",
)
@click.option(
    "--objective",
    type=click.Choice(["step-time", "cpu-time", "time-to-quality", "joules"]),
    default="step-time",
    show_default=True,
    help="What to minimise. cpu-time, of all ranks, suits a machine that other programs use too. time-to-quality also "
    "tries the batches that have reference points, and counts their epochs. joules are those of a step, by the"
    " machine's "
    "counters.",
)
@click.option(
    "--fix", multiple=True, metavar="NAME=VALUE", help="Search with this value of a tunable only; repeatable."
)
@click.option("--only", multiple=True, metavar="NAME", help="Search this tunable; others keep the default; repeatable.")
@click.option(
    "--space", "space_file", type=click.Path(path_type=Path), help="YAML file with tunables to add or replace."
)
@click.option(
    "--from",
    "earlier",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="First measure the settings of this earlier search, run folder or package; repeatable.",
)
@click.option(
    "--predict",
    is_flag=True,
    help="Measure nothing: predict the times of all configurations from the searches that --from names.",
)
@click.option(
    "--evaluations",
    type=IntegerRange(1, 10_000),
    default=500,
    show_default=True,
    help="Most configurations to measure.",
)
@click.option(
    "--pairs",
    type=IntegerRange(7, 1000),
    default=16,
    show_default=True,
    help="Most pairs of fresh blocks of the best configuration and the default; they end when the answer is clear.",
)
@click.option(
    "--blocks", type=IntegerRange(1, 1000), default=2, show_default=True, help="Number of blocks of a measurement."
)
@click.option(
    "--steps",
    type=IntegerRange(1, 100_000),
    help="Number of timed steps in a block. [5, or as many as the default does in half a second, at most 100]",
)
@click.option(
    "--limit-s",
    type=FiniteRange(0, 1e6, min_open=True),
    help="End a configuration that takes longer than this, in seconds. [ten times the default's time, at least 60]",
)
@click.option(
    "--seed", type=IntegerRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of weights and samples."
)
@click.option("--resume", is_flag=True, help="Continue the search in the folder of -o, with the same options.")
@output_option("New folder.", "tune/<workload>-<size>-<time>")
@format_option()
@click.option(
    "--job", type=click.Path(path_type=Path), hidden=True, help="JSON file of a job: how `mlhpc tune` starts its ranks."
)
def tune(
    workload: str,
    size: str | None,
    config: str | None,
    overrides: tuple[str, ...],
    ranks: int,
    output: Path | None,
    style: str,
    job: Path | None,
    **options: Any,
) -> None:
    """Find the fastest setting of a workload on this machine.

    Tries numbers of ranks and threads, precision, plans and the card's tunables. Measures each with the default, in
    blocks of steps that take turns. Then runs the best and the default in fresh pairs: nothing better is an answer too.
    The closed division stays within its rules.
    """
    if job is not None:
        _run_ranks(workload, job)
    refuse_several_ranks("mlhpc tune starts its ranks itself")
    if AXES in list_missing_wings():
        raise InputError(f"mlhpc tune predicts what can run: {explain_missing_wing(AXES)}")
    name = choose_config_name(size, config) or DEFAULT_SIZE
    # Mistakes in settings come before torch is imported, which takes seconds.
    resolved = load_config(load_descriptor(workload), name, overrides).with_stated_precision("mlhpc tune")
    _refuse_lone_options(output, options)
    reasons = [] if options["resume"] else judge_statement(load_descriptor(workload), resolved)
    if options.pop("strict") and reasons:
        raise InputError(f"--strict: the checker would refuse a result with the default: {'; '.join(reasons)}")
    for note in explain_refusals(reasons):
        print_line(note, error=True)
    if options.pop("predict"):
        # The files of --from are what is learned from: their settings are not measured.
        setting = _prepare(workload, name, overrides, ranks, {**options, "earlier": ()})
        _print_predictions(setting, resolved.size, options["earlier"], style)
        return
    folder = output or choose_default_folder(resolved.workload, resolved.size, datetime.now(UTC), under="tune")
    if options["resume"] != folder.exists():
        raise InputError(
            f"{folder}: exists already; choose another folder with -o, or continue it with --resume"
            if folder.exists()
            else f"{folder}: no search here to resume"
        )
    import optuna  # noqa: F401  a search that cannot begin should not predict for minutes first
    import sklearn  # noqa: F401

    from mlhpc.suite.data.build import find_data

    find_data(
        resolved.data or choose_default_data_root(resolved.workload, resolved.size), resolved.workload, resolved.size
    )
    setting = _prepare(workload, name, overrides, ranks, options)
    if not options["resume"]:
        make_folder(folder)
    with create_lock(folder / LOCK, f"search {folder}"):
        search, decision, begun = _search(setting, folder, options)
        result = _describe(setting, search, decision, begun, options)
        write_file_of_folder(folder / RESULT, render_json(result) + "\n")
        best = folder / BEST
        if result.outcome == Outcome.FASTER:
            _write_best(setting, result, best)
    if style == JSON:
        print_line(render_json(result))
    else:
        _print_answer(setting, result, best)


def _refuse_lone_options(output: Path | None, options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option without the one that it needs, InputError for a folder that is no search."""
    if options["predict"] and not options["earlier"]:
        raise click.UsageError("--predict needs --from PATH: an earlier search, run folder or package to learn from")
    if not options["resume"]:
        return
    if output is None:
        raise click.UsageError("--resume: say which search to continue with -o FOLDER")
    # A search that was killed early left an empty folder or a lock
    began = output.is_dir() and any((output / name).exists() for name in (HISTORY, LOCK))
    if output.is_dir() and any(output.iterdir()) and not began:
        raise InputError(f"{output}: no search here to resume; without --resume a new one begins in a new folder")


@dataclass(frozen=True)
class Setting:
    """What is searched: the configurations, the points that can run, the refused ones with reasons, and the default.

    ``first``: points of earlier searches and runs, which are measured first if they are in the pool.
    """

    candidates: Candidates
    pool: list[Point]
    refused: Mapping[str, str]
    default: Point
    first: list[Point]


def _prepare(workload: str, name: str, overrides: tuple[str, ...], ranks: int, options: Mapping[str, Any]) -> Setting:
    """Build the space and keep the points that can run. InputError if the default cannot."""
    import torch

    from mlhpc.plugins.tune import space as spaces
    from mlhpc.plugins.tune.candidates import (
        TIME_TO_QUALITY,
        Candidates,
        Limits,
        list_plan_values,
        read_references,
        refuse_inadmissible,
    )
    from mlhpc.plugins.tune.space import read_earlier_points

    chosen = load_descriptor(workload)
    chosen.code()
    base = load_config(chosen, name, overrides)
    resources, gpus = find_usable_resources(), torch.cuda.device_count() if base.device != "cpu" else 0
    places = gpus or resources.cores
    own = chosen.card().tunable
    space = spaces.build_space(
        own,
        places=places,
        cores=resources.cores,
        gpu=gpus > 0,
        batch=base.global_batch_size,
        plans=list_plan_values(chosen, [n for n in spaces.list_powers(places) if n > 1]),
        batches=tuple(read_references(chosen, base.size)) if options["objective"] == TIME_TO_QUALITY else (),
    )
    if options["space_file"] is not None:
        given = spaces.read_space_file(options["space_file"])
        refuse_inadmissible(given, own, base.submission.division)
        space = spaces.Space({**space.tunables, **given})
    threads = os.environ.get("OMP_NUM_THREADS", "")
    each = int(threads) if threads.isdigit() and int(threads) > 0 else max(1, resources.cores // ranks)
    default = spaces.find_default(space, base, ranks, each)
    space = spaces.narrow(spaces.add_default(space, default), default, options["fix"], options["only"])
    # Not what is free now: a search that is resumed must find the same configurations.
    memory = torch.cuda.mem_get_info()[1] if gpus else resources.memory_limit or resources.memory_total
    limits = Limits(resources.cores, memory, shared=not gpus)
    candidates = Candidates(chosen, name, overrides, space, limits, options["objective"])
    if why := candidates.explain_refused(default):
        raise InputError(f"the default itself cannot run here: {why}")
    first = read_earlier_points(options["earlier"], chosen, space, resources.cores)
    points = space.pool(options["seed"])
    print_progress(f"{len(points)} configurations; predicting which can run")
    reasons = [(point, candidates.explain_refused(point)) for point in points]
    pool = [point for point, why in reasons if not why]
    refused = {spaces.render_point(point, default): why for point, why in reasons if why}
    if not any(point != default for point in pool):
        raise InputError(
            "no configuration of the space can run, except the default: "
            + next(iter(refused.values()), "it is all that --fix and --only leave")
        )
    able = {spaces.key_of_point(point) for point in pool}
    for point in first:
        if spaces.key_of_point(point) not in able:
            print_progress(f"--from: {spaces.render_point(point, default)} cannot run here or is not in the space")
    return Setting(candidates, [default, *(point for point in pool if point != default)], refused, default, first)


def _search(setting: Setting, folder: Path, options: Mapping[str, Any]) -> tuple[Search, Decision, str]:
    from mlhpc.plugins.tune.job import Blocks, FailedJobError, Meter
    from mlhpc.plugins.tune.search import History, Proxy, Search, SearchRules

    candidates, default = setting.candidates, setting.default
    blocks = Blocks(options["blocks"], options["steps"] or LEAST_STEPS, options["seed"])
    kept = {key: str(value) for key, value in options.items() if key not in ("resume", "budget", "evaluations")}
    request = json.dumps({**kept, "name": candidates.name, "set": candidates.overrides, "pool": setting.pool})
    history = History(folder / HISTORY, candidates.space, request)
    forms = [candidates.closed_form_s(point) for point in setting.pool]
    proxy = Proxy(candidates.space, setting.pool, [math.log(form / forms[0]) for form in forms])
    rules = SearchRules(options["budget"], options["evaluations"], options["pairs"], ERROR, options["seed"])
    search = Search(history, setting.pool, 0, proxy, rules, setting.first)
    fixed = options["steps"] is not None
    meter = Meter(candidates, default, blocks, options["limit_s"], len(history.trials()), fixed)
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        took = meter.measure_default()
    except FailedJobError as error:
        raise InputError(f"the default itself cannot be measured: {error}") from None
    limit = render_duration(meter.limit_s or 0.0)
    print_progress(
        f"{len(setting.pool)} can run; the default took {render_duration(took)}, the limit of each is {limit}"
    )
    for trial in search.run(meter.measure):
        print_progress(f"{len(history.trials())}: {_render_trial(trial, default)}")
    print_progress("the best against the default, in fresh pairs")
    return search, search.decide(meter.compare), begun


def _render_trial(trial: TunedTrial, default: Point) -> str:
    from mlhpc.plugins.tune.space import render_point

    result = f"cannot run: {trial.why}" if trial.ratio is None else f"{trial.ratio:.3f} of the default's time"
    error = "" if trial.error is None or trial.why else f", gradient {trial.error:.2g} from float64"
    return f"{render_point(trial.point, default)}: {result}{error} ({render_duration(trial.seconds)})"


def _describe(
    setting: Setting, search: Search, decision: Decision, begun: str, options: Mapping[str, Any]
) -> TuneResult:
    """Return the document of the search."""
    from mlhpc.plugins.tune.space import TuneResult

    trials, config = search.history.trials(), setting.candidates.config(setting.default)
    return TuneResult(
        workload=config.workload,
        size=config.size,
        division=config.submission.division,
        objective=options["objective"],
        processor=read_cpu(find_machine_root(os.environ)).model,
        begun=begun,
        error=ERROR,
        default=dict(setting.default),
        configurations=len(setting.pool),
        refused=dict(setting.refused),
        trials=tuple(trials),
        search_s=math.fsum(trial.seconds for trial in trials),
        best=dict(decision.point),
        pairs=decision.pairs,
        pairs_s=decision.seconds,
        ratio=decision.ratio,
        importance=search.history.measure_importance(),
        outcome=decision.outcome,
        power=decision.power,
    )


def _write_best(setting: Setting, result: TuneResult, path: Path) -> None:
    """Write the settings file, which states how it was found."""
    from mlhpc.plugins.tune.space import list_settings

    candidates, point, ratio = setting.candidates, result.best, result.ratio
    assert ratio is not None  # a race that was won has pairs
    assert ratio.value is not None  # a winner's times are finite
    assert ratio.high is not None
    launch = candidates.launch(point)
    tuned = Tuned(
        by=f"mlhpc tune {SUITE_VERSION}",
        objective=result.objective,
        ranks=launch.ranks,
        threads=launch.threads,
        evaluations=len(result.trials),
        search_s=round(result.search_s + result.pairs_s, 1),
        ratio=ratio.value,
        low=ratio.low or 0.0,
        high=ratio.high,
        pairs=result.pairs,
    )
    config = load_config(candidates.descriptor, candidates.name, (*candidates.overrides, *list_settings(point)))
    text = yaml.safe_dump(convert_to_plain_data(structs.replace(config, tuned=tuned)), sort_keys=False)
    write_file_of_folder(path, f"# {_render_use(setting, point, path)}\n{text}")


def _render_use(setting: Setting, point: Point, path: Path) -> str:
    launch = setting.candidates.launch(point)
    workload = setting.candidates.descriptor.name
    return f"OMP_NUM_THREADS={launch.threads} mlhpc run {workload} --ranks {launch.ranks} --config {quote_path(path)}"


def _print_answer(setting: Setting, result: TuneResult, best: Path) -> None:
    from mlhpc.plugins.tune.space import render_point

    trials, ratio = result.trials, result.ratio
    failed = sum(trial.ratio is None for trial in trials)
    print_line(
        f"measured {len(trials)} of {result.configurations} configurations in {render_duration(result.search_s)}"
        f" ({failed} could not run), then {result.pairs} pairs in {render_duration(result.pairs_s)}"
    )
    shown = render_point(result.best, setting.default)
    if ratio is not None and ratio.value is not None:
        ends = [f"{end:.3f}" if end else "unknown" for end in (ratio.low, ratio.high)]
        print_line(f"best: {shown}")
        print_line(f"its {result.objective} / the default's: {ratio.value:.3f}, 95 % interval {' to '.join(ends)}")
    if result.outcome == Outcome.FASTER:
        print_line(f"faster than the default; to use it: {_render_use(setting, result.best, best)}")
    else:
        print_line(result.describe_silence())


def _print_predictions(setting: Setting, size: str, paths: Sequence[Path], style: str) -> None:
    """Predict all configurations, and print the fastest. InputError without a search to learn from."""
    from mlhpc.plugins.tune.search import predict_points
    from mlhpc.plugins.tune.space import read_result, render_point

    results = [read_result(path) for path in paths]
    if not results:
        raise click.UsageError("--predict: say what to learn from with --from FOLDER, the folder of a search")
    predicted = predict_points(setting.candidates, setting.pool, setting.default, results)
    if style == JSON:
        print_line(json.dumps(convert_to_plain_data(predicted), indent=1))
        return
    here = read_cpu(find_machine_root(os.environ)).model
    for result in results:
        if result.size != size or result.processor != here:
            print_progress(
                f"learned from {result.workload} {result.size} on {result.processor}; "
                f"the intervals leave out what is different for {size} on {here}"
            )
    measured = sum(each.measured > 0 for each in predicted)
    print_line(f"{len(predicted)} configurations, {measured} of them measured; time / default's, 90 % interval:")
    for each in predicted[:MOST_PREDICTED]:
        note = f"  measured {each.measured} x" if each.measured else ""
        shown = render_point(each.point, setting.default)
        print_line(f"  {each.ratio:.3f}  {each.low:.3f} to {each.high:.3f}  {shown}{note}")


def _run_ranks(workload: str, path: Path) -> None:
    """Measure as one rank of a job, and end the process."""
    from mlhpc.plugins.tune.job import measure_sides, read_job

    job = read_job(path)

    def body(world: World) -> None:
        measure_sides(world, job, workload)

    sys.exit(run_as_rank(find_world(None), lambda: None, body))
