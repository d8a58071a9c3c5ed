"""Where results go: standard output that cannot be written, and -o that names a link, a pipe or a device."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlhpc.suite.plugins import EXCHANGE, list_missing_wings
from tests.fixtures.cli import mlhpc
from tests.fixtures.disk import fill
from tests.fixtures.runs import run_folder
from tests.fixtures.shared_disk import shared_disk
from tests.fixtures.warm import warm_python
from tests.fixtures.wings import needs_axes

MLHPC = str(Path(sys.executable).with_name("mlhpc"))
exchange = pytest.mark.skipif(EXCHANGE in list_missing_wings(), reason="the wing exchange is not installed")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run R and a history H of it."""
    folder = tmp_path_factory.mktemp("place")
    run_folder(folder / "R")
    done = subprocess.run(
        [MLHPC, *["history", "add", "R", "--any", "-o", "H"]], cwd=folder, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder


def run(command: str, cwd: Path, stdout: int, **more: object) -> tuple[int, str]:
    start = [MLHPC] if "env" in more else [*warm_python(), "-P", "-m", "mlhpc"]  # a library is loaded by a whole start
    words = [*start, *command.split()]
    done = subprocess.run(words, cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, **more)  # type: ignore[call-overload]
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "score R --format json",
        "check R --format json",
        "compare R R",
        "status R --format json",
        "history show H",
        "history check H --format json",
        "workload list",
        pytest.param("plan cosmoflow", marks=needs_axes),
        pytest.param("report R --form prometheus", marks=exchange),
        "doctor --format json",
        "submit cosmoflow --system example --nodes 1 --dry-run",
        "--help",
        "help score",
        "--version",
    ],
)
def test_a_result_that_could_not_be_written_is_an_error(place: Path, command: str) -> None:
    expected = "mlhpc: standard output: disk full"
    with Path("/dev/full").open("wb") as full:
        code, errors = run(command, place, full.fileno())
    assert code in (1, 3, 4)  # 3 and 4: no verdict, whether it can be written or not
    last = errors.splitlines()[-1]
    assert last.startswith(expected), errors
    assert errors.count("standard output") == 1
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


