"""A series of local trials: which run, which end it, and what is kept of each. The ranks are functions of this test."""

import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.config import OUTER_SETTINGS
from mlhpc.suite.data.lock import LockedError, create_lock
from mlhpc.suite.launch import trials
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Lines, our_run, write

FINISHED, MISSED = our_run(), our_run(values=(0.9,))
NEVER_BEGAN = MISSED[:9]


class Ranks:
    """In place of run_local: each trial leaves its log and ends with its exit code."""

    def __init__(self, folder: RunFolder, *ends: tuple[int, Lines | None]) -> None:
        self.folder, self.ends, self.started = folder, dict(enumerate(ends)), list[int]()
        self.signal_in: int | None = None

    def __call__(self, command: Sequence[str], *, on_stop: Callable[[int], object], **_: Any) -> int:
        trial = int(command[command.index("--trial") + 1])
        if trial == self.signal_in:
            on_stop(signal.SIGTERM)
        code, log = self.ends[trial]
        if log is not None:
            write(self.folder.result(trial), log)
        self.started.append(trial)
        return code


def run(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, **options: Any) -> int:
    monkeypatch.setattr(trials, "run_local", ranks)
    return trials.run_trials("cosmoflow", ranks.folder, range(3), ranks=2, mode="strong", seed=None, **options)


def codes(folder: RunFolder) -> list[str]:
    return [path.read_text().strip() if (path := folder.exit_code(trial)).exists() else "-" for trial in range(3)]


@pytest.mark.parametrize(
    ("ends", "code", "kept", "said"),
    [
        (((0, FINISHED), (1, MISSED), (0, FINISHED)), 1, ["0", "1", "0"], ""),
        (((0, FINISHED), (0, FINISHED), (0, FINISHED)), 0, ["0", "0", "0"], ""),
        (((1, NEVER_BEGAN), (0, FINISHED), (0, FINISHED)), 1, ["1", "-", "-"],
         "run 0 failed before it began: 2 more runs not started"),
        (((0, FINISHED), (1, None), (0, FINISHED)), 1, ["0", "1", "-"], "run 1 failed before it began: 1 more run not started"),
        (((0, FINISHED), (0, FINISHED), (1, None)), 1, ["0", "0", "1"], ""),
        (((2, None), (0, FINISHED), (0, FINISHED)), 2, ["2", "-", "-"], "run 0 ended with exit code 2: 2 more runs not started"),
        (((3, MISSED), (0, FINISHED), (0, FINISHED)), 3, ["3", "-", "-"], "run 0 ended with exit code 3: 2 more runs not started"),
    ],
)  # fmt: skip
def test_a_trial_that_cannot_begin_ends_the_series_and_one_that_misses_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ends: Sequence[tuple[int, Lines | None]], code: int, kept: list[str], said: str,
) -> None:  # fmt: skip
    ranks = Ranks(RunFolder(tmp_path), *ends)
    assert run(monkeypatch, ranks) == code
    assert codes(ranks.folder) == kept
    assert capsys.readouterr().err == (f"mlhpc: {said}\n" if said else "")


@pytest.mark.parametrize(
    ("signal_in", "ends", "code", "started"),
    [
        (0, ((0, FINISHED), (0, FINISHED), (0, FINISHED)), 3, [0]),
        (1, ((0, FINISHED), (1, MISSED), (0, FINISHED)), 3, [0, 1]),
        (2, ((0, FINISHED), (0, FINISHED), (0, FINISHED)), 0, [0, 1, 2]),
        (2, ((0, FINISHED), (0, FINISHED), (1, MISSED)), 1, [0, 1, 2]),
        (1, ((0, FINISHED), (1, None), (0, FINISHED)), 143, [0, 1]),
        (2, ((0, FINISHED), (0, FINISHED), (1, NEVER_BEGAN)), 143, [0, 1, 2]),
    ],
)
def test_a_signal_that_finds_the_ranks_done_starts_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    signal_in: int, ends: Sequence[tuple[int, Lines | None]], code: int, started: list[int],
) -> None:  # fmt: skip
    ranks = Ranks(RunFolder(tmp_path), *ends)
    ranks.signal_in = signal_in
    assert run(monkeypatch, ranks) == code
    assert ranks.started == started
    assert [kept != "-" for kept in codes(ranks.folder)] == [trial in started for trial in range(3)]
    said = capsys.readouterr().err
    assert ("was done when a signal came" in said) == (signal_in == 0)
    assert ("not started" in said) == (signal_in < 2)
    assert ("was stopped before it began" in said) == (code == 143)


