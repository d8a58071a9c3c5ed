"""`mlhpc doctor`: what is found, what was expected and what to do, on this machine and on those of the zoo."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlhpc.suite import launcher
from mlhpc.suite.commands.machine import doctor
from mlhpc.suite.commands.machine.doctor import (
    Check,
    CommandResult,
    can_run,
    check_folders,
    check_image,
    check_machine,
    check_mpi_load,
    check_node_name,
    check_system,
    judge_clock,
    judge_mpi,
    judge_mpi_load,
    judge_srun,
    parse_mpi_types,
    render_checks,
)
from mlhpc.suite.launch import local
from mlhpc.suite.launch.job import Container, Site, SystemFile
from mlhpc.suite.launch.local import SiteMpi
from mlhpc.suite.launch.schedulers import load_dialect
from mlhpc.suite.machine.probes.allowance import UsableResources, read_usable_resources
from mlhpc.suite.machine.probes.collect import is_loopback, is_synchronised, list_own_addresses, measure_clock_skew
from mlhpc.suite.machine.probes.processor import VARIABLE
from tests.fixtures.warm import warm_python
from tests.fixtures.zoo import Machine, every_machine, machine

LAPTOP = SiteMpi(None, (), False)
CLUSTER = SiteMpi(None, (), True)
LOADED = SiteMpi("/opt/ompi/bin/mpicc", ("openmpi/5.0",), True)
HALF_LOADED = SiteMpi(None, ("cray-mpich/8.1",), True)
REBUILD = "MPICC=/opt/ompi/bin/mpicc"


@pytest.mark.drawn(6)
@every_machine
def test_what_a_machine_lacks_for_a_rank_on_each_core_is_what_it_lacks(machine: Machine, zoo_root: Path) -> None:
    allowed = read_usable_resources(zoo_root)
    checks = [*check_machine(allowed, allowed.cores), *check_node_name(zoo_root)]
    assert [check.name for check in checks if not check.ok] == machine.expected["doctor"]
    assert all(check.found and (check.ok or (check.expected and check.fix)) for check in checks)


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "ok", "fix"),
    [
        (1024, 4096, 224, True, ""),
        (1023, 4096, 224, False, "ulimit -n 1024"),
        (1023, None, 224, False, "ulimit -n 1024"),
        (1023, 1023, 224, False, "have the hard limit raised"),
        (None, None, 8192, True, ""),
        (136, 136, 2, True, ""),
        (135, 136, 2, False, "ulimit -n 136"),
    ],
)
def test_open_files_are_held_against_the_ranks(
    soft: int | None, hard: int | None, ranks: int, ok: bool, fix: str
) -> None:
    allowed = UsableResources(frozenset({0}), open_files=soft, open_files_most=hard)
    check = next(each for each in check_machine(allowed, ranks) if each.name == "open files")
    assert check.ok == ok
    assert ok or check.fix.startswith(fix)
    assert check.expected.endswith(f" for {ranks} ranks")


@pytest.mark.parametrize(
    ("hosts", "ok"),
    [
        ("127.0.0.1 localhost", True),
        ("", True),
        ("127.0.1.1 n1", False),
        ("127.0.1.1\tn1.site n1\n", False),
        ("::1 n1", False),
        ("127.0.1.1 n1.site", True),  # another name than the node's own
        ("# 127.0.1.1 n1", True),
        ("127.0.1.1 n11", True),
        ("10.0.0.1 n1", True),
        ("127.0.1.1 n1\n10.0.0.1 n1", True),  # the name service has a choice
        ("127.0.1.1 localhost # n1", True),
        ("nonsense n1", True),
        ("127.0.1.1 N1 n1", False),
        ("fe80::1%eth0 n1", True),
        ("\0\0", True),
    ],
)
def test_a_host_name_that_leads_back_to_the_node_is_found(hosts: str, ok: bool, tmp_path: Path) -> None:
    for name, text in (("proc/sys/kernel/hostname", "n1\n"), ("etc/hosts", hosts)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (check,) = check_node_name(tmp_path)
    assert check.ok == ok, list_own_addresses(tmp_path)
    assert check.name == "host name"


def test_loopback_is_told_from_addresses_and_from_nonsense() -> None:
    assert [is_loopback(text) for text in ("127.0.0.1", "127.9.9.9", "::1")] == [True] * 3
    assert [is_loopback(text) for text in ("10.0.0.1", "fe80::1%eth0", "", "x", "127.0.0")] == [False] * 5


@pytest.mark.parametrize(
    ("skew", "synchronised", "ok"),
    [
        (0.0, True, [True, True]),
        (-0.01, None, [True, True]),  # the kernel stamps files with a clock of 4 to 10 ms
        (1.0, True, [True, True]),
        (1.1, True, [False, True]),
        (-3600.0, True, [False, True]),
        (0.0, False, [True, False]),
        (None, None, [True, True]),
    ],
)
def test_clocks_that_differ_are_found(skew: float | None, synchronised: bool | None, ok: list[bool]) -> None:
    checks = judge_clock(skew, synchronised, Path("/scratch"))
    assert [check.ok for check in checks] == ok
    assert skew is None or ("behind" if skew <= 0 else "ahead of") in checks[0].found


def test_the_clock_of_a_file_server_is_read_from_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skew = measure_clock_skew(tmp_path)
    assert skew is not None
    assert abs(skew) < 0.1, "a local file system has this node's clock"
    assert list(tmp_path.iterdir()) == []
    assert measure_clock_skew(tmp_path / "none") is None
    assert is_synchronised() in {True, False, None}
    here = "mlhpc.suite.machine.probes.collect.time.time"
    now = tmp_path.stat().st_mtime
    monkeypatch.setattr(here, lambda: now - 100)
    ahead = measure_clock_skew(tmp_path)
    assert ahead is not None
    assert 99 < ahead < 110


def test_two_ranks_of_one_world_are_the_same_mpi() -> None:
    check = judge_mpi("mpiexec", CommandResult(0, "RANKS 2 MPICH Version: 5.0.2\n"), LAPTOP, "mpich")
    assert (check.ok, check.found) == (True, "mpiexec: 2 ranks, MPICH Version: 5.0.2")


@pytest.mark.parametrize("end", ["\n", " "])
def test_two_worlds_of_one_are_two_mpis(end: str) -> None:
    output = f"RANKS 1 MPICH Version: 5.0.2{end}RANKS 1 MPICH Version: 5.0.2\n"
    check = judge_mpi("/usr/bin/mpiexec", CommandResult(0, output), LOADED, "openmpi")
    assert not check.ok
    assert "/usr/bin/mpiexec (openmpi) starts 2 processes that do not see each other" in check.found
    assert "mpi4py belongs to MPICH Version: 5.0.2" in check.found
    assert REBUILD in check.fix
    assert "pip uninstall -y mpich" in check.fix, "the wheel's library would be found before the site's"


@pytest.mark.parametrize(
    ("site", "words"),
    [
        (LAPTOP, "-m pip install --force-reinstall mpich mpi4py"),
        (CLUSTER, "module load NAME"),
        (
            LOADED,
            f"{REBUILD} {sys.executable} -m pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py",
        ),
        (HALF_LOADED, "module cray-mpich/8.1 has no mpicc on PATH"),
    ],
)
def test_the_advice_fits_the_site(site: SiteMpi, words: str) -> None:
    assert words in local.explain_fix(site, environ={})
    for output in ("", "Bus error", "gethostname failed", "Permission denied", "libmpi.so.40: cannot open"):
        said = local.explain_fix(site, output=output, environ={"HYDRA_LAUNCHER": "bogus", "PATH": ""})
        assert said.startswith("unset HYDRA_LAUNCHER, which changes")
        said = local.explain_fix(site, output=output, environ={"MPI4PY_LIBMPI": "/x", "MPI4PY_MPIABI": "openmpi"})
        assert said.startswith("unset MPI4PY_LIBMPI MPI4PY_MPIABI, which change ")


@pytest.mark.parametrize("set_to", [{"MPI4PY_LIBMPI": "/opt/none/libmpi.so"}, {"MPI4PY_MPIABI": "openmpi"}])
def test_a_variable_that_chose_another_mpi_is_named_by_doctor_and_by_a_run(
    set_to: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (set_to | {"PMI_RANK": "0", "PMI_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    advice = f"unset {next(iter(set_to))}, "
    (check,), _ = check_mpi_load()
    assert (check.ok, check.fix.startswith(advice)) == (False, True)
    program = "from mlhpc.suite.world import World; World.create()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert f"; {advice}" in done.stderr
    assert "PMI_RANK" not in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("large", [True, False])
def test_more_shared_memory_is_asked_for_only_where_there_is_little(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=(1 if large else 0) << 30))
    said = local.explain_fix(LAPTOP, output="Bus error (signal 7)", environ={})
    assert ("shm" in said) != large
    assert ("pip install" in said) == large


def test_a_limit_of_cpu_time_is_told_if_there_is_one() -> None:
    for limit_s, ok in ((None, []), (9, [False]), (599, [False]), (600, [True]), (10**6, [True])):
        checks = check_machine(UsableResources(frozenset({0}), cpu_time_s=limit_s), 1)
        assert [check.ok for check in checks if check.name == "CPU time"] == ok


@pytest.mark.parametrize(
    ("code", "output", "words"),
    [
        (1, "Fatal error in internal_Init: gethostname failed, File name too long", "host name of fewer than 64"),
        (1, "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Bus error (signal 7)", "/dev/shm"),
        (135, "", "/dev/shm"),
        (-7, "", "/dev/shm"),
        (1, "shm_open: /dev/shm/mpich: No space left on device", "/dev/shm"),
        (1, "write: No space left on device", "TMPDIR"),
        (1, "mkdir /tmp/ompi: Permission denied", "TMPDIR"),
        (1, "socket: Too many open files", "ulimit -n"),
        (137, "", "memory"),
        (1, "fork: Resource temporarily unavailable", "ulimit -u"),
        (1, 'HYDU_sock_connect: unable to connect from "a" to "a" (Connection refused)', "/etc/hosts"),
        (1, "unable to get host address for node7", "/etc/hosts"),
        (132, "", "built for this processor"),
        (1, "mpirun has detected an attempt to run mpirun as root.", "OMPI_ALLOW_RUN_AS_ROOT"),
        (1, "ImportError: libmpi.so.12: cannot open shared object file", "pip install"),
    ],
)
def test_the_remedy_is_one_for_the_failure(code: int, output: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "has_shared_memory", lambda: False)
    answer = CommandResult(code, f"{output}\nsome last line\n")
    for check in (judge_mpi("mpiexec", answer, LAPTOP, "mpich"), judge_mpi_load(answer, LAPTOP)[0][0]):
        assert words in check.fix
        assert ("pip install" in check.fix) == ("pip install" in words)


def test_the_site_is_found_beside_this_pythons_own_folder(tmp_path: Path) -> None:
    (tmp_path / "mpicc").write_text("#!/bin/sh\n")
    (tmp_path / "mpicc").chmod(0o755)
    own = Path(sys.executable).parent
    environ = {"PATH": f"{own}:{tmp_path}", "LOADEDMODULES": "gcc/13:OpenMPI/5.0:cuda/12", "MODULEPATH": "/m"}
    assert local.find_site(environ) == SiteMpi(str(tmp_path / "mpicc"), ("OpenMPI/5.0",), True)
    assert local.find_site({"PATH": str(own)}) == SiteMpi(None, (), False)


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("MPICH Version: 5.0.2", "mpich"),
        ("HYDRA build details:", "mpich"),
        ("Intel(R) MPI Library 2021.10", "mpich"),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", "mpich"),
        ("MVAPICH Version: 3.0", "mpich"),
        ("Open MPI v5.0.3, package: Open MPI", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.4", "openmpi"),
        ("prterun (PRRTE) 3.0.5", "openmpi"),
        ("", None),
        ("something else", None),
    ],
)
def test_the_family_of_an_mpi_is_read_from_its_version(text: str, family: str | None) -> None:
    assert local.parse_family(text) == family


@pytest.mark.parametrize(
    ("types", "library", "ok", "found"),
    [
        (["pmi2", "pmix"], "MPICH Version: 5.0.2", True, "pmi2"),
        (["cray_shasta", "none"], "CRAY MPICH version 8", True, "cray_shasta"),
        (["pmix_v4"], "Open MPI v5.0.3", True, "pmix"),
        (["pmi2"], "Open MPI v5.0.3", False, "none connects Open MPI"),
        ([], "MPICH Version: 5.0.2", False, "none: none connects"),
        (["pmi2"], "", True, "pmi2"),
        (["openmpi"], "", False, "none connects MPI"),
    ],
)
def test_srun_must_have_a_plug_in_for_the_library(types: list[str], library: str, ok: bool, found: str) -> None:
    check = judge_srun(types, library)
    assert check.ok == ok
    assert found in check.found
    assert ok or "site.mpi" in check.fix


@pytest.mark.parametrize(
    ("output", "ok", "found"),
    [
        (
            "LOADS MPICH Version: 5.0.2 FROM /site/lib/libmpi.so.12\n",
            True,
            "loads MPICH Version: 5.0.2 from /site/lib/libmpi.so.12",
        ),
        ("noise\nLOADS Open MPI v5.0.3 FROM\n", True, "loads Open MPI v5.0.3"),
        ("Traceback\nRuntimeError: cannot load MPI library\n", False, "RuntimeError: cannot load MPI library"),
        ("ImportError: libmpi.so.40: cannot open shared object file\n", False, "libmpi.so.40"),
        ("", False, "exit code 1"),
    ],
)
def test_mpi_is_loaded_and_not_believed(output: str, ok: bool, found: str) -> None:
    (check,), library = judge_mpi_load(CommandResult(1, output), CLUSTER)
    assert (check.name, check.ok, bool(library)) == ("mpi4py", ok, ok)
    assert found in check.found
    assert ok or "module load" in check.fix


def test_a_library_that_is_installed_but_does_not_load_is_missing(tmp_path: Path) -> None:
    """Its package list is as it should be: mpi4py is there."""
    environ = os.environ | {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so.12")}
    done = subprocess.run(
        [sys.executable, "-c", local.LOAD_PROGRAM], env=environ, capture_output=True, text=True, timeout=300
    )
    (check,), library = judge_mpi_load(CommandResult(done.returncode, done.stdout + done.stderr), LAPTOP)
    assert (check.ok, library) == (False, "")
    done = subprocess.run([sys.executable, "-c", local.LOAD_PROGRAM], capture_output=True, text=True, timeout=300)
    (check,), library = judge_mpi_load(CommandResult(done.returncode, done.stdout + done.stderr), LAPTOP)
    assert check.ok
    assert "libmpi" in check.found


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (CommandResult(1, "Traceback\nModuleNotFoundError: No module named 'mpi4py'\n"), "No module named 'mpi4py'"),
        (CommandResult(124, "no answer in 60 s"), "no answer in 60 s"),
        (CommandResult(5, ""), "exit code 5"),
    ],
)
def test_a_failed_try_says_its_last_line(answer: CommandResult, found: str) -> None:
    check = judge_mpi("mpiexec", answer, LAPTOP, "mpich")
    assert not check.ok
    assert check.found.endswith(found)


def test_the_folders_of_data_and_temporary_files_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    environ = {
        "MLHPC_DATA": str(tmp_path / "not" / "there"),
        "TMPDIR": str(tmp_path / "tmp"),
        "SCRATCH": str(tmp_path / "no"),
    }
    checks = {check.name: check for check in check_folders(environ)}
    assert checks["data"].found.startswith(f"{tmp_path}, "), "the data folder would be made there"
    assert checks["temporary"].found.startswith(f"{tmp_path / 'tmp'}, ")
    assert not checks["$SCRATCH"].ok
    assert "MLHPC_DATA" in checks["data"].fix


@pytest.mark.parametrize(
    "text",
    [
        "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n",
        "srun: MPI types are...\nsrun: pmix\nsrun: none\nsrun: pmi2\n",
    ],
)
def test_mpi_types_are_read_from_old_and_new_slurm(text: str) -> None:
    assert parse_mpi_types(text) == ["pmix", "pmi2"]


def test_the_screen_shows_the_fix_of_what_is_missing() -> None:
    checks = [
        Check("torch", False, "not installed", "local", "pip install torch"),
        Check("commands", True, "sbatch", "slurm", "apt-get install slurm-wlm"),
    ]
    text = "\n".join(render_checks(checks))
    assert "Local runs: something is missing\n  MISSING  torch          not installed; fix: pip install torch" in text
    assert "Slurm runs: ready" in text
    assert "apt-get" not in text
    assert not can_run(checks, "local")
    assert can_run(checks, "slurm")


def test_a_folder_that_cannot_be_written_or_is_full_is_missing(tmp_path: Path) -> None:
    assert doctor._check_space("here", tmp_path, 1, "fix").ok
    assert not doctor._check_space("here", tmp_path, 1 << 62, "fix").ok
    assert not doctor._check_space("here", tmp_path / "absent", 1, "fix").ok


def test_the_command_names_every_part_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlhpc", "doctor", "--format", "json"], capture_output=True, text=True, timeout=300
    )
    checks = {item["name"]: item for item in json.loads(done.stdout)}
    named = {
        "python",
        "torch",
        "mpi4py",
        "mpiexec",
        "cores",
        "memory free",
        "open files",
        "/dev/shm",
        "quota",
        "host name",
    }
    assert named | {"this folder", "data", "temporary", "clock", "commands"} <= set(checks)
    assert all(item["fix"] for item in checks.values() if not item["ok"])
    missing = [item for item in checks.values() if item["purpose"] == "local" and not item["ok"]]
    assert done.returncode == (1 if missing else 0)


def test_the_command_meets_a_machine_that_is_not_here(tmp_path: Path) -> None:
    environ = os.environ | {VARIABLE: str(machine("hosts_to_loopback").lay_out(tmp_path))}
    command = [*warm_python(), "-m", "mlhpc", "doctor", "--ranks", "4"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "MISSING  host name      node07: 127.0.1.1; expected an address that other nodes reach; fix: " in done.stdout
    assert (
        "MISSING  open files     64 (hard limit 64); expected 144 for 4 ranks; fix: have the hard limit raised"
        in done.stdout
    )


def test_a_system_file_is_checked_without_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tools := tmp_path / "tools").mkdir()
    for name, body in (("qsub", "exit 1"), ("qstat", '[[ $* != "-Q wrong" ]] && echo fine')):
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    system = SystemFile(name="s", kind="pbs", site=Site(queue="right", mpi="pals", python="$HOME/python"))
    assert [check.name for check in check_system(system) if not check.ok] == []
    wrong = Site(queue="wrong", mpi="palls", python="/nowhere/python")
    container = Container(runtime="apptainer", image="/nowhere/image.sif")
    checks = {
        check.name: check for check in check_system(SystemFile(name="s", kind="pbs", site=wrong, container=container))
    }
    bad = {"commands", "queue", "site.python", "container.image", "job script"}
    assert {name for name, check in checks.items() if not check.ok} == bad
    assert all(checks[name].fix for name in bad)
    assert "not run on a real PBS" in checks["scheduler"].found
    assert "did you mean 'pals'" in checks["job script"].found
    monkeypatch.setenv("PATH", str(tmp_path))
    assert any("no qsub, qstat on PATH" in line for line in render_checks(check_system(system)))


@pytest.mark.parametrize(
    ("kind", "said", "fix"),
    [
        ("pbs", "qstat: Unknown queue batch", "correct site.queue"),
        ("lsf", "batch: No such queue.", "correct site.queue"),
        ("pbs", "Connection refused; qstat: cannot connect to server pbs (errno=111)", "ask whether the scheduler runs"),
        ("lsf", "Failed in an LSF library call: LIM is down; try later", "ask whether the scheduler runs"),
        ("slurm", "sbatch: error: Unable to contact slurm controller", "ask whether the scheduler runs"),
        ("grid_engine", "error: unable to send message to qmaster using port 6444", "ask whether the scheduler runs"),
    ],
)  # fmt: skip
def test_a_scheduler_that_cannot_be_reached_is_not_a_wrong_queue(
    kind: str, said: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialect = load_dialect(kind)
    for name in {dialect.SUBMIT[0], *(words[0] for words in dialect.CHECKS.values())}:
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    checks = check_system(SystemFile(name="s", kind=kind, site=Site(queue="batch")))
    (found,) = [check for check in checks if check.name == "queue"]
    assert found.fix.startswith(fix)


@pytest.mark.parametrize(
    ("inside", "outside", "bad"),
    [
        (f'exec {sys.executable} "${{@:4}}"', "pmi2 none", set()),  # what an image has: this Python's own MPI
        (f'exec {sys.executable} "${{@:4}}"', "none openmpi", {"PMI outside"}),
        ("echo FATAL: could not open image >&2; exit 255", "pmi2 none", {"MPI in image"}),
    ],
)
def test_an_image_has_an_mpi_that_the_scheduler_outside_can_start(
    inside: str, outside: str, bad: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in (("apptainer", inside), ("srun", f"printf '%s\\n' 'MPI plugin types are...' {outside}")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    checks = check_image(SystemFile(name="s", container=Container(runtime="apptainer", image="/images/mlhpc.sif")))
    assert {check.name for check in checks if not check.ok} == bad
    assert all(check.fix for check in checks if not check.ok)
