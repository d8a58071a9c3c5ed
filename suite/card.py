"""Reads the card of a workload, by which its runs are judged: per size target, required runs, constraints, counts.

Reads ``card.yaml`` without torch, and reference convergence points (RCPs) from ``rcp/<size>.json`` next to it.
Compliance takes its rules from the card, never from the log. A run must not state its own rules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from mlhpc.suite.documents import FolderName, YamlSource, read_json_document
from mlhpc.suite.errors import InputError, explain_unknown_name

FULL = "full"  # the size that MLPerf HPC names; published logs state none
RCP_VERSION: Final = 1


class Target(Struct, frozen=True):
    """The value that a run must reach, and the runs that a time-to-train score needs.

    ``metric`` is the MLLOG key of the values, ``metric_name`` its name for people. With ``direction`` min, smaller
    values are better. ``source`` names the card or ruleset that sets the target.
    """

    metric: str
    threshold: float
    direction: str
    required_runs: int
    metric_name: str
    source: str

    def reached(self, value: float) -> bool:
        """Return True if ``value`` meets the target. NaN never does, nor an error of zero or an accuracy above one."""
        if self.direction == "min":
            return 0.0 < value <= self.threshold
        return self.threshold <= value <= 1.0

    @property
    def target_text(self) -> str:
        """The target for messages: ``eval_error <= 0.124``."""
        return f"{self.metric} {'<=' if self.direction == 'min' else '>='} {self.threshold:g}"

    def best(self, values: Sequence[float]) -> float:
        """Return the best of some values. InputError if there are none."""
        return min(values) if self.direction == "min" else max(values)


def render_metric_value(value: float, threshold: float, style: str = "f") -> str:
    """Render a value next to a threshold: 4 decimals, or 4 digits with the style "g".

    Uses more digits if 4 would not show on which side of the threshold the value lies.
    """
    # No float needs more than 17 digits, and `repr` shows as many as it needs.
    for digits in range(4, 17):
        text = f"{value:.{digits}{style}}"
        if _side(float(text), threshold) == _side(value, threshold):
            return text
    return repr(value)


def _side(value: float, threshold: float) -> int:
    """Return 1 above the threshold, -1 below, 0 on it or for NaN."""
    return (value > threshold) - (value < threshold)


class Constraint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constraint of the closed division on one MLLOG key. A bound of None does not apply; bounds are for numbers.

    ``when`` maps other keys to values. The constraint holds only in logs with all these values.
    """

    when: dict[str, Any] | None = None
    count: Literal["exactly_one", "at_least_one", "optional"] = "exactly_one"
    at_least: float | None = None
    greater_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    equals: Any = None
    one_of: tuple[Any, ...] | None = None


class OfficialRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constants of MLPerf HPC that MLCommons' own tools apply to a result of this size.

    ``identical``: this size is the MLPerf configuration itself.
    """

    benchmark: FolderName
    threshold: float
    identical: bool
    required_runs: int


class Baseline(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metric of a predictor, with its standard error over the samples if that is known."""

    value: float
    standard_error: float | None = None