def test_a_continued_series_starts_only_what_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(RunFolder(tmp_path), (0, None), (0, FINISHED), (0, FINISHED))
    for trial, log in enumerate((FINISHED, NEVER_BEGAN, MISSED)):
        write(ranks.folder.result(trial), log)
    assert run(monkeypatch, ranks, resume=True) == 1  # the run that failed counts, and the exit code says so
    assert ranks.started == [1]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run 0: finished already, left as it is (result_0.txt)"
    assert lines[1].startswith("run 2: began and failed (result_2.txt ended with status aborted), which counts")
    ranks.started.clear()
    assert run(monkeypatch, ranks, resume=True, replace_failed=True) == 0
    assert ranks.started == [2]


def content(root: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"resume": True, "replace_failed": True}])
@pytest.mark.parametrize("held", ["by ranks", "by a launcher"])
def test_a_series_with_a_trial_that_runs_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], held: str
) -> None:
    """The last trial of three runs; its log has no end, and a trial before it failed."""
    ranks = Ranks(RunFolder(tmp_path), (0, FINISHED), (0, FINISHED), (0, FINISHED))
    write(ranks.folder.result(0), MISSED)
    write(ranks.folder.result(2), MISSED[:-1])
    path = ranks.folder.lock(2) if held == "by ranks" else ranks.folder.running(2)
    path.parent.mkdir(exist_ok=True)
    with create_lock(path, "trial 2"):
        before = content(tmp_path)
        with pytest.raises(LockedError, match=f"^{path}: trial 2 is in use by process "):
            run(monkeypatch, ranks, **options)
        assert content(tmp_path) == before
    assert ranks.started == []
    assert run(monkeypatch, ranks, **options) == (1 if options == {"resume": True} else 0)


def test_an_exit_code_of_ranks_that_were_refused_is_not_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job took the trial after this launcher had looked."""
    ranks = Ranks(RunFolder(tmp_path), (2, None), (0, FINISHED), (0, FINISHED))

    def refused(*arguments: Any, **options: Any) -> int:
        stack.enter_context(create_lock(ranks.folder.lock(0), "trial 0"))
        return ranks(*arguments, **options)

    monkeypatch.setattr(trials, "run_local", refused)
    with ExitStack() as stack:
        assert trials.run_trials("cosmoflow", ranks.folder, range(3), ranks=2, mode="strong", seed=None) == 2
        assert codes(ranks.folder) == ["-", "-", "-"]


def test_a_rank_that_takes_a_moment_to_end_does_not_cost_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed rank gives its memory back after the launcher was told of its end."""
    ranks = Ranks(RunFolder(tmp_path), (1, MISSED), (0, FINISHED), (0, FINISHED))
    ending = ["held", "held"]
    monkeypatch.setattr(trials, "_is_held", lambda folder, trial: bool(ending and ending.pop()))
    assert run(monkeypatch, ranks) == 1
    assert codes(ranks.folder) == ["1", "0", "0"]


