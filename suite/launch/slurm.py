"""Parses the launcher block of a system file and renders the Slurm job script from it. Starts no process.

The script is bash that a person can read, edit and give to sbatch without `mlhpc submit`. It calls srun with the worker
(docs/architecture.md) and needs neither root, scontrol, sacct, pmix, ssh nor a container.

Submits jobs to Slurm and asks for their state: squeue, then scontrol, then the exit file. Does not need sacct.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlhpc import suite
from mlhpc.suite.documents import YamlSource
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.files import read_bytes, render_repr
from mlhpc.suite.log.reader import EXIT_CODE_BYTES

LONGEST_S = 366 * 86400
TIME_LIMIT = re.compile(r"\A(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?\Z")


def parse_time_limit_s(text: str) -> int:
    """Parse a Slurm time limit to seconds: minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s. InputError otherwise."""
    match = TIME_LIMIT.fullmatch(text)
    if match is None:
        raise InputError(f"time limit {text!r}: expected minutes, h:mm:ss or d-hh:mm:ss")
    seconds = _sum_time_limit(match)
    if not 0 < seconds <= LONGEST_S:
        raise InputError(
            f"time limit {text!r}: expected more than nothing, and at most a year; Slurm takes 0 for no limit, and ranks that"
            " are never told of their end save nothing"
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
Word = Annotated[str, Meta(pattern=r"\A[^\s\"'`$\\#;&|<>()]+\Z", description="one word without shell characters")]


class Container(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The container in which the worker's Python runs. Paths and the image may use variables of the job."""

    runtime: Literal["none", "apptainer", "pyxis"] = "none"
    image: Line | None = None
    mounts: Annotated[tuple[Line, ...], "host:container paths; run folder, data and code must be visible"] = ()
    options: Annotated[tuple[Line, ...], "more options of `apptainer exec`, or of srun for pyxis"] = ()

    def __post_init__(self) -> None:
        if (self.runtime == "none") != (self.image is None):
            raise InputError("runtime and image belong together: give both, or neither")


