"""The launcher block of a system file, and the Slurm job script rendered from it. Starts no process.

The script is bash that a person can read, edit and give to sbatch without `mlhpc submit`. It calls srun with the worker
(docs/architecture.md) and needs neither root, scontrol, sacct, pmix, ssh nor a container.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

import suite
from suite.errors import InputError, unknown, unknown_key
from suite.files import YamlSource, first_error

TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def time_limit_s(text: str) -> int:
    """Seconds of a Slurm time limit: minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s. InputError otherwise."""
    match = TIME_LIMIT.fullmatch(text)
    if match is None:
        raise InputError(f"time limit {text!r}: expected minutes, h:mm:ss or d-hh:mm:ss")
    days, *rest = (None if part is None else int(part) for part in match.groups())
    first, second, third = rest
    assert first is not None
    if days is not None:
        return ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return (first * 60 + (second or 0)) * 60 + third
    return first * 60 + (second or 0)


def _one_line(text: str) -> str:
    if "\n" in text or not text.strip():
        raise InputError("expected one line of text")
    return text


def _word(text: str) -> str:
    if not re.fullmatch(r"[^\s\"'`$\\#;&|<>()]+", text):
        raise InputError("expected one word without shell characters")
    return text


def _time_limit(text: str) -> str:
    time_limit_s(text)
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Word = Annotated[str, AfterValidator(_word)]
TimeLimit = Annotated[str, AfterValidator(_time_limit)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Container(_Section):
    """The container in which the worker's Python runs. Paths and the image may use variables of the job."""

    runtime: Literal["none", "apptainer", "pyxis"] = "none"
    image: Line | None = None
    mounts: tuple[Line, ...] = Field((), description="host:container paths; run folder, data and code must be visible")
    options: tuple[Line, ...] = Field((), description="more options of `apptainer exec`, or of srun for pyxis")

    @model_validator(mode="after")
    def _has_image(self) -> Container:
        if (self.runtime == "none") != (self.image is None):
            raise InputError("runtime and image belong together: give both, or neither")
        return self


