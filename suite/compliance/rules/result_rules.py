"""The rules for the runs of one result together."""

# ruff: noqa: D103  the explanation of a rule is the second argument of its decorator, where --explain finds it

from __future__ import annotations

import math
import re
import statistics
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from mlhpc.suite.compliance import rcp_limit
from mlhpc.suite.compliance.identities import find_broken
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.rules.base import (
    BENCHMARK_RESULTS,
    PACKAGE,
    ResultBreach,
    ResultBreaches,
    Rule,
    check_distinct,
    render_log_name,
    result_rule,
)
from mlhpc.suite.files import render_duration, render_repr
from mlhpc.suite.log.record import RunRecord, find_first_on_target
from mlhpc.suite.log.reference_course import find_reference_course, judge_run_course
from mlhpc.suite.log.results_tree import PRUNED

_RUN_SETTINGS = (  # hyperparameters that no ruleset restricts may change the convergence, too
    *("global_batch_size", "dropout", "opt_weight_decay"),
    *("precision", "precision_mode", "data_oversampling_factor", "data_format", "shuffle_mode"),
)
_MOST_PACE = 1.5  # times that of the median run; the most of published results is 1.24
_FACTOR_SHARE = 1e-4  # a review may round its factor
_WIDE_SHARE = 0.2  # of the reference's epochs
_LEAST_RUN_SHARE = 0.7  # of the reference's mean, for one run; the least of the published runs is 0.727
_SHARE_ROUNDING = 1e-7  # of a logged value; float32 has 6e-8
_FIRST_LOSS = 1.5  # times those of healthy runs, or as many times as these differ
_SEED_S = 3600.0  # between a seed that is the time, and run_start; published: at most 720 s
_LARGEST_SINGLE = 3e38
_FORM_SHARE, _FEWEST_ALIKE = 0.75, 8  # of the numbers of a name; of those with a form all published results have all
_SHOWN_BELOW, _MAY_BE_BELOW = 2**20, 2**26  # of ratios; one in 30,000 and one in 7 of any numbers are such
_SHARE_CHANCE = 1e-6  # that healthy values look like those of fewer samples


@result_rule(
    "run-count", "a time-to-train result has exactly the required runs, a throughput result at least as many", PACKAGE
)
def check_run_count(result: Result) -> ResultBreaches:
    if result.benchmark is None or not result.runs:
        return
    need, runs = result.benchmark.required_runs, len(result.runs)
    if runs < need:
        yield None, f"{runs} run{'s' * (runs != 1)}; {result.benchmark.name} needs {need}"
    elif runs > need and not result.weak:
        yield None, f"{runs} runs; a time-to-train result of {result.benchmark.name} has exactly {need}"


@result_rule("runs-failed", "at most one run of a result fails", f"{BENCHMARK_RESULTS}; {PACKAGE}")
def check_runs_failed(result: Result) -> ResultBreaches:
    failed = [run for run in result.judged() if not run.converged] if result.benchmark else []
    if len(failed) > 1:
        names = ", ".join(f"{render_log_name(run.record)} ({run.failure})" for run in failed[:5])
        yield None, f"{len(failed)} runs did not converge, one may: {names}"


@result_rule("run-failed", "a run that fails counts as the slowest", BENCHMARK_RESULTS)
def check_run_failed(result: Result) -> ResultBreaches:
    failed = [run for run in result.judged() if not run.converged] if result.benchmark else []
    if len(failed) == 1:
        then = f"it belongs into {PRUNED}" if result.weak else "the one run that may, counts as the slowest"
        yield failed[0].record.path, f"did not converge ({failed[0].failure}): {then}"


