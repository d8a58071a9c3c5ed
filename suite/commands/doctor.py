"""`mlhpc doctor`: shows what this machine has for local and Slurm runs, and a command that fixes what is missing.

Versions are read from installed metadata, so nothing heavy is imported. MPI is tested by running two ranks: a launcher and
an mpi4py that do not fit together start without an error, as two worlds of one rank.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import click

from suite import VERSION
from suite.launch.cost import render_bytes
from suite.launch.local import mpiexec_command

Purpose = Literal["local", "slurm", "extra"]
PYTHON_NEEDED = (3, 11)
FREE_NEEDED_BYTES = 2 << 30
SHARED_NEEDED_BYTES = 256 << 20
TIMEOUT_S = 60
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where MPI and NCCL exchange within a node
# Run by two processes: one line from one world of two, or two lines from two worlds of one
MPI_PROGRAM = """
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() == 0:
    print("RANKS", MPI.COMM_WORLD.Get_size(), " ".join(MPI.Get_library_version().splitlines()[0].split()), flush=True)
"""
# (package, what needs it, the extra that installs it)
PACKAGES: tuple[tuple[str, Purpose, str], ...] = (
    ("torch", "local", "run"),
    ("mpi4py", "local", "run"),
    ("h5py", "local", "run"),
    ("numpy", "local", "run"),
    ("google-crc32c", "local", "run"),
    ("pandas", "extra", "analysis"),
    ("matplotlib", "extra", "analysis"),
    ("mlperf_logging", "extra", "official"),
)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``fix`` is a command that repairs it; ``purpose`` is what cannot work without it."""

    name: str
    ok: bool
    found: str
    purpose: Purpose
    fix: str = ""


HELP_GROUP = "Run"
HELP_ORDER = 2


@click.command(
    epilog="""\b
Examples:
  mlhpc doctor
  mlhpc doctor --json

\b
Exit codes: 0 a local run can start, 1 something it needs is missing.
"""
)
@click.option("--json", "as_json", is_flag=True, help="One JSON list on standard output.")
def doctor(as_json: bool) -> None:
    """Show what is there and what is missing for local and Slurm runs, with the line that fixes it."""
    checks = [check for group in (python_checks, mpi_checks, machine_checks, slurm_checks) for check in group()]
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for line in lines(checks):
            click.echo(line)
    sys.exit(0 if can_run(checks, "local") else 1)


def can_run(checks: Iterable[Check], purpose: Purpose) -> bool:
    """True if nothing that a purpose needs is missing."""
    return all(check.ok for check in checks if check.purpose == purpose)


def lines(checks: Sequence[Check]) -> list[str]:
    """The checks as lines for a terminal, grouped by purpose."""
    titles: dict[Purpose, str] = {"local": "Local runs", "slurm": "Slurm runs", "extra": "Analysis and checks"}
    text = [f"mlhpc {VERSION} on {platform.node()}"]
    for purpose, title in titles.items():
        ready = "ready" if can_run(checks, purpose) else "something is missing"
        text += ["", f"{title}: {ready}"]
        for check in checks:
            if check.purpose == purpose:
                text.append(f"  {'ok     ' if check.ok else 'MISSING'}  {check.name:<14} {check.found}")
                if check.fix and not check.ok:
                    text.append(f"           {'':<14} fix: {check.fix}")
    return text


def python_checks() -> list[Check]:
    """Check the interpreter and, by their metadata, the packages."""
    running = sys.version_info[:2]
    fix = f"install Python {'.'.join(map(str, PYTHON_NEEDED))} or newer"
    checks = [Check("python", running >= PYTHON_NEEDED, f"{platform.python_version()} {sys.executable}", "local", fix)]
    for name, purpose, extra in PACKAGES:
        try:
            found, ok = version(name), True
        except PackageNotFoundError:
            found, ok = "not installed", False
        checks.append(Check(name, ok, found, purpose, f"{sys.executable} -m pip install 'mlhpc[{extra}]'"))
    return checks


def mpi_checks() -> list[Check]:
    """Check that mpiexec and mpi4py are of the same MPI: two ranks must be in one world."""
    try:
        command = mpiexec_command(2)
    except ValueError as error:
        return [Check("mpiexec", False, "none", "local", str(error).rpartition(": ")[2])]
    answer = _run([*command, sys.executable, "-c", MPI_PROGRAM])
    return [judge_mpi(command[0], answer)]


