"""`mlhpc doctor`: checks this machine for runs here, on several nodes and through a scheduler, and says what to do.

Versions are read from installed metadata. Packages are imported in another process, MPI is loaded, and two ranks are
run. A launcher and an mpi4py of different MPIs start without an error, as two worlds of one rank.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

import click

from mlhpc.suite import VERSION
from mlhpc.suite.cli.options import JSON, format_option, ranks_option
from mlhpc.suite.errors import PACKAGES, InputError, find_pip_requirement
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, render_bytes, render_duration
from mlhpc.suite.launch import local
from mlhpc.suite.launch.job import Job, SystemFile, find_system, read_system
from mlhpc.suite.launch.local import make_mpiexec_command, make_trial_environment
from mlhpc.suite.launch.schedulers import load_dialect
from mlhpc.suite.launch.script import render_directives
from mlhpc.suite.launcher import (
    SHARED_MEMORY,
    SHARED_NEEDED_BYTES,
    describe_launcher,
    find_launch,
    render_unset_command,
)
from mlhpc.suite.machine.probes.allowance import UsableResources, find_usable_resources
from mlhpc.suite.machine.probes.collect import (
    is_loopback,
    is_synchronised,
    list_own_addresses,
    measure_clock_skew,
    read_hostname,
)
from mlhpc.suite.machine.probes.processor import find_machine_root, is_simulated
from mlhpc.suite.processes import make_python_command
from mlhpc.suite.shadowed import describe_location

Purpose = Literal["local", "nodes", "slurm", "system", "extra"]
PYTHON_NEEDED = (3, 11)  # as pyproject.toml
FREE_NEEDED_BYTES = 2 << 30
MEMORY_PER_RANK_BYTES = 512 << 20  # a rank of CosmoFlow smoke has 442 MiB resident at its peak
# A rank over gloo had 44 + 2 per rank files and sockets open (2 to 16 ranks measured). Twice that, and shards and
# Python beside it
FILES, FILES_PER_RANK = 128, 4
CPU_TIME_S = 600  # of a process; the threads of a rank of size smoke take minutes together
SKEW_S = 1.0  # clocks that differ by more confuse file times: what looks older may be newer
TIMEOUT_S = 60  # of a command that is asked
# What needs each module
NEEDED: Mapping[str, Purpose] = {
    "psutil": "local",
    "torch": "local",
    "h5py": "local",
    "numpy": "local",
    "google_crc32c": "local",
    "pandas": "extra",
    "altair": "extra",
    "mlperf_logging": "extra",
}

# A module that a PYTHONPATH puts first has another file than the package whose metadata are found
IMPORT_PROGRAM = """
import importlib, importlib.util, sys
from mlhpc.suite.shadowed import describe_shadowed
for name in sys.argv[1:]:
    file, hidden, problem = "", "", ""
    try:
        spec = importlib.util.find_spec(name)
        file = str(spec.origin or next(iter(spec.submodule_search_locations))) if spec else ""
        importlib.import_module(name)
    except Exception as error:
        hidden = describe_shadowed(error)
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    print("IMPORT", name, file, hidden, problem, sep="\\t", flush=True)
"""


@dataclass(frozen=True)
class Check:
    """One check. ``expected`` is "" if any value will do.

    ``fix`` says what to do if it is not ``ok``. ``purpose`` names the runs that need it.
    """

    name: str
    ok: bool
    found: str
    purpose: Purpose
    fix: str = ""
    expected: str = ""


@click.command(
    epilog="""\b
Examples:
  mlhpc doctor
  mlhpc doctor --ranks 64             are memory and the limit of open files enough for 64 ranks?
  srun -N 2 --ntasks-per-node=1 mlhpc doctor --format json
  mlhpc doctor --system mysite        what can be checked of a system file without a job

