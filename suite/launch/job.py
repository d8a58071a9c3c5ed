"""Reads a system file and describes a job: which site, which resources, which container. Starts no process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlhpc import suite
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.files import expand_home, render_repr

LONGEST_S = 366 * 86400
TIME_LIMIT = re.compile(r"\A(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?\Z")


def parse_time_limit_s(text: str) -> int:
    """Parse a time limit to seconds: minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s. InputError otherwise."""
    match = TIME_LIMIT.fullmatch(text)
    if match is None:
        raise InputError(f"time limit {text!r}: expected minutes, h:mm:ss or d-hh:mm:ss")
    seconds = _sum_time_limit(match)
    if not 0 < seconds <= LONGEST_S:
        raise InputError(
            f"time limit {text!r}: expected more than nothing, and at most a year; some schedulers take 0 for no limit,"
            " and ranks that are never told of their end save nothing"
        )
    return seconds


def _sum_time_limit(match: re.Match[str]) -> int:
    days, *rest = (None if part is None else int(part) for part in match.groups())
    first, second, third = rest
    # After days comes hours. Without days three parts begin with hours, and one or two with minutes.
    assert first is not None
    if days is not None:
        return ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return (first * 60 + (second or 0)) * 60 + third
    return first * 60 + (second or 0)


Line = Annotated[str, Meta(pattern=r"\A[^\n]*\S[^\n]*\Z", description="one line of text")]
TimeLimit = Annotated[str, Meta(pattern=TIME_LIMIT.pattern, description="minutes, h:mm:ss or d-hh:mm:ss")]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z_]\w*\Z", description="the name of an environment variable")]
# What becomes a word of a command may not look like one of its options.
Word = Annotated[
    str,
    Meta(
        pattern=r"\A(?!-)[^\s\"'`$\\#;&|<>(){}\[\]*?~]+\Z",
        description="one word without shell characters that does not begin with -",
    ),
]
Host = Annotated[
    str,
    Meta(
        pattern=r"\A(?:[A-Za-z0-9][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9_.:-]*\Z",
        description="letters, digits and . - _ : @; a host name begins with a letter or digit",
    ),
]
Place = Annotated[
    str,
    Meta(pattern=r"\A(?!-)[^\n]*\S[^\n]*\Z", description="one line of text that does not begin with -"),
]


class Container(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The container in which the worker's Python runs. Paths and the image may use variables of the job."""

    runtime: Literal["none", "apptainer", "pyxis"] = "none"
    image: Place | None = None
    mounts: Annotated[tuple[Place, ...], "host:container paths; run folder, data and code must be visible"] = ()
    options: Annotated[tuple[Line, ...], "more options of `apptainer exec`, or of srun for pyxis"] = ()

    def __post_init__(self) -> None:
        if (self.runtime == "none") != (self.image is None):
            raise InputError("runtime and image belong together: give both, or neither")


