"""The configuration of a run: a YAML file, changed by ``--set key=value``. Unknown keys are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast, dataclass_transform, get_type_hints

from suite import FORBID, Bound, fitted
from suite.descriptor import Descriptor
from suite.errors import InputError, unknown
from suite.files import YamlSource, brief, first_error

if TYPE_CHECKING:
    from pydantic import ValidationError


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Section:
    """The base class of what is read from a file of settings: a frozen dataclass whose values fit its annotations.

    It is made by `suite.fitted`, also where it is called, so that most commands need no pydantic. Its methods have pydantic's names
    and arguments. A check across fields is a ``__post_init__`` that raises InputError.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = FORBID

    def __init_subclass__(cls) -> None:
        for name, value in list(vars(cls).items()):
            if type(value).__module__.startswith("pydantic"):
                _adopt(cls, name, value)
        dataclass(frozen=True, kw_only=True)(cls)
        cls._fill, cls.__init__ = cls.__init__, Section.__init__  # type: ignore[method-assign]

    _fill: ClassVar[Callable[..., None]]

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(self.model_validate(given).__dict__)

    @classmethod
    def of_fitting(cls, **values: Any) -> Self:
        """Make one of values that fit, which are not looked at."""
        made = cls.__new__(cls)
        made._fill(**values)
        return made

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """Make one of plain data. pydantic.ValidationError, a ValueError, if they do not fit."""
        return fitted(cls, data)

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy with other values, which are not looked at."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__ | dict(update or {}))
        return made

    def model_dump(
        self, *, mode: Literal["python", "json"] = "python", exclude_none: bool = False, include: Collection[str] = ()
    ) -> dict[str, Any]:
        """The fields as plain data, sections as mappings; in mode json paths are text and tuples lists."""
        return {
            name: _plain(value, json=mode == "json", exclude_none=exclude_none)
            for name, value in self._values().items()
            if (not include or name in include) and not (exclude_none and value is None)
        }

    def _values(self) -> dict[str, Any]:
        return {item.name: self.__dict__[item.name] for item in fields(cast("Any", self))}


def _plain(value: Any, *, json: bool, exclude_none: bool) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json" if json else "python", exclude_none=exclude_none)
    if isinstance(value, dict):
        return {key: _plain(item, json=json, exclude_none=exclude_none) for key, item in value.items()}
    if isinstance(value, list | tuple):
        each = [_plain(item, json=json, exclude_none=exclude_none) for item in value]
        return each if json else type(value)(each)
    return str(value) if json and isinstance(value, Path) else value


def _adopt(cls: Any, name: str, value: Any) -> None:
    """Take over what a class of another package was given by pydantic: fields and validators of the finished model.

    TypeError for any other. Such a class is always read by pydantic.
    """
    if type(value).__name__ == "FieldInfo":
        hint = get_type_hints(cls, include_extras=True)[name]
        cls.__annotations__[name] = Annotated[hint, *value.metadata] if value.metadata else hint
        delattr(cls, name)
        if not value.is_required():
            setattr(cls, name, field(default_factory=lambda: value.get_default(call_default_factory=True)))
    elif getattr(getattr(value, "decorator_info", None), "mode", None) == "after" and "Model" in repr(
        type(value.decorator_info)
    ):
        before, check = getattr(cls, "__post_init__", None), value.wrapped

        def both(self: Any) -> None:
            if before is not None:
                before(self)
            check(self)

        setattr(cls, name, check)
        cls.__post_init__ = both
    else:
        raise TypeError(
            f"{cls.__qualname__}.{name}: of pydantic only Field and model_validator(mode='after') can be used"
        )


class Hyperparameters(Section):
    """The base class of each workload's hyperparameters: frozen, unknown keys refused."""