@pytest.mark.parametrize("command", ["--help", "workload list", "score R --format json"])
def test_it_is_one_error_whether_python_keeps_output_in_a_buffer_or_not(
    place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A buffer fails when it is flushed, which once was a second time."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with Path("/dev/full").open("wb") as full:
        unbuffered = run(command, place, full.fileno())
        monkeypatch.delenv("PYTHONUNBUFFERED")
        assert run(command, place, full.fileno()) == unbuffered
    assert unbuffered == (1, "mlhpc: standard output: disk full: the result was not written\n")


@pytest.mark.parametrize("command", ["score R --format json", "workload list", "check R", "--help", "--version"])
def test_a_reader_that_had_enough_is_no_error(place: Path, command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        code, errors = run(command, place, writer)
    finally:
        os.close(writer)
    assert "standard output" not in errors
    assert code == run(command, place, subprocess.DEVNULL)[0]


@pytest.mark.parametrize(
    "command",
    [
        "data generate moe_lm --size smoke --ranks 2 -o {0}",
        pytest.param("moe --ranks 2 --tokens 64", marks=pytest.mark.long),
    ],
)
def test_ranks_go_on_where_their_output_cannot_be_written(place: Path, tmp_path: Path, command: str) -> None:
    """The mpiexec of MPICH would end them, with ten lines of its own."""
    with Path("/dev/full").open("wb") as full:
        code, errors = run(command.format(tmp_path / "data"), place, full.fileno())
    assert code == 1
    assert errors.splitlines()[-1] == "mlhpc: standard output: disk full: the result was not written"
    assert "mpiexec" not in errors
    assert "data generate" not in command or (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("command", ["status R", "check R", "--help"])
def test_a_closed_standard_output_is_named(place: Path, command: str) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" <&- >&-', "bash", MLHPC, *command.split()],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("mlhpc: standard output: Bad file descriptor: the result was not written\n")
    assert "defect" not in done.stderr


def test_an_error_of_the_disk_is_named(place: Path, tmp_path: Path) -> None:
    environment = shared_disk(tmp_path / "library.so", tmp_path / "disk", writes=5)
    (tmp_path / "disk").mkdir()
    with (tmp_path / "disk" / "score.json").open("wb") as file:
        code, errors = run("score R --format json", place, file.fileno(), env=environment)
    assert code == 1
    assert errors == "mlhpc: standard output: Input/output error: the result was not written\n"


def test_what_only_tells_the_progress_may_be_lost(place: Path) -> None:
    program = "import mlhpc.suite.files as f; f.print_progress('half'); raise SystemExit(f.find_output_error())"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("report R -o {disk}/report", "report"),
        ("package R --system x --submitter ACME -o {disk}/ACME", "ACME"),
        ("history add R --any -o {disk}/history", "history"),
        pytest.param("report R --form prometheus -o {disk}/runs.prom", "runs.prom", marks=exchange),
        pytest.param("report R --form tensorboard -o {disk}/boards", "boards", marks=exchange),
        ("check --write-official-rules {disk}/rules", "rules"),
        ("submit cosmoflow --system example --nodes 1 -o {disk}/run", "run"),
        ("run cosmoflow --size smoke -o {disk}/run", "run"),
    ],
)
def test_on_a_full_disk_an_error_names_the_destination(
    place: Path, small_disk: Path, smoke_data: Path, command: str, named: str
) -> None:
    fill(small_disk)
    environment = {**os.environ, "MLHPC_DATA": str(smoke_data)}
    code, errors = run(command.format(disk=small_disk), place, subprocess.DEVNULL, env=environment)
    assert code in (1, 2)
    last = errors.splitlines()[-1]
    assert f"{small_disk / named}" in last
    assert "disk full" in last
    assert ".part" not in errors
    assert "/." not in errors  # a hidden folder
    assert f"{place}" not in errors
    assert [path.name for path in small_disk.iterdir() if path.name.startswith(".")] == []


@exchange
def test_a_symbolic_link_given_to_o_is_followed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    for name, target in {"new.prom": "real/new.prom", "old.prom": "real/old.prom", "page": "real/page"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "real" / "old.prom").write_text("earlier")
    for name in ("new.prom", "old.prom"):
        assert run(f"report R --form prometheus -o {tmp_path / name}", place, subprocess.DEVNULL) == (0, "")
        assert (tmp_path / name).is_symlink()
        assert "mlhpc_run" in (tmp_path / "real" / name).read_text()
    assert run(f"history add R --any -o {tmp_path / 'page'}", place, subprocess.DEVNULL) == (0, "")
    assert (tmp_path / "page").is_symlink()
    assert list((tmp_path / "real" / "page").glob("*.json"))
    (tmp_path / "loop").symlink_to("loop")
    code, errors = run(f"report R --form prometheus -o {tmp_path / 'loop'}", place, subprocess.DEVNULL)
    assert (code, errors) == (
        2,
        f"mlhpc: {tmp_path / 'loop'}: it is a link to loop, which leads back to it; choose another -o\n",
    )


@exchange
def test_a_pipe_and_a_device_are_written_into_and_stay(place: Path, tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()), daemon=True)
    reader.start()
    assert run(f"report R --form prometheus -o {fifo}", place, subprocess.DEVNULL) == (0, "")
    reader.join(300)
    assert "mlhpc_run" in read[0]
    assert fifo.is_fifo()
    assert run("report R --form prometheus -o /dev/null", place, subprocess.DEVNULL) == (0, "")
    assert Path("/dev/null").is_char_device()
    code, errors = run("report R --form prometheus -o /dev/full", place, subprocess.DEVNULL)
    assert (code, errors) == (1, "mlhpc: /dev/full: disk full; choose another -o\n")
    (tmp_path / "link").symlink_to("/dev/null")
    assert run(f"report R --form prometheus -o {tmp_path / 'link'}", place, subprocess.DEVNULL) == (0, "")
    assert (tmp_path / "link").is_symlink()


@exchange
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_given_to_o_is_written_in_its_place(place: Path, tmp_path: Path, name: str) -> None:
    """Also where it goes to a file: what is there before and after stays."""
    with (tmp_path / "output").open("wb") as file:
        file.write(b"before\n")
        file.flush()
        assert run(f"report R --form prometheus -o {name}", place, file.fileno()) == (0, "")
        file.write(b"after\n")
    first, *middle, told, last = (tmp_path / "output").read_text().splitlines()
    assert (first, told, last) == ("before", name, "after")
    assert any(line.startswith("mlhpc_run") for line in middle)


@pytest.mark.parametrize(
    "command",
    [
        "report R -o {0}",
        "run cosmoflow --size smoke -o {0}",
        "submit cosmoflow --system example --nodes 1 -o {0}",
        "package R --system x --submitter ACME -o {0}",
        "history add R --any -o {0}",
        "demo -o {0}",
        "ceilings --quick -o {0}",
        "data generate cosmoflow --size smoke -o {0}",
        "reproduce R -o {0}",
    ],
)
def test_a_device_in_the_place_of_a_folder_is_refused_in_one_line(place: Path, command: str) -> None:
    done = mlhpc(*command.format("/dev/null").split(), cwd=place)
    assert done.returncode in (1, 2)
    assert "/dev/null" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert Path("/dev/null").is_char_device()