class Site(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a site's scheduler wants, and where things lie there. example.yaml explains every key."""

    queue: Annotated[Word, "Slurm's partition, Fugaku's resource group"] | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Place | None = None
    max_nodes: Annotated[int, Meta(ge=1), "nodes of the queue; more are refused before they are asked for"] | None = (
        None
    )
    requeue: Annotated[bool, "a job that stopped with a checkpoint may start itself again"] = False
    parallel_environment: Annotated[Word, "of Grid Engine; its allocation_rule is the ranks of a node"] | None = None
    hosts: Annotated[tuple[Host, ...], "the nodes, where no scheduler gives them"] = ()
    mpi: Annotated[Word, "how ranks start: srun --mpi=, or the kind of mpiexec"] | None = None
    options: Annotated[tuple[Line, ...], "more directives; lines that begin with # stay as they are"] = ()
    launch_options: Annotated[tuple[Line, ...], "more options of the command that starts the ranks"] = ()
    modules: tuple[Word, ...] = ()
    environment: Mapping[Name, str] = {}
    setup: Annotated[tuple[Place, ...], "lines of bash, run once per node before the ranks; all must succeed"] = ()
    python: Annotated[Place, "interpreter; default: the one that submits, python3 in a container"] | None = None
    scratch: Annotated[Place, "TMPDIR of the ranks"] | None = None
    staging_directory: Annotated[Place, "node-local; {node} becomes the node's name"] | None = None
    cache_drop_command: Annotated[Place, "run once per node before each trial; its exit code is logged"] | None = None
    data: Annotated[Place, "folder of the data sets; MLHPC_DATA comes first"] | None = None
    runs: Annotated[Place, "folder in which run folders are made"] | None = None
    preflight_history: (
        Annotated[Place, "folder in which `submit --preflight` keeps what it measured of good nodes"] | None
    ) = None


class Resources(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a job takes of each node, and for how long."""

    ranks_per_node: Annotated[int, Meta(ge=1)] = 1
    cpus_per_rank: Annotated[int, Meta(ge=1)] = 1
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    exclusive: bool = True
    time_limit: TimeLimit = "01:00:00"
    signal_margin_s: Annotated[int, Meta(ge=1), "seconds before the time limit at which ranks save and stop"] = 120
    flops_per_s_per_rank: Annotated[float, Meta(gt=0), "stated rate for the estimate of `--dry-run`"] | None = None


class SystemFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A system file. ``kind`` names the scheduler's dialect; mlhpc.suite.machine.system parses ``description``.

    ``submitter`` is used for runs on this system whose configuration names none.
    """

    name: Line
    kind: Word = "slurm"
    submitter: Line | None = None
    description: dict[str, Any] = {}
    site: Site = Site()
    resources: Resources = Resources()
    container: Container = Container()


@dataclass(frozen=True)
class Job:
    """One job: ``runs`` scored runs in sequence, or ``instances`` at once (throughput), each on ``nodes`` nodes.

    With ``run`` None the script chooses the run folder (runs/<workload>-<size>-<job id>). ``config`` is the name of a
    size, or the path of a YAML file on the compute nodes. ``overrides`` are KEY=VALUE settings on top of it. ``nodes``
    and ``ranks_per_node`` are those of one trial. ``makes_data``: the job makes the data set of the size, and ``seed``
    is that of the data. ``output`` is the folder of the job's own output; None: the
    scheduler's place. ``preflight``: seconds for measuring the nodes first; 0: not at all. ``spares``: extra nodes,
    from which preflight chooses.
    """

    workload: str
    size: str
    config: str
    system: SystemFile
    nodes: int
    ranks_per_node: int
    runs: int = 1
    instances: int = 1
    array: bool = False
    seed: int | None = None
    run: str | None = None
    python: str = "python3"
    time_limit: TimeLimit = "01:00:00"
    output: str | None = None
    overrides: tuple[str, ...] = ()
    makes_data: bool = False
    preflight: int = 0
    spares: int = 0

    def __post_init__(self) -> None:
        if self.instances > 1 and (self.array or self.runs > 1):
            raise InputError("--instances cannot be combined with --runs or --array: each instance is one scored run")
        spaced = next((text for text in self.overrides if re.search(r"\s", text)), None)
        if spaced is not None:
            raise InputError(
                f"--set {render_repr(spaced)}: a job script takes settings without spaces; "
                "write this one into a file for --config"
            )
        for name in (*filter(None, (self.run, self.config)), *self.overrides):
            if not name.isprintable():
                raise InputError(
                    f"{render_repr(name, longest=200)}: a job script takes printable names; choose another"
                )
        if self.run is not None and "\\" in self.run:
            raise InputError(
                f"{self.run}: a scheduler writes no output where a name has a backslash; choose another folder with -o"
            )
        if self.spares and not self.preflight:
            raise InputError("--spares: spare nodes are chosen by --preflight: give it too")
        asked = self.all_nodes
        most = self.system.site.max_nodes
        if most is not None and asked > most:
            raise InputError(
                f"{asked} nodes asked for; {self.system.name} has {most} (site.max_nodes); "
                "lower --nodes, --instances or --spares"
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
    def all_nodes(self) -> int:
        """Nodes to ask for: those of the trials, and the spare ones."""
        return self.total_nodes + self.spares

    @property
    def limit_s(self) -> int:
        """Seconds of the time limit."""
        return parse_time_limit_s(self.time_limit)

    @property
    def cpus_per_node(self) -> int:
        """Cores of all ranks of a node."""
        return self.ranks_per_node * self.system.resources.cpus_per_rank

    @property
    def ranks(self) -> int:
        """Ranks of one trial."""
        return self.nodes * self.ranks_per_node


def find_system(name: str) -> Path:
    """Find a system's file by its path, or by name in submissions/systems here or next to the suite."""
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        return path
    folders = [Path("submissions/systems"), Path(suite.__file__).parents[1] / "submissions" / "systems"]
    for folder in folders:
        if (folder / f"{name}.yaml").exists():
            return folder / f"{name}.yaml"
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise InputError(explain_unknown_name("system", name, names, "or a path to a .yaml file"))


def read_system(path: Path) -> SystemFile:
    """Read a system file. InputError names file, line, value and what is expected."""
    source = YamlSource.read(path)
    if "launcher" in source.data:
        line = source.lines.get(("launcher",), 1)
        raise InputError(
            f"{path}:{line}: launcher: is now kind, site, resources and container; "
            "submissions/systems/example.yaml shows which key lies where"
        )
    for section in ("site", "container"):
        if section in source.data:
            source.data[section] = _expand_home(source.data[section], source.where(section))
    return source.convert(SystemFile)


def _expand_home(value: Any, where: str) -> Any:
    """Replace the ~ of paths in a section of a system file. A job script quotes them, so a shell leaves it."""
    if isinstance(value, dict):
        return {key: _expand_home(each, where) for key, each in value.items()}
    if isinstance(value, list):
        return [_expand_home(each, where) for each in value]
    try:
        return expand_home(value) if isinstance(value, str) else value
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
