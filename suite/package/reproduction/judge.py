"""Judges the levels 2 to 4 from losses, epochs and times: pure functions.

Lists the differences between two runs, the likeliest cause first. Pure functions of their `RunFacts`.

A cause comes before its consequences: other data, another configuration, other code, other libraries, another machine.
Facts that differ between any two runs are not compared: times, free memory, host names, job numbers. Nor are facts that
cannot change a number of a run: other workloads' files, tools for tests.

Writes, reads and renders reproduction.json, version 1: the verdicts on the results of a package.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, structs

from mlhpc.suite import REDACTED
from mlhpc.suite.documents import Fields, convert_to_plain_data, read_json_document
from mlhpc.suite.files import render_repr, write_file_atomically
from mlhpc.suite.log.origin.sources import InstalledPackage, convert_distribution_name
from mlhpc.suite.log.record import FACTS
from mlhpc.suite.machine.facts import UNKNOWN, Facts
from mlhpc.suite.package.reproduction.run_facts import RunFacts
from mlhpc.suite.statistics import Outcome, compute_t_quantile
from mlhpc.suite.statistics.comparison import ALPHA, compute_equivalence

REPRODUCTION_VERSION: Final = 1
FILE_NAME = "reproduction.json"
_LISTED = 12  # differences of a result in the table
LEVELS = ("log", "data", "numerics", "convergence", "time")  # by number


class LevelOutcome(StrEnum):
    """The outcome of a level. ``cannot``: the package lacks something. ``inconclusive``: this attempt cannot tell."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    INCONCLUSIVE = "inconclusive"
    CANNOT = "cannot"


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of the parts of the document."""


class Difference(_Part, frozen=True, kw_only=True):
    """One fact that differs. ``kind`` is its place in the order of causes (mlhpc.suite.package.reproduction.judge)."""

    kind: str
    what: str
    was: str
    now: str


class LevelVerdict(_Part, frozen=True, kw_only=True):
    """One level: the outcome, one line why, the numbers compared, and the likeliest cause of a difference."""

    level: Annotated[int, Meta(ge=0, le=4)]
    name: str
    verdict: LevelOutcome
    reason: str
    cause: Difference | None = None
    compared: dict[str, Any] = {}


class ResultVerdict(_Part, frozen=True, kw_only=True):
    """One result of the package. ``result`` is the folder of its logs. The likeliest cause comes first."""

    result: str
    workload: str | None
    size: str | None
    levels: tuple[LevelVerdict, ...]
    differences: tuple[Difference, ...] = ()
    against: Annotated[
        str | None, Meta(description="what the package was compared with: a run folder, or this machine")
    ] = None
    settings: Annotated[
        tuple[str, ...], Meta(description="settings in which the compared run differs from the package's")
    ] = ()
    left_out: Annotated[
        tuple[str, ...], Meta(description="settings of the package that were not followed, each with the reason")
    ] = ()


class Reproduction(_Part, frozen=True, kw_only=True):
    """The document. ``reproduced`` is true if every requested level of every result was reproduced.

    No run with other settings reproduces a result.
    """

    version: Literal[1] = REPRODUCTION_VERSION
    package: str
    manifest_sha256: str | None
    made: str
    suite_version: str
    asked: tuple[int, ...]
    reproduced: bool
    results: tuple[ResultVerdict, ...]

    def text(self) -> str:
        """Render the document as JSON."""
        return json.dumps(convert_to_plain_data(self), indent=1) + "\n"


def write_reproduction(folder: Path, document: Reproduction) -> Path:
    """Write ``reproduction.json`` into a folder, whole, and return its path."""
    path = folder / FILE_NAME
    write_file_atomically(path, document.text())
    return path


def read_reproduction(path: Path) -> Reproduction:
    """Read a reproduction.json. InputError names the file, what was expected and what it holds."""
    return read_json_document(path, Reproduction, "a reproduction", REPRODUCTION_VERSION)


def make_level_verdict(
    level: int,
    verdict: LevelOutcome,
    reason: str,
    cause: Difference | None = None,
    compared: Fields | None = None,
) -> LevelVerdict:
    """Make the verdict of a level by its number."""
    return LevelVerdict(
        level=level, name=LEVELS[level], verdict=verdict, reason=reason, cause=cause, compared=dict(compared or {})
    )


def is_reproduced(results: tuple[ResultVerdict, ...]) -> bool:
    """Return True if runs with the package's settings reproduced all levels of all results. False without results."""
    levels = [level for result in results for level in result.levels]
    settings = any(result.settings for result in results)
    return bool(levels) and not settings and all(level.verdict == LevelOutcome.REPRODUCED for level in levels)


