"""Courses of healthy runs: recorded by one command beside a card, and what the checker says of runs that are unlike them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlhpc.suite.card import read_reference_courses
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.course import LEAST_CHANCE, is_share
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.reference_course import (
    build_reference_band,
    collect_courses,
    describe_run_course,
    find_reference_course,
)
from mlhpc.suite.statistics.courses import LEAST_SHARE, build_band, judge_course
from mlhpc.suite.workload import load_workload
from tests.fixtures.cli import mlhpc
from tests.fixtures.logs import Line, Lines, chain, edit, insert, our_run, write
from tests.suite.test_cards import card_file

WINDOW, EPOCHS = "step_phases", 5
COURSES = Path(__file__).resolve().parents[3] / "workloads"


def healthy(seed: int, data: int = 0) -> Lines:
    """A run whose losses and metrics fall as those of other seeds do, with a little noise."""
    chance = random.Random(seed)
    values = [0.42 - 0.01 * at + 0.001 * chance.gauss(0, 1) for at in range(EPOCHS - 1)]
    lines = our_run(
        seed=seed, values=(*values, 0.355 + 0.001 * chance.gauss(0, 1)), start_ms=1_790_000_000_000 + 100_000 * seed
    )
    lines = edit("data_manifest", value=f"{data:x}" * 32 + "0" * 32)(lines)
    for epoch in range(EPOCHS):
        loss = 0.1 * 0.8**epoch * (1 + 0.02 * chance.gauss(0, 1))
        steps = next(line for line in lines if line.key == "rank_phases").metadata["steps"]  # type: ignore[index]
        total = next(line for line in [x for x in lines if x.key == "rank_phases"][epoch:]).value
        lines = edit(WINDOW, epoch, meta={"loss": loss})(lines)
        lines = edit("rank_phases", epoch, value=total | {"loss_sum": loss * steps})(lines)
    return lines


def renamed(folder: Path, runs: Callable[[int], Lines], count: int) -> Path:
    for at in range(count):
        path = write(folder / f"result_{at}.txt", runs(at))
        path.write_text(path.read_text().replace("cosmoflow", "mine"))
    return folder


def slow(lines: Lines) -> Lines:
    """The loss of the third epoch is 30 % above."""
    window = [line for line in lines if line.key == WINDOW][2].metadata["loss"]  # type: ignore[index]
    ranks = [line for line in lines if line.key == "rank_phases"][2].value
    lines = edit(WINDOW, 2, meta={"loss": 1.3 * window})(lines)
    return edit("rank_phases", 2, value=ranks | {"loss_sum": 1.3 * ranks["loss_sum"]})(lines)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A card with the course of fifteen runs on five data sets beside it."""
    folder = tmp_path_factory.mktemp("course")
    path = card_file(folder / "mine.yaml")
    runs = renamed(folder / "runs", lambda at: healthy(at + 1, at % 5 + 1), 15)
    done = mlhpc("workload", "rcp", "record", runs, "--card", path)
    assert done.returncode == 0, done.stderr
    assert "batch 16, float32: course of 15 healthy runs on 5 data sets" in done.stdout
    assert (folder / "rcp" / "smoke_course.json").exists()
    return path


def findings(card: Path, runs: Path) -> list[dict[str, str]]:
    done = mlhpc("check", runs, "--card", card, "--format", "json")
    return [each for each in json.loads(done.stdout)["findings"] if each["rule"].startswith("course-re")]


def test_a_course_is_shown_and_another_size_has_none(card: Path) -> None:
    shown = mlhpc("workload", "rcp", "show", "mine", "--card", card).stdout
    assert "course of 15 healthy runs on 5 data sets" in shown
    assert "no reference course" in mlhpc("workload", "rcp", "show", "open_catalyst").stdout


def test_healthy_runs_pass_and_one_that_is_unlike_is_named(card: Path, tmp_path: Path) -> None:
    fine = renamed(tmp_path / "fine", lambda at: healthy(at + 50, 6), 5)
    assert findings(card, fine) == []
    (tmp_path / "bad").mkdir()
    bad = renamed(tmp_path / "bad", lambda at: slow(healthy(50, 6)) if at == 3 else healthy(at + 50, 6), 5)
    (found,) = findings(card, bad)
    assert (found["rule"], found["severity"]) == ("course-reference", "warning")
    assert found["file"].endswith("result_3.txt")
    assert "loss of epoch 3" in found["message"]


