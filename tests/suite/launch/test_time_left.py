"""The time left of a series of runs, from the lines of its ranks, with its basis."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.files import QUIET
from mlhpc.suite.launch import estimates, trials
from mlhpc.suite.launch.estimates import Epochs, SeriesTimeEstimator, find_expectation
from mlhpc.suite.log.run_folder import RunFolder
from tests.fixtures.logs import our_run, write
from tests.fixtures.runs import describe

EPOCHS = Epochs(6.0, "mean of 12 reference runs with global batch size 16")


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(
    clock: Clock, series: SeriesTimeEstimator, *, start_s: float = 5.0, epoch_s: float = 10.0, epochs: int = 6
) -> list[str]:
    """What is said in one run, a text for each epoch."""
    clock.now += start_s
    said = []
    for epoch in range(1, epochs + 1):
        clock.now += epoch_s
        said.append(series.line(f"epoch {epoch}: error 0.3 (target 0.2), 12 samples/s") or "")
    series.end(reached=True)
    return said


def seconds_left(text: str) -> float:
    match = re.search(r"(?:about|at most) ([\d.e+]+) (s|min|h) left", text)
    assert match is not None, text
    return float(match.group(1)) * {"s": 1, "min": 60, "h": 3600}[match.group(2)]


def test_the_time_left_is_that_of_what_is_expected_at_the_pace_so_far() -> None:
    clock = Clock()
    series = SeriesTimeEstimator(3, EPOCHS, clock)
    first, second, third = (run(clock, series) for _ in range(3))
    truth = [3 * 65 - 15 - 10 * epoch for epoch in range(6)]
    for text, left in zip(first[1:], truth[1:], strict=True):
        assert seconds_left(text) == pytest.approx(left, rel=0.1)
    assert truth[0] < seconds_left(first[0]) < 1.5 * truth[0], "the first line has the start in its pace"
    assert [" at most " in text for text in first] == [True] + [False] * 5
    assert not any(" at most " in text for text in second + third)
    assert "mean of 12 reference runs" in first[2]
    assert seconds_left(second[3]) == pytest.approx(65 + 20, rel=0.02)
    assert "(epoch 6, mean of 12 reference runs)" in second[3]
    assert third[5].endswith("past the expected end of 3 runs (epoch 6, mean of 12 reference runs)")


def test_runs_that_took_longer_here_count_more_than_the_reference() -> None:
    clock = Clock()
    series = SeriesTimeEstimator(4, EPOCHS, clock)
    for _ in range(2):
        run(clock, series, epochs=12)
    assert "reference" in run(clock, series, epochs=12)[0]
    (said,) = run(clock, series, epochs=1)
    assert seconds_left(said) == pytest.approx(110, rel=0.02)
    assert said.endswith("(epoch 12, mean of 3 runs here)")


def test_a_run_that_takes_longer_than_expected_is_never_owed_time() -> None:
    clock = Clock()
    assert "past the expected end of the run" in run(clock, SeriesTimeEstimator(1, EPOCHS, clock), epochs=9)[-1]


@pytest.mark.parametrize(
    "line",
    ["", "staging and opening data", "epoch", "epoch x: 3", "Epoch 3: a", "3 epochs", "epoch 0: before training"],
)
def test_a_line_without_an_epoch_says_no_time(line: str) -> None:
    clock = Clock()
    series = SeriesTimeEstimator(1, EPOCHS, clock)
    assert series.line(line) is None


def test_without_an_expectation_nothing_is_said() -> None:
    clock = Clock()
    assert run(clock, SeriesTimeEstimator(1, None, clock)) == [""] * 6


def test_a_run_that_failed_is_no_basis() -> None:
    clock = Clock()
    series = SeriesTimeEstimator(2, EPOCHS, clock)
    clock.now += 15
    series.line("epoch 1: error 0.3")
    series.end(reached=False)
    assert "reference" in run(clock, series)[2]


def test_epochs_that_repeat_do_no_harm() -> None:
    clock = Clock()
    series = SeriesTimeEstimator(1, EPOCHS, clock)
    for epoch in (1, 1, 1, 2):
        clock.now += 10
        assert series.line(f"epoch {epoch}: x") is not None


def test_the_expectation_of_a_run_folder_is_its_reference_points(tmp_path: Path) -> None:
    found = find_expectation(RunFolder(describe(write(tmp_path / "run" / "result_0.txt", our_run()).parent)))
    assert "reference runs" in found.epochs.source
    assert find_expectation(RunFolder(tmp_path)) is None


def test_the_lines_of_a_local_run_say_it_and_quiet_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(describe(write(tmp_path / "run" / "result_0.txt", our_run()).parent, count=2))

    def ranks(command: Sequence[str], *, echo: Any, **_: Any) -> int:
        echo("epoch 1: error 0.3 (target 0.2), 12 samples/s")
        return 0

    monkeypatch.setattr(trials, "run_local", ranks)
    trials.run_trials("cosmoflow", folder, range(2), ranks=1, mode="strong", seed=None)
    assert "left" not in capsys.readouterr().out, "the first ten seconds say little"
    monkeypatch.setattr(estimates, "LEAST_S", 0.0)
    trials.run_trials("cosmoflow", folder, range(2), ranks=1, mode="strong", seed=None)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"run 0: epoch 1: .* samples/s; .* at most .* left of 2 runs \(.*reference runs.*\)", first)
    assert second.startswith("run 1: epoch 1: ")
    monkeypatch.setenv(QUIET, "1")
    trials.run_trials("cosmoflow", folder, range(2), ranks=1, mode="strong", seed=None)
    assert capsys.readouterr().out == ""


def test_where_epoch_num_counts_samples_the_expectation_does_too(tmp_path: Path) -> None:
    """OpenFold's full size has no reference points here: its limit of epochs is no number of samples."""
    (tmp_path / "run").mkdir()
    info = json.loads((describe(tmp_path / "run", size="full") / "run.json").read_text()) | {"workload": "openfold"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    (tmp_path / "run" / "config.yaml").write_text("max_epochs: 3\nglobal_batch_size: 256\n")
    found = find_expectation(RunFolder(tmp_path / "run"))
    assert found.epochs.count == 3 * found.card.train_samples