class Launcher(_Section):
    """The launcher block of ``submissions/systems/<system>.yaml``: a site's Slurm. example.yaml explains every key."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Line | None = None
    max_nodes: int | None = Field(None, ge=1, description="nodes of the partition; more are refused before sbatch")
    ranks_per_node: int = Field(1, ge=1)
    cpus_per_task: int = Field(1, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    exclusive: bool = True
    time_limit: TimeLimit = "01:00:00"
    signal_margin_s: int = Field(120, ge=1, description="seconds before the time limit at which ranks save and stop")
    requeue: bool = Field(False, description="the site allows `scontrol requeue` from inside a job")
    mpi: Word = Field("pmi2", description="srun --mpi=; `srun --mpi=list` shows the site's")
    sbatch_options: tuple[Line, ...] = ()
    srun_options: tuple[Line, ...] = ()
    modules: tuple[Word, ...] = ()
    environment: Mapping[str, str] = {}
    setup: tuple[Line, ...] = Field(
        (), description="lines of bash, run once per node before the ranks; all must succeed"
    )
    python: Line | None = Field(None, description="interpreter; default: the one that submits, python3 in a container")
    container: Container = Container()
    scratch: Line | None = Field(None, description="TMPDIR of the ranks")
    staging_directory: Line | None = Field(None, description="node-local; {node} becomes the node's name")
    cache_drop_command: Line | None = Field(
        None, description="run once per node before each trial; its exit code is logged"
    )
    preflight_history: Line | None = Field(
        None, description="folder in which `submit --preflight` keeps what it measured of good nodes"
    )
    flops_per_s_per_rank: float | None = Field(None, gt=0, description="stated rate for the estimate of `--dry-run`")


class SystemFile(_Section):
    """A system file. ``description`` is parsed by suite.machine.system."""

    name: Line
    description: dict[str, Any] = {}
    launcher: Launcher = Launcher()


@dataclass(frozen=True)
class Job:
    """One job: ``runs`` scored runs one after another, or ``instances`` at once (throughput) on as many times the nodes.

    With ``run`` None the script chooses the run folder (runs/<workload>-<size>-<job id>). ``config`` is the name of a
    size, or the path of a YAML file on the compute nodes; ``overrides`` are KEY=VALUE settings on top of it. ``nodes`` and
    ``ranks_per_node`` are those of one trial. ``preflight``: seconds for measuring the nodes first, 0: they are not;
    ``spares``: nodes more than the trials need.
    """

    workload: str
    size: str
    config: str
    system: str
    launcher: Launcher
    nodes: int
    ranks_per_node: int
    runs: int = 1
    instances: int = 1
    array: bool = False
    seed: int | None = None
    run: str | None = None
    python: str = "python3"
    time_limit: str = "01:00:00"
    output: str = "%x-%j.out"
    overrides: tuple[str, ...] = ()
    preflight: int = 0
    spares: int = 0

    def __post_init__(self) -> None:
        if self.instances > 1 and (self.array or self.runs > 1):
            raise InputError("--instances cannot be combined with --runs or --array: each instance is one scored run")
        if any(re.search(r"\s", text) for text in self.overrides):
            raise InputError(
                "--set: a job script takes settings without spaces; write this one into a file for --config"
            )
        if self.spares and not self.preflight:
            raise InputError("--spares: spare nodes are chosen by --preflight: give it too")
        asked = self.total_nodes + self.spares
        if self.launcher.max_nodes is not None and asked > self.launcher.max_nodes:
            raise InputError(
                f"{asked} nodes asked for; {self.system} has {self.launcher.max_nodes} (launcher.max_nodes)"
            )

    @property
    def mode(self) -> Literal["strong", "weak"]:
        """``weak`` for throughput, ``strong`` for time to train."""
        return "weak" if self.instances > 1 else "strong"

    @property
    def trials(self) -> int:
        """Number of scored runs of the job."""
        return max(self.runs, self.instances)

    @property
    def total_nodes(self) -> int:
        """Nodes of all trials that run at once."""
        return self.nodes * self.instances

    @property
    def ranks(self) -> int:
        """Ranks of one trial."""
        return self.nodes * self.ranks_per_node


def sbatch_script(job: Job) -> str:
    """Render the job script."""
    return _TEMPLATES.get_template("job.sbatch.j2").render(job=job, launcher=job.launcher, VERSION=suite.VERSION)


def find_system(name: str) -> Path:
    """Find the file of a system by its path, or by its name in submissions/systems here or beside the suite."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        return path
    folders = [Path("submissions/systems"), Path(suite.__file__).parents[1] / "submissions" / "systems"]
    for folder in folders:
        if (folder / f"{name}.yaml").exists():
            return folder / f"{name}.yaml"
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise InputError(unknown("system", name, names, "or a path to a .yaml file"))


def read_system(path: Path) -> SystemFile:
    """Read a system file. InputError names file, line, value and what is expected."""
    source = YamlSource.read(path)
    try:
        return SystemFile.model_validate(source.data)
    except ValidationError as error:
        raise InputError(_explain(error, source)) from None


def _explain(error: ValidationError, source: YamlSource) -> str:
    item = error.errors()[0]
    key = tuple(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        sections: dict[tuple[str, ...], type[BaseModel]] = {(): SystemFile, ("launcher",): Launcher}
        section = sections.get(key[:-1], Container)
        return f"{source.where(*key)}: {unknown_key(section, key[-1])}"
    return first_error(error, source)


def _directive(text: str) -> str:
    """Quote a value for an #SBATCH line: sbatch understands double quotes and expands no variables."""
    return f'"{text}"' if re.search(r"[\s&|]", text) else text


def _inside_quotes(text: str) -> str:
    """Escape text for double quotes of bash, where variables are still expanded."""
    return re.sub(r'(["`\\])', r"\\\1", text)


def _default(text: str) -> str:
    """Escape text for the default value in "${NAME:=...}"."""
    return _inside_quotes(text).replace("}", r"\}")


_TEMPLATES = Environment(
    loader=PackageLoader("suite.launch"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # noqa: S701  bash, not HTML; values are escaped by the filters below
)
_TEMPLATES.filters.update(
    directive=_directive,
    inside_quotes=_inside_quotes,
    default_text=_default,
    quote=shlex.quote,
)