@pytest.mark.parametrize(("division", "rule"), [("closed", "course-required"), ("open", "course-reference")])
def test_a_card_makes_it_an_error_of_the_closed_division(card: Path, tmp_path: Path, division: str, rule: str) -> None:
    folder = tmp_path / "strict"
    folder.mkdir()
    (folder / "rcp").symlink_to(card.parent / "rcp")
    strict = card_file(folder / "mine.yaml", course="error")
    bad = renamed(
        tmp_path / "bad", lambda at: edit("submission_division", value=division)(slow(healthy(at + 50, 6))), 5
    )
    found = findings(strict, bad)
    assert {each["rule"] for each in found} == {rule}
    assert {each["severity"] for each in found} == {"error" if rule == "course-required" else "warning"}


def record(folder: Path, lines: Lines) -> RunRecord:
    return summarise_log(read_events(write(folder / "result_0.txt", lines)))


def test_one_line_says_how_a_run_went(tmp_path: Path) -> None:
    logs = [record(tmp_path / str(at), healthy(at + 1, at % 5 + 1)) for at in range(15)]
    courses = collect_courses(logs, "a laptop")
    run = record(tmp_path / "fine", healthy(60, 7))
    assert describe_run_course(run, courses) == "course as 15 healthy runs (of healthy runs 1 in 100 is called unlike)"
    text = describe_run_course(record(tmp_path / "slow", slow(healthy(60, 7))), courses)
    assert text.startswith("course unlike healthy runs: loss of epoch 3")
    assert "in 15 healthy runs" in text
    assert describe_run_course(run, ()).startswith("no reference course of these settings")
    few = collect_courses(logs[:5], "a laptop")
    assert describe_run_course(run, few).startswith("no reference course")


@pytest.mark.parametrize("key", ["opt_base_learning_rate", "global_batch_size"])
def test_other_settings_have_another_course(tmp_path: Path, key: str) -> None:
    logs = [record(tmp_path / str(at), healthy(at + 1, at % 5 + 1)) for at in range(3)]
    other = record(tmp_path / "other", edit(key, value=32)(healthy(9)))
    courses = collect_courses([*logs, other], "a laptop")
    assert [len(course.seeds) for course in courses] == [3, 1]
    assert find_reference_course(other, courses) is courses[1]
    assert find_reference_course(other, courses[:1]) is None


def test_a_course_has_what_all_its_runs_have(tmp_path: Path) -> None:
    """Later epochs would be those of slow runs alone. A run that died has no course."""
    logs = [record(tmp_path / str(at), healthy(at + 1)) for at in range(2)]
    short = record(tmp_path / "short", [line for line in healthy(8) if (line.metadata or {}).get("epoch_num") != 5])
    died = record(tmp_path / "died", [line for line in healthy(9) if line.key != "run_stop"])
    (course,) = collect_courses([*logs, short, died], "a laptop")
    assert len(course.seeds) == 3
    assert "eval_error after epoch 4" in course.values
    assert not [name for name in course.values if "epoch 5" in name]


SHIPPED = sorted(
    (path.parts[-3], path.name.removesuffix("_course.json")) for path in COURSES.glob("*/rcp/*_course.json")
)


@pytest.mark.parametrize(("name", "size"), SHIPPED)
def test_a_shipped_course_is_of_the_settings_of_today(name: str, size: str) -> None:
    """A course of settings that a card no longer has would judge nothing, and nobody would know."""
    chosen = load_descriptor(name)
    config = load_config(chosen, size, [])
    (course,) = read_reference_courses(chosen.folder, size)
    assert (course.global_batch_size, course.precision) == (config.global_batch_size, config.precision)
    today = load_workload(chosen)(config).hyperparameters()
    assert today.items() <= course.hyperparameters.items()


@pytest.mark.parametrize(("name", "size"), SHIPPED)
def test_a_shipped_course_accuses_none_of_its_own_runs_but_broken_ones(name: str, size: str) -> None:
    (course,) = read_reference_courses(load_descriptor(name).folder, size)
    runs = [dict(zip(course.values, of_run, strict=True)) for of_run in zip(*course.values.values(), strict=True)]
    few = {number: 0.0 for number, values in course.values.items() if is_share(number) and max(values) < LEAST_SHARE}
    band = build_reference_band(course)
    assert band is not None
    assert [judge_course(band, run) for run in (*runs, runs[0] | few)] == [[]] * (len(runs) + 1)
    rounded = next(number for number in course.values if number.startswith("weights that bfloat16 holds"))
    assert judge_course(band, runs[0] | {rounded: 1.0})[0].name == rounded
    losses = {number: 2 * value for number, value in runs[0].items() if number.startswith("loss of")}
    assert {each.name for each in judge_course(band, runs[0] | losses)} & set(losses)