def render_table(document: Reproduction) -> str:
    """Render all results for a terminal, each with a line for each level."""
    return "\n".join(line for result in document.results for line in _render_result(result))


def _render_result(result: ResultVerdict) -> Iterator[str]:
    yield f"{result.result}: {result.workload or 'unknown workload'} {result.size or ''}".rstrip()
    for level in result.levels:
        yield f"  {level.level} {level.name:<12} {level.verdict:<15} {level.reason}"
        if level.cause is not None and level.verdict == LevelOutcome.NOT_REPRODUCED:
            yield f"    first cause: {_render_difference(level.cause)}"
    if result.differences:
        yield f"  what differs from {result.against or 'the package'}, the likeliest cause first:"
        yield from (f"    {_render_difference(each)}" for each in result.differences[:_LISTED])
        if len(result.differences) > _LISTED:
            yield f"    and {len(result.differences) - _LISTED} more"
    if result.settings:
        yield f"  not reproduced with the package's settings, {len(result.settings)} of which differ"
    yield from (f"  not followed: {text}" for text in result.left_out)


def _render_difference(each: Difference) -> str:
    return f"{each.kind}: {each.what}: {each.was} in the package, {each.now} here"


NUMERICS, CONVERGENCE, TIME = 2, 3, 4
CONFIDENCE = 0.99  # of the interval of epochs: one in a hundred good reproductions with other seeds lies outside


@dataclass(frozen=True)
class RoundingGrowth:
    """The largest relative difference that rounding makes: at step 0, its factor per step, and its maximum."""

    first: float
    factor: float
    most: float

    def bound(self, step: int) -> float:
        """Return the largest relative difference of the losses of a step, counted from 0."""
        return min(self.most, self.first * self.factor**step)


# Each lies three times or more above every difference that was measured under other roundings
# (benchmarks/first_losses.py). TF32 was not measured, it needs a GPU: three bits more than bfloat16, and the same
# growth.
LOSS_GROWTH = {
    "float32": RoundingGrowth(4e-6, 2.1, 0.1),
    "tf32": RoundingGrowth(6e-5, 5.0, 0.5),
    "bfloat16": RoundingGrowth(5e-4, 5.0, 0.5),
}

# Of the metric, per evaluation. The losses show how far rounding took a run by its 20th step: that times
# `LATER_FACTOR`, or this if it is more, is what rounding may do to the first evaluation.
METRIC_GROWTH = {
    "float32": RoundingGrowth(1e-5, 10.0, 0.5),
    "tf32": RoundingGrowth(2e-4, 10.0, 0.5),
    "bfloat16": RoundingGrowth(1e-2, 10.0, 0.5),
}
LATER_FACTOR = 30.0