class AnyHyperparameters(Hyperparameters):
    """The hyperparameters of a person's own loop: keys and values are as they are logged, and the card constrains them."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "allow"}

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def _values(self) -> dict[str, Any]:
        return self.__dict__


class Staging(Section):
    """Copy of the data set to node-local storage before training."""

    directory: Annotated[Path | None, "node-local folder; {node} and {trial} are filled in"] = None
    overlap: Annotated[bool, "stage during the first epoch; the time then counts inside the run"] = False


class Checkpointing(Section):
    """Checkpoints while a trial trains. When it is told to stop, it writes one in any case."""

    interval_s: Annotated[float | None, Bound(gt=0), "seconds of training that a kill may cost; null: none"] = 600.0


class Watching(Section):
    """What to do about a trial in which nothing goes on."""

    silence_s: Annotated[float | None, Bound(gt=0), "seconds without progress on any rank; null: never look"] = 600.0
    action: Annotated[Literal["end", "report"], "end the run with exit code 1, or only say it"] = "end"


class Choosing(Section):
    """What is measured for a moment before a run, to compute as this machine does it fastest."""

    measure: Annotated[bool, "false: fixed rules, the same on every machine of a kind"] = True
    pinned: Annotated[dict[str, str], "choices by name, as a log has them (measured_choice): not measured"] = field(
        default_factory=dict
    )


class Submission(Section):
    """What MLPerf requires a submitter to state."""

    org: Annotated[str, Bound(min_length=1)] = "unknown"
    division: Literal["closed", "open"] = "closed"
    status: Literal["cloud", "onprem", "preview", "research"] = "research"
    platform: Annotated[str, Bound(min_length=1)] = "unknown"


class RunConfig(Section):
    """The resolved configuration of a run. Nothing in it depends on the number of ranks, which the launch determines."""

    workload: str
    size: str
    global_batch_size: Annotated[int, Bound(ge=1)]
    max_epochs: Annotated[int, Bound(ge=1)]
    gradient_accumulation_steps: Annotated[int, Bound(ge=1), "parts a rank computes its share of a batch in"] = 1
    data: Annotated[Path | None, "data root; default: data/<workload>-<size>"] = None
    verify_data: Annotated[bool, "compare every shard with its checksum before the run"] = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Annotated[
        Literal["float32", "tf32", "bfloat16", "auto"],
        "tf32: products and convolutions of a GPU in TF32; bfloat16: autocast of the model; auto: bfloat16 where a run measures it "
        "to be worth it, else float32",
    ] = "float32"
    channels_last: Annotated[bool | Literal["auto"], "auto: what is measured to be fastest"] = False
    compile: bool = False
    loader_threads: Annotated[int, Bound(ge=1)] = 1
    eval_batch_size: Annotated[int, Bound(ge=1), "samples per rank and evaluation step; does not change the metric"] = (
        64
    )
    window_steps: Annotated[int, Bound(ge=1), "training steps per step_phases event"] = 50
    instrumentation: Annotated[bool, "time the phases of steps; count bytes, memory and energy"] = True
    checkpoint: Checkpointing = Checkpointing()
    cache_drop_command: Annotated[str | None, "run on every node before init_start; its exit code is logged"] = None
    staging: Staging = Staging()
    watchdog: Watching = Watching()
    choices: Choosing = Choosing()
    plan: Annotated[Path | None, "parallel plan: a name of the workload's, or a YAML file (docs/plans.md)"] = None
    mesh: Annotated[str | None, "ranks by axis, for example data=2,spatial=2x1x1; [the plan's]"] = None
    submission: Submission = Submission()
    hyperparameters: Hyperparameters

    @property
    def model_fields_set(self) -> frozenset[str]:
        """The keys that the file or --set gave; of a configuration made otherwise, those with another value than the default."""
        other = (item.name for item in fields(cast("Any", self)) if self.__dict__[item.name] != item.default)
        return cast("frozenset[str]", self.__dict__.get(_STATED) or frozenset(other))

    def with_stated_precision(self, what: str) -> RunConfig:
        """This configuration, for ``what`` that chooses no precision. InputError if it leaves the choice to a run (``auto``)."""
        if self.precision == "auto":
            raise InputError(f"precision auto: {what} chooses none: expected --set precision=float32, tf32 or bfloat16")
        return self

    def samples_per_pass(self, ranks: int) -> int:
        """Samples of one forward pass of a rank, at least one, where ``ranks`` share the batches."""
        return max(1, self.global_batch_size // self.gradient_accumulation_steps // ranks)

    def logged(self) -> dict[str, Any]:
        """The configuration as a log has it: of paths only the last component, for logs are published and never edited.

        Data are known by their ``data_manifest``, not by where they were.
        """

        def short(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: short(item) for key, item in value.items()}
            return value.name if isinstance(value, Path) else value

        return {key: short(value) for key, value in self.model_dump().items()} | {
            "hyperparameters": self.hyperparameters.model_dump(mode="json")
        }


_STATED = " stated"  # in the __dict__ of a RunConfig that was read: no name of a field


def default_data_root(workload: str, size: str) -> Path:
    """The default folder of a data set: $MLHPC_DATA (or ``data``) / <workload>-<size>."""
    return Path(os.environ.get("MLHPC_DATA") or "data") / f"{workload}-{size}"


def load_config(descriptor: Descriptor, name: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Load a config of a workload: ``name`` is one of its shipped configs or the path of a YAML file.

    ``overrides`` are ``key=value`` with dotted keys and YAML values. InputError is one line for the user.
    """
    return resolve_config(descriptor, YamlSource.read(_find(descriptor, name)), overrides)