class Baselines(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What predictors without a network reach on ``samples`` of the validation split (data of ``seed``).

    ``oracle``: predictors that know the rule of the data. ``table``: the file below benchmarks/results/ that has the
    measured values.
    """

    table: str
    seed: int
    samples: int
    values: dict[str, Baseline]
    oracle: dict[str, Baseline] = {}

    def metrics(self, *, oracle: bool = False) -> dict[str, float]:
        """Return the metric of each baseline, or of each oracle baseline."""
        return {name: each.value for name, each in (self.oracle if oracle else self.values).items()}


class SizeCard(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size of one workload. A multiply-add is 2 FLOPs; ``sample_bytes`` is a stored sample's, uncompressed.

    FLOPs are those of the model (`mlhpc.suite.workload.Work`). ``forward_flops_per_sample`` is the forward pass's part
    of the training FLOPs. It includes what a prediction needs, such as OpenFold's recycles and OpenCatalyst's forces.

    The four counts from ``model_parameters`` on are 0 until `mlhpc workload card` counts them. ``required_runs`` are
    the scored runs of a time-to-train result; the olympic mean drops two of them. ``eval_every_steps`` None: every
    epoch; else epoch_num counts samples seen. ``course``: what it is in the closed division if a run's course is unlike
    those of healthy runs. ``share``: the metric is a share of the validation samples. ``data_sha256`` belongs to the
    manifest of the generated data (seed 0). It is None if they differ between processors. ``official`` None: MLPerf HPC
    has no such benchmark. ``baselines`` None: not measured.
    """

    description: str
    metric: Literal["eval_error", "eval_accuracy"]
    metric_name: str
    threshold: float
    direction: Literal["min", "max"]
    share: bool = False
    # Of three runs the olympic mean keeps one.
    required_runs: Annotated[int, Meta(ge=3)]
    eval_every_steps: Annotated[int, Meta(ge=1)] | None = None
    course: Literal["warning", "error"] = "warning"
    train_samples: int
    eval_samples: int
    model_parameters: int
    forward_flops_per_sample: float
    training_flops_per_sample: float
    sample_bytes: int
    data_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    official: OfficialRules | None = None
    baselines: Baselines | None = None
    # By MLLOG key.
    constraints: dict[str, Constraint] = {}

    @property
    def data_bytes(self) -> int:
        """Bytes of the data set, without compression."""
        return (self.train_samples + self.eval_samples) * self.sample_bytes

    def between_evals(self, global_batch_size: int) -> float:
        """Return the distance of two evaluations in the unit of epoch_num: 1 epoch, or a number of samples."""
        return float(self.eval_every_steps * global_batch_size) if self.eval_every_steps else 1.0


def render_baselines(values: Mapping[str, float], oracle: Mapping[str, float]) -> list[str]:
    """Render the lines under a result: one for baselines, one for oracle baselines, none for an empty mapping."""
    heads = {
        "simple predictors reach on such data": values,
        "oracle baselines, which know how the data were made": oracle,
    }
    return [
        f"{head}: {', '.join(f'{name} {value:.4f}' for name, value in numbers.items())}"
        for head, numbers in heads.items()
        if numbers
    ]


class Tunable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of a setting that `mlhpc tune` tries. ``when``: it counts only where other settings have these values.

    ``gpu`` and ``cpu`` are values that only such a device has. ``predicted``: the predictions of `mlhpc plan` depend on
    it.
    """

    values: Annotated[tuple[bool | int | float | str | None, ...], Meta(min_length=1)]
    gpu: tuple[bool | int | float | str | None, ...] = ()
    cpu: tuple[bool | int | float | str | None, ...] = ()
    when: dict[str, tuple[bool | int | float | str | None, ...]] = {}
    predicted: bool = True


class Card(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All sizes of one workload.

    ``tunable``: settings of its own, by dotted name, that may change how a step is computed and not what it computes.
    """

    version: Literal[1]
    workload: FolderName
    mlperf_name: FolderName
    title: str
    domain: str
    reference: str
    tunable: dict[str, Tunable] = {}
    sizes: dict[FolderName, SizeCard]

    def size(self, name: str) -> SizeCard:
        """Return the card of one size. InputError names the known sizes."""
        if name not in self.sizes:
            raise InputError(f"{self.workload}: {explain_unknown_name('size', name, self.sizes)}")
        return self.sizes[name]

    def target(self, size: str) -> Target:
        """Return the target of one size. InputError names the known sizes."""
        entry = self.size(size)
        return Target(
            metric=entry.metric,
            threshold=entry.threshold,
            direction=entry.direction,
            required_runs=entry.required_runs,
            metric_name=entry.metric_name,
            source=f"card of {self.workload}, size {size}",
        )


class ReferencePoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Epochs to target at one batch size, over seeds and data sets.

    ``epochs``, ``seeds`` and ``data_manifests`` (the sha256 of the data set's manifest) have one entry per converged
    run. ``not_converged`` has the seeds of the others. ``data_manifests`` is empty if that was not recorded.
    """

    global_batch_size: int
    epochs: tuple[float, ...]
    seeds: tuple[int, ...]
    data_manifests: tuple[str, ...] = ()
    not_converged: tuple[int, ...] = ()
    hyperparameters: dict[str, Any]
    recorded: str
    suite_version: str
    system: str

    @property
    def mean(self) -> float:
        """Arithmetic mean of epochs to target."""
        return math.fsum(self.epochs) / len(self.epochs)

    @property
    def std(self) -> float:
        """Sample standard deviation (n - 1) of epochs to target; 0.0 for one seed."""
        return statistics.stdev(self.epochs) if len(self.epochs) > 1 else 0.0


class ReferencePoints(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``rcp/<size>.json``."""

    version: Literal[1]
    workload: FolderName
    size: FolderName
    points: tuple[ReferencePoint, ...]


class ReferenceCourse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers that healthy runs logged, by name in the order of training (mlhpc.suite.log.course).

    ``seeds``, ``data_manifests`` and each list of ``values`` have one entry per run. It judges runs of the same batch
    size, precision and hyperparameters.
    """

    global_batch_size: int
    precision: str
    hyperparameters: dict[str, Any]
    seeds: tuple[int, ...]
    data_manifests: tuple[str, ...]
    values: dict[str, tuple[float, ...]]
    recorded: str
    suite_version: str
    system: str


class ReferenceCourses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``rcp/<size>_course.json``."""

    version: Literal[1]
    workload: FolderName
    size: FolderName
    courses: tuple[ReferenceCourse, ...]


def read_card(path: Path) -> Card:
    """Read the card in a YAML file. InputError names file, line, value and what was expected."""
    return YamlSource.read(path).convert(Card)


def read_reference_points(folder: Path, size: str) -> ReferencePoints | None:
    """Read ``<folder>/rcp/<size>.json``. None if there is none; InputError if it is not valid."""
    path = folder / "rcp" / f"{size}.json"
    if not path.exists():
        return None
    return read_json_document(path, ReferencePoints, "a reference point file", RCP_VERSION)


def read_reference_courses(folder: Path, size: str) -> tuple[ReferenceCourse, ...]:
    """Read ``<folder>/rcp/<size>_course.json``. Empty if there is none; InputError if it is not valid."""
    path = folder / "rcp" / f"{size}_course.json"
    if not path.exists():
        return ()
    return read_json_document(path, ReferenceCourses, "a file of reference courses", RCP_VERSION).courses