def judge_losses(was: Sequence[float], now: Sequence[float], precision: str, cause: Difference | None) -> LevelVerdict:
    """Judge level 2: compare the first steps' losses, bit for bit and within the bound of rounding.

    The reason names the step whose difference is largest relative to its bound.
    """
    if not was:
        why = "the package's log has no first_losses; its suite did not log the losses of single steps"
        return make_level_verdict(NUMERICS, LevelOutcome.CANNOT, why)
    if not now:
        return make_level_verdict(NUMERICS, LevelOutcome.INCONCLUSIVE, "the log of the new run has no first_losses")
    if len(was) != len(now):
        why = f"{len(was)} first losses are logged in the package, {len(now)} in the new run"
        return make_level_verdict(NUMERICS, LevelOutcome.NOT_REPRODUCED, why, cause, {"steps": min(len(was), len(now))})
    compared: dict[str, object]
    equal = sum(a == b for a, b in zip(was, now, strict=True))
    apart = compute_relative_differences(was, now)
    growth = LOSS_GROWTH.get(precision, LOSS_GROWTH["float32"])  # an unknown precision gets the strictest bound
    step = max(range(len(apart)), key=lambda step: apart[step] / growth.bound(step))
    worst, bound = max(apart), growth.bound(step)
    compared = {"steps": len(was), "equal_bits": equal, "largest_relative_difference": worst}
    compared |= {"step": step, "relative_difference": apart[step], "bound": bound}
    first = next((step for step, gap in enumerate(apart) if gap), None)
    if first is None:
        return make_level_verdict(
            NUMERICS, LevelOutcome.REPRODUCED, f"the first {len(was)} losses are equal bit for bit", compared=compared
        )
    where = f"from step {first} on, by at most {worst:.2g} of the loss"
    text = f"the first {len(was)} losses differ {where}; at step {step} by {apart[step]:.2g}"
    return _judge_difference(text, apart[step], bound, precision, cause, compared)


def judge_evaluations(
    losses: LevelVerdict,
    was: Sequence[float],
    now: Sequence[float],
    precision: str,
    cause: Difference | None,
) -> LevelVerdict:
    """Judge level 2 further, after the losses agreed: compare the evaluations that both runs made.

    The bound of an evaluation grows with its number and with the differences of the first losses.
    """
    count = min(len(was), len(now))
    if losses.verdict != LevelOutcome.REPRODUCED or not count:
        return losses
    apart = compute_relative_differences(was[:count], now[:count])
    growth = METRIC_GROWTH.get(precision, METRIC_GROWTH["float32"])
    first = max(growth.first, LATER_FACTOR * float(losses.compared["largest_relative_difference"]))
    grown = RoundingGrowth(first, growth.factor, growth.most)
    place = max(range(count), key=lambda number: apart[number] / grown.bound(number))
    bound = grown.bound(place)
    compared = losses.compared | {
        "evaluations": count,
        "evaluation": place + 1,
        "evaluation_difference": apart[place],
        "evaluation_bound": bound,
    }
    if not any(apart):
        why = f"{losses.reason}; {count} evaluations are equal"
        return make_level_verdict(NUMERICS, LevelOutcome.REPRODUCED, why, losses.cause, compared)
    text = f"{losses.reason}; evaluation {place + 1} of {count} differs by {apart[place]:.2g}"
    return _judge_difference(text, apart[place], bound, precision, cause, compared)


def _judge_difference(
    text: str, apart: float, bound: float, precision: str, cause: Difference | None, compared: Mapping[str, object]
) -> LevelVerdict:
    """Judge level 2 by one difference, which ``text`` says, and what rounding may do."""
    outcome, side = LevelOutcome.NOT_REPRODUCED, "more than"
    if apart <= bound:  # never of NaN
        outcome, side = LevelOutcome.REPRODUCED, "within"
    why = f"{text}: {side} {bound:.2g}, what rounding in {precision} may do by then"
    return make_level_verdict(NUMERICS, outcome, why, cause, compared)