def resolve_config(descriptor: Descriptor, source: YamlSource, overrides: Iterable[str] = ()) -> RunConfig:
    """Make the configuration of what was read, or of a mapping that a caller gave. InputError is one line for the user."""
    data = source.data
    override_keys = []
    for text in overrides:
        override_keys.append(_override(data, text))
    data.setdefault("workload", descriptor.name)
    if data["workload"] != descriptor.name:
        raise InputError(f"{source.where('workload')}: workload is {data['workload']!r}, not {descriptor.name!r}")
    config = _fitted(_model(descriptor.load_hyperparameters()), source, override_keys)
    descriptor.card().size(config.size)
    config.__dict__[_STATED] = frozenset(data)
    return config


def _fitted(model: type[RunConfig], source: YamlSource, override_keys: Iterable[tuple[str, ...]]) -> RunConfig:
    """Make the configuration of the data. InputError with file and line, or with --set if an override made the mistake."""
    try:
        return fitted(model, source.data)
    except ValueError as error:
        wrong = cast("ValidationError", error)
        key = tuple(str(part) for part in wrong.errors()[0]["loc"])
        message = first_error(wrong, source, model)
        if any(key[: len(override)] == override for override in override_keys):
            message = f"--set {'.'.join(key)}: {message.partition(': ')[2]}"
        raise InputError(message) from None


@cache
def _model(own: type[Hyperparameters]) -> type[RunConfig]:
    """RunConfig with the hyperparameter class of a workload, so that its fields are checked too."""
    names = {"__annotations__": {"hyperparameters": own}, "__module__": __name__, "__doc__": RunConfig.__doc__}
    return type(RunConfig.__name__, (RunConfig,), names)


def _find(descriptor: Descriptor, name: str) -> Path:
    """The path of a config. InputError names the shipped ones."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        return path
    shipped = sorted((descriptor.folder / "config").glob("*.yaml"))
    for candidate in shipped:
        if candidate.stem == name:
            return candidate
    sizes = [candidate.stem for candidate in shipped]
    raise InputError(f"{descriptor.name}: {unknown('size', name, sizes, 'or a .yaml file of settings as --config')}")


def _override(data: dict[str, Any], text: str) -> tuple[str, ...]:
    """Set one ``key=value`` in ``data``; returns the parts of its key."""
    import yaml

    key, separator, value = text.partition("=")
    if not separator or not key:
        raise InputError(f"--set {text!r}: expected key=value, for example hyperparameters.dropout=0.1")
    parts = tuple(key.split("."))
    target = data
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise InputError(f"--set {text!r}: {part!r} is not a section")
    try:
        target[parts[-1]] = yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError):
        raise InputError(f"--set {brief(text)}: the value is not valid YAML") from None
    return parts