\b
Exit codes: 0 a local run can start, 1 something it needs is missing. With --system: the same of its jobs.
"""
)
@click.option(
    "--system", "system_name", help="Check this system file too: a name under submissions/systems, or a .yaml file."
)
@ranks_option(2, "Number of MPI ranks to check memory and open files for.")
@format_option()
def doctor(system_name: str | None, ranks: int, style: str) -> None:
    """Check this machine for local, multi-node and Slurm runs; say what is missing and how to get it."""
    system = read_system(find_system(system_name)) if system_name else None
    root = find_machine_root(os.environ)
    loaded, library = check_mpi_load()
    checks = [
        *check_python(),
        *check_launch(os.environ),
        *loaded,
        *check_mpi(),
        *check_machine(find_usable_resources(), ranks),
        *check_folders(os.environ),
    ]
    checks += [
        *check_node_name(root),
        *check_clock(Path.cwd(), simulated=is_simulated(root)),
        *(check_slurm(library) if system is None else check_system(system)),
    ]
    if style == JSON:
        print_line(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for line in render_checks(checks):
            print_line(line)
    sys.exit(ExitCode.OK if can_run(checks, "system" if system else "local") else ExitCode.FINDINGS)


def can_run(checks: Iterable[Check], purpose: Purpose) -> bool:
    """Return True if nothing that a purpose needs is missing."""
    return all(check.ok for check in checks if check.purpose == purpose)


def render_checks(checks: Sequence[Check]) -> list[str]:
    """Render the checks as lines for a terminal, grouped by purpose."""
    titles: dict[Purpose, str] = {
        "local": "Local runs",
        "nodes": "Runs on several nodes",
        "slurm": "Slurm runs",
        "system": "Jobs of this system file",
        "extra": "Analysis and checks",
    }
    text = [f"mlhpc {VERSION} on {platform.node()}"]
    if not any(check.purpose == "system" for check in checks):
        del titles["system"]
    for purpose, title in titles.items():
        ready = "ready" if can_run(checks, purpose) else "something is missing"
        text += ["", f"{title}: {ready}"]
        for check in checks:
            if check.purpose == purpose:
                line = f"  {'ok     ' if check.ok else 'MISSING'}  {check.name:<14} {check.found}"
                line += f"; expected {check.expected}" if check.expected and not check.ok else ""
                line += f"; fix: {check.fix}" if check.fix and not check.ok else ""
                text.append(line)
    return text


def check_python() -> list[Check]:
    """Check the interpreter and the packages: by their metadata, and by an import in another process."""
    running = sys.version_info[:2]
    wanted = f"Python {'.'.join(map(str, PYTHON_NEEDED))} or newer"
    here = f"{platform.python_version()} {sys.executable}"
    checks = [Check("python", running >= PYTHON_NEEDED, here, "local", f"install {wanted}", wanted)]
    imported = _import_packages()
    for module, purpose in NEEDED.items():
        name, install = PACKAGES[module][0], f"{sys.executable} -m pip install {find_pip_requirement(module)}"
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            checks.append(Check(name, False, "not installed", purpose, install, "installed"))
            continue
        file, hidden, problem = imported.get(module, ("", "", "its import ended the process"))
        elsewhere = describe_location(file) if file else ""
        fix = "env -u PYTHONPATH mlhpc …" if hidden or (elsewhere and "PYTHONPATH" in os.environ) else install
        if hidden:
            problem = f"{hidden}: {problem}"
        if not problem and not Path(file).is_relative_to(str(installed.locate_file(""))):
            problem = f"hides the package that is installed in {installed.locate_file('')}"
        shown = f"{installed.version}{elsewhere}" + (f": {problem}" if problem else "")
        checks.append(Check(name, not problem, shown, purpose, fix, "a package that can be imported"))
    return checks


def _import_packages() -> dict[str, tuple[str, str, str]]:
    """Import every module in another process, as a run would.

    Return by module: its file, the modules it needs that a PYTHONPATH hides, and the problem. "" if there is none.
    """
    answer = _run_command(make_python_command("-c", IMPORT_PROGRAM, *NEEDED))
    rows = [line.split("\t") for line in answer.output.splitlines() if line.startswith("IMPORT\t")]
    return {name: (file, hidden, problem) for _, name, file, hidden, problem in rows}


def check_launch(environ: Mapping[str, str]) -> list[Check]:
    """Check whether commands take themselves for ranks of a launcher. Say what to do about it in a person's shell."""
    try:
        launch, found = find_launch(environ), describe_launcher(environ)
    except InputError as error:
        # The message of `find_launch` ends with what to do.
        found, _, fix = str(error).partition("; ")
        return [Check("launcher", False, found, "local", fix)]
    if launch is not None:
        found += ": --ranks N starts N ranks here" if launch.size == 1 else f"; {render_unset_command(environ)}"
    return [Check("launcher", True, found, "local")]


