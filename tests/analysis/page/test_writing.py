"""What `mlhpc report` writes beside the page, what it checks before it works, and what it says meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mlhpc.analysis.commands.report import FIGURE_FORMATS
from mlhpc.analysis.commands.report import report as command
from mlhpc.analysis.page.report import hide_paths
from mlhpc.suite.errors import InputError

Build = Callable[..., Any]
STARTS = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_figures_are_written_for_slides(tmp_path: Path, run_folder: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlhpc.analysis.figures import list_views

    kept = {name: list_views()[name] for name in ("time_split", "standing", "startup")}
    monkeypatch.setattr("mlhpc.analysis.figures.list_views", lambda: kept)
    folder, output = run_folder(tmp_path, runs=3), tmp_path / "report"
    said = invoke(folder, "-o", output, "--figures", "svg,png,pdf")
    assert said.exit_code == 0, said.output
    written = {path.name: path.read_bytes() for path in (output / "figures").iterdir()}
    assert set(written) == {
        f"{name}.{form}" for name in ("time_split", "startup") for form in FIGURE_FORMATS
    }  # no comparison of one
    for name, content in written.items():
        assert content.startswith(STARTS[name.rsplit(".", 1)[1]])
        assert len(content) > 3000
    assert b'fill="white"' in written["startup.svg"]  # slides may be dark
    assert invoke(folder, "-o", output, "--figures", "png").exit_code == 2  # exists
    assert invoke(folder, "-o", output, "--figures", "PNG, png", "--force").exit_code == 0
    assert {path.suffix for path in (output / "figures").iterdir()} == {".png"}


def test_without_the_option_no_figure_is_written(tmp_path: Path, run_folder: Build) -> None:
    assert invoke(run_folder(tmp_path, runs=1), "-o", tmp_path / "report").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.html", "report.json", "tables"]


LAID = ("report.html", "report.json", "brief.html", "tables", "figures", ".writable")


@pytest.mark.parametrize("name", LAID)
@pytest.mark.parametrize("kind", ["file", "folder", "nothing", "itself"])
def test_a_link_laid_in_the_folder_of_a_report_is_not_followed(
    tmp_path: Path, run_folder: Build, name: str, kind: str
) -> None:
    victim, output, run = tmp_path / "victim", tmp_path / "report", run_folder(tmp_path / "run", runs=1)
    output.mkdir()
    if kind == "file":
        victim.write_text("mine")
    elif kind == "folder":
        victim.mkdir()
        (victim / "kept").write_text("mine")
    (output / name).symlink_to(output / name if kind == "itself" else victim)
    for more in ((), ("--force",)):
        said = invoke(run, "-o", output, "--figures", "svg", *more)
        assert isinstance(said.exception, InputError | SystemExit)
        assert "is a link, which is not followed" in f"{said.exception} {said.output}"
        kept = victim / "kept" if kind == "folder" else victim
        assert kept.read_text() == "mine" if kind in ("file", "folder") else not victim.exists()
        assert [path.name for path in output.iterdir()] == [name]


def test_links_below_a_report_and_beside_its_tables_are_replaced(tmp_path: Path, run_folder: Build) -> None:
    victim, output, run = tmp_path / "victim", tmp_path / "report", run_folder(tmp_path / "run", runs=1)
    victim.mkdir()
    (victim / "runs.csv").write_text("mine")
    (output / "tables").mkdir(parents=True)
    (output / "tables" / "runs.csv").symlink_to(victim / "runs.csv")
    (output / "tables.part").symlink_to(victim)
    assert invoke(run, "-o", output, "--force").exit_code == 0
    assert [path.read_text() for path in victim.iterdir()] == ["mine"]
    assert not (output / "tables" / "runs.csv").is_symlink()


@pytest.mark.parametrize("forms", ["gif", "svg,jpeg", "svg;png", "SVG PNG"])
def test_an_unknown_form_is_refused_before_anything_is_read(tmp_path: Path, forms: str) -> None:
    (tmp_path / "nothing").mkdir()
    said = invoke(tmp_path / "nothing", "-o", tmp_path / "report", "--figures", forms)
    assert said.exit_code == 2
    assert "expected one or several of svg, png, pdf" in said.output
    assert not (tmp_path / "report").exists()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads a log fails the test."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a log was read before the output was checked")

    monkeypatch.setattr("mlhpc.analysis.study.read_study", fail)
    monkeypatch.setattr("mlhpc.analysis.page.issues.check_paths", fail)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("place", ["a file/report", "/proc/self/report", "kept/report.html"])
def test_an_output_that_cannot_be_written_is_found_before_minutes_of_work(
    tmp_path: Path, run_folder: Build, place: str
) -> None:
    (tmp_path / "a file").write_text("kept")
    (tmp_path / "kept" / "report.html").mkdir(parents=True)
    output = tmp_path / place if place != "kept/report.html" else tmp_path / "kept"
    said = invoke(run_folder(tmp_path, runs=1), "-o", output)
    assert said.exit_code != 0
    assert not isinstance(said.exception, AssertionError)
    assert (tmp_path / "a file").read_text() == "kept"


@pytest.mark.usefixtures("unread")
def test_a_disk_without_room_is_found_first(small_disk: Path, tmp_path: Path, run_folder: Build) -> None:
    said = invoke(run_folder(tmp_path, runs=1), "-o", small_disk / "new" / "report")
    assert isinstance(said.exception, OSError)
    assert list(small_disk.iterdir()) == []


def test_what_fails_leaves_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    said = invoke(tmp_path / "nothing", "-o", tmp_path / "new" / "report")
    assert said.exit_code != 0
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    assert invoke(tmp_path / "nothing", "-o", tmp_path / "mine").exit_code != 0
    assert (tmp_path / "mine").is_dir()  # what was there stays


def test_a_long_report_says_how_far_it_is(tmp_path: Path, run_folder: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlhpc.suite.cli.progress.PLAIN_INTERVAL_S", 0.0)
    said = invoke(run_folder(tmp_path, runs=4), "-o", tmp_path / "report").output
    for title in ("reading logs", "drawing figures"):
        shares = [int(share) for share in re.findall(rf"{title}: (\d+) %", said)]
        assert len(shares) >= 4
        assert shares == sorted(shares)
        assert shares[-1] == 100


def test_a_brief_has_two_figures_and_no_script(tmp_path: Path, run_folder: Build) -> None:
    paths = [str(run_folder(tmp_path, "one")), str(run_folder(tmp_path, "two", train_s=30.0, extra=(("seed", 7),)))]
    done = CliRunner().invoke(command, [*paths, "-o", str(tmp_path / "report"), "--brief"])
    assert done.exit_code == 0, done.output
    brief = (tmp_path / "report/brief.html").read_text()
    assert brief.count("<svg") == brief.count("<figure>") == 2
    assert "<script" not in brief
    assert 3 <= brief.count("<li>") <= 5
    assert str(tmp_path) not in brief


@pytest.mark.long
def test_a_watched_report_grows_until_all_runs_ended(
    tmp_path: Path, run_folder: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> SimpleNamespace:
        return SimpleNamespace(runs=3)

    folder, output = run_folder(tmp_path, "one", runs=3), tmp_path / "report"
    monkeypatch.setattr(
        "mlhpc.analysis.commands.report.RunFolder", lambda root: SimpleNamespace(root=root, read_info=read)
    )
    last = folder / "result_2.txt"
    kept = last.read_text()
    last.unlink()
    pages = []

    def sleep(_: float) -> None:
        if (output / "report.html").exists():
            pages.append((output / "report.html").read_text())
            last.write_text(kept)

    monkeypatch.setattr("mlhpc.analysis.commands.report.time.sleep", sleep)
    done = CliRunner().invoke(command, [str(folder), "-o", str(output), "--watch"])
    assert done.exit_code == 0, done.output
    assert 'http-equiv="refresh"' in pages[0]
    assert "result_2.txt" not in pages[0]
    final = (output / "report.html").read_text()
    assert 'http-equiv="refresh"' not in final
    assert "result_2.txt" in final


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--price", "H200=2.50 USD/h"), "--price: no result has the device 'H200'"),
        (("--index", "weights.yaml", "--reference", "nobody"), "--reference 'nobody' is no system with a score"),
    ],
)
def test_what_is_not_there_is_an_error_before_anything_is_drawn(
    tmp_path: Path, run_folder: Build, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "weights.yaml").write_text("version: 1\nworkloads:\n  - {benchmark: cosmoflow, size: mini}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlhpc.analysis.page.report.render_report", lambda *_, **__: pytest.fail("drawn"))
    done = CliRunner().invoke(command, [str(run_folder(tmp_path)), "-o", "report", *words])
    assert said in str(done.exception)
    assert not (tmp_path / "report").exists()


def test_folders_of_a_disk_are_hidden_and_fractions_are_not() -> None:
    assert hide_paths('is also "/home/me/runs/a/result_1.txt", file:///tmp/x/y') == 'is also "…/result_1.txt", …/y'
    same = "samples/s, https://github.com/a/b, runs/one/result_0.txt, </td></tr>, 8 / 10 / 10, GB/s/node, v1/v2"
    assert hide_paths(same) == same
