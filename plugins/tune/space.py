"""The space of settings that `mlhpc tune` searches: typed, conditional, from the card, the machine and a person's file.

A point maps the names of the active tunables to values. Names are ``ranks``, ``threads`` (of a rank), ``plan`` (a name
and, after a blank, a mesh) and dotted names of settings. Needs no torch.

`TuneResult` is `tune.json`, the document of a search, which `mlhpc report` draws. Points of earlier searches and runs
(`mlhpc tune --from`) are measured first. Their machine may be another one. So only the settings are taken.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from mlhpc.plugins.tune.race import MOST_NEEDED_PAIRS, MedianRatio, PairPower
from mlhpc.suite.card import Tunable
from mlhpc.suite.config import RunConfig, load_config, parse_setting
from mlhpc.suite.descriptor import Descriptor
from mlhpc.suite.documents import FolderName, NotNegative, Positive, YamlSource, read_json_document
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.files import render_repr
from mlhpc.suite.log.run_folder import RunFolder
from mlhpc.suite.statistics import Outcome

RANKS, THREADS, PLAN, BATCH = "ranks", "threads", "plan", "global_batch_size"
LAUNCH_TUNABLES = (RANKS, THREADS)  # of the launch: no setting of a run
SAME_TRAINING = (  # settings that leave the mathematics as it is, of every workload
    *(RANKS, THREADS, PLAN, "gradient_accumulation_steps", "precision", "channels_last", "loader_threads"),
    *("checkpoint.interval_s", "staging.overlap"),
)
MOST_POINTS = 4096  # of a space that are looked at: a larger one is sampled
Value = bool | int | float | str | None
Point = Mapping[str, Value]


class SpaceFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file for ``--space``: tunables that replace those of the same name, or are new."""

    version: Literal[1]
    tunable: dict[str, Tunable]


@dataclass(frozen=True)
class Space:
    """Tunables. Each comes after the ones that its ``when`` names."""

    tunables: Mapping[str, Tunable]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name, tunable in self.tunables.items():
            if len({key_of(value) for value in tunable.values}) < len(tunable.values):
                raise InputError(f"tunable {name}: a value occurs twice in {render_repr(list(tunable.values))}")
            for other in tunable.when:
                if other not in seen:
                    raise InputError(
                        f"tunable {name}: when names {other!r}; expected a tunable before it:"
                        f" {', '.join(seen) or 'none'}"
                    )
            seen.add(name)

    def is_active(self, name: str, point: Point) -> bool:
        """Return True if a tunable counts, with the values of earlier ones."""
        when = self.tunables[name].when
        return all(other in point and is_in(point[other], allowed) for other, allowed in when.items())

    def restrict(self, values: Point) -> Point:
        """Return the part of ``values`` that is active."""
        point: dict[str, Value] = {}
        for name in self.tunables:
            if name in values and self.is_active(name, point):
                point[name] = values[name]
        return point

    def points(self) -> Iterator[Point]:
        """Yield every point of the space."""
        yield from self._extend({}, list(self.tunables))

    def _extend(self, point: dict[str, Value], names: Sequence[str]) -> Iterator[Point]:
        if not names:
            yield point
            return
        first, *rest = names
        if not self.is_active(first, point):
            yield from self._extend(point, rest)
            return
        for value in self.tunables[first].values:
            yield from self._extend({**point, first: value}, rest)

    def count(self) -> int:
        """Count the points, up to a hundred times `MOST_POINTS`."""
        return sum(1 for _ in islice(self.points(), 100 * MOST_POINTS))

    def draw(self, seed: int) -> Point:
        """Draw one point: each active tunable's value with the same chance."""
        drawn, point = random.Random(seed), dict[str, Value]()  # noqa: S311  no secret
        for name, tunable in self.tunables.items():
            if self.is_active(name, point):
                point[name] = drawn.choice(tunable.values)
        return point

    def pool(self, seed: int) -> list[Point]:
        """List all points, or different random ones where they are more than `MOST_POINTS`."""
        if self.count() <= MOST_POINTS:
            return list(self.points())
        return list(
            {key_of_point(point): point for point in (self.draw(seed + i) for i in range(MOST_POINTS))}.values()
        )