def check_mpi_load() -> tuple[list[Check], str]:
    """Load mpi4py and its MPI library in another process. Also return the library's version, or ""."""
    return judge_mpi_load(_run_command(make_python_command("-c", local.LOAD_PROGRAM)), local.find_site(os.environ))


def judge_mpi_load(answer: CommandResult, site: local.SiteMpi) -> tuple[list[Check], str]:
    """Judge the output of a process that loads MPI."""
    loaded = local.parse_loaded_library(answer.output)
    if loaded is not None:
        library, path = loaded
        return [Check("mpi4py", True, f"loads {library[:60]}" + (f" from {path}" if path else ""), "local")], library
    last = answer.output.strip().splitlines()[-1:] or [f"exit code {answer.code}"]
    fix = local.explain_fix(site, output=answer.text)
    # With a site's MPI the wheel would be the wrong one: mpi4py is built against the site's.
    if "No module named 'mpi4py'" in answer.output and not site.mpicc:
        fix = f"{sys.executable} -m pip install 'mlhpc[run,mpi]'"
    return [Check("mpi4py", False, last[0][:120], "local", fix, "an MPI library that loads")], ""


def check_mpi() -> list[Check]:
    """Check that mpiexec and mpi4py are of the same MPI: two ranks must be in one world."""
    try:
        command = make_mpiexec_command(2)
    except InputError as error:
        # The last part of the message is the command that installs an mpiexec.
        return [Check("mpiexec", False, "none", "local", str(error).rpartition(": ")[2], "mpiexec on PATH")]
    # As commands start their ranks: without the variables of a launcher around this one
    answer = _run_command(
        [*command, *make_python_command("-c", local.WORLD_PROGRAM)], make_trial_environment(os.environ, ranks=2)
    )
    launcher = local.parse_family(_run_command([command[0], "--version"]).output) or "unknown"
    return [judge_mpi(command[0], answer, local.find_site(os.environ), launcher)]


def judge_mpi(mpiexec: str, answer: CommandResult, site: local.SiteMpi, launcher: str) -> Check:
    """Judge the output of two ranks; ``launcher`` is the MPI that mpiexec belongs to."""
    worlds = local.parse_worlds(answer.output)
    library = worlds[0][1][:60] if worlds else ""
    if [ranks for ranks, _ in worlds] == [2]:
        return Check("mpiexec", True, f"{mpiexec}: 2 ranks, {library}", "local")
    expected, fix = "2 ranks in one world", local.explain_fix(site, output="" if worlds else answer.text)
    if worlds:
        found = f"{mpiexec} ({launcher}) starts 2 processes that do not see each other: mpi4py belongs to {library}"
        return Check("mpiexec", False, found, "local", fix, expected)
    last = answer.output.strip().splitlines()[-1:] or [f"exit code {answer.code}"]
    return Check("mpiexec", False, f"{mpiexec}: {last[0][:100]}", "local", fix, expected)


