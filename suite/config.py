"""Reads the configuration of a run: a YAML file, changed by ``--set key=value``. Unknown keys are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from msgspec import Meta, Struct, ValidationError, defstruct, structs, to_builtins

from mlhpc.suite import NO_SUBMITTER
from mlhpc.suite.descriptor import Descriptor, load_descriptor
from mlhpc.suite.documents import (
    FOLDER_NAME,
    Count,
    FolderName,
    YamlSource,
    convert,
    convert_to_plain_data,
    find_mistake,
    list_key_paths,
    parse_yaml,
)
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.files import convert_to_path, render_repr


class Hyperparameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of each workload's hyperparameters: frozen, unknown keys refused.

    Derive from it with ``frozen=True, kw_only=True``. To check across fields, raise InputError in ``__post_init__``.
    """

    def collect_logged(self, config: RunConfig, ranks: int = 1) -> dict[str, Any]:
        """Collect the hyperparameters that a log states, so that they are judged before the run. No torch.

        ``ranks``: how many share the experts. Default: empty, so they are judged afterwards alone.
        """
        return {}


Seconds = Annotated[float, Meta(gt=0, le=1e9)]  # 30 years: a later moment is none that the system's clock can show


class Staging(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copy of the data set to node-local storage before training."""

    directory: Annotated[Path | None, "node-local folder; {node} and {trial} are filled in"] = None
    overlap: Annotated[bool, "stage during the first epoch; the time then counts inside the run"] = False


class Checkpointing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints while a trial trains. A trial that is stopped always writes one."""

    interval_s: Annotated[Seconds, "seconds of training that a kill may cost; null: none"] | None = 600.0


class WatchdogSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do about a trial that makes no progress."""

    silence_s: Annotated[Seconds, "seconds without progress on any rank; null: never look"] | None = 600.0
    action: Annotated[Literal["end", "report"], "end the run with exit code 1, or only say it"] = "end"


class ChoiceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The short measurements before a run that choose the fastest way to compute on this machine."""

    measure: Annotated[bool, "false: fixed rules, the same on every machine of a kind"] = True
    pinned: Annotated[dict[str, str], "choices by name, as a log has them (measured_choice): not measured"] = {}


class Submission(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What MLPerf requires a submitter to state."""

    org: Annotated[str, Meta(min_length=1)] = NO_SUBMITTER
    division: Literal["closed", "open"] = "closed"
    status: Literal["cloud", "onprem", "preview", "research"] = "research"
    platform: Annotated[str, Meta(min_length=1)] = "unknown"


class Tuned(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The search that chose the settings (`mlhpc tune` writes it). ``ratio``: over the default's time."""

    by: str
    objective: str
    ranks: int
    threads: int
    evaluations: int
    search_s: float
    ratio: float
    low: float
    high: float
    pairs: int


class RunConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The resolved configuration of a run. It does not depend on the number of ranks."""

    workload: FolderName
    size: FolderName
    global_batch_size: Count
    max_epochs: Count
    gradient_accumulation_steps: Annotated[Count, "parts a rank computes its share of a batch in"] = 1
    data: Annotated[Path | None, "data root; default: data/<workload>-<size>"] = None
    verify_data: Annotated[bool, "compare every shard with its checksum before the run"] = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Annotated[
        Literal["float32", "tf32", "bfloat16", "auto"],
        "tf32: products and convolutions of a GPU in TF32; bfloat16: autocast of the model; "
        "auto: bfloat16 where a run measures it "
        "to be worth it, else float32",
    ] = "float32"
    channels_last: Annotated[bool | Literal["auto"], "auto: what is measured to be fastest"] = False
    compile: bool = False
    graphs: Annotated[
        bool | Literal["auto"], "CUDA graphs of forward and backward pass, on one GPU; auto: if measured to be worth it"
    ] = False
    loader_threads: Count = 1
    eval_batch_size: Annotated[Count, "samples per rank and evaluation step; does not change the metric"] = 64
    window_steps: Annotated[Count, "training steps per step_phases event"] = 50
    instrumentation: Annotated[bool, "time the phases of steps; count bytes, memory and energy"] = True
    checkpoint: Checkpointing = Checkpointing()
    cache_drop_command: Annotated[str | None, "run on every node before init_start; its exit code is logged"] = None
    staging: Staging = Staging()
    watchdog: WatchdogSettings = WatchdogSettings()
    choices: ChoiceSettings = ChoiceSettings()
    plan: Annotated[Path | None, "parallel plan: a name of the workload's, or a YAML file (docs/plans.md)"] = None
    mesh: Annotated[str | None, "ranks by axis, for example data=2,spatial=2x1x1; [the plan's]"] = None
    submission: Submission = Submission()
    tuned: Annotated[Tuned | None, "written by mlhpc tune: how these settings were found"] = None
    hyperparameters: (
        Any  # the workload's Hyperparameters; a dict for a person's own loop, whose keys are as it logs them
    )

    @property
    def stated(self) -> frozenset[str]:
        """The keys that the file or --set gave. Without a file: the keys that differ from the default."""
        other = (item.name for item in structs.fields(self) if getattr(self, item.name) != item.default)
        return cast("frozenset[str]", self.__dict__.get(_STATED) or frozenset(other))

    def with_stated_precision(self, what: str) -> RunConfig:
        """Return this configuration with a stated precision, for ``what``. InputError for ``auto``."""
        if self.precision == "auto":
            raise InputError(
                f"precision is auto, but {what} does not measure which is fastest: "
                "give --set precision=float32, tf32 or bfloat16"
            )
        return self

    def samples_per_pass(self, ranks: int) -> int:
        """Return the samples of one forward pass of a rank, at least one, if ``ranks`` share the batches."""
        return max(1, self.global_batch_size // self.gradient_accumulation_steps // ranks)

    def logged(self) -> dict[str, Any]:
        """Return the configuration to log. Paths are reduced to their last part: logs are published and never edited.

        Data are identified by their ``data_manifest``, not by their place.
        """

        settings: dict[str, Any] = to_builtins(self, enc_hook=lambda path: path.name)
        return settings | {"hyperparameters": convert_to_plain_data(settings["hyperparameters"])}


class UserSubmission(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person states once for all runs."""

    org: Annotated[str, Meta(min_length=1)]


class UserFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A person's own defaults, ``~/.config/mlhpc.yaml``."""

    submission: UserSubmission | None = None


ORG = "MLHPC_ORG"  # environment variable: the submitter of runs whose configuration states none
SUBMITTER_HINT = f"set {ORG}, or submission.org in ~/.config/mlhpc.yaml"


def find_user_file() -> Path:
    """Return the file of a person's own defaults: $XDG_CONFIG_HOME/mlhpc.yaml, or ~/.config/mlhpc.yaml."""
    folder = os.environ.get("XDG_CONFIG_HOME") or f"{os.environ.get('HOME', '')}/.config"
    return Path(folder) / "mlhpc.yaml"


def find_default_submitter() -> str | None:
    """Return the submitter in $MLHPC_ORG, or else in `find_user_file`. None if neither names one.

    InputError for a damaged file.
    """
    if org := os.environ.get(ORG):
        return org
    path = find_user_file()
    if not os.access(path, os.F_OK):  # Path.exists raises for a home folder that this user may not enter
        return None
    submission = YamlSource.read(path).convert(UserFile).submission
    return None if submission is None else submission.org


def check_folder_name(what: str, name: str) -> None:
    """Raise InputError if a name is unsafe for a folder: a package's folder is named after its submitter."""
    if not re.fullmatch(FOLDER_NAME, name):
        raise InputError(
            f"{what} {render_repr(name)}: expected letters, digits and _ . + - (it becomes the name of a package's"
            " folder)"
        )


def explain_missing_submitter(config: RunConfig) -> str | None:
    """Return one line for a person if a run's submitter is not known, else None."""
    if config.submission.org != NO_SUBMITTER:
        return None
    return (
        f"note: the submitter is not known: the logs will say submission_org = {NO_SUBMITTER!r}. {SUBMITTER_HINT}; "
        "`mlhpc package --submitter ORG` can name it later, and marks it as late"
    )


def _fill_submitter(data: dict[str, Any], submitter: str | None) -> None:
    """Set submission.org to the person's default, or else to ``submitter``, unless the configuration has it."""
    submission = data.get("submission", {})
    if not isinstance(submission, dict) or "org" in submission:
        return
    if org := find_default_submitter() or submitter:
        data["submission"] = submission | {"org": org}


_STATED = "stated keys"  # in the __dict__ of a RunConfig that was read


def choose_default_data_root(workload: str, size: str) -> Path:
    """Return the default folder of a data set: $MLHPC_DATA (or ``data``) / <workload>-<size>."""
    return convert_to_path(os.environ.get("MLHPC_DATA") or "data") / f"{workload}-{size}"


def load_config(
    descriptor: Descriptor, name: str, overrides: Iterable[str] = (), submitter: str | None = None
) -> RunConfig:
    """Load a config of a workload. ``name`` is one of its shipped configs or the path of a YAML file.

    ``overrides`` are ``key=value`` with dotted keys and YAML values. ``submitter`` is the one that a system file names.
    InputError is one line for the user.
    """
    return resolve_config(descriptor, YamlSource.read(_find_config(descriptor, name)), overrides, submitter)


def resolve_config(
    descriptor: Descriptor, source: YamlSource, overrides: Iterable[str] = (), submitter: str | None = None
) -> RunConfig:
    """Make the configuration from data that was read or passed. InputError is one line for the user.

    If the configuration states no submitter, it is the person's own default, or else ``submitter``.
    """
    data = source.data
    override_keys = []
    for text in overrides:
        override_keys.append(_override(data, text))
    _fill_submitter(data, submitter)
    data.setdefault("workload", descriptor.name)
    if data["workload"] != descriptor.name:
        where = "--set workload" if ("workload",) in override_keys else source.where("workload")
        raise InputError(
            f"{where}: workload is {data['workload']!r}; expected {descriptor.name!r}, the workload that is run"
        )
    kind = _config_kind(descriptor.load_hyperparameters())
    try:
        # Workload-specific keys are checked by the type of their own hyperparameters.
        config = convert(data, kind)
    except ValidationError as error:
        mistake = find_mistake(data, kind, error)
        raise InputError(f"{_find_place(source, mistake.key, override_keys)}: {mistake.text}") from None
    check_folder_name("submission.org", config.submission.org)
    descriptor.card().size(config.size)
    # A frozen Struct refuses a new attribute, but not an entry of its `__dict__` (dict=True).
    config.__dict__[_STATED] = frozenset(data)
    return config


def _find_place(source: YamlSource, key: tuple[str, ...], override_keys: Iterable[tuple[str, ...]]) -> str:
    """Return where a wrong key is: in a --set, or else in the file.

    A misspelt section in a --set is a shorter key than the --set's own. A value that should be a section is a longer
    one.
    """
    for override in override_keys:
        if key[: len(override)] == override:
            return f"--set {'.'.join(key)}"
        if key and override[: len(key)] == key:
            return f"--set {'.'.join(override)}"
    return source.where(*key)


def make_config_kind(descriptor: Descriptor) -> type[RunConfig]:
    """Make the type of a workload's configuration, with its own hyperparameters."""
    return _config_kind(descriptor.load_hyperparameters())


@cache
def _config_kind(own: Any) -> type[RunConfig]:
    """Return RunConfig with the type of a workload's hyperparameters, so that they are checked too."""
    kind = defstruct("RunConfig", [("hyperparameters", own)], bases=(RunConfig,), kw_only=True, frozen=True)
    return cast("type[RunConfig]", kind)


@cache
def list_setting_keys(workload: str) -> tuple[str, ...]:
    """Return the dotted keys that ``--set`` takes. Those of the workload itself come last."""
    own = load_descriptor(workload).load_hyperparameters()
    inner = list(list_key_paths(_config_kind(own)))
    sections = {path.partition(".")[0] for path in inner} | {"workload", "size", "tuned"}
    return (*(field.name for field in structs.fields(RunConfig) if field.name not in sections), *inner)


def _find_config(descriptor: Descriptor, name: str) -> Path:
    """Return the path of a config. InputError names the shipped ones."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        return path
    shipped = sorted((descriptor.folder / "config").glob("*.yaml"))
    for candidate in shipped:
        if candidate.stem == name:
            return candidate
    sizes = [candidate.stem for candidate in shipped]
    raise InputError(
        f"{descriptor.name}: {explain_unknown_name('size', name, sizes, 'or a .yaml file of settings as --config')}"
    )


def _override(data: dict[str, Any], text: str) -> tuple[str, ...]:
    """Set one ``key=value`` in ``data``. Returns the parts of its key."""
    key, separator, _ = text.partition("=")
    if not separator or not key:
        raise InputError(f"--set {text!r}: expected key=value, for example hyperparameters.dropout=0.1")
    parts = tuple(key.split("."))
    target = data
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise InputError(
                f"--set {text!r}: {part!r} is a single value and has no settings below it; expected a key such as "
                "hyperparameters.dropout"
            )
    _set(target, parts[-1], parse_setting("--set", text))
    return parts


def _set(target: dict[str, Any], key: str, value: Any) -> None:
    """Set a value. The keys of a mapping join those that are there: {dropout: 0.1} leaves other hyperparameters."""
    if isinstance(value, dict) and isinstance(there := target.get(key), dict):
        for inner, each in value.items():
            _set(there, inner, each)
    else:
        target[key] = value


# Settings that run a program or write outside of the run folder. A folder may be a stranger's, so its own do not count
OUTER_SETTINGS = ("cache_drop_command", "staging.directory", "hyperparameters.moe.offload.folder")


def list_outer_settings(config: Path) -> list[str]:
    """Return those of `OUTER_SETTINGS` that a file of settings has, as ``key=value``."""
    found = []
    data = YamlSource.read(config).data
    for key in OUTER_SETTINGS:
        value: Any = data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found.append(f"{key}={value}")
    return found


def split_mapping(text: str) -> list[tuple[str, str]]:
    """Return the dotted keys and the values of ``{a: {b: 1}}``, as ``--set`` takes them. Empty if it is no mapping."""
    try:
        left, found = [("", parse_setting("", f"={text}"))], []
    except InputError:
        return []
    while left:
        key, value = left.pop(0)
        if isinstance(value, dict):
            left[:0] = [(f"{key}.{inner}".lstrip("."), each) for inner, each in value.items()]
        elif key:
            found.append((key, str(value)))
    return found


def parse_setting(option: str, text: str) -> Any:
    """Parse the YAML value of ``NAME=VALUE``. InputError names the option."""
    try:
        return parse_yaml(text.partition("=")[2])
    # PyYAML raises errors of Python for a value that does not fit its tag.
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError):
        raise InputError(
            f"{option} {render_repr(text)}: the value is not valid YAML; put quotes around a text with special"
            " characters"
        ) from None