def key_of(value: Value) -> str:
    """Return a text that is equal for equal values only: true is not 1."""
    return json.dumps(value)


def key_of_point(point: Point) -> str:
    """Return a text that is equal for equal points only."""
    return json.dumps(dict(sorted(point.items())))


def is_in(value: Value, allowed: Iterable[Value]) -> bool:
    """Return True if a value is among others: true is not 1."""
    return key_of(value) in map(key_of, allowed)


def render_point(point: Point, beside: Point | None = None) -> str:
    """Render a point, without the values that ``beside`` has too."""
    same = {} if beside is None else beside
    shown = [f"{name}={_render(value)}" for name, value in point.items() if name not in same or same[name] != value]
    return " ".join(shown) or "the default"


def _render(value: Value) -> str:
    return value.replace(" ", ":") if isinstance(value, str) else key_of(value)


def list_settings(point: Point) -> list[str]:
    """List the settings of a point, as ``--set`` takes them."""
    found = []
    for name, value in point.items():
        if name == PLAN:
            plan, _, mesh = str(value or "").partition(" ")
            found += [f"plan={json.dumps(plan or None)}", f"mesh={json.dumps(mesh or None)}"]
        elif name not in LAUNCH_TUNABLES:
            found.append(f"{name}={key_of(value)}")
    return found


def find_default(space: Space, config: RunConfig, ranks: int, threads: int) -> Point:
    """Return the point of a configuration. InputError for a tunable that is no setting."""
    values: dict[str, Value] = {RANKS: ranks, THREADS: threads}
    values[PLAN] = None if config.plan is None else f"{config.plan} {config.mesh or ''}".strip()
    values |= {name: find_setting(config, name) for name in space.tunables if name not in values}
    return space.restrict(values)


def find_setting(config: RunConfig, name: str) -> Value:
    """Return the value of a setting by its dotted name. InputError if there is none."""
    found: Any = config
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"tunable {name}: no such setting; expected ranks, threads, plan or a name as --set takes")
        found = getattr(found, part)
    if not isinstance(found, Value):
        raise InputError(f"tunable {name}: is a section; expected a single setting, such as {name}.NAME")
    return found


def list_powers(most: int) -> tuple[int, ...]:
    """List the powers of two up to a number, and the number."""
    return tuple(sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most}))


def build_space(
    own: Mapping[str, Tunable],
    *,
    places: int,
    cores: int,
    gpu: bool,
    batch: int,
    plans: Sequence[str],
    batches: Sequence[int] = (),
) -> Space:
    """Build the space of a machine and a card's ``own`` tunables. ``places``: ranks that can run at once, a GPU each.

    ``plans``: names with meshes, tried where there is more than one rank. ``batches``: other global batches to try.
    """
    several: dict[str, tuple[Value, ...]] = {RANKS: tuple(ranks for ranks in list_powers(places) if ranks > 1)}
    tunables = {RANKS: Tunable(values=list_powers(places))}
    if not gpu:
        tunables[THREADS] = Tunable(values=list_powers(cores), predicted=False)
    if batches:
        tunables[BATCH] = Tunable(values=tuple(sorted({batch, *batches})))
    parts = tuple(parts for parts in (1, 2, 4) if all(each % parts == 0 for each in (batch, *batches)))
    tunables["gradient_accumulation_steps"] = Tunable(values=parts)
    # Bytes in another precision differ, but are not predicted: the proxy learns by what factor it is faster.
    formats = ("float32", "tf32", "bfloat16") if gpu else ("float32", "bfloat16")
    tunables["precision"] = Tunable(values=formats, predicted=False)
    tunables["loader_threads"] = Tunable(values=list_powers(min(4, cores)), predicted=False)
    if plans and several[RANKS]:
        tunables[PLAN] = Tunable(values=(None, *plans), when=several)
    return Space({**tunables, **{name: _choose_device(tunable, gpu=gpu) for name, tunable in own.items()}})