class Launcher(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The launcher block of ``submissions/systems/<system>.yaml``: a site's Slurm. example.yaml explains every key."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Line | None = None
    max_nodes: Annotated[int, Meta(ge=1), "nodes of the partition; more are refused before sbatch"] | None = None
    ranks_per_node: Annotated[int, Meta(ge=1)] = 1
    cpus_per_task: Annotated[int, Meta(ge=1)] = 1
    gpus_per_node: Annotated[int, Meta(ge=0)] = 0
    exclusive: bool = True
    time_limit: TimeLimit = "01:00:00"
    signal_margin_s: Annotated[int, Meta(ge=1), "seconds before the time limit at which ranks save and stop"] = 120
    requeue: Annotated[bool, "the site allows `scontrol requeue` from inside a job"] = False
    mpi: Annotated[Word, "srun --mpi=; `srun --mpi=list` shows the site's"] = "pmi2"
    sbatch_options: tuple[Line, ...] = ()
    srun_options: tuple[Line, ...] = ()
    modules: tuple[Word, ...] = ()
    environment: Mapping[Name, str] = {}
    setup: Annotated[tuple[Line, ...], "lines of bash, run once per node before the ranks; all must succeed"] = ()
    python: Annotated[Line | None, "interpreter; default: the one that submits, python3 in a container"] = None
    container: Container = Container()
    scratch: Annotated[Line | None, "TMPDIR of the ranks"] = None
    staging_directory: Annotated[Line | None, "node-local; {node} becomes the node's name"] = None
    cache_drop_command: Annotated[Line | None, "run once per node before each trial; its exit code is logged"] = None
    preflight_history: Annotated[
        Line | None, "folder in which `submit --preflight` keeps what it measured of good nodes"
    ] = None
    flops_per_s_per_rank: Annotated[float, Meta(gt=0), "stated rate for the estimate of `--dry-run`"] | None = None


class SystemFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A system file. ``description`` is parsed by mlhpc.suite.machine.system.

    ``submitter`` is used for runs on this system whose configuration names none.
    """

    name: Line
    submitter: Line | None = None
    description: dict[str, Any] = {}
    launcher: Launcher = Launcher()


@dataclass(frozen=True)
class Job:
    """One job: ``runs`` scored runs in sequence, or ``instances`` at once (throughput), each on ``nodes`` nodes.

    With ``run`` None the script chooses the run folder (runs/<workload>-<size>-<job id>). ``config`` is the name of a
    size, or the path of a YAML file on the compute nodes. ``overrides`` are KEY=VALUE settings on top of it. ``nodes``
    and ``ranks_per_node`` are those of one trial. ``preflight``: seconds for measuring the nodes first; 0: not at all.
    ``spares``: extra nodes, from which preflight chooses.
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
    time_limit: TimeLimit = "01:00:00"
    output: str = "%x-%j.out"
    overrides: tuple[str, ...] = ()
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
                f"{self.run}: Slurm writes no output where a name has a backslash; choose another folder with -o"
            )
        if self.spares and not self.preflight:
            raise InputError("--spares: spare nodes are chosen by --preflight: give it too")
        asked = self.total_nodes + self.spares
        if self.launcher.max_nodes is not None and asked > self.launcher.max_nodes:
            raise InputError(
                f"{asked} nodes asked for; {self.system} has {self.launcher.max_nodes} (launcher.max_nodes); "
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
    def ranks(self) -> int:
        """Ranks of one trial."""
        return self.nodes * self.ranks_per_node


def render_sbatch_script(job: Job) -> str:
    """Render the job script from templates/job.sbatch. A line with an empty ``{{ name }}`` alone is left out."""
    parts = _render_parts(job)
    # The line that sets the variable is in the script only if a text needs it.
    used = any(_APOSTROPHE in part for part in parts.values())
    parts["apostrophe"] = 'apostrophe="\'"' if used else ""

    def text(match: re.Match[str]) -> str:
        found = parts[match[1] or match[2]]
        return f"{found}\n" if found and match[1] else found

    return _PLACEHOLDER.sub(text, _read_template("job"))


_PLACEHOLDER = re.compile(r"^\{\{ (\w+) \}\}\n|\{\{ (\w+) \}\}", re.MULTILINE)  # a line of its own, or a part of one


def _read_template(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.sbatch").read_text(encoding="utf-8")


def _render_parts(job: Job) -> dict[str, str]:
    """Return the texts for the template, by name. Text of a user is escaped for its place."""
    launcher, weak = job.launcher, job.mode == "weak"
    runs = (
        f"{job.instances} instances at once (throughput mode), each"
        if weak
        else f"{_render_count(job.runs, 'scored run')}, one after another,"
    )
    return {
        # On many sites only a login shell defines `module`.
        "login": " -l" if launcher.modules else "",
        "workload": job.workload,
        "size": job.size,
        "system": job.system,
        "what": f"{runs} of {_render_count(job.ranks, 'rank')} on {_render_count(job.nodes, 'node')}.",
        "directives": "\n".join(f"#SBATCH {each}" for each in _render_directives(job)),
        "modules": _render_modules(launcher),
        "scratch": _escape_quoted(launcher.scratch) if launcher.scratch else "${TMPDIR:-/tmp}",
        "environment": "\n".join(
            f'export {name}="{_escape_quoted(value)}"' for name, value in launcher.environment.items()
        ),
        # A path that a person wrote may use variables of the job; this interpreter's path is taken as it is.
        "python": _escape_literal(job.python) if job.python == sys.executable else _escape_default(job.python),
        "config_name": "MLHPC_CONFIG" if job.config.endswith((".yaml", ".yml")) else "MLHPC_SIZE",
        "config": _escape_literal(job.config),
        "run": _escape_literal(job.run) if job.run else f"runs/{job.workload}-{job.size}-$job",
        "trials_name": "MLHPC_INSTANCES" if weak else "MLHPC_RUNS",
        "trials": str(job.instances if weak else job.runs),
        "seed": "" if job.seed is None else str(job.seed),
        "overrides": _escape_literal(" ".join(job.overrides)),
        "mpi": launcher.mpi,
        "staging_directory": _escape_default(launcher.staging_directory or ""),
        "cache_drop_command": _escape_default(launcher.cache_drop_command or ""),
        "spares": str(job.spares),
        "preflight_settings": _render_preflight(job) if job.preflight else "",
        "requeue": str(int(launcher.requeue)),
        "site_options": "\n".join(_render_site_options(launcher)),
        "suite": _render_suite_command(launcher.container),
        "mode": job.mode,
        "setup": _render_setup(launcher),
        "preflight": _read_template("preflight").removesuffix("\n") if job.preflight else "",
        "loop": _read_template("instances" if weak else "trials").removesuffix("\n"),
    }


def _render_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _render_directives(job: Job) -> Iterator[str]:
    """Yield the options of sbatch."""
    launcher = job.launcher
    yield f"--job-name={job.workload}-{job.size}"
    yield f"--nodes={job.total_nodes + job.spares}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    yield f"--cpus-per-task={launcher.cpus_per_task}"
    if launcher.gpus_per_node:
        yield f"--gpus-per-node={launcher.gpus_per_node}"
    if launcher.exclusive:
        yield "--exclusive"
    yield f"--time={job.time_limit}"
    # Without `B:` Slurm signals the job's steps, and so the ranks, not the script.
    yield f"--signal=TERM@{launcher.signal_margin_s}"
    # If neither is given, the site's default decides.
    yield "--requeue" if launcher.requeue else "--no-requeue"
    yield f"--output={_quote_directive(job.output)}"
    # A requeued job would overwrite the output of its first start.
    yield "--open-mode=append"
    if job.array:
        # %1: one task at a time, as the runs of one job.
        yield f"--array=0-{job.runs - 1}%1"
    for name in ("partition", "account", "qos", "constraint"):
        if value := getattr(launcher, name):
            yield f"--{name}={_quote_directive(value)}"
    yield from launcher.sbatch_options


def _render_modules(launcher: Launcher) -> str:
    if not launcher.modules:
        return ""
    return f"module load {' '.join(launcher.modules)} || exit 2 # before set -u, which module functions seldom survive"


def _render_preflight(job: Job) -> str:
    history = _escape_default(job.launcher.preflight_history or "")
    return f"""\
: "${{MLHPC_PREFLIGHT_S:={job.preflight}}}" # seconds for measuring the nodes before the first trial
: "${{MLHPC_PREFLIGHT_HISTORY={history}}}" # folder of earlier measurements, for few nodes
: "${{MLHPC_PREFLIGHT_DIRECTORY=}}" # where storage is measured, where data are staged to; empty: $TMPDIR"""


def _render_site_options(launcher: Launcher) -> Iterator[str]:
    """Yield lines that give every srun the site's options, and those that start a container by pyxis."""
    container = launcher.container
    for option in launcher.srun_options:
        yield f'site+=("{_escape_quoted(option)}")'
    if container.runtime == "pyxis":
        assert container.image is not None
        yield f'site+=(--container-image="{_escape_quoted(container.image)}" --container-workdir="$PWD")'
        if container.mounts:
            yield f'site+=(--container-mounts="{_escape_quoted(",".join(container.mounts))}")'
        for option in container.options:
            yield f'site+=("{_escape_quoted(option)}")'


def _render_suite_command(container: Container) -> str:
    """Return the lines that start the suite: in a container by apptainer, or directly."""
    if container.runtime != "apptainer":
        return 'suite=("$MLHPC_PYTHON" -P -m mlhpc)'
    assert container.image is not None
    lines = ['suite=(apptainer exec --pwd "$PWD")']
    lines += [f'suite+=(--bind "{_escape_quoted(mount)}")' for mount in container.mounts]
    lines += [f'suite+=("{_escape_quoted(option)}")' for option in container.options]
    return "\n".join([*lines, f'suite+=("{_escape_quoted(container.image)}" "$MLHPC_PYTHON" -P -m mlhpc)'])


def _render_setup(launcher: Launcher) -> str:
    if not launcher.setup:
        return ""
    return f"""\
# Once per node, before the ranks: what they need there, such as the environment in TMPDIR.
# shellcheck disable=SC2016 # variables are expanded on the node
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 \\
  --kill-on-bad-exit=1 --input=none bash -euc {shlex.quote(chr(10).join(launcher.setup))} || {{
  echo "setup failed with exit code $?: no trial was started" >&2
  exit 1
}}
"""


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
    return YamlSource.read(path).convert(SystemFile)


def _quote_directive(text: str) -> str:
    """Quote a value for an #SBATCH line: sbatch understands double quotes and expands no variables."""
    return text if re.fullmatch(r"[\w./:=@+,%-]+", text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _escape_quoted(text: str) -> str:
    """Escape text for double quotes of bash, where variables are still expanded."""
    return re.sub(r'(["`\\])', r"\\\1", text)


def _escape_default(text: str) -> str:
    """Escape text for the default value in "${NAME:=...}", where variables are still expanded.

    An apostrophe there would begin a quoted text, and no backslash would prevent it.
    """
    # A brace would end the default value early.
    return _escape_quoted(text).replace("}", r"\}").replace("'", _APOSTROPHE)


_APOSTROPHE = "${apostrophe}"


def _escape_literal(text: str) -> str:
    """Escape text for the default value in "${NAME:=...}", where it stays as it is."""
    return r"\$".join(_escape_default(part) for part in text.split("$"))


# Settings of a job script that `mlhpc submit` does not pass on from its environment; a person who calls sbatch may set
# them.
SCRIPT_VARIABLES = (
    "MLHPC_PYTHON",
    "MLHPC_SIZE",
    "MLHPC_CONFIG",
    "MLHPC_RUN",
    "MLHPC_RUNS",
    "MLHPC_INSTANCES",
    "MLHPC_SEED",
    "MLHPC_SET",
    "MLHPC_MPI",
    "MLHPC_STAGING_DIRECTORY",
    "MLHPC_CACHE_DROP_COMMAND",
    "MLHPC_CACHE_DROP_RC",
    "MLHPC_REQUEUE",
    "MLHPC_REPLACE_FAILED",
    "MLHPC_SPARES",
    "MLHPC_PREFLIGHT",
    "MLHPC_PREFLIGHT_S",
    "MLHPC_PREFLIGHT_HISTORY",
    "MLHPC_PREFLIGHT_DIRECTORY",
)
# The most active first: a job of several array tasks has the state of its most active task
NOT_KNOWN = "not known"  # the state of a job where Slurm does not answer
ACTIVE_STATES = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "PENDING")
ANSWER_TIMEOUT_S = 30


def make_clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, without sbatch's options, an outer job's variables and settings of
    the script.
    """

    def foreign(name: str) -> bool:
        return name in SCRIPT_VARIABLES or (name.startswith(("SBATCH_", "SLURM_")) and name != "SLURM_CONF")

    return {name: value for name, value in environ.items() if not foreign(name)}


def parse_job_id(text: str) -> str:
    """Parse the job id that ``sbatch --parsable`` prints: ``123`` or ``123;cluster``. InputError otherwise."""
    match = re.search(r"^(\d+)(?:;\S+)?$", text.strip(), re.MULTILINE)
    if match is None:
        raise InputError(
            f"sbatch answered {text.strip()[:200]!r}: expected a job id; squeue --me shows whether the job is queued"
        )
    return match.group(1)


def submit_script(script: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Give a script to sbatch and return the job id. InputError has sbatch's message in one line."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            env=make_clean_environment(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise InputError("no sbatch on PATH: submit on a login node, or see the script with --dry-run") from None
    if done.returncode:
        message = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
        raise InputError(f"sbatch refused {script.name}: {message or f'exit code {done.returncode}'}")
    return parse_job_id(done.stdout)


def parse_squeue(text: str) -> dict[str, str]:
    """Parse lines ``<job id> <array index> <state>``. Returns the state of each job and of each task, as 7 and 7_0.

    The state of a job is that of its most active task.
    """
    states: dict[str, set[str]] = {}
    for words in map(str.split, text.splitlines()):
        if len(words) == 3:
            job, index, state = words
            for name in (job, *([f"{job}_{index}"] if index.isdecimal() else [])):
                states.setdefault(name, set()).add(state)
    return {name: _select_most_active(found) for name, found in states.items()}


def parse_scontrol(text: str) -> str | None:
    """Parse the state of the most active array task from ``scontrol show job``. None if it prints none."""
    states = set(re.findall(r"\bJobState=(\w+)", text))
    return _select_most_active(states) if states else None


def fetch_job_states(ids: Iterable[str]) -> dict[str, str]:
    """Return the state of each job that squeue or scontrol still knows; `NOT_KNOWN` if neither answers.

    A task of an array that squeue lists has an entry too, as 7_0.
    """
    ids = sorted(set(ids))
    if not ids:
        return {}
    # %F is the job id without the number of an array task, %K that number, %T the long name of the state. With --array
    # tasks that wait have a line each.
    listed = _query_slurm("squeue", "--array", "--noheader", "--format=%F %K %T", f"--jobs={','.join(ids)}")
    states = parse_squeue(listed or "")
    shown: str | None = ""
    for job in ids:
        if job in states:
            continue
        if shown is not None:  # who does not answer once is not asked again
            shown = _query_slurm("scontrol", "show", "job", job)
        state = parse_scontrol(shown or "") or (NOT_KNOWN if shown is None and listed is None else None)
        if state is not None:
            states[job] = state
    return states


def list_started_jobs(run: Path) -> set[str]:
    """List the ids of all jobs whose script started in this run folder, including jobs submitted by hand."""
    # Files of job 123: `123` or `123_<task>` with an exit code, and the same with `.running` while the script runs.
    names = (re.fullmatch(r"(\d+)(_\d+)?(\.running)?", path.name) for path in (run / "exit").glob("*"))
    return {match[1] for match in names if match}


def may_be_running(run: Path, job: str) -> bool:
    """Return True unless the files of a job's script say that it has ended."""
    # An array has a file per task: one task may still run when others have ended.
    return not list_exit_codes(run, job) or any((run / "exit").glob(f"{job}*.running"))


def list_exit_codes(run: Path, job: str) -> dict[int | None, int]:
    """Return the exit codes that the job's script wrote, by array task (None: no array). A killed task has none."""
    codes: dict[int | None, int] = {}
    for path in sorted((run / "exit").glob(f"{job}*")):
        # The pattern of glob also finds job 1234 for 123.
        if match := re.fullmatch(rf"{job}(?:_(\d+))?", path.name):
            text = ""
            with suppress(OSError):  # a file that is larger than a number, or no file
                text = read_bytes(path, EXIT_CODE_BYTES).decode(errors="replace").strip()
            if text.isascii() and text.isdigit():
                codes[None if match[1] is None else int(match[1])] = int(text)
    return codes


def _select_most_active(states: set[str]) -> str:
    # If no task is active, any state will do, but the same one at every call.
    return next((state for state in ACTIVE_STATES if state in states), min(states))


def _query_slurm(*command: str) -> str | None:
    """Return the standard output of a query. None if the program is missing, or cannot ask Slurm.

    "Invalid job id" is an answer: the job no longer exists.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode and "Invalid job id" not in done.stderr else done.stdout
