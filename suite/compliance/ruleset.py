"""Reads the rulesets in rulesets/*.yaml, resolves their inheritance, and finds the benchmark that a log names.

Reads the metric of a run as its benchmark defines it. A log may have others. A metric may have parts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field, structs

from mlhpc.suite import RULESET
from mlhpc.suite.card import (
    FULL,
    Card,
    Constraint,
    ReferenceCourse,
    SizeCard,
    Target,
    read_reference_courses,
    read_reference_points,
)
from mlhpc.suite.compliance.consistency import EvalInterval, EvalSchedule, ScaledValue
from mlhpc.suite.descriptor import Descriptor, list_card_files, load_descriptors
from mlhpc.suite.documents import YamlSource, convert
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.files import read_bytes
from mlhpc.suite.log.reader import Log, convert_to_float, read_limits
from mlhpc.suite.log.record import MetricValue, RunRecord, summarise_log

RULESETS_FOLDER = Path(__file__).parent / "rulesets"
LAST_ROUND = "3.0.0"  # of MLPerf HPC
TRAINING_PREFIX = "training-"  # the names of MLPerf Training's rulesets begin so
_DEFAULT_SUITE = "MLPerf HPC"  # of a ruleset that names no other
Severity = Literal["error", "warning", "info"]


class KeyRule(Constraint, frozen=True, kw_only=True, dict=True):  # the dict is for cached_property
    """A `Constraint` with the further conditions of the published rulesets."""

    not_empty: bool = False
    integer: bool = False
    text_integer: bool = False  # an integer, also as text, as OpenFold logs write seeds
    truthy: bool = False
    sha256: bool = False  # a sha256 in hexadecimal, not one digit 64 times
    release: str | None = None  # a version of this suite with this Major.Minor
    close_to: float | None = None
    about: float | None = None  # a number within 1 %; more is an error, any difference a warning
    length: int | None = None
    length_at_least: int | None = None
    scaled: ScaledValue | None = None
    each: KeyRule | None = None  # the rule for a value that is no list, or for every item of a list

    @cached_property
    def asks(self) -> bool:
        """True if the rule restricts the value at all."""
        return structs.replace(self, count=_NO_RULE.count, when=None) != _NO_RULE

    def applies(self, logged: Callable[[str], Any]) -> bool:
        """Return True if the log has the values that the rule depends on. ``logged`` maps a key to its value."""
        return all(is_same_value(logged(key), value) for key, value in (self.when or {}).items())

    def problem(self, value: Any, logged: Callable[[str], Any] = lambda key: None) -> str | None:
        """Return what is wrong with a value, or None, as the end of a message. ``logged`` maps a key to its value."""
        if self.each is not None:
            items = value if isinstance(value, list) and value else [value]
            problems = [self.each.problem(item) for item in items]
        else:
            problems = [self._type_problem(value), self._value_problem(value), self._bounds_problem(value)]
            problems += [self.scaled.problem(value, logged)] if self.scaled is not None else []
        return next((text for text in problems if text), None)

    def _type_problem(self, value: Any) -> str | None:
        text = value if isinstance(value, str) else ""
        items = value if isinstance(value, list) else None
        sha256 = re.fullmatch(_SHA256, text) and len(set(text)) > 1
        conditions = (
            (self.not_empty, text.strip(), "expected a text that is not empty"),
            (self.truthy, value, "expected true"),
            (self.sha256, sha256, "expected a sha256: 64 hexadecimal digits"),
            (
                self.release is not None,
                _parse_release(text) == self.release,
                f"expected a version {self.release}.x of mlhpc",
            ),
            (self.integer or self.text_integer, self._integer(value) is not None, "expected an integer"),
            (
                self.length is not None,
                items is not None and len(items) == self.length,
                f"expected a list of {self.length}",
            ),
            (self.length_at_least is not None, items is not None, "expected a list"),
        )
        return next((expected for asked, holds, expected in conditions if asked and not holds), None)

    def _value_problem(self, value: Any) -> str | None:
        if self.equals is not None and not is_same_value(value, self.equals):
            return f"expected {self.equals!r}"
        if self.one_of is not None and not any(is_same_value(value, allowed) for allowed in self.one_of):
            return f"expected one of {', '.join(map(repr, self.one_of))}"
        return None

    def _integer(self, value: Any) -> int | None:
        if self.text_integer and isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                return None
        # A code may log a whole number as 32.0.
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _bounds_problem(self, value: Any) -> str | None:
        bounds = (
            (self.at_least, ">=", lambda number, bound: number >= bound),
            (self.greater_than, ">", lambda number, bound: number > bound),
            (self.at_most, "<=", lambda number, bound: number <= bound),
            (self.less_than, "<", lambda number, bound: number < bound),
            (self.close_to, "=", lambda number, bound: math.isclose(number, bound)),
            (self.about, "=", lambda number, bound: abs(number - bound) <= 0.01 * bound),
        )
        number = convert_to_float(self._integer(value) if self.integer or self.text_integer else value)
        for bound, sign, holds in bounds:
            if bound is not None and (number is None or not holds(number, bound)):
                return f"expected a number {sign} {bound:g}"
        return None


_NO_RULE = KeyRule()


class Benchmark(Target, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One benchmark of a ruleset, at one size if it has sizes: its target and the rules of its keys.

    A ruleset's file has the benchmarks of a round without ``name`` and ``source``. Cards define those of this suite.
    """

    name: str
    size: str | None = None
    workload: str | None = None
    epoch_counts_samples: bool = False
    throughput_per_rank: int | None = None  # samples of an epoch per rank, as some codes log them
    closed: dict[str, KeyRule] = field(default_factory=dict)
    reference_points: dict[int, tuple[float, ...]] = field(default_factory=dict)
    reference_courses: tuple[ReferenceCourse, ...] = ()
    reference_slack: float = 0.0  # a submission may converge faster than the test allows by this amount
    parts: dict[str, KeyRule] = field(default_factory=dict)  # the rule for each part of a metric that has several
    offline_evals: bool = False  # other processes may evaluate after the run
    numbered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    schedule: EvalSchedule | None = None
    interval: EvalInterval | None = None
    fastest: dict[str, float] = field(default_factory=dict)  # published samples/s of one accelerator, by its model
    card: SizeCard | None = None


class KnownResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published result that was accepted although it breaks rules. There these rules only warn.

    ``logs`` is the sha256 of its logs: anybody can write their times.
    """

    result: str
    logs: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    rules: dict[str, str]  # the reason by the rule's name


class RulesetData(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a ruleset's file and of its parents. Fingerprints of results are the keys of ``known``."""

    version: Literal[1]
    name: str
    title: str
    extends: str | None
    reference: str
    year: int  # of the round: no run of it is more than two years older
    init_minutes: dict[Literal["closed", "open"], float]
    init_ends: Literal["init_stop", "run_start"] = "run_start"  # init_minutes count up to this event
    staging_before_run: bool = False
    scenario_folders: bool = True  # results lie in results/<system>/strong|weak/<benchmark>
    status_optional: bool = False  # run_stop may lack its status
    first_epochs: tuple[int, ...] = (1,)  # the numbers that the first epoch may have
    many_writers: bool = False  # several ranks may write into one log, each by its own clock
    rcp_confidence: Annotated[float, Meta(gt=0.5, lt=1.0)]  # of the one-sided test against the reference points
    cards: bool = False  # benchmarks come from the workloads' cards
    suite: str = _DEFAULT_SUITE  # the benchmark suite whose rules these are
    elsewhere: dict[str, tuple[str, ...]] = {}  # benchmarks of other suites that no ruleset has
    numbered: dict[str, tuple[str, ...]] = {}  # by key: one of these names in the metadata has a number
    either: tuple[tuple[str, ...], ...] = ()  # at least one key of each set is logged
    common: dict[str, KeyRule]
    closed: dict[str, KeyRule]
    open: dict[str, KeyRule]
    benchmarks: dict[str, Benchmark]
    severity: dict[str, Literal["error", "warning", "info", "ignore"]]
    known: dict[str, KnownResult] = {}


@dataclass(frozen=True)
class ExtraReferencePoints:
    """Reference points from a file: epochs by benchmark, size (None: any) and global batch size."""

    source: str
    points: Mapping[tuple[str, str | None, int], tuple[float, ...]]

    def added(self, benchmark: Benchmark) -> dict[int, tuple[float, ...]]:
        """Select the points of a benchmark at batch sizes without points of its own."""
        found = {}
        for (name, size, batch), epochs in self.points.items():
            # A reference needs twice the runs of a submission, as in mlperf_logging's rcp_checker.
            enough = len(epochs) >= 2 * benchmark.required_runs
            new = batch not in benchmark.reference_points
            if name == benchmark.name and size in (None, benchmark.size) and new and enough:
                found[batch] = epochs
        return found