def compute_relative_differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Compute the difference of each pair of losses, relative to the larger one."""
    # Two zeros or two equal infinities would give NaN.
    return [abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0 for x, y in zip(a, b, strict=True)]


def judge_epochs(
    was: Mapping[int, float | None],
    now: Mapping[int, float | None],
    reference: Sequence[float],
    between_evals: float,
    unit: str,
    cause: Difference | None,
) -> LevelVerdict:
    """Judge level 3: compare epochs to the target by seed. None: the run missed the target.

    Equal epochs with equal seeds are reproduced. Otherwise the mean must lie in the prediction interval for the mean of
    the new runs. The interval comes from the reference points (``reference``), else from the package's own runs.
    """
    # A seed that missed the target in the package too is no failure here.
    failed = sorted(seed for seed, epochs in now.items() if epochs is None and was.get(seed, 0.0) is not None)
    reached = [epochs for epochs in now.values() if epochs is not None]
    compared: dict[str, object] = {"seeds": sorted(now), "epochs": [now[seed] for seed in sorted(now)], "unit": unit}
    if failed:
        why = f"the run with seed {failed[0]} did not reach the target; that of the package did"
        return make_level_verdict(CONVERGENCE, LevelOutcome.NOT_REPRODUCED, why, cause, compared)
    if all(seed in was and was[seed] == now[seed] for seed in now):
        same = (
            f"{_render_amounts(reached, unit)} to the target, as in the package with the same"
            f" seed{'s' * (len(now) > 1)}"
        )
        why = same if reached else "the target is not reached, as in the package with the same seeds"
        return make_level_verdict(CONVERGENCE, LevelOutcome.REPRODUCED, why, compared=compared)
    return _judge_mean(reached, was, reference, between_evals, unit, cause, compared)


def _judge_mean(
    reached: Sequence[float],
    was: Mapping[int, float | None],
    reference: Sequence[float],
    between_evals: float,
    unit: str,
    cause: Difference | None,
    compared: dict[str, object],
) -> LevelVerdict:
    """Judge the mean of new runs by its prediction interval."""
    own = [epochs for epochs in was.values() if epochs is not None]
    basis, source = (reference, "reference points") if len(reference) > 1 else (own, "runs of the package")
    if len(basis) < 2 or not reached:
        why = (
            f"{_render_amounts(reached, unit)} to the target; there are no reference points and too few runs to compare"
            " with"
        )
        return make_level_verdict(CONVERGENCE, LevelOutcome.INCONCLUSIVE, why, cause, compared)
    low, high = compute_expected_mean(basis, len(reached), between_evals)
    mean = statistics.fmean(reached)
    compared |= {"mean": mean, "interval": [low, high], "confidence": CONFIDENCE, "basis": source, "n": len(basis)}
    outcome, place = LevelOutcome.NOT_REPRODUCED, "outside"
    if low <= mean <= high:
        outcome, place = LevelOutcome.REPRODUCED, "inside"
    interval = f"the {CONFIDENCE:.0%} interval {low:.4g} to {high:.4g} of {len(basis)} {source}"
    why = f"{mean:.4g} {unit} to the target (n={len(reached)}), {place} {interval}"
    return make_level_verdict(CONVERGENCE, outcome, why, cause, compared)


def compute_expected_mean(basis: Sequence[float], new: int, between_evals: float) -> tuple[float, float]:
    """Compute the prediction interval of the mean of ``new`` runs from two or more known ones.

    A run notices the target only at an evaluation: the deviation is at least that of this rounding.
    """
    spread = max(statistics.stdev(basis), between_evals / math.sqrt(12.0))
    half = compute_t_quantile(0.5 + CONFIDENCE / 2, len(basis) - 1) * spread * math.sqrt(1.0 / len(basis) + 1.0 / new)
    # A run notices its target only at an evaluation: one evaluation earlier or later is no difference.
    half = max(half, between_evals)
    middle = statistics.fmean(basis)
    return middle - half, middle + half


def judge_times(a_s: Sequence[float], b_s: Sequence[float], margin: float, cause: Difference | None) -> LevelVerdict:
    """Judge level 4: paired times of the original (A) and the changed configuration (B) on one machine."""
    if len(a_s) < 2:
        why = f"{len(a_s)} pair of runs reached the target; at least two are needed"
        return make_level_verdict(
            TIME, LevelOutcome.INCONCLUSIVE, why, cause, {"original_s": list(a_s), "changed_s": list(b_s)}
        )
    # Two one-sided tests (TOST) at ALPHA: the 90 % interval must lie within the margin.
    found = compute_equivalence(a_s, b_s, margin)
    compared = {
        **{"pairs": found.pairs, "ratio": found.ratio, "interval": [found.low, found.high], "margin": margin},
        **{"alpha": ALPHA, "original_s": list(a_s), "changed_s": list(b_s)},
    }
    text = (
        f"changed over original {found.ratio:.3f}, 90 % interval {found.low:.3f} to {found.high:.3f} "
        f"(n={found.pairs} pairs on this machine)"
    )
    if found.outcome == Outcome.EQUIVALENT:
        return make_level_verdict(
            TIME, LevelOutcome.REPRODUCED, f"{text}: equivalent within {margin:.0%}", compared=compared
        )
    if found.outcome in (Outcome.SLOWER, Outcome.FASTER):
        return make_level_verdict(
            TIME, LevelOutcome.NOT_REPRODUCED, f"{text}: {found.outcome} by more than {margin:.0%}", cause, compared
        )
    return make_level_verdict(
        TIME,
        LevelOutcome.INCONCLUSIVE,
        f"{text}: neither equivalent within {margin:.0%} nor different; more --pairs decide",
        cause,
        compared,
    )


def _render_amounts(values: Sequence[float], unit: str) -> str:
    return f"{', '.join(f'{value:,.6g}' for value in values)} {unit}"


LOST, ALTERED, DATA = "lost file", "altered file", "data"
CONFIGURATION, DEFAULT, SEED, RANKS = "configuration", "changed default", "seed", "ranks"
CHANGES, COMMIT, VERSION, FILES = "uncommitted changes", "commit", "suite version", "suite files"
TORCH, PACKAGE, PYTHON, THREADS = "torch", "package", "python", "threads"
CHOICE = "measured choice"
DEVICE, PROCESSOR, LIBRARY, VARIABLE = "device", "processor", "library", "environment variable"
KERNEL, CLOCK, LOCALE, TIME_ZONE, OTHER = "kernel", "firmware and clock", "locale", "time zone", "other package"
ORDER = (
    *(LOST, ALTERED, DATA, CONFIGURATION, DEFAULT, SEED, RANKS, CHANGES, COMMIT, VERSION, FILES),
    *(TORCH, PACKAGE, PYTHON, CHOICE, THREADS, DEVICE, PROCESSOR, LIBRARY, VARIABLE),
    *(KERNEL, CLOCK, OTHER, LOCALE, TIME_ZONE),
)
# Settings of places and of the supervision of a run, which change no loss. ``choices`` says only how a machine chooses;
# the choices that it made are compared.
OPERATIONAL = frozenset(
    {"data", "staging", "checkpoint", "watchdog", "cache_drop_command", "submission", "verify_data", "choices"}
)
# Distributions that take part in the arithmetic or the data, and those that come with them
_NUMERIC_PACKAGES = re.compile(
    "torch|triton|nvidia-.*|numpy|scipy|h5py|mpi4py|mpich|openmpi|impi-rt|google-crc32c|ase|matscipy|lmdb|intel-.*"
    "|mkl.*"
)
_THREADS = re.compile("(?:OMP|KMP|GOMP|MKL|OPENBLAS|BLIS)_.*")
_LOCALE = re.compile("LANG|LANGUAGE|LC_[A-Z]+")
_LIBRARY = re.compile("LD_.*")
_MISSING = "none"


def group_by_cause(differences: Iterator[Difference] | list[Difference]) -> tuple[Difference, ...]:
    """Sort differences by cause. Differences of one kind keep their order."""
    return tuple(sorted(differences, key=lambda each: ORDER.index(each.kind)))


def compare_run_facts(was: RunFacts, now: RunFacts, *, workload: str | None) -> tuple[Difference, ...]:
    """List the differences between two runs, or a run and a machine, the likeliest cause first.

    A fact that only one of them has is no difference.
    """
    found: list[Difference] = []
    if was.run.config is not None and now.run.config is not None:
        found += compare_configs(was.run.config, now.run.config, CONFIGURATION)
    found += _compare_code(was, now, workload)
    found += _compare_environment(was, now)
    choices, others = was.run.choices, now.run.choices
    for name in sorted({*choices} & {*others}):  # a choice of one run only follows from its configuration
        found += _compare_values(CHOICE, name, choices[name], others[name])
    if was.facts is not None and now.facts is not None:
        found += compare_facts(was.facts, now.facts, running=now.run.config is not None)
    for name, fact in FACTS.items():
        if fact.cause is not None:
            found += _compare_values(*fact.cause, getattr(was.run, name), getattr(now.run, name))
    return group_by_cause(found)


def compare_facts(was: Facts, now: Facts, *, running: bool = True) -> list[Difference]:
    """List the differences between two nodes, variables first: OMP_PROC_BIND changes the CPUs that a run may use.

    Without ``running``, ``now`` is a machine on which no launcher has set variables yet.
    """
    found = []
    names = {*was.tuning, *now.tuning} if running else {*now.tuning}
    for name in sorted(names):
        one, other = was.tuning.get(name), now.tuning.get(name)
        if one != other and REDACTED not in f"{one}{other}":
            found.append(
                Difference(kind=_choose_kind(name), what=name, was=_render_value(one), now=_render_value(other))
            )
    found += [
        difference for kind, what, get in _FACTS for difference in _compare_values(kind, what, get(was), get(now))
    ]
    return found


def _choose_kind(name: str) -> str:
    if name == "TZ":
        return TIME_ZONE
    kinds = ((_THREADS, THREADS), (_LOCALE, LOCALE), (_LIBRARY, LIBRARY))
    return next((kind for pattern, kind in kinds if pattern.fullmatch(name)), VARIABLE)


_FACTS: tuple[tuple[str, str, Callable[[Facts], object]], ...] = (
    (PROCESSOR, "processor", lambda facts: facts.cpu.model),
    (PROCESSOR, "architecture", lambda facts: facts.cpu.architecture),
    (PROCESSOR, "vector instructions", lambda facts: " ".join(facts.cpu.simd)),
    (PROCESSOR, "cores", lambda facts: facts.cpu.cores),
    (THREADS, "CPUs that the run may use", lambda facts: facts.limits.cpus_allowed),
    (THREADS, "CPU quota", lambda facts: facts.limits.cpu_quota),
    (DEVICE, "accelerators", lambda facts: ", ".join(f"{each.model} ({each.driver})" for each in facts.accelerators)),
    (LIBRARY, "libc", lambda facts: facts.software.libc),
    (LIBRARY, "loader", lambda facts: facts.software.loader),
    (LIBRARY, "preloaded libraries", lambda facts: facts.software.preloaded),
    (LIBRARY, "MPI", lambda facts: facts.software.mpi),
    (LIBRARY, "modules", lambda facts: " ".join(facts.software.modules)),
    (KERNEL, "operating system", lambda facts: facts.software.operating_system),
    (KERNEL, "kernel", lambda facts: facts.software.kernel),
    (KERNEL, "container", lambda facts: facts.software.container),
    (KERNEL, "huge pages", lambda facts: facts.memory.transparent_hugepages),
    (CLOCK, "firmware", lambda facts: f"{facts.firmware.bios_vendor} {facts.firmware.bios_version}"),
    (CLOCK, "clock source", lambda facts: facts.software.clock_source),
    (CLOCK, "governor", lambda facts: facts.cpu.governor),
    (CLOCK, "boost", lambda facts: facts.cpu.boost),
    (CLOCK, "threads per core", lambda facts: facts.cpu.smt),
    (LOCALE, "locale", lambda facts: facts.software.locale),
    (TIME_ZONE, "time zone", lambda facts: facts.software.time_zone),
)


def _compare_values(kind: str, what: str, was: object, now: object) -> Iterator[Difference]:
    """Yield the difference of two values, if both are known."""
    unknown = {was, now} & {None, UNKNOWN, f"{UNKNOWN} {UNKNOWN}"}
    if was != now and not unknown and REDACTED not in f"{was}{now}":
        yield Difference(kind=kind, what=what, was=_render_value(was), now=_render_value(now))


def compare_configs(was: Fields, now: Fields, kind: str) -> Iterator[Difference]:
    """List the settings that differ, by their dotted names, except settings that change no number."""
    one, other = (
        _list_leaves({key: value for key, value in each.items() if key not in OPERATIONAL}) for each in (was, now)
    )
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield Difference(kind=kind, what=name, was=_render_value(one.get(name)), now=_render_value(other.get(name)))


def _list_leaves(values: Fields, above: str = "", depth: int = 0) -> dict[str, Any]:
    """Return the leaves by dotted name. A setting of None counts as absent, a list as one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and depth < 8:  # a stranger's file may be nested without end
            found |= _list_leaves(value, f"{name}.", depth + 1)
        elif value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _compare_code(was: RunFacts, now: RunFacts, workload: str | None) -> Iterator[Difference]:
    """Compare the suite's code. A commit or a change without effect on the files of a run is no difference."""
    one, other = _select_used(was.sources, workload), _select_used(now.sources, workload)
    # Without digests of both sides only commits and diffs can be compared.
    files = _list_differing(one, other) if one and other else []
    if one and other and not files:
        return
    if was.git is not None and now.git is not None:
        diffs = was.git.get("diff_sha256"), now.git.get("diff_sha256")
        if diffs[0] != diffs[1]:
            what = _describe_change(was.changes, now.changes, files)
            yield Difference(kind=CHANGES, what=what, was=_render_value(diffs[0], 12), now=_render_value(diffs[1], 12))
        yield from _compare_values(COMMIT, "commit", str(was.git.get("commit"))[:12], str(now.git.get("commit"))[:12])
    if files:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        name = files[0]
        yield Difference(
            kind=FILES, what=name + more, was=_render_value(one.get(name), 12), now=_render_value(other.get(name), 12)
        )


