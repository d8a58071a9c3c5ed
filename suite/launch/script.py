"""Renders the job script: bash that a person can read, edit and submit without `mlhpc submit`.

One script for every scheduler (templates/job.sh). What differs stands in the dialects (`schedulers/`). It starts the worker
(docs/architecture.md) and needs neither root, accounting, ssh nor a container.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from mlhpc.suite.launch.job import Container, Job, Site
from mlhpc.suite.launch.schedulers import Dialect, load_dialect, render_command


def render_script(job: Job) -> str:
    """Render the job script from templates/job.sh. A line with an empty ``{{ name }}`` alone is left out."""
    parts = _render_parts(job, load_dialect(job.system.kind))
    # The line that sets the variable is in the script only if a text needs it.
    used = any(_APOSTROPHE in part for part in parts.values())
    parts["apostrophe"] = 'apostrophe="\'"' if used else ""

    def text(match: re.Match[str]) -> str:
        found = parts[match[1] or match[2]]
        return f"{found}\n" if found and match[1] else found

    return _PLACEHOLDER.sub(text, _read_template("job"))


_PLACEHOLDER = re.compile(r"^ *\{\{ (\w+) \}\}\n|\{\{ (\w+) \}\}", re.MULTILINE)  # a line of its own, or a part of one


def _read_template(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.sh").read_text(encoding="utf-8")


def _render_parts(job: Job, dialect: Dialect) -> dict[str, str]:
    """Return the texts for the template, by name. Text of a user is escaped for its place."""
    site, weak = job.system.site, job.mode == "weak"
    runs = (
        "the data set, made by one group"
        if job.makes_data
        else f"{job.instances} instances at once (throughput mode), each"
        if weak
        else f"{_render_count(job.runs, 'scored run')}, one after another,"
    )
    # Without a signal of the scheduler's the script ends the ranks itself.
    timer = not tuple(dialect.render_signal(job))
    return {
        # On many sites only a login shell defines `module`.
        "login": " -l" if site.modules else "",
        "kind": job.system.kind,
        "workload": job.workload,
        "size": job.size,
        "system": job.system.name,
        "what": f"{runs} of {_render_count(job.ranks, 'rank')} on {_render_count(job.nodes, 'node')}.",
        "example": dialect.EXAMPLE,
        "submit": render_command(dialect),
        "directives": "\n".join(render_directives(job, dialect)),
        "unused": "# shellcheck disable=SC2317,SC2329 # functions of trials" if job.makes_data else "",
        "modules": _render_refusal(dialect) + _render_modules(site),
        "environment_of_job": dialect.render_environment(job),
        "redirect": _render_redirect(job) if job.output and not dialect.WRITES_OUTPUT else "",
        "scratch": _escape_quoted(site.scratch) if site.scratch else "${TMPDIR:-/tmp}",
        "environment": "\n".join(
            f'export {name}="{_escape_quoted(value)}"' for name, value in site.environment.items()
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
        "mpi": site.mpi or dialect.MPI,
        "staging_directory": _escape_default(site.staging_directory or ""),
        "cache_drop_command": _escape_default(site.cache_drop_command or ""),
        "spares": str(job.spares),
        "preflight_settings": _render_preflight(job) if job.preflight else "",
        "requeue": str(int(site.requeue)),
        "timer": _TIMER.format(job.limit_s - job.system.resources.signal_margin_s) if timer else "",
        "stop": _STOP if timer else "",
        "site_options": "\n".join(_render_site_options(job)),
        "suite": _render_suite_command(job.system.container),
        "mode": job.mode,
        "setup": _render_setup(site),
        "preflight": _read_template("preflight").removesuffix("\n") if job.preflight else "",
        "data": f': "${{MLHPC_DATA:={_escape_default(site.data)}}}"; export MLHPC_DATA' if site.data else "",
        "loop": _render_loop(job),
    }


def _render_loop(job: Job) -> str:
    name = "data" if job.makes_data else "instances" if job.mode == "weak" else "trials"
    return _read_template(name).removesuffix("\n").replace("WORKLOAD", job.workload)


_TIMER = (
    ': "${{MLHPC_STOP_AFTER_S:={}}}" # of this script: then the ranks save and stop; the scheduler has no signal for it'
)
_STOP = """\
  ((SECONDS < MLHPC_STOP_AFTER_S)) || exit 143
  stop=(timeout --foreground --preserve-status "$((MLHPC_STOP_AFTER_S - SECONDS))")"""


def render_directives(job: Job, dialect: Dialect) -> Iterator[str]:
    """Yield the lines that the scheduler reads. A site's own lines that begin with # stay as they are, such as #DW."""
    yield from (f"{dialect.PREFIX} {each}" for each in dialect.render_header(job))
    yield from (f"{dialect.PREFIX} {each}" for each in dialect.render_signal(job))
    yield from (f"{dialect.PREFIX} {each}" for each in (dialect.render_array(job) if job.array else ()))
    for each in job.system.site.options:
        yield each if each.startswith("#") else f"{dialect.PREFIX} {each}"


def _render_redirect(job: Job) -> str:
    """Return the line that sends the job's own output to its folder: no scheduler has to read the folder's name."""
    assert job.output is not None
    return f'exec >> {shlex.quote(job.output)}/job_"$task".log 2>&1'


def _render_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _render_refusal(dialect: Dialect) -> str:
    """Render what ends a script that a person started by hand, before anything else."""
    if not dialect.IN_JOB:
        return ""
    said = f"this is no job of {dialect.TITLE} ({dialect.IN_JOB} is not set); submit it: {render_command(dialect)}"
    return f'[[ -n ${{{dialect.IN_JOB}:-}} ]] || {{\n  echo "$0: {said} $0" >&2\n  exit 2\n}}\n'


def _render_modules(site: Site) -> str:
    if not site.modules:
        return ""
    return f"module load {' '.join(site.modules)} || exit 2 # before set -u, which module functions seldom survive"


def _render_preflight(job: Job) -> str:
    history = _escape_default(job.system.site.preflight_history or "")
    return f"""\
: "${{MLHPC_PREFLIGHT_S:={job.preflight}}}" # seconds for measuring the nodes before the first trial
: "${{MLHPC_PREFLIGHT_HISTORY={history}}}" # folder of earlier measurements, for few nodes
: "${{MLHPC_PREFLIGHT_DIRECTORY=}}" # where storage is measured, where data are staged to; empty: $TMPDIR"""


def _render_site_options(job: Job) -> Iterator[str]:
    """Yield lines that give the site's options to what starts the suite, and those of a container by pyxis."""
    container = job.system.container
    for option in job.system.site.launch_options:
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


def _render_setup(site: Site) -> str:
    if not site.setup:
        return ""
    return f"""\
# Once per node, before the ranks: what they need there, such as the environment in TMPDIR.
place "$nodes" 0 1 1
# shellcheck disable=SC2016 # variables are expanded on the node
"${{start[@]}}" bash -euc {shlex.quote(chr(10).join(site.setup))} || {{
  echo "setup failed with exit code $?: no trial was started" >&2
  exit 1
}}
"""


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