def _choose_device(tunable: Tunable, *, gpu: bool) -> Tunable:
    """Return the tunable with the values that a device of this kind has."""
    more = tunable.gpu if gpu else tunable.cpu
    return structs.replace(tunable, values=(*tunable.values, *more), gpu=(), cpu=())


def read_space_file(path: Path) -> Mapping[str, Tunable]:
    """Read the tunables of a file for ``--space``. InputError names file, line and value."""
    return YamlSource.read(path).convert(SpaceFile).tunable


def narrow(space: Space, default: Point, fixed: Sequence[str], only: Sequence[str]) -> Space:
    """Fix tunables to ``NAME=VALUE``, and all that are not in ``only`` (if it names any) to the default's value.

    Tunables that the default lacks, because another one's value makes them inactive, are then left out.
    """
    given: dict[str, Value] = {}
    for text in fixed:
        name, equals, _ = text.partition("=")
        if not equals:
            raise InputError(f"--fix {text}: expected NAME=VALUE")
        _check_name(space, "--fix", name)
        parsed = parse_setting("--fix", text)
        if not isinstance(parsed, Value):
            raise InputError(f"--fix {text}: expected a single value")
        given[name] = parsed
    for name in only:
        _check_name(space, "--only", name)
    kept = {}
    for name, tunable in space.tunables.items():
        if name in given:
            kept[name] = structs.replace(tunable, values=(given[name],))
        elif not only or name in only:
            kept[name] = tunable
        elif name in default:
            kept[name] = structs.replace(tunable, values=(default[name],))
    left = {name: _drop_conditions(tunable, kept) for name, tunable in kept.items()}
    return Space(left)


def _check_name(space: Space, option: str, name: str) -> None:
    if name not in space.tunables:
        raise InputError(f"{option} {name}: {explain_unknown_name('tunable', name, space.tunables)}")


def _drop_conditions(tunable: Tunable, kept: Mapping[str, Tunable]) -> Tunable:
    return structs.replace(tunable, when={name: values for name, values in tunable.when.items() if name in kept})


def add_default(space: Space, default: Point) -> Space:
    """Add the default's values to tunables with several values. Names that were fixed keep their one value."""
    return Space(
        {
            name: structs.replace(tunable, values=(default[name], *tunable.values))
            if name in default and len(tunable.values) > 1 and not is_in(default[name], tunable.values)
            else tunable
            for name, tunable in space.tunables.items()
        }
    )


KIND: Literal["tune"] = "tune"
RESULT = "tune.json"  # in the folder of a search


class StepError(Struct, frozen=True):
    """The relative error of a step's gradient ``of`` a weight, against float64. None with the reason, if unknown.

    The weight is the one whose error is largest over its bound.
    """

    error: NotNegative | None = None
    bound: NotNegative | None = None
    why: str = ""
    of: str = ""

    @property
    def is_wrong(self) -> bool:
        """True if rounding does not explain the error."""
        return self.error is not None and self.bound is not None and not self.error <= self.bound

    def render(self) -> str:
        """Render the error for people."""
        if self.error is None:
            return f"not compared with float64: {self.why}"
        weight = f" of {self.of}" if self.of else ""
        place = f"gradient{weight} {self.error:.2g} from float64, rounding gives at most {self.bound:.2g}"
        return f"{place}: refused, it computes something else" if self.is_wrong else place


class TunedTrial(Struct, frozen=True, kw_only=True):
    """A measured point: its time over the default's in the same blocks, or why there is none. ``seconds``: it took.

    ``error``: of the gradient, relative to float64; None if it was not compared.
    """

    point: dict[str, Value]
    ratio: Positive | None
    seconds: NotNegative
    error: NotNegative | None = None
    why: str = ""