def check_machine(allowed: UsableResources, ranks: int) -> list[Check]:
    """Check what a number of ranks on this node needs: cores, memory, open files."""
    quota = f" of {len(allowed.cpus)}, the control group's quota" if allowed.cores < len(allowed.cpus) else ""
    needed = ranks * MEMORY_PER_RANK_BYTES
    free = allowed.memory_free
    limit = f", limit of the control group {render_bytes(allowed.memory_limit)}" if allowed.memory_limit else ""
    total = f" of {render_bytes(allowed.memory_total)}" if allowed.memory_total else ""
    memory = Check(
        "memory free",
        free is None or free >= needed,
        "unknown" if free is None else f"{render_bytes(free)}{total}{limit}",
        "local",
        "end what else runs here, ask the scheduler for more memory, or use fewer ranks",
        f"{render_bytes(needed)} for {ranks} ranks",
    )
    cores = Check("cores", True, f"{allowed.cores} usable{quota}", "local")
    return [cores, memory, _check_open_files(allowed, ranks), *_check_cpu_time(allowed.cpu_time_s)]


def _check_cpu_time(limit_s: int | None) -> list[Check]:
    """Check the CPU time that a process may take, where it is limited: the kernel ends what takes more."""
    if limit_s is None:
        return []
    fix = "ulimit -t unlimited, or a shell or job without this limit (limits.conf)"
    found, needed = f"{limit_s} s per process (ulimit -t)", f"{CPU_TIME_S} s or more"
    return [Check("CPU time", limit_s >= CPU_TIME_S, found, "local", fix, needed)]


def _check_open_files(allowed: UsableResources, ranks: int) -> Check:
    needed, soft, most = FILES + FILES_PER_RANK * ranks, allowed.open_files, allowed.open_files_most
    raised = most is None or most >= needed
    return Check(
        "open files",
        soft is None or soft >= needed,
        ("unlimited or unknown" if soft is None else f"{soft}") + (f" (hard limit {most})" if most else ""),
        "local",
        f"ulimit -n {needed}" if raised else "have the hard limit raised (limits.conf, or the scheduler's own limit)",
        f"{needed} for {ranks} ranks",
    )


def check_folders(environ: Mapping[str, str]) -> list[Check]:
    """Check the folders that runs, data and temporary files go to."""
    fix = "export {}=<a writable folder with room>"
    data = Path(environ.get("MLHPC_DATA") or "data")
    places = [("this folder", Path.cwd(), FREE_NEEDED_BYTES, "run where there is room, or give -o and -d other places")]
    places.append(("data", _find_existing_folder(data), FREE_NEEDED_BYTES, fix.format("MLHPC_DATA")))
    if "SCRATCH" in environ:
        places.append(("$SCRATCH", Path(environ["SCRATCH"]), FREE_NEEDED_BYTES, fix.format("SCRATCH")))
    temporary = Path(environ.get("TMPDIR") or tempfile.gettempdir())
    places.append(("temporary", temporary, FREE_NEEDED_BYTES, fix.format("TMPDIR")))
    places.append((str(SHARED_MEMORY), SHARED_MEMORY, SHARED_NEEDED_BYTES, "mount -o remount,rw,size=1G /dev/shm"))
    return [*(_check_space(*place) for place in places), Check("quota", True, _read_quota(), "local")]


def _find_existing_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists. The path would be made there."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def check_node_name(root: Path) -> list[Check]:
    """Check that /etc/hosts does not map this node's name to loopback alone. Other nodes could not reach it."""
    name, addresses = read_hostname(root), list_own_addresses(root)
    looped = bool(addresses) and all(map(is_loopback, addresses))
    found = f"{name}: {', '.join(addresses) or 'not in /etc/hosts, left to the name service'}"
    fix = f"remove {name} from that line of /etc/hosts, or give it the address of the network between nodes"
    return [Check("host name", not looped, found, "nodes", fix, "an address that other nodes reach")]


def check_clock(folder: Path, *, simulated: bool = False) -> list[Check]:
    """Compare this node's clock with the file server's. Check, if the kernel says it, that a time service keeps it."""
    if simulated:
        return [Check("clock", True, "not looked at: a simulated machine has none", "nodes")]
    return judge_clock(measure_clock_skew(folder), is_synchronised(), folder)