def test_a_continued_folder_keeps_its_base_seed_and_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that never began starts afresh with the seed that it would have had, in the same mode."""
    seeds = []

    def note(*arguments: object, seed: int | None, mode: str, **options: object) -> int:
        seeds.append((mode, seed))
        return 0

    monkeypatch.setattr("mlhpc.suite.commands.run.run_trials", note)
    monkeypatch.setattr("mlhpc.suite.commands.run._check_before_launch", lambda plan, ranks, **options: [])
    folder = tmp_path / "run"
    assert mlhpc("run", "cosmoflow", "--size", "smoke", "--seed", 7, "--mode", "weak", "-o", folder).returncode == 0
    assert mlhpc("run", "cosmoflow", "-o", folder, "--resume").returncode == 0
    other = mlhpc("run", "cosmoflow", "-o", folder, "--resume", "--seed", 9)  # run.json states the seed of all runs
    assert (other.returncode, seeds) == (2, 2 * [("weak", 7)])
    assert other.stderr == f"mlhpc: {folder}: its runs have the seed 7 (run.json): leave --seed out\n"


def test_a_continued_folder_can_have_more_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def note(workload: str, folder: RunFolder, trials: range, **options: object) -> int:
        started.append(len(trials))
        return 0

    monkeypatch.setattr("mlhpc.suite.commands.run.run_trials", note)
    monkeypatch.setattr("mlhpc.suite.commands.run._check_before_launch", lambda plan, ranks, **options: [])
    folder = tmp_path / "run"
    mlhpc("run", "cosmoflow", "--size", "smoke", "--runs", 3, "-o", folder)
    again = ("run", "cosmoflow", "-o", folder, "--resume")
    assert f"{folder}: begun with 3 runs, now has 5\n" in mlhpc(*again, "--runs", 5).stdout
    mlhpc(*again)
    fewer = mlhpc(*again, "--runs", 4)
    assert fewer.stderr == f"mlhpc: {folder}: it was begun with 5 runs; --runs 4 cannot take any away\n"
    assert (started, RunFolder(folder).read_info().runs) == ([3, 5, 5], 5)


@pytest.mark.parametrize("link", ["checkpoint", "exit/trial_0", "output/trial_0.log", "result_0.txt"])
def test_a_link_in_a_continued_folder_is_not_followed(
    link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's `checkpoint` may be a link to another run's: what begins with trial_0. is removed there."""
    started = list[object]()
    monkeypatch.setattr("mlhpc.suite.commands.run.run_trials", lambda *options, **more: len(started.append(more) or ""))
    monkeypatch.setattr("mlhpc.suite.commands.run._check_before_launch", lambda plan, ranks, **options: [])
    folder = tmp_path / "run"
    mlhpc("run", "moe_lm", "--size", "smoke", "-o", folder)
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(tmp_path / "victim")
    refused = mlhpc("run", "moe_lm", "-o", folder, "--resume")
    assert (refused.returncode, len(started)) == (2, 1)
    assert f"{folder}/{link}: is a link to {tmp_path}/victim" in refused.stderr


@pytest.mark.parametrize("setting", OUTER_SETTINGS)
def test_a_continued_folder_reaches_out_of_itself_only_if_the_person_says_so(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder may be a stranger's. The command that continues it repeats what it would do elsewhere."""
    started = list[object]()
    monkeypatch.setattr("mlhpc.suite.commands.run.run_trials", lambda *options, **more: len(started.append(more) or ""))
    monkeypatch.setattr("mlhpc.suite.commands.run._check_before_launch", lambda plan, ranks, **options: [])
    folder, value = tmp_path / "run", f"{setting}={tmp_path}/a b"
    offload = "{tier: file, cache: 1000000000}"
    words = ["--set", f"hyperparameters.moe.offload={offload}"] if "offload" in setting else []
    words += ["--set", value]
    mlhpc("run", "moe_lm", "--size", "smoke", *words, "-o", folder)
    assert len(started) == 1
    refused = mlhpc("run", "moe_lm", "-o", folder, "--resume")
    assert (refused.returncode, len(started)) == (2, 1)
    assert f"{folder}/config.yaml: {setting} acts outside" in refused.stderr
    command = shlex.split(refused.stderr.rpartition("repeat it: mlhpc ")[2])
    assert mlhpc(*command).returncode == 0
    assert len(started) == 2