def _list_differing(was: Fields, now: Fields) -> list[str]:
    return sorted(name for name in {*was, *now} if was.get(name) != now.get(name))


def _describe_change(was: str, now: str, files: list[str]) -> str:
    """Name the files in which two diffs differ, first the files that a run uses."""
    by_file = re.compile(r"(?ms)^diff --git a/(\S+) (.*?)(?=^diff --git |\Z)")
    names = _list_differing(dict(by_file.findall(was)), dict(by_file.findall(now)))
    used = [name for name in names if name in files] or names
    return ", ".join(used[:3]) + (f" and {len(used) - 3} more" if len(used) > 3 else "") or "uncommitted changes"


def _select_used(files: Mapping[str, str], workload: str | None) -> dict[str, str]:
    """Select the files that a run of a workload may use: no analysis, no commands, no other workload."""
    suite = r"suite/(?!commands/|compliance/|package/|cli/|launch/).*"
    inside = re.compile(rf"{suite}|workloads/(?:__init__\.py|moe/.*|{re.escape(workload or '')}/.*)")
    return {name: sha256 for name, sha256 in files.items() if inside.fullmatch(name)}


def _compare_environment(was: RunFacts, now: RunFacts) -> Iterator[Difference]:
    if was.environment is None or now.environment is None:
        return
    yield from _compare_values(PYTHON, "Python", was.environment.python, now.environment.python)
    one, other = was.environment.by_name(), now.environment.by_name()
    for name in sorted({*one, *other} - {convert_distribution_name("mlhpc")}):
        yield from _compare_distributions(name, one.get(name), other.get(name))


def _compare_distributions(
    name: str, was: InstalledPackage | None, now: InstalledPackage | None
) -> Iterator[Difference]:
    """Compare one distribution in two environments. A missing one matters only if it takes part in a run."""
    computes = _NUMERIC_PACKAGES.fullmatch(name) is not None
    kind = PACKAGE if computes else OTHER
    if name == "torch":
        kind = TORCH
    versions = was.version if was else _MISSING, now.version if now else _MISSING
    if versions[0] != versions[1]:
        if computes or _MISSING not in versions:
            yield Difference(kind=kind, what=name, was=versions[0], now=versions[1])
    elif computes and was is not None and now is not None:
        # Two builds of one version differ in their files, such as torch for CPUs and for CUDA.
        for found in _compare_values(kind, f"{name} {was.version}: other files", was.record_sha256, now.record_sha256):
            yield structs.replace(found, was=f"files {found.was[:12]}", now=f"files {found.now[:12]}")


def _render_value(value: object, longest: int = 80) -> str:
    if value is None:
        return _MISSING
    return value[:longest] if isinstance(value, str) else render_repr(value, longest=longest)