def judge_clock(skew: float | None, synchronised: bool | None, folder: Path) -> list[Check]:
    """Judge the difference in seconds between the file server's clock and this node's, and the kernel's state."""
    fix = "start a time service (chronyd, systemd-timesyncd) on the nodes and the file server"
    if skew is None:
        difference = Check("clock", True, f"not compared: no file can be written in {folder}", "nodes")
    else:
        found = (
            f"a new file in {folder} is {render_duration(abs(skew))} {'ahead of' if skew > 0 else 'behind'} this node's"
            " clock"
        )
        difference = Check("clock", abs(skew) <= SKEW_S, found, "nodes", fix, f"at most {render_duration(SKEW_S)}")
    state = {True: "synchronised", False: "not synchronised", None: "the kernel does not say"}[synchronised]
    return [difference, Check("time service", synchronised is not False, state, "nodes", fix, "synchronised")]


def check_slurm(library: str = "") -> list[Check]:
    """Check the client commands, whether a controller answers, and how srun can connect ranks of this MPI library."""
    programs = ("sbatch", "srun", "squeue", "scancel", "sinfo")
    missing = [name for name in programs if shutil.which(name) is None]
    install = "use a login node, or as root: apt-get install -y slurm-wlm munge"
    if missing:
        return [Check("commands", False, f"no {', '.join(missing)} on PATH", "slurm", install)]
    checks = [Check("commands", True, ", ".join(programs), "slurm")]
    # Slurm's commands can be installed where no controller answers.
    partitions = _run_command(["sinfo", "--noheader", "--format=%P %D nodes %T"])
    text = "; ".join(line.strip() for line in partitions.output.strip().splitlines())
    fix = "export SLURM_CONF=<the site's slurm.conf>, or ask whether slurmctld runs"
    checks.append(Check("controller", partitions.code == 0 and bool(text), text[:160] or "no answer", "slurm", fix))
    if partitions.code == 0:
        checks.append(judge_srun(parse_mpi_types(_run_command(["srun", "--mpi=list"]).output), library))
    return checks


def check_system(system: SystemFile) -> list[Check]:
    """Check what a system file says, as far as a login node knows it: the scheduler, the queue, paths and programs."""
    dialect, site = load_dialect(system.kind), system.site
    checks = [Check("scheduler", True, f"{dialect.TITLE} ({dialect.TRIED})", "system")]
    programs = dict.fromkeys((*dialect.SUBMIT[:1], *(words[0] for words in dialect.CHECKS.values())))
    runtime = system.container.runtime
    programs |= {"apptainer": None} if runtime == "apptainer" and not site.modules else {}
    missing = [name for name in programs if shutil.which(name) is None]
    found = f"no {', '.join(missing)} on PATH" if missing else ", ".join(programs)
    checks.append(Check("commands", not missing, found, "system", "use a login node of this system"))
    for name, words in dialect.CHECKS.items():
        # A queue that the file does not name is the scheduler's choice.
        wanted = [key for key in ("queue", "parallel_environment") if f"{{{key}}}" in " ".join(words)]
        if words[0] in missing or any(getattr(site, key) is None for key in wanted):
            continue
        answer = _run_command([word.format(**{key: getattr(site, key) for key in wanted}) for word in words])
        text = "; ".join(line.strip() for line in answer.output.strip().splitlines())[:120]
        # A scheduler that does not know a name says so with it; one that cannot be reached speaks of something else.
        named = [key for key in wanted if not text or re.search(rf"\b{re.escape(getattr(site, key))}\b", answer.output)]
        fix = f"correct site.{named[0]}" if named else "ask whether the scheduler runs, and from which hosts it answers"
        checks.append(Check(name, answer.code == 0 and bool(text), text or "no answer", "system", fix, "an answer"))
    paths = {"site.python": site.python, "container.image": system.container.image}
    for key, value in paths.items():
        # Variables of a compute node say nothing here.
        if value and value.startswith("/") and "$" not in value:
            there = Path(value).exists()
            checks.append(
                Check(key, there, value, "system", f"correct {key}, or make this file", "a file that is there")
            )
    checks += check_image(system)
    try:
        job = Job("workload", "size", "size", system, nodes=1, ranks_per_node=system.resources.ranks_per_node)
        list(render_directives(job, dialect))
        dialect.render_environment(job)
    except InputError as error:
        checks.append(Check("job script", False, str(error), "system", "correct the system file"))
    return checks


