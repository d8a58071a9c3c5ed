"""The course of a run against the clock, and its epochs against the reference points: forgeries are errors, odd runs are not."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlhpc.suite.compliance.check import check, check_log
from mlhpc.suite.compliance.ruleset import read_ruleset
from tests.fixtures.course_mutations import CourseCase, course_cases
from tests.fixtures.logs import Line, Lines, Mutation, chain, drop, edit, hpc_run, insert, results, settle, write

BOUNDARIES = (19, 21, 22, 23)  # of the epochs after which the learning rate falls
DECAY = ("learning_rate_decay_boundary_epochs", "learning_rate_decay_factor")


@pytest.mark.drawn(80)
@pytest.mark.parametrize("case", course_cases(), ids=str)
def test_courses(tmp_path: Path, case: CourseCase) -> None:
    lines = case.lines() if case.rule else settle(case.lines())
    log = check_log(write(tmp_path / "result_0.txt", lines), read_ruleset(case.ruleset))
    found = [(finding.rule, finding.message) for finding in log.findings if finding.severity == "error"]
    assert (case.rule in {rule for rule, _ in found}) if case.rule else not found, found


def result(folder: Path, benchmark: str, name: str, *mutations: Mutation, first: tuple[Mutation, ...] = ()) -> set[str]:
    """The rules that a time-to-train result of a round breaks; ``first``: what is done to the first log only."""
    count = 5 if benchmark in ("deepcam", "oc20") else 10
    staged = () if name == "3.0.0" else (drop("staging_start", "staging_stop"),)

    def run(index: int) -> Lines:
        lines = hpc_run(
            benchmark, seed=index + 1, epochs=50, start_ms=1_695_000_000_000 + index * 10**7, epoch_s=5 + 0.1 * index
        )
        return chain(*staged, *mutations, *(first if index == 0 else ()))(lines)

    results(folder, count, run)
    return {finding.rule for finding in check([folder], name).findings if finding.severity == "error"}


@pytest.mark.parametrize("name", ["1.0.0", "2.0.0", "3.0.0"])
@pytest.mark.parametrize(
    ("benchmark", "batch"), [("cosmoflow", 1025), ("cosmoflow", 65536), ("deepcam", 4096), ("oc20", 2049)]
)
def test_a_batch_above_all_reference_points_is_an_error(tmp_path: Path, benchmark: str, batch: int, name: str) -> None:
    assert result(tmp_path, benchmark, name, edit("global_batch_size", value=batch)) == {"rcp-above"}


@pytest.mark.parametrize(
    ("benchmark", "batch"),
    [("cosmoflow", 1024), ("cosmoflow", 700), ("cosmoflow", 8), ("deepcam", 2048), ("oc20", 300)],
)
def test_a_batch_that_has_a_reference_is_not(tmp_path: Path, benchmark: str, batch: int) -> None:
    assert not result(tmp_path, benchmark, "3.0.0", edit("global_batch_size", value=batch))


def test_the_open_division_and_the_first_round_have_no_reference(tmp_path: Path) -> None:
    big = edit("global_batch_size", value=65536)
    assert not result(tmp_path / "open", "cosmoflow", "3.0.0", big, edit("submission_division", value="open"))
    assert not result(tmp_path / "first", "cosmoflow", "0.7.0", big, edit("train_samples", value=262144))


def test_a_first_log_without_a_batch_does_not_switch_the_comparison_off(tmp_path: Path) -> None:
    """It once did: the batch was that of result_0."""
    big = edit("global_batch_size", value=65536)
    assert "rcp-above" in result(tmp_path, "cosmoflow", "3.0.0", big, first=(drop("global_batch_size"),))


def test_epochs_cannot_be_edited_to_pass_the_reference_points(tmp_path: Path) -> None:
    """Nine epochs where the reference needs twelve; then the last evaluation is said to be of the 90th."""

    def run(number: int) -> Mutation:
        return edit("eval_accuracy", 8, meta={"epoch_num": number})

    def runs(folder: Path, number: int) -> set[str]:
        def one(index: int) -> Lines:
            lines = hpc_run(
                "deepcam", seed=index + 1, epochs=9, start_ms=1_695_000_000_000 + index * 10**7, epoch_s=5 + index / 10
            )
            return chain(edit("global_batch_size", value=1024), run(number))(lines)

        results(folder, 5, one)
        return {finding.rule for finding in check([folder], "3.0.0").findings if finding.severity == "error"}

    assert runs(tmp_path / "true", 9) == {"rcp-speed"}
    assert runs(tmp_path / "edited", 90) == {"epoch-begun"}


def test_in_1_0_a_rate_that_contradicts_the_times_is_a_warning(tmp_path: Path) -> None:
    case = next(case for case in course_cases() if case.name == "cosmoflow: all times halved")
    lines = drop("staging_start", "staging_stop")(case.lines())
    log = check_log(write(tmp_path / "result_0.txt", lines), read_ruleset("1.0.0"))
    assert [item.severity for item in log.findings if item.rule == "throughput-true"] == ["warning"]


@pytest.mark.parametrize(("seconds", "found"), [(3.0, True), (4.5, False), (30.0, False)])
def test_a_run_far_faster_than_the_others_is_an_error(tmp_path: Path, seconds: float, found: bool) -> None:
    def run(index: int) -> Lines:
        epoch_s = 5 + index / 10 if index else seconds
        return hpc_run("deepcam", seed=index + 1, epochs=9, start_ms=1_695_000_000_000 + index * 10**7, epoch_s=epoch_s)

    results(tmp_path, 5, run)
    assert ("run-pace" in {finding.rule for finding in check([tmp_path], "3.0.0").findings}) == found


@pytest.mark.parametrize("changed", [None, *BOUNDARIES, "factor", "warmup_epochs", "warmup_factor"])
@pytest.mark.parametrize("by", [-4, 1])
def test_learning_rates_are_those_of_the_stated_schedule(tmp_path: Path, changed: object, by: int) -> None:
    """The log states warm-up and decay once and the rate in each epoch: each number of them is changed alone."""
    lines, base = hpc_run(epochs=30), 0.024
    stated = [end + by * (end == changed) for end in BOUNDARIES]
    factors = [0.5, 0.25, 0.125, 0.0625 + (changed == "factor") * by / 100]
    for place, line in enumerate(lines):
        epoch = (line.metadata or {}).get("epoch_num", 0)
        rate = base * min(0.25 * epoch, 1.0) * 0.5 ** sum(end < epoch for end in BOUNDARIES)
        if line.key == "epoch_start":
            lines[place] = replace(line, metadata={**(line.metadata or {}), "lr": [rate, rate]})
    for key, value in zip(("base_learning_rate", *DECAY), (base, stated, factors), strict=True):
        lines = edit(f"opt_{key}", value=value)(lines)
    for key, value in (("warmup_epochs", 3), ("warmup_factor", 4.0)):
        other = value + (by == 1 or -2) * (changed == key)
        lines = edit(f"opt_learning_rate_{key}", value=other)(lines)
    found = check_log(write(tmp_path / "result_0.txt", lines), read_ruleset("3.0.0")).findings
    assert [item.rule for item in found if "learning rate" in item.message] == ["stated-twice"] * (changed is not None)


@pytest.mark.parametrize("each", [10, 58, 473])
@pytest.mark.parametrize(
    ("changed", "value", "found"),
    [
        *(
            (None, None, False),
            ("milestones", [100], True),
            ("milestones", [2900], True),
            ("milestones", [800, 900], True),
        ),
        *(("milestones", [], False), ("decay_rate", 0.2, True), ("lr_warmup_steps", 3000, False)),
    ],
)
def test_learning_rates_of_steps_fall_at_the_stated_milestones(
    tmp_path: Path, changed: str | None, value: object, found: bool, each: int
) -> None:
    """Milestones count from the end of the warm-up. Rates that are logged rarely may all be before them or after."""
    stated = {"milestones": [800], "decay_rate": 0.1, "lr_warmup_steps": 400}
    stated |= {} if changed is None else {changed: value}
    lines = edit("opt_lr", value=0.0055)(hpc_run("deepcam", epochs=3000 // each))
    for key, stands in stated.items():
        lines = edit(f"scheduler_{key}", value=stands)(lines)
    for number in range(3000 // each):
        step = (number + 1) * each
        rate = 0.0055 * min(step / 400, 1.0) * (0.1 if step > 1200 else 1.0)
        lines = insert(Line("learning_rate", rate, metadata={"step_num": step}), "eval_start", number)(lines)
    findings = check_log(write(tmp_path / "result_0.txt", lines), read_ruleset("3.0.0")).findings
    assert any("milestones" in item.message for item in findings if item.rule == "stated-twice") == found


def _with_rates(base: float | None, warm: int | None, each: int) -> Mutation:
    """A learning rate before each evaluation: they rise for 400 steps to 0.0055 and fall then. An epoch has ``each`` steps."""
    named = {"opt_base_learning_rate": base, "opt_learning_rate_warmup_steps": warm}
    stated = [insert(Line(key, value), "init_stop") for key, value in named.items() if value is not None]

    def add(lines: Lines) -> Lines:
        for number in range(sum(line.key == "eval_start" for line in lines)):
            step = (number + 1) * each
            rate = 0.0055 * min(step / 400, 1.0) * 0.9 ** max(0, step // 400 - 1)
            lines = insert(Line("learning_rate", rate, metadata={"step_num": step}), "eval_start", number)(lines)
        return lines

    return chain(drop(*named), *stated, add)


RATES = [
    *((0.0055, 400, False), (0.0055, 800, False), (0.0055, None, False), (None, 400, False), (0.01, 400, False)),
    *((0.0045, 400, True), (0.0055, 200, True), (0.001, None, True), (0.0055, 0, True)),
]


@pytest.mark.parametrize("each", [40, 50, 70, 100])
@pytest.mark.parametrize(("base", "warm", "found"), RATES)
def test_learning_rates_of_steps_follow_what_the_log_states(
    tmp_path: Path, base: float | None, warm: int | None, found: bool, each: int
) -> None:
    log = write(tmp_path / "result_0.txt", _with_rates(base, warm, each)(hpc_run(epochs=38)))
    findings = check_log(log, read_ruleset("3.0.0")).findings
    assert any("learning rate" in item.message for item in findings if item.rule == "stated-twice") == found