def judge_mpi(mpiexec: str, answer: Answer) -> Check:
    """Judge the output of two ranks."""
    worlds = re.findall(r"RANKS (\d+) ([^\n]+?)\s*(?=RANKS|\n|$)", answer.output)
    library = worlds[0][1][:60] if worlds else ""
    pip = f"{sys.executable} -m pip install --force-reinstall mpich mpi4py"
    if [ranks for ranks, _ in worlds] == ["2"]:
        return Check("mpiexec", True, f"{mpiexec}: 2 ranks, {library}", "local")
    if worlds:
        found = f"{mpiexec} starts 2 processes that do not see each other: mpi4py belongs to {library}"
        return Check("mpiexec", False, found, "local", pip)
    last = answer.output.strip().splitlines()[-1:] or [f"exit code {answer.code}"]
    return Check("mpiexec", False, f"{mpiexec}: {last[0][:100]}", "local", pip)


def machine_checks() -> list[Check]:
    """Check cores, memory and the folders that runs write to."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    checks = [
        Check("cores", True, f"{cores} usable by this process", "local"),
        Check("memory", True, render_bytes(memory), "local"),
        _space("this folder", Path.cwd(), FREE_NEEDED_BYTES, "run where there is room, or give -o and -d other places"),
        _space(str(SHARED_MEMORY), SHARED_MEMORY, SHARED_NEEDED_BYTES, "mount -o remount,size=1G /dev/shm"),
    ]
    fix = "export {}=<a writable folder with room>"
    if "SCRATCH" in os.environ:
        scratch = Path(os.environ["SCRATCH"])
        checks.append(_space("$SCRATCH", scratch, FREE_NEEDED_BYTES, fix.format("SCRATCH")))
    checks.append(_space("temporary", Path(tempfile.gettempdir()), FREE_NEEDED_BYTES, fix.format("TMPDIR")))
    checks.append(Check("quota", True, _quota(), "local"))
    return checks


def slurm_checks() -> list[Check]:
    """Check the client commands, whether a controller answers, and how srun can connect ranks."""
    programs = ("sbatch", "srun", "squeue", "scancel", "sinfo")
    missing = [name for name in programs if shutil.which(name) is None]
    install = "use a login node, or as root: apt-get install -y slurm-wlm munge"
    if missing:
        return [Check("commands", False, f"no {', '.join(missing)} on PATH", "slurm", install)]
    checks = [Check("commands", True, ", ".join(programs), "slurm")]
    partitions = _run(["sinfo", "--noheader", "--format=%P %D nodes %T"])
    text = "; ".join(line.strip() for line in partitions.output.strip().splitlines())
    fix = "export SLURM_CONF=<the site's slurm.conf>, or ask whether slurmctld runs"
    checks.append(Check("controller", partitions.code == 0 and bool(text), text[:160] or "no answer", "slurm", fix))
    if partitions.code == 0:
        types = parse_mpi_types(_run(["srun", "--mpi=list"]).output)
        usable = [name for name in types if name.startswith(("pmi", "cray"))]
        fix = "none needed: without one, set launcher.mpi to none and ranks connect over TCP"
        checks.append(Check("srun --mpi", True, ", ".join(usable) or "none", "slurm", fix))
    return checks


def parse_mpi_types(text: str) -> list[str]:
    """Parse the output of ``srun --mpi=list``, whose wording differs between Slurm releases."""
    words = re.findall(r"^(?:srun: )?\s*(?:MPI types are\.\.\.)?\s*([a-z0-9_]+)\s*$", text, re.MULTILINE)
    return [word for word in dict.fromkeys(words) if word != "none"]


@dataclass(frozen=True)
class Answer:
    """The exit code of a command and its output, both streams together."""

    code: int
    output: str


def _run(command: Sequence[str]) -> Answer:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        return Answer(127, f"{command[0]}: not found")
    except subprocess.TimeoutExpired:
        return Answer(124, f"no answer in {TIMEOUT_S} s")
    return Answer(done.returncode, done.stdout)


def _space(name: str, folder: Path, needed_bytes: int, fix: str) -> Check:
    """Check that a folder can be written to and has room."""
    if not os.access(folder, os.W_OK):
        return Check(name, False, f"{folder} cannot be written", "local", fix)
    free = shutil.disk_usage(folder).free
    return Check(
        name,
        free >= needed_bytes,
        f"{folder}, {render_bytes(free)} free of {render_bytes(needed_bytes)} needed",
        "local",
        fix,
    )


def _quota(run: Callable[[Sequence[str]], Answer] = _run) -> str:
    """The quota of this user in one line, from the quota command."""
    answer = run(["quota", "-s"])
    if answer.code == 127:
        return "no quota command here"
    rows = [" ".join(line.split()) for line in answer.output.strip().splitlines()]
    return rows[-1][:120] if rows else "none set"
