"""What commands say of a folder that is missing, empty, unfinished, in use or cannot be written, and their exit code."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mlhpc.suite.exit_codes import choose_exit_code
from mlhpc.suite.launch.command_on_ranks import start_ranks
from mlhpc.suite.log.run_folder import RunFolder, find_continue_command
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import our_run, write
from tests.fixtures.reproduction import left_by_run
from tests.fixtures.runs import run_folder
from tests.fixtures.wings import needs_axes

RUN = ("run", "cosmoflow", "--size", "smoke")


def test_an_existing_run_folder_with_runs_left_names_the_command_that_continues_it(tmp_path: Path) -> None:
    whole, half, saved = (run_folder(tmp_path / name, staging_s=None) for name in ("whole", "a half", "saved"))
    (half / "result_4.txt").unlink()
    RunFolder(saved).checkpoint(2).parent.mkdir()
    RunFolder(saved).checkpoint(2).touch()
    assert find_continue_command(whole) is None
    assert find_continue_command(tmp_path) is None
    for folder in (half, saved):
        done = mlhpc(*RUN, "-o", folder)
        assert done.returncode == 2
        assert done.stderr.rstrip().endswith("--resume")
    assert "'" + str(half) + "' --resume" in mlhpc(*RUN, "-o", half).stderr, "a name with a blank is quoted"
    (half / "job.sbatch").touch()
    submitted = mlhpc(
        "submit", "cosmoflow", "--system", "slurm-two-node", "--size", "smoke", "--nodes", "1", "-o", half
    )
    assert submitted.stderr.rstrip().endswith(f"to continue it: sbatch '{half}/job.sbatch'")


@pytest.mark.parametrize("have", [1, 3])
def test_a_series_that_was_begun_too_short_is_told_how_to_get_the_other_runs(tmp_path: Path, have: int) -> None:
    folder = run_folder(tmp_path / "short", staging_s=None)
    info = folder / "run.json"
    info.write_text(info.read_text().replace('"runs": 5', f'"runs": {have}'))
    for number in range(have, 5):
        (folder / f"result_{number}.txt").unlink()
    way = f"to go on: mlhpc run cosmoflow --output {folder} --resume --runs 5\n"
    assert f"{have} of the 5 required runs complete; {way}" in mlhpc("score", folder).stdout
    (folder / f"result_{have - 1}.txt").unlink()
    if have > 1:
        assert f"to go on: {find_continue_command(folder)}\n" in mlhpc("score", folder).stdout, (
            "what is left comes first"
        )


def test_a_folder_to_resume_that_is_not_there_is_named_with_what_may_be_meant(tmp_path: Path) -> None:
    run_folder(tmp_path / "first")
    for words in ((), ("--size", "smoke")):
        missing = mlhpc("run", "cosmoflow", *words, "--resume", "-o", tmp_path / "frist")
        assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
        assert "frist: does not exist; did you mean 'first'? --resume continues" in missing.stderr
        other = mlhpc("run", "cosmoflow", *words, "--resume", "-o", tmp_path)
        assert f"{tmp_path}: no run folder (no run.json); --resume continues" in other.stderr
    assert f"{tmp_path}/none: does not exist" in mlhpc("status", tmp_path / "none").stderr


def test_a_folder_is_resumed_with_its_own_seed(tmp_path: Path) -> None:
    folder = left_by_run(tmp_path / "first")
    info = folder / "run.json"
    info.write_text(info.read_text().replace('"seed": null', '"seed": 5'))
    done = mlhpc("run", "cosmoflow", "--resume", "--seed", "7", "--set", "staging.directory=stage", "-o", folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "its runs have the seed 5 (run.json): leave --seed out" in done.stderr


@pytest.mark.parametrize(
    ("setting", "place", "text"),
    [
        ("submision.org=A", "submision.org", "did you mean 'submission'"),
        ("submission.orgg=A", "submission.orgg", "did you mean 'org'"),
        ("submission.org.x=A", "submission.org.x", "expected str, got a mapping"),
        ("hyperparameter.dropout=0.1", "hyperparameter.dropout", "did you mean 'hyperparameters'"),
        ("staging.a.b.c=1", "staging.a.b.c", "unknown key 'a'"),
        ("workload=deepcam", "workload", "workload is 'deepcam'; expected 'cosmoflow'"),
    ],
)
def test_a_mistake_in_a_setting_names_the_setting_and_no_file(setting: str, place: str, text: str) -> None:
    for words in (RUN, ("submit", "cosmoflow", "--system", "example", "--nodes", "1", "--size", "smoke")):
        done = mlhpc(*words, "--set", setting)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"mlhpc: --set {place}: ")
        assert text in done.stderr


def test_a_mistake_in_a_file_names_the_file_whatever_is_set_beside_it(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("size: smoke\nglobal_batch_size: 4\nmax_epochs: 1\nhyperparameters: {dropot: 0.1}\n")
    for setting in ("hyperparameters.dropout=0.1", "submission.org=A"):
        done = mlhpc("run", "cosmoflow", "--config", config, "--set", setting)
        assert f"mlhpc: {config}:4: unknown key 'dropot'" in done.stderr


def test_a_package_of_too_few_runs_is_called_incomplete(tmp_path: Path) -> None:
    few, many = run_folder(tmp_path / "few", count=2), run_folder(tmp_path / "many")
    built = mlhpc("package", few, "--system", "bed", "-o", tmp_path / "a" / "ACME")
    assert built.returncode == 0
    assert "strong/cosmoflow: not a score: 2 of the 5 required runs complete" in built.stdout
    assert "package incomplete: see above; next: mlhpc check" in built.stdout
    assert "package complete" not in built.stdout
    whole = mlhpc("package", many, "--system", "bed", "-o", tmp_path / "b" / "ACME")
    assert "package complete; next: mlhpc check" in whole.stdout
    assert "incomplete" not in whole.stdout


def test_a_run_that_goes_on_is_not_judged_yet(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a", count=2)
    write(run / "result_1.txt", our_run(seed=2)[:-3])
    lock = RunFolder(run).lock(1)
    for age_s, under_way in ((None, False), (0, True), (300, False)):
        if age_s is not None:
            lock.touch()
            os.utime(lock, (time.time() - age_s,) * 2)
        checked, scored = mlhpc("check", run), mlhpc("score", run)
        assert (checked.returncode, scored.returncode) == (1, 1)
        assert ("NOT compliant" in checked.stdout) != under_way
        assert ("NOT compliant" in scored.stdout) != under_way
        assert ("run 1 of" in checked.stdout and "under way" in scored.stdout) == under_way
        findings = [line for line in checked.stdout.splitlines() if not line.startswith("to mend ")]
        [unfinished] = [line for line in findings if "run-unfinished" in line]
        assert unfinished.endswith("(the run is under way)") == under_way
        assert ("may fail" in unfinished) != under_way
        packaged = mlhpc("package", run, "--system", "bed", "--count-failed", "-o", tmp_path / str(age_s) / "ACME")
        assert (packaged.returncode == 2) == under_way
        assert (f"run 1 of {run} is under way: wait until" in packaged.stderr) == under_way
        assert (tmp_path / str(age_s)).exists() != under_way


def test_an_empty_folder_is_the_same_mistake_for_every_command(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (
        ("check", empty),
        ("score", empty),
        ("score", empty, "--format", "json"),
        ("compare", empty, empty),
        ("package", empty, "--system", "x"),
        ("package", "--verify", empty),
        ("data", "verify", empty),
        ("data", "verify", empty, "--deep"),
        ("data", "describe", empty),
        ("status", empty),
        ("history", "add", empty),
        ("history", "check", empty),
        ("reproduce", empty),
        ("report", empty, "-o", tmp_path / "report"),
    ):
        assert mlhpc(*words).returncode == 2, words
    assert "nothing checked: 0 logs" in mlhpc("check", empty).stdout


def test_a_package_or_data_set_without_its_manifest_is_at_fault_and_a_folder_of_other_things_is_a_mistake(
    tmp_path: Path,
) -> None:
    package, data, other = tmp_path / "ACME", tmp_path / "data", tmp_path / "other"
    for path in (package / "results" / "x", data / "train" / "shard_00000.h5", other / "notes" / "letter.txt"):
        path.parent.mkdir(parents=True)
        path.touch()
    for words, code in (
        (("package", "--verify", package), 1),
        (("data", "verify", data), 1),
        (("package", "--verify", other), 2),
        (("package", "--verify", package, other), 2),
        (("data", "verify", other), 2),
        (("data", "verify", other / "notes" / "letter.txt"), 2),
    ):
        done = mlhpc(*words)
        assert (done.returncode, (done.stdout + done.stderr).count("\n")) == (code, 1), words


def test_a_place_that_cannot_be_written_is_the_same_mistake_for_every_command(tmp_path: Path) -> None:
    run, blocked = run_folder(tmp_path / "run"), tmp_path / "file" / "below"
    blocked.parent.write_text("a file where a folder should be")
    for words in (
        ("package", run, "--system", "x", "--submitter", "ACME", "-o", blocked / "ACME"),
        ("history", "add", run, "-o", blocked),
        ("workload", "new", "tides", "-o", blocked),
        ("report", run, "-o", blocked),
        ("check", "--write-official-rules", blocked),
        ("demo", "-o", blocked),
    ):
        done = mlhpc(*words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (words, done.stderr)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied"), 2),
        (FileNotFoundError(2, "No such file or directory"), 2),
        (OSError(30, "Read-only file system"), 2),
        (ValueError("mistake"), 2),
        (OSError(28, "No space left on device"), 1),
        (OSError(5, "Input/output error"), 1),
        (RuntimeError("fault"), 1),
    ],
)
def test_a_wrong_place_is_a_persons_mistake_and_a_full_disk_is_not(error: Exception, code: int) -> None:
    assert choose_exit_code(error) == code


def test_ranks_whose_time_is_over_are_not_called_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start_ranks(["ceilings", "-o", str(tmp_path / "ceilings.json")], 1, limit_s=0.2) == 1
    assert "signal" not in capsys.readouterr().err


def test_a_history_is_named_alike_when_it_is_added_to_shown_and_checked(tmp_path: Path) -> None:
    run, kept = run_folder(tmp_path / "run"), tmp_path / "kept"
    assert mlhpc("history", "add", run, "-o", kept).returncode == 0
    for command in ("show", "check"):
        assert mlhpc("history", command, "-o", kept).stdout == mlhpc("history", command, kept).stdout != ""
        both = mlhpc("history", command, kept, "-o", kept)
        assert (both.returncode, "give one of them" in both.stderr) == (2, True)


@needs_axes
def test_a_plan_takes_the_ranks_that_a_run_takes() -> None:
    ranks = mlhpc("plan", "cosmoflow", "--size", "smoke", "--ranks", "2")
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout == mlhpc("plan", "cosmoflow", "--size", "smoke", "--nodes", "2").stdout
    assert mlhpc("plan", "cosmoflow", "--size", "smoke", "--ranks", "2", "--nodes", "2").returncode == 2