@dataclass(frozen=True)
class Ruleset:
    """The rules of a round, with inheritance resolved. ``given`` has reference points from a file."""

    data: RulesetData
    given: ExtraReferencePoints | None = None

    @property
    def name(self) -> str:
        """The name for --ruleset: 1.0.0 ... mlhpc-1.0."""
        return self.data.name

    @property
    def foreign(self) -> bool:
        """True for MLPerf HPC rounds, whose logs were written by other codes."""
        return not self.data.cards

    @property
    def complete(self) -> bool:
        """True if all runs of a result log the same keys. Some codes of MLPerf Training log what one run needs."""
        return self.data.suite == _DEFAULT_SUITE

    def severity(self, rule: str) -> Severity | None:
        """Return the severity of a rule's findings. None if the ruleset does not apply the rule.

        A rule that no ruleset's file names is an error in this suite's own rulesets. MLPerf's rounds ignore it: they
        are judged as they were.
        """
        severity = self.data.severity.get(rule, "error" if self.data.cards else "ignore")
        return None if severity == "ignore" else severity

    def known(self, runs: Sequence[RunRecord]) -> KnownResult | None:
        """Find the published result with these runs, if it has known breaches. Its name and folder do not count."""
        found = self.data.known.get(compute_fingerprint(runs)) if self.data.known else None
        return found if found is not None and compute_logs_digest(runs) == found.logs else None

    def benchmark(self, name: str | None, size: str | None) -> Benchmark | None:
        """Find the benchmark of a name and size. None if the ruleset has none."""
        if name is None:
            return None
        if not self.data.cards:
            known = self.data.benchmarks.get(name)
        else:
            known = _find_card_benchmark(name, size, list_card_files()) if size is not None else None
        if known is None or self.given is None:
            return known
        return structs.replace(known, reference_points={**known.reference_points, **self.given.added(known)})

    def other_suite(self, benchmark: str | None) -> str | None:
        """Find the other suite that has a benchmark. None if this ruleset has it too, or if no suite has it."""
        if benchmark is None or benchmark in self.benchmark_names():
            return None
        suites = (
            suite for suite, names in _list_benchmarks_of_suites() if benchmark in names and suite != self.data.suite
        )
        return next(suites, None)

    def benchmark_names(self) -> tuple[str, ...]:
        """List the benchmark names that a log may have."""
        if self.data.cards:
            return tuple(sorted(item.card().mlperf_name for item in _load_descriptors(list_card_files()).values()))
        return tuple(self.data.benchmarks)

    def sizes(self, name: str | None) -> tuple[str, ...]:
        """List the sizes of a benchmark; none if it is not known, or has no sizes."""
        cards = [item.card() for item in _load_descriptors(list_card_files()).values()] if self.data.cards else []
        return next((tuple(card.sizes) for card in cards if card.mlperf_name == name), ())

    def keys(self, benchmark: Benchmark | None, division: str | None) -> dict[str, KeyRule]:
        """Return the rule of each key in a division."""
        keys = dict(self.data.common)
        keys |= self.data.open if division == "open" else self.data.closed
        if benchmark is not None and division != "open":
            keys |= benchmark.closed
        if benchmark is not None:
            keys.setdefault(benchmark.metric, KeyRule(count="at_least_one"))
        return keys


def compute_fingerprint(runs: Sequence[RunRecord]) -> str:
    """Hash the times at which runs began and ended, which identify a result."""
    times = sorted(f"{run.run_start_s} {run.run_stop_s}" for run in runs)
    return hashlib.sha256("\n".join(times).encode()).hexdigest()


def compute_logs_digest(runs: Sequence[RunRecord]) -> str | None:
    """Hash the bytes of the logs of a result. The order of the logs does not count. None if one cannot be read."""
    try:
        digests = sorted(hashlib.sha256(read_bytes(run.path, read_limits().file)).digest() for run in runs if run.path)
    except OSError:
        return None
    return hashlib.sha256(b"".join(digests)).hexdigest()


@cache
def read_ruleset(name: str) -> Ruleset:
    """Read a ruleset by name. InputError, with the list of rulesets, for an unknown name."""
    if name not in list_rulesets():
        raise InputError(explain_unknown_name("ruleset", name, list_rulesets()))
    try:
        data = _read_merged(name)
        source = f"{data['title']} rules ({data['reference']})"
        benchmarks = {key: {**entry, "name": key, "source": source} for key, entry in data["benchmarks"].items()}
        return Ruleset(convert({**data, "benchmarks": benchmarks}, RulesetData))
    except ValueError as error:
        # Rulesets are part of the suite: a mistake in one is a defect of ours, not of the user.
        raise AssertionError(f"{RULESETS_FOLDER / name}.yaml: {error}") from None


