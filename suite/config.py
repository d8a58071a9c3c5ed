"""The configuration of a run: a YAML file, changed by ``--set key=value``. Unknown keys are refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from suite.descriptor import Descriptor, Hyperparameters
from suite.errors import InputError, unknown
from suite.files import YamlSource, first_error, unknown_key


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Staging(_Section):
    """Copy of the data set to node-local storage before training."""

    directory: Path | None = Field(None, description="node-local folder; {node} and {trial} are filled in")
    overlap: bool = Field(False, description="stage during the first epoch; the time then counts inside the run")


class Checkpointing(_Section):
    """Checkpoints while a trial trains. When it is told to stop, it writes one in any case."""

    interval_s: float | None = Field(600.0, gt=0, description="seconds of training that a kill may cost; null: none")


class Watching(_Section):
    """What to do about a trial in which nothing goes on."""

    silence_s: float | None = Field(600.0, gt=0, description="seconds without progress on any rank; null: never look")
    action: Literal["end", "report"] = Field("end", description="end the run with exit code 1, or only say it")


class Choosing(_Section):
    """What is measured for a moment before a run, to compute as this machine does it fastest. Precision is never chosen."""

    measure: bool = Field(True, description="false: fixed rules, the same on every machine of a kind")
    pinned: dict[str, str] = Field({}, description="choices by name, as a log has them (measured_choice): not measured")


class Submission(_Section):
    """What MLPerf requires a submitter to state."""

    org: str = Field("unknown", min_length=1)
    division: Literal["closed", "open"] = "closed"
    status: Literal["cloud", "onprem", "preview", "research"] = "research"
    platform: str = Field("unknown", min_length=1)


class RunConfig(_Section):
    """The resolved configuration of a run. Nothing in it depends on the number of ranks, which the launch determines."""

    workload: str
    size: str
    global_batch_size: int = Field(ge=1)
    max_epochs: int = Field(ge=1)
    gradient_accumulation_steps: int = Field(1, ge=1, description="parts a rank computes its share of a batch in")
    data: Path | None = Field(None, description="data root; default: data/<workload>-<size>")
    verify_data: bool = Field(True, description="compare every shard with its checksum before the run")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["float32", "tf32", "bfloat16"] = Field(
        "float32", description="tf32: products and convolutions of a GPU in TF32; bfloat16: autocast of the model"
    )
    channels_last: bool | Literal["auto"] = Field(False, description="auto: what is measured to be fastest")
    compile: bool = False
    loader_threads: int = Field(1, ge=1)
    eval_batch_size: int = Field(
        64, ge=1, description="samples per rank and evaluation step; does not change the metric"
    )
    window_steps: int = Field(50, ge=1, description="training steps per step_phases event")
    instrumentation: bool = Field(True, description="time the phases of steps; count bytes, memory and energy")
    checkpoint: Checkpointing = Checkpointing()
    cache_drop_command: str | None = Field(
        None, description="run on every node before init_start; its exit code is logged"
    )
    staging: Staging = Staging()
    watchdog: Watching = Watching()
    choices: Choosing = Choosing()
    plan: Path | None = Field(
        None, description="parallel plan: a name of the workload's, or a YAML file (docs/plans.md)"
    )
    mesh: str | None = Field(None, description="ranks by axis, for example data=2,spatial=2x1x1; [the plan's]")
    submission: Submission = Submission()
    hyperparameters: Hyperparameters

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
    model = _model(descriptor)
    data.setdefault("workload", descriptor.name)
    if data["workload"] != descriptor.name:
        raise InputError(f"{source.where('workload')}: workload is {data['workload']!r}, not {descriptor.name!r}")
    try:
        config = model.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(error, source, model, override_keys)) from None
    descriptor.card().size(config.size)
    return config


def _model(descriptor: Descriptor) -> type[RunConfig]:
    """RunConfig with the hyperparameter class of the workload, so that pydantic checks its fields too."""

    class WorkloadRunConfig(RunConfig):
        hyperparameters: descriptor.hyperparameters  # type: ignore[name-defined]

    return WorkloadRunConfig


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
    except yaml.YAMLError:
        raise InputError(f"--set {text!r}: the value is not valid YAML") from None
    return parts


def _explain(
    error: ValidationError, source: YamlSource, model: type[BaseModel], override_keys: list[tuple[str, ...]]
) -> str:
    """Render the first mistake as one line: with file and line, or with --set if an override made it."""
    item = error.errors()[0]
    key = tuple(str(part) for part in item["loc"])
    message = first_error(error, source)
    if item["type"] == "extra_forbidden":
        message = f"{source.where(*key)}: {unknown_key(_section(model, key[:-1]), key[-1])}"
    if any(key[: len(override)] == override for override in override_keys):
        return f"--set {'.'.join(key)}: {message.partition(': ')[2]}"
    return message


def _section(model: type[BaseModel], key: tuple[str, ...]) -> type[BaseModel]:
    """The model of the section at a key path."""
    for part in key:
        inner = model.model_fields[part].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return model