def load(*layers: object) -> Line:
    """What a window logs of its experts."""
    entries = {str(at): {"tokens_per_expert": tokens} for at, tokens in enumerate(layers)}
    return Line("window_stats", {"load": entries}, metadata={"epoch_num": 2, "first_step": 0, "steps": 1})


def read(folder: Path, *windows: Line, metrics: object = None) -> Mapping[str, float]:
    lines = edit("eval_error", 1, meta={"metrics": metrics})(our_run())
    return record(folder, chain(*(insert(line, "eval_error", 1) for line in windows))(lines)).course


def test_the_use_of_experts_is_that_of_all_layers_and_windows_of_an_epoch(tmp_path: Path) -> None:
    """Two of four experts with all tokens are half of them in use; a layer without tokens says nothing."""
    windows = load([7, 7, 0, 0], [5, 5, 5, 5]), load([0, 0, 0, 3]), load([0, 0], [], [1, None], [1, -1], None)
    course = read(tmp_path, *windows)
    assert course["experts in use of epoch 2"] == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert [name for name in course if name.startswith("experts")] == ["experts in use of epoch 2"]
    assert read(tmp_path / "large", load([1e308, 1e308]))["experts in use of epoch 2"] == 1.0


def test_other_metrics_are_odds_of_what_was_right_or_errors_over_the_loss(tmp_path: Path) -> None:
    metrics = {
        "eval_error": 3.0,
        "accuracy_mu": 0.75,
        "iou": 1.0,
        "val_loss": 0.5,
        "mse": None,
        "rmse": 1e400,
        "x": "y",
    }
    course = read(tmp_path, metrics=metrics)
    found = {name: value for name, value in course.items() if name.startswith("odds") or "over" in name}
    loss = course["loss of epoch 2"]
    assert found == {
        "odds of accuracy_mu after epoch 2": pytest.approx(3.0),
        "odds of iou after epoch 2": pytest.approx(1 / LEAST_CHANCE - 1),
        "val_loss after epoch 2 over its loss": pytest.approx(0.5 / loss),
    }
    assert course["eval_error after epoch 2"] != 3.0
    assert read(tmp_path / "none", metrics=["eval_error"]).keys() == read(tmp_path / "empty").keys()


def test_experts_that_take_all_tokens_are_unlike_healthy_runs(tmp_path: Path) -> None:
    def run(at: int, spread: int) -> RunRecord:
        tokens = [100 + random.Random(at).randrange(spread), 100, 100, 100] if spread else [200, 200, 0, 0]
        return record(tmp_path / f"{at} {spread}", insert(load(tokens), "eval_error", 1)(healthy(at, at % 5)))

    courses = collect_courses([run(at, 30) for at in range(1, 16)], "a laptop")
    assert describe_run_course(run(60, 30), courses).startswith("course as 15 healthy runs")
    assert "experts in use of epoch 2: 0.5" in describe_run_course(run(60, 0), courses)


@pytest.mark.long
def test_healthy_runs_whose_data_no_course_knows_are_rarely_accused() -> None:
    """Each data set of each shipped course is left out in turn, and its runs are judged by the others."""
    accused = judged = 0
    for name, size in SHIPPED:
        (course,) = read_reference_courses(load_descriptor(name).folder, size)
        runs = [dict(zip(course.values, of_run, strict=True)) for of_run in zip(*course.values.values(), strict=True)]
        sets, shares = course.data_manifests, {*filter(is_share, course.values)}
        for left_out in dict.fromkeys(sets):
            known = [run for run, of in zip(runs, sets, strict=True) if of != left_out]
            band = build_band(known, [of for of in sets if of != left_out], shares)
            assert band is not None
            found = [judge_course(band, run) for run, of in zip(runs, sets, strict=True) if of == left_out]
            accused, judged = accused + sum(map(bool, found)), judged + len(found)
    assert judged >= 200
    assert accused <= 0.02 * judged