@cache
def list_rulesets() -> tuple[str, ...]:
    """List the names of all rulesets, oldest first."""
    found = (path.stem for path in RULESETS_FOLDER.iterdir() if path.name.endswith(".yaml"))
    # Names of rounds sort by age; ours comes last.
    return tuple(sorted(found, key=lambda name: (name == RULESET, name)))


@cache
def _list_benchmarks_of_suites() -> tuple[tuple[str, frozenset[str]], ...]:
    """List (suite, names of its benchmarks) for every MLPerf suite that has a ruleset or that one mentions."""
    names: dict[str, set[str]] = {}
    for data in (_read_merged(name) for name in list_rulesets() if name != RULESET):
        names.setdefault(data.get("suite", _DEFAULT_SUITE), set()).update(data["benchmarks"])
        for suite, others in data.get("elsewhere", {}).items():
            names.setdefault(suite, set()).update(others)
    return tuple((suite, frozenset(found)) for suite, found in names.items())


def find_round_ruleset(round_: str | None, suite: str | None) -> str | None:
    """Return the ruleset of a round such as ``v3.0``. None if there is none.

    ``suite`` is training or hpc. None, or another name: of MLPerf HPC, else of MLPerf Training.
    """
    names = {"hpc": [f"{(round_ or '')[1:]}.0"], "training": [f"{TRAINING_PREFIX}{(round_ or '')[1:]}.0"]}
    candidates = names.get(suite or "", [*names["hpc"], *names["training"]])
    return next((name for name in candidates if name in list_rulesets()), None)


def list_training_rounds() -> list[str]:
    """List the rounds of MLPerf Training that have a ruleset, as ``v5.0``, oldest first."""
    names = [name for name in list_rulesets() if name.startswith(TRAINING_PREFIX)]
    return [f"v{name.removeprefix(TRAINING_PREFIX).removesuffix('.0')}" for name in names]


def find_newest_training_ruleset(benchmark: str | None) -> str | None:
    """Return the newest ruleset of MLPerf Training that has a benchmark. None if none has."""
    names = [name for name in list_rulesets() if name.startswith(TRAINING_PREFIX)]
    return next((name for name in reversed(names) if benchmark in _read_merged(name)["benchmarks"]), None)


def find_target(benchmark: str, size: str, cards: Mapping[str, Card]) -> Target | None:
    """Find the target of a benchmark at a size: in its card, else in the last MLPerf HPC round. None if neither has
    one.

    ``cards`` maps MLPerf names to cards. A log's own statement of its target does not count.
    """
    card = cards.get(benchmark)
    if card is not None and size in card.sizes:
        return card.target(size)
    return read_ruleset(LAST_ROUND).benchmark(benchmark, None) if size == FULL else None


def is_same_value(value: Any, expected: Any) -> bool:
    """Compare JSON values: 1 equals 1.0 and NaN equals NaN, but true is not 1, and "32" is not 32."""
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(expected, float) and not math.isfinite(expected):
        return isinstance(value, float) and str(value) == str(expected)
    if isinstance(expected, float | int) and not isinstance(expected, bool):
        number = convert_to_float(value)
        return number is not None and number == expected
    return type(value) is type(expected) and bool(value == expected)


@cache
def _read_merged(name: str) -> dict[str, Any]:
    """Return the data of a ruleset, merged over its parents. The cache shares them, so no caller may change them."""
    data: dict[str, Any] = YamlSource.read(RULESETS_FOLDER / f"{name}.yaml").data
    parent = data["extends"]
    return _merge(_read_merged(parent), data) if parent else data


def _merge(base: Any, change: Any) -> Any:
    """Merge ``change`` into ``base``: mappings key by key, and null removes a key."""
    merged = dict(base)
    for key, value in change.items():
        if value is None and key != "extends":
            merged.pop(key, None)
        elif not isinstance(value, dict) or not isinstance(merged.get(key), dict):
            merged[key] = value
        elif key in ("closed", "open", "common"):
            # The rule of a log key is replaced as a whole: a round restates all its conditions.
            merged[key] = {name: rule for name, rule in (merged[key] | value).items() if rule is not None}
        else:
            merged[key] = _merge(merged[key], value)
    return merged