@result_rule(
    "seed-distinct",
    "no two runs have the same seed, and no two instances the same number, nor one that is not of the result or system",
    "mlperf_logging seed_checker",
)
def check_seed_distinct(result: Result) -> ResultBreaches:
    yield from check_distinct(
        result.runs, lambda run: run.seed, lambda run: f"seed {render_repr(run.seed)} is also that of"
    )
    late = [run for run in result.runs if run.run_start_s and abs(run.run_start_s - (run.seed or 0)) > _SEED_S]
    if len(late) < (1.0 - _FORM_SHARE) * len(result.runs):
        yield from ((run.path, f"seed {run.seed} is no time of the start; of the other runs it is") for run in late)
    # As many as there are here, or as fit into the system. Some launchers number none, some the first one 0.
    of_one = result.run_units or math.inf
    places = max(len(result.runs) + len(result.pruned), (result.total_units or 0) // of_one)
    for run in result.runs:
        yield from (
            (run.path, text) for _, text in find_broken("seed-distinct", {"run": run, "result": {"places": places}})
        )
    if result.weak and len({run.instance for run in result.runs}) > 1:
        yield from check_distinct(
            result.runs, lambda run: run.instance, lambda run: f"instance {run.instance} is also that of"
        )


# What a run states of itself: which one it was, and where its copy of the data lay.
_OF_ONE_RUN = re.compile("instance|stage_|seed")
# Of run_config. The others say how a run was watched and stored.
_SETTINGS = (
    *("precision", "gradient_accumulation_steps", "hyperparameters", "plan", "mesh"),
    *("compile", "graphs", "channels_last", "loader_threads"),
)
_FACTS = (
    *("nodes", "accelerators_per_node", "ranks", "threads_per_rank", "device", "suite_version", "data_manifest"),
    *("work_per_sample", "baselines", "oracle_baselines", "code_file", "code_lines", "stop_epochs", "negated_errors"),
)


@result_rule(
    "run-drift",
    "all runs of a result log the same keys, from the same lines of code, and state the same hyperparameters, scale, "
    "data, work and version",
)
def check_run_drift(result: Result) -> ResultBreaches:
    stated = [(run, dict(_list_stated(result, run))) for run in result.runs]
    for name in dict.fromkeys(name for _, found in stated for name in found):
        (first, due), *others = [(run, found[name]) for run, found in stated if name in found]
        for run, value in others:
            if value != due:
                where, more = render_log_name(first), _describe_differences(value, due)
                what = f"another {name} than {where}{more}" if more else f"{name} = {render_repr(value)}"
                yield run.path, what if more else f"{what}, in {where} it is {render_repr(due)}"
                break
    whole = [run for run in result.judged() if run.converged] if result.benchmark and result.ruleset.complete else []
    keys = [(run.record, run.record.keys if result.ruleset.foreign else {*run.record.hyperparameters}) for run in whole]
    # Hundreds of instances log one set of keys: it is compared once, for the first run that has it
    first_with: dict[frozenset[str], RunRecord] = {}
    for run, found in keys:
        first_with.setdefault(frozenset(found), run)
    for run, logged in keys:
        pairs = ((each, found - logged) for found, each in first_with.items())
        other, lacking = max(pairs, key=lambda pair: len(pair[1]))
        if lacking:
            yield run.path, f"logs no {', '.join(sorted(lacking)[:3])}, which {render_log_name(other)} logs"


def _list_stated(result: Result, run: RunRecord) -> Iterator[tuple[str, object]]:
    """Yield name and value of each statement that all runs of a result have in common."""
    named = {*(result.benchmark.closed if result.benchmark else ()), *_RUN_SETTINGS} - {"seed"}
    for key, value in run.hyperparameters.items():
        if key in named or (result.ruleset.complete and not _OF_ONE_RUN.match(key)):
            yield key, value
    yield from ((name, value) for name, value in (run.config or {}).items() if name in _SETTINGS)
    # OpenFold begins from one checkpoint.
    counted = result.benchmark is not None and result.benchmark.epoch_counts_samples
    yield from (("evaluation before training", item.value) for item in run.evals if counted and item.epoch == 0)
    # A run that died early stated less.
    facts = ((name, getattr(run, name)) for name in _FACTS if run.run_start_s is not None)
    yield from ((name, value) for name, value in facts if value is not None and value != {})


@result_rule("strong-pruned", "only instances of a throughput result can be pruned", "training_policies PR#499")
def check_strong_pruned(result: Result) -> ResultBreaches:
    if not result.weak:
        yield from ((path, "a pruned run of a time-to-train result") for path in result.group.pruned)


@result_rule("org-drift", "all runs name the same organisation")
def check_org_drift(result: Result) -> ResultBreaches:
    yield from _check_drift(result.runs, "submission_org", lambda run: result.organisations[run.path])


NUMBERS_ALIKE = Rule(
    "numbers-alike",
    "numbers of one name have one form: if three quarters of those of a result or package are float32 numbers, or "
    "ratios of two counts, all are",
)


def _is_single(number: float, _: int) -> bool:
    """Return True for a number that single precision has."""
    return abs(number) < _LARGEST_SINGLE and struct.unpack("f", struct.pack("f", number))[0] == number


def _is_ratio(number: float, most: int) -> bool:
    """Return True for a share that is the ratio of two whole numbers, the second at most ``most``."""
    return 0.0 < number < 1.0 and float(Fraction(number).limit_denominator(most)) == number


_FORMS = {"float32 number": _is_single, "ratio of two counts": _is_ratio}


def find_odd_numbers(results: Sequence[Result]) -> ResultBreaches:
    """Yield the first number of each name that lacks the form which most of its name have in a result.

    Those of that result, and of all results of the package that the same code logged.
    """
    groups: dict[tuple[Path, tuple[object, ...]], list[tuple[Path | None, float]]] = {}
    for result in results:
        for run in (*result.runs, *result.pruned):
            for name, numbers in run.evaluated.items():
                place = result.group.folder, (run.benchmark, run.code_file, name)
                groups.setdefault(place, []).extend((run.path, number) for number in numbers)
    formed: dict[tuple[tuple[object, ...], str], str] = {}
    for (_, code), found in groups.items():
        for form, has in _FORMS.items():
            alike = sum(has(number, _SHOWN_BELOW) for _, number in found)
            if alike >= max(_FEWEST_ALIKE, _FORM_SHARE * len(found)):
                formed[code, form] = f"{alike} of {len(found)}"
    odd: dict[tuple[object, str], ResultBreach] = {}
    for (_, code), found in groups.items():
        for form, has in _FORMS.items():
            if (code, form) not in formed:
                continue
            # The counts of a class of pixels vary from epoch to epoch.
            first = next(((path, number) for path, number in found if not has(number, _MAY_BE_BELOW)), None)
            if first is not None:
                text = f"{code[2]} = {first[1]!r} is no {form}; {formed[code, form]} are"
                odd.setdefault((code[2], form), (first[0], text))
    yield from odd.values()


@result_rule("run-pace", "no run trains 1.5 times as fast as the median run: all have one system")
def check_run_pace(result: Result) -> ResultBreaches:
    paces = [
        (statistics.median(seconds), run)
        for run in result.runs
        if (seconds := [epoch.train_s for epoch in run.epochs if epoch.complete])
    ]
    middle = statistics.median(pace for pace, _ in paces) if paces else 0.0
    for pace, run in paces if result.ruleset.foreign else ():  # a machine that people share has no pace
        if middle > _MOST_PACE * pace:
            yield (
                run.path,
                f"an epoch takes {render_duration(pace)}, {render_duration(middle)} in the median run",
            )


@result_rule("platform-drift", "all runs state the same submission_status and submission_platform")
def check_platform_drift(result: Result) -> ResultBreaches:
    what = "submission_status, submission_platform"
    yield from _check_drift(result.runs, what, lambda run: (run.submission_status, run.platform))


@result_rule("size-mixed", "all runs have the same benchmark and size: sizes are never ranked together")
def check_size_mixed(result: Result) -> ResultBreaches:
    yield from _check_drift((*result.runs, *result.pruned), "benchmark and size", lambda run: (run.benchmark, run.size))


@result_rule(
    "rcp-speed",
    "a closed submission converges no faster than the reference, by a t test of as many runs as are required, and no run "
    "of it in 0.7 of its epochs",
    "mlperf_logging rcp_checker",
)
def check_rcp_speed(result: Result) -> ResultBreaches:
    mean, bound = _compute_convergence(result)
    if mean is not None and bound is not None and mean < bound.minimum:
        message = (
            f"converges in {_render_amount(mean, result)} (mean without best and worst); the reference at batch "
            f"{bound.global_batch_size} ({bound.kind}) needs {_render_amount(bound.mean, result)}, "
            f"at least {_render_amount(bound.minimum, result)} are credible"
        )
        yield None, message
    if bound is None or result.benchmark is None or not result.ruleset.complete:
        return  # of MLPerf Training no runs were looked at
    points, card = result.benchmark.reference_points.get(bound.global_batch_size, ()), result.benchmark.card
    apart = card.between_evals(bound.global_batch_size) if card is not None else 0.0
    least = min(_LEAST_RUN_SHARE * bound.mean, min(points, default=math.inf) - apart)
    for run in result.runs:
        first = find_first_on_target(run, result.benchmark)
        if first is not None and first.epoch is not None and first.epoch < least:
            ours, theirs = _render_amount(first.epoch, result), _render_amount(bound.mean, result)
            yield run.path, f"converges in {ours}, the reference in {theirs}; {least:g} are credible of a single run"


@result_rule(
    "rcp-slower",
    "a submission faster than the reference's mean would be slowed by MLPerf",
    "mlperf_logging rcp_checker",
)
def check_rcp_slower(result: Result) -> ResultBreaches:
    mean, bound = _compute_convergence(result)
    factor = _compute_factor(mean, bound)
    if mean is not None and bound is not None and factor > 1.0:
        ours, theirs = _render_amount(mean, result), _render_amount(bound.mean, result)
        yield None, f"converges in {ours}, the reference in {theirs}: MLPerf would multiply the time by {factor:.4f}"


@result_rule(
    "scaling-true",
    "the factor in a scaling.json is the one by which MLPerf multiplies the time",
    "mlperf_logging rcp_checker",
)
def check_scaling_true(result: Result) -> ResultBreaches:
    due = _compute_factor(*_compute_convergence(result))
    path, factor = result.group.folder / "scaling.json", result.scale_factor
    if path in result.group.others and (factor is None or not math.isclose(factor, due, rel_tol=_FACTOR_SHARE)):
        yield path, f"scaling_factor = {render_repr(factor)}; of these runs it is {due:.4f}"


@result_rule(
    "rcp-wide",
    "the reference points would show it if a fifth of the epochs were missing",
)
def check_rcp_wide(result: Result) -> ResultBreaches:
    mean, bound = _compute_convergence(result)
    if mean is None or bound is None or result.benchmark is None or bound.unseen <= _WIDE_SHARE * bound.mean:
        return
    useful = rcp_limit.count_useful_runs(result.benchmark.required_runs, result.ruleset.data.rcp_confidence)
    advice = f"; {useful} reference runs in place of {bound.runs} would show more" if bound.runs < useful else ""
    yield (
        None,
        (
            f"the reference points would not show it if {bound.unseen:.3g} of {_render_amount(bound.mean, result)} were"
            f" missing: the reference runs spread by {bound.std:.3g}{advice}"
        ),
    )


def _list_unlike(result: Result) -> ResultBreaches:
    if result.benchmark is None or not result.benchmark.reference_courses:
        return
    for run in result.runs:
        found = judge_run_course(run, result.benchmark.reference_courses, together=len(result.runs))
        if found:
            more = f"; {len(found) - 1} more numbers are" if len(found) > 1 else ""
            yield run.path, f"its course is unlike that of healthy runs: {found[0].render()}{more}"


def _is_course_required(result: Result) -> bool:
    card = result.benchmark.card if result.benchmark else None
    return result.closed and card is not None and card.course == "error"


@result_rule("course-reference", "a run goes as healthy runs of its size go: losses, norms, metric")
def check_course_reference(result: Result) -> ResultBreaches:
    if not _is_course_required(result):
        yield from _list_unlike(result)


@result_rule(
    "course-required",
    "the same, where the card asks for it and the division is closed; elsewhere of the first loss alone, which no "
    "training has changed",
)
def check_course_required(result: Result) -> ResultBreaches:
    for run in result.runs if result.benchmark is not None and result.closed else ():
        course = find_reference_course(run, result.benchmark.reference_courses) if result.benchmark else None
        known = course.values.get("loss of step 1") if course is not None and not run.resumed else None
        if known and run.first_losses:
            wide = max(_FIRST_LOSS, max(known) / min(known))
            if not min(known) / wide <= run.first_losses[0] <= max(known) * wide:
                what = f"the loss of its first step is {run.first_losses[0]:.4g}"
                yield run.path, f"{what}, in {len(known)} healthy runs {min(known):.4g} to {max(known):.4g}"
    if _is_course_required(result):
        yield from _list_unlike(result)


@result_rule("metric-share", "a metric that is a share of the validation samples has their steps")
def check_metric_share(result: Result) -> ResultBreaches:
    card = result.benchmark.card if result.benchmark else None
    if card is None:
        return
    values = {each.value for run in result.runs for each in run.evals if 0 < each.value < 1}
    due = card.eval_samples
    odd = sorted(value for value in values if abs(value * due - round(value * due)) > _SHARE_ROUNDING * due)
    # A person's card need not say that the metric is a share.
    if not card.share and (len(values) < _FEWEST_ALIKE or len(odd) > (1.0 - _FORM_SHARE) * len(values)):
        return
    if odd:
        yield None, f"{card.metric} = {odd[0]:.8g} is no share of {due} validation samples"
    if odd or not card.share:
        return
    step = math.gcd(due, *(round(value * due) for value in values))
    if step > 1 and len(values) * math.log(step) > -math.log(_SHARE_CHANCE):
        seen = f"all {len(values)} values of {card.metric} are shares of {due // step} samples"
        yield None, f"{seen}, by chance once in {float(step) ** len(values):.0e} results; it has {due}"


@result_rule("rcp-given", "reference points that did not come with the ruleset are named", "mlperf_logging rcp_checker")
def check_rcp_given(result: Result) -> ResultBreaches:
    given, benchmark = result.ruleset.given, result.benchmark
    if given is None or benchmark is None or not result.closed:
        return
    # Without the given points, to see which of them were used.
    own = replace(result.ruleset, given=None).benchmark(benchmark.name, benchmark.size)
    added = given.added(own) if own is not None else {}
    if added:
        batches = ", ".join(map(str, sorted(added)))
        yield None, f"reference points for batch size {batches} are those of {given.source}, not of the ruleset"


@result_rule("rcp-missing", "there are reference points of the benchmark", "mlperf_logging rcp_checker")
def check_rcp_missing(result: Result) -> ResultBreaches:
    if (
        _has_references(result)
        and result.benchmark
        and not rcp_limit.compute_lower_hull(result.benchmark.reference_points)
    ):
        yield None, f"no reference point for batch size {find_batch_size(result.runs)}"


@result_rule("rcp-above", "the batch size is not above those of all reference points", "mlperf_logging rcp_checker")
def check_rcp_above(result: Result) -> ResultBreaches:
    points = rcp_limit.compute_lower_hull(result.benchmark.reference_points) if result.benchmark else []
    batch = find_batch_size(result.runs)
    if _has_references(result) and points and batch is not None and batch > points[-1].batch:
        known = ", ".join(map(str, sorted(result.benchmark.reference_points))) if result.benchmark else ""
        yield None, f"batch size {batch} is above all reference points, which are of {known}"


def _has_references(result: Result) -> bool:
    """True if the rules compare the result with a reference: only the closed division fixes the training."""
    return result.benchmark is not None and result.closed and bool(result.runs)


def find_batch_size(runs: Sequence[RunRecord]) -> int | None:
    """Return the batch size of the first run that logs one. Rule run-drift finds runs with another."""
    return next((run.global_batch_size for run in runs if run.global_batch_size is not None), None)


def _render_amount(amount: float, result: Result) -> str:
    """Render how long a convergence took in the unit of the benchmark's epoch_num: epochs or samples."""
    samples = result.benchmark is not None and result.benchmark.epoch_counts_samples
    return f"{amount:,.0f} samples" if samples else f"{amount:.4g} epochs"


def _compute_factor(mean: float | None, bound: rcp_limit.RcpLimit | None) -> float:
    """Compute by what MLPerf multiplies the time of a result: above 1 if it converges faster than the reference."""
    return bound.mean / mean if mean and bound is not None and bound.minimum <= mean < bound.mean else 1.0


def _compute_convergence(result: Result) -> tuple[float | None, rcp_limit.RcpLimit | None]:
    """Return the mean of epochs to target without best and worst, and its limit. None for each that does not exist."""
    benchmark, batch = result.benchmark, find_batch_size(result.runs)
    if benchmark is None or not result.closed or len(result.runs) < benchmark.required_runs:
        return None, None
    epochs = []
    for run in result.runs:
        first = find_first_on_target(run, benchmark)
        # The one run that may fail counts as the slowest, which the trimmed mean leaves out.
        epochs.append(math.inf if first is None or first.epoch is None else first.epoch)
    mean = rcp_limit.compute_trimmed_mean(epochs)
    if mean == math.inf:
        return None, None
    if batch is None:
        return mean, None
    confidence = result.ruleset.data.rcp_confidence
    own = not result.ruleset.foreign  # MLPerf's rounds are judged as they were
    apart = benchmark.card.between_evals(batch) if own and benchmark.card else 0.0
    bound = rcp_limit.compute_limit(
        benchmark.reference_points, batch, benchmark.required_runs, confidence, hull=own, between_evals=apart
    )
    return mean, bound and replace(bound, minimum=bound.minimum - benchmark.reference_slack)


def _check_drift(runs: Sequence[RunRecord], name: str, value: Callable[[RunRecord], object]) -> ResultBreaches:
    """Yield the first run whose value differs from that of the run that logs most. Missing values agree."""
    if not runs:
        return
    # Compared with a run that logs little, most differences would not be seen.
    first = max(runs, key=lambda run: sum(part is not None for part in _split_parts(value(run))))
    for run in runs:
        pairs = zip(_split_parts(value(run)), _split_parts(value(first)), strict=True)
        if any(None not in pair and pair[0] != pair[1] for pair in pairs):
            yield (
                run.path,
                f"{name}: {render_repr(value(run))}, in {render_log_name(first)} {render_repr(value(first))}",
            )
            return


def _split_parts(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _describe_differences(value: object, other: object) -> str:
    """List the names whose values differ between two mappings, as the end of a message."""
    if not isinstance(value, dict) or not isinstance(other, dict):
        return ""
    names = sorted(name for name in value.keys() | other.keys() if value.get(name) != other.get(name))
    return ": " + ", ".join(render_repr(name) for name in names[:5])