class TuneResult(Struct, frozen=True, kw_only=True):
    """A search with its answer. ``refused``: points that could not run, with reasons.

    ``ratio``: the median of fresh pairs, best over default. ``importance``: the part of the variance of log time that
    each tunable explains alone. It is empty after few trials. ``power``: what the pairs could have found.
    """

    version: Literal[1] = 1
    kind: Literal["tune"] = KIND
    workload: FolderName
    size: FolderName
    division: str
    objective: str
    processor: str
    begun: str
    error: Annotated[float, Meta(gt=0, lt=1)]
    default: dict[str, Value]
    configurations: Annotated[int, Meta(ge=1)]
    refused: dict[str, str]
    trials: tuple[TunedTrial, ...]
    search_s: NotNegative
    best: dict[str, Value]
    pairs: Annotated[int, Meta(ge=0)]
    pairs_s: NotNegative
    ratio: MedianRatio | None
    importance: dict[str, float] = {}
    outcome: Outcome
    power: PairPower | None = None

    def describe_silence(self) -> str:
        """Say of a search without a faster configuration what was seen, and what could have been."""
        parts = ["nothing better than the default was found"]
        seen = self.ratio.value if self.ratio else None
        if self.outcome == Outcome.INCONCLUSIVE and self.ratio and seen is not None and seen < 1.0:
            ends = [f"{100 * (end - 1.0):+.2g}" if end else "unknown" for end in (self.ratio.low, self.ratio.high)]
            best = f"the best was {100 * (1.0 - seen):.2g} % faster [{', '.join(ends)}]"
            parts = [f"not decided in {self.pairs} pairs: {best}"]
            if self.power:
                needed = self.power.count_needed(1.0 - seen) or f"more than {MOST_NEEDED_PAIRS}"
                parts.append(f"if it is, about {needed} pairs would show it in 8 of 10 cases")
        if self.power:
            visible = self.power.find_visible()
            least = (
                "not even one that is 20 times as fast"
                if visible is None
                else f"one that is {100 * visible:.2g} % faster"
            )
            parts.append(f"{self.power.pairs} pairs show {least}" + " in 8 of 10 cases" * (visible is not None))
        return "; ".join(parts)

    def list_fastest(self, number: int) -> list[dict[str, Value]]:
        """List the points with the shortest times, the best first: of a point measured twice, the mean counts once."""
        measured: dict[str, list[TunedTrial]] = {}
        for trial in self.trials:
            if trial.ratio is not None:
                measured.setdefault(key_of_point(trial.point), []).append(trial)
        ordered = sorted(measured.values(), key=lambda same: sum(each.ratio or 0.0 for each in same) / len(same))
        return [same[0].point for same in ordered[:number]]


FASTEST = 3  # points that a search gives to the next one


def read_earlier_points(paths: Sequence[Path], descriptor: Descriptor, space: Space, cores: int) -> list[Point]:
    """List the points of searches (tune.json, or its folder), of run folders, and of packages; each point once.

    A value that the space does not have, such as more ranks than this machine has cores, stays: such a point is in no
    pool. InputError for a path with neither, or of another workload.
    """
    found: dict[str, Point] = {}
    for path in paths:
        points = list(_read_points(path, descriptor, space, cores))
        if not points:
            raise InputError(
                f"{path}: holds no search or run of {descriptor.name}; expected {RESULT}, a run folder or a package"
            )
        found.update({key_of_point(point): point for point in points})
    return list(found.values())


def read_result(path: Path) -> TuneResult:
    """Read the document of a search, from its file or folder. InputError names what is wrong with it."""
    file = path / RESULT if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{path}: has no {RESULT}; expected the folder of a search by mlhpc tune")
    return read_json_document(file, TuneResult, "result of mlhpc tune", 1)


def _read_points(path: Path, descriptor: Descriptor, space: Space, cores: int) -> Iterator[Point]:
    if path.is_file() or (path / RESULT).is_file():
        result = read_result(path)
        if result.workload == descriptor.name:
            yield from (space.restrict(point) for point in result.list_fastest(FASTEST))
        return
    for file in sorted(path.rglob("run.json")):
        run = RunFolder(file.parent)
        info = run.read_info()
        if info.workload == descriptor.name:
            ranks = info.ranks or 1
            config = load_config(descriptor, str(run.config_path))
            yield find_default(space, config, ranks, max(1, cores // ranks))