@cache  # by the cards that --card adds, and their times of change
def _load_descriptors(cards: tuple[tuple[Path, int], ...]) -> dict[str, Descriptor]:
    return load_descriptors()


@cache
def _find_card_benchmark(name: str, size: str, cards: tuple[tuple[Path, int], ...]) -> Benchmark | None:
    for descriptor in _load_descriptors(cards).values():
        card = descriptor.card()
        if card.mlperf_name == name and size in card.sizes:
            return build_card_benchmark(descriptor, size)
    return None


def build_card_benchmark(descriptor: Descriptor, size: str) -> Benchmark:
    """Build the benchmark that the card of a workload defines at one size."""
    card = descriptor.card()
    entry = card.size(size)
    points = read_reference_points(descriptor.folder, size)
    keys = {key: KeyRule(**structs.asdict(rule)) for key, rule in entry.constraints.items()}
    # The card restricts hyperparameters; these numbers are properties of the data and the model.
    batch = keys.get("global_batch_size", KeyRule(at_least=1))
    keys["global_batch_size"] = structs.replace(batch, integer=True)
    keys["train_samples"] = KeyRule(equals=entry.train_samples)
    keys["eval_samples"] = KeyRule(equals=entry.eval_samples)
    keys["model_parameters"] = KeyRule(equals=entry.model_parameters)
    return Benchmark(
        **structs.asdict(card.target(size)),
        name=card.mlperf_name,
        size=size,
        workload=card.workload,
        epoch_counts_samples=entry.eval_every_steps is not None,
        closed=keys,
        reference_points={point.global_batch_size: point.epochs for point in points.points} if points else {},
        reference_courses=read_reference_courses(descriptor.folder, size),
        card=entry,
    )


_SHA256 = "[0-9a-f]{64}"
_VERSION = r"(\d+\.\d+)\.\d+(?:\.dev\d+|rc\d+)?"


def _parse_release(version: str) -> str | None:
    """Return Major.Minor of a version of this suite, None for other text."""
    match = re.fullmatch(_VERSION, version)
    return match[1] if match else None


def summarise_for_benchmark(
    log: Log, rules: Ruleset, known: RunRecord | None = None
) -> tuple[RunRecord, Benchmark | None]:
    """Summarise a log by the metric of its benchmark. The benchmark is None if the ruleset has none of that name.

    ``known`` is the result of `summarise` for the log without a metric, if the caller has it already.
    """
    record = known or summarise_log(log)
    benchmark = rules.benchmark(record.benchmark, record.size)
    if benchmark is not None and record.metric_key not in (None, benchmark.metric):
        # Without a benchmark the first metric of the log counts; here it was another one.
        record = summarise_log(log, benchmark.metric)
    if benchmark is not None and benchmark.parts:
        record = replace(record, metric_key=benchmark.metric, evals=_join_parts(log, benchmark, record))
    return record, benchmark


def _join_parts(log: Log, benchmark: Benchmark, record: RunRecord) -> tuple[MetricValue, ...]:
    """Return one value per evaluation: the share of its target that the worst part reaches, at most 1.

    samples_count identifies the evaluation: the parts may be logged singly, in any order, even after run_stop.
    """
    shares: dict[float, dict[str, float]] = {}
    last: dict[float, MetricValue] = {}
    for event in log.every(benchmark.metric):
        part, at = event.metadata.get("metric"), convert_to_float(event.metadata.get("samples_count"))
        if at is None or not isinstance(part, str) or part not in benchmark.parts:
            continue
        shares.setdefault(at, {})[part] = _compute_target_share(benchmark.parts[part], event.value)
        # The evaluation ends with the last of its parts.
        last[at] = MetricValue(at, 0.0, event.time_ms / 1e3 - (record.run_start_s or 0.0), event.line)
    # A part that was not logged has not reached its target.
    worst = {at: min(parts.get(part, 0.0) for part in benchmark.parts) for at, parts in shares.items()}
    return tuple(last[at]._replace(value=worst[at]) for at in sorted(last))


def _compute_target_share(rule: KeyRule, value: object) -> float:
    """Return 1 if a part satisfies its rule, else the quotient of value and bound. 0 if the value is not positive."""
    number = convert_to_float(value)
    if rule.problem(value) is None:
        return 1.0
    if number is None or number <= 0.0:
        return 0.0
    quotients = [number / rule.at_least] if rule.at_least else []
    quotients += [rule.at_most / number] if rule.at_most is not None else []
    return min((quotient for quotient in quotients if quotient < 1.0), default=0.0)
