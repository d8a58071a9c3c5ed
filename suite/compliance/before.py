"""Judges what a run will state before it trains, by the rules of the check afterwards: no hours are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import structs

from mlhpc.suite import RULESET, VERSION
from mlhpc.suite.compliance.all_rules import LOG_RULES, RESULT_RULES
from mlhpc.suite.compliance.result import Result
from mlhpc.suite.compliance.rules.base import LogContext
from mlhpc.suite.compliance.ruleset import read_ruleset, summarise_for_benchmark
from mlhpc.suite.config import RunConfig, explain_missing_submitter
from mlhpc.suite.data.manifest import Manifest
from mlhpc.suite.descriptor import Descriptor, use_cards
from mlhpc.suite.documents import Fields
from mlhpc.suite.errors import InputError
from mlhpc.suite.files import print_line
from mlhpc.suite.log import mllog
from mlhpc.suite.log.reader import Event, Log
from mlhpc.suite.log.results_tree import Group

# Rules that look at what is stated before the first step, and at nothing that the run adds.
_OF_STATEMENT = frozenset(
    {"benchmark-known", "key-value", "key-near", "placeholder", "config-agrees", "plan-stated", "data-expected"}
    | {"rcp-above", "rcp-missing"}
)
_OF_SERIES = "run-count"
_ABSENT = "key-missing"  # asked of hyperparameters alone: the run itself states the others


def judge_statement(
    descriptor: Descriptor,
    config: RunConfig,
    logged: Fields | None = None,
    *,
    runs: int | None = None,
    mode: str = "strong",
    data: Manifest | None = None,
    plan: Fields | None = None,
) -> list[str]:
    """Return one line for each reason for which the checker would refuse the result. It takes no second and no torch.

    ``logged``: the hyperparameters that the log will have; default: those of the workload's own class. Without any they
    are not judged. ``plan``: as it will be logged. ``runs`` None: not known.
    """
    if logged is None:
        stated = structs.replace(config, precision="float32") if config.precision == "auto" else config
        logged = _collect_logged(stated)
    with use_cards([descriptor.card_path] if descriptor.hyperparameters is None else []):
        log = Log(Path("statement"), tuple(_list_events(descriptor, config, logged, mode, data, plan)))
        # Some hyperparameters are those of the data. An own loop has stated all of them by now.
        whole = bool(logged) and (data is not None or descriptor.hyperparameters is None)
        return list(_find_reasons(log, runs, mode, whole=whole))


def _collect_logged(config: RunConfig) -> Fields:
    logged: Fields = {}
    with suppress(OSError):  # a file that is not there: the run says so when it opens it
        logged = config.hyperparameters.collect_logged(config)
    return logged


def _find_reasons(log: Log, runs: int | None, mode: str, *, whole: bool) -> Iterator[str]:
    rules = read_ruleset(RULESET)
    record, benchmark = summarise_for_benchmark(log, rules)
    context = LogContext(log, record, rules, benchmark)
    for rule in LOG_RULES:
        if rules.severity(rule.name) != "error":
            continue
        if rule.name in _OF_STATEMENT:
            yield from (f"{message} (rule {rule.name})" for _, message in rule.check(context))
        elif rule.name == _ABSENT and benchmark is not None and whole:
            asked = set(benchmark.closed) if context.division == "closed" else set()
            for key in sorted(context.key_rules.keys() & asked - {*log.places, *_COUNTS}):
                yield f"{key} is not among the hyperparameters, and the card requires it (rule {rule.name})"
    group = Group(Path("statement"), (), scenario=mode)
    result = Result(group, (record,) * (1 if runs is None else runs), rules, benchmark, None)
    for each in RESULT_RULES:
        asks = each.name in _OF_STATEMENT or (each.name == _OF_SERIES and runs is not None)
        if asks and rules.severity(each.name) == "error":
            yield from (f"{message} (rule {each.name})" for _, message in each.check(result))


_COUNTS = (mllog.TRAIN_SAMPLES, mllog.EVAL_SAMPLES, mllog.MODEL_PARAMETERS)


def _list_events(
    descriptor: Descriptor,
    config: RunConfig,
    logged: Fields,
    mode: str,
    data: Manifest | None,
    plan: Fields | None,
) -> Iterator[Event]:
    submission = config.submission
    stated: dict[str, Any] = {
        mllog.SUBMISSION_BENCHMARK: descriptor.card().mlperf_name,
        mllog.SUBMISSION_ORG: submission.org,
        mllog.SUBMISSION_DIVISION: submission.division,
        mllog.SUBMISSION_STATUS: submission.status,
        mllog.SUBMISSION_PLATFORM: submission.platform,
        mllog.RULESET: RULESET,
        mllog.BENCHMARK_SIZE: config.size,
        mllog.SUITE_VERSION: VERSION,
        mllog.RUN_MODE: mode,
        mllog.RUN_CONFIG: config.logged(),
        mllog.GRADIENT_ACCUMULATION_STEPS: config.gradient_accumulation_steps,
        mllog.GLOBAL_BATCH_SIZE: config.global_batch_size,
    }
    stated |= logged
    if data is not None:
        of_data = descriptor.card().size(config.size).constraints
        stated |= {key: value for key, value in data.attributes.items() if key in of_data}
        stated[mllog.DATA_MANIFEST] = data.sha256
        stated[mllog.TRAIN_SAMPLES], stated[mllog.EVAL_SAMPLES] = data.samples("train"), data.samples("validation")
    if plan is not None:
        stated[mllog.PARALLEL_PLAN] = plan
    for line, (key, value) in enumerate(stated.items(), start=1):
        yield Event(key, mllog.convert_to_json(value), 0.0, mllog.POINT_IN_TIME, {}, line)


def explain_refusals(reasons: Iterable[str]) -> list[str]:
    """Return one line for each reason, for the person who begins the run."""
    return [f"note: the checker would refuse this result: {reason}" for reason in dict.fromkeys(reasons)]


def explain_refusals_of(descriptor: Descriptor, config: RunConfig, logged: Fields) -> list[str]:
    """Return the lines for a person's own loop, which has stated its hyperparameters."""
    return [*explain_refusals(judge_statement(descriptor, config, logged)), *_find_submitter_note(config)]


def _find_submitter_note(config: RunConfig) -> Iterable[str]:
    return filter(None, [explain_missing_submitter(config)])


def print_refusals(reasons: Iterable[str], config: RunConfig, *, strict: bool) -> None:
    """Print each reason as one line, and that the submitter is not known. With ``strict`` they are an InputError."""
    notes = [*explain_refusals(reasons), *_find_submitter_note(config)]
    if strict and notes:
        raise InputError(f"--strict: {'; '.join(note.removeprefix('note: ') for note in notes)}")
    for note in notes:
        print_line(note, error=True)