def check_image(system: SystemFile) -> list[Check]:
    """Check that an image starts, which MPI is in it, and whether Slurm outside can connect its ranks."""
    image = system.container.image
    if system.container.runtime != "apptainer" or shutil.which("apptainer") is None or image is None or "$" in image:
        return []
    load = make_python_command("-c", local.LOAD_PROGRAM, python=system.site.python or "python3")
    answer = _run_command(["apptainer", "exec", image, *load])
    checks, library = judge_mpi_load(answer, local.find_site(os.environ))
    fix = "make the image by containers/mlhpc.def"
    checks = [replace(check, name="MPI in image", purpose="system", fix=fix) for check in checks]
    if library and system.kind == "slurm" and system.site.mpi != "none":
        types = parse_mpi_types(_run_command(["srun", "--mpi=list"]).output)
        wanted = [name for name in types if system.site.mpi in (None, name)]
        checks.append(replace(judge_srun(wanted, library), name="PMI outside", purpose="system"))
    return checks


def judge_srun(types: Sequence[str], library: str) -> Check:
    """Judge whether srun can connect ranks of an MPI library ("": none). Without a plug-in they use TCP."""
    fitting = local.list_srun_plugins(library, types)
    known = ", ".join(types) or "none"
    if fitting:
        return Check("srun --mpi", True, f"{fitting[0]} for {library[:40] or 'MPI'} (of {known})", "slurm")
    fix = "set site.mpi to none (ranks connect over TCP), or build mpi4py against the MPI that Slurm knows"
    return Check(
        "srun --mpi", False, f"{known}: none connects {library[:40] or 'MPI'}", "slurm", fix, "a fitting plug-in"
    )


def parse_mpi_types(text: str) -> list[str]:
    """Parse the output of ``srun --mpi=list``, whose wording differs between Slurm releases."""
    words = re.findall(r"^(?:srun: )?\s*(?:MPI types are\.\.\.)?\s*([a-z0-9_]+)\s*$", text, re.MULTILINE)
    return [word for word in dict.fromkeys(words) if word != "none"]


@dataclass(frozen=True)
class CommandResult:
    """The exit code of a command and its output, both streams together."""

    code: int
    output: str

    @property
    def text(self) -> str:
        """What was printed, and the signal that ended the command."""
        number = -self.code if self.code < 0 else self.code - 128
        return f"{self.output}\nsignal {number}" if 0 < number < 64 else self.output


def _run_command(command: Sequence[str], environ: Mapping[str, str] | None = None) -> CommandResult:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,  # mpiexec reads it, and with it what is typed for the next command
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            env=environ,
        )
    except FileNotFoundError:
        # 127 and 124 are the codes of a shell and of timeout(1) for these cases.
        return CommandResult(127, f"{command[0]}: not found")
    except subprocess.TimeoutExpired:
        return CommandResult(124, f"no answer in {TIMEOUT_S} s")
    return CommandResult(done.returncode, done.stdout)


def _check_space(name: str, folder: Path, needed_bytes: int, fix: str) -> Check:
    """Check that a folder can be written to and has room."""
    if not os.access(folder, os.W_OK):
        return Check(name, False, f"{folder} cannot be written", "local", fix, "a folder that can be written")
    free = shutil.disk_usage(folder).free
    expected = f"{render_bytes(needed_bytes)} or more"
    return Check(name, free >= needed_bytes, f"{folder}, {render_bytes(free)} free", "local", fix, expected)


def _read_quota(run: Callable[[Sequence[str]], CommandResult] = _run_command) -> str:
    """Read this user's quota from the quota command, as one line."""
    answer = run(["quota", "-s"])
    if answer.code == 127:
        return "no quota command here"
    rows = [" ".join(line.split()) for line in answer.output.strip().splitlines()]
    return rows[-1][:120] if rows else "none set"
