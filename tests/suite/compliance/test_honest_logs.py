"""What honest logs of MLPerf's rounds do is no finding; the same rules still find what is wrong beside it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mlhpc.analysis.tables.ingest import read_log
from mlhpc.suite.compliance.check import check, check_log
from mlhpc.suite.compliance.rules.package_rules import SYSTEM_FIELDS, list_blank_fields
from mlhpc.suite.compliance.ruleset import read_ruleset
from mlhpc.suite.log.results_tree import find_logs
from tests.fixtures.logs import (
    START_MS,
    Line,
    Lines,
    Mutation,
    chain,
    drop,
    drop_one,
    edit,
    hpc_run,
    insert,
    move,
    our_run,
    our_runs,
    results,
    write,
)
from tests.fixtures.systems import hpc_package


def found(path: Path, name: str, rule: str) -> list[str]:
    return [item.message for item in check_log(path, read_ruleset(name)).findings if item.rule == rule]


def numbered_from(first: int) -> Mutation:
    """All epoch numbers shifted, so that the first epoch has the given number."""

    def apply(lines: Lines) -> Lines:
        return [
            Line(
                line.key,
                line.value,
                line.time_ms,
                dict(line.metadata) | {"epoch_num": line.metadata["epoch_num"] - 1 + first},
            )
            if line.metadata and "epoch_num" in line.metadata
            else line
            for line in lines
        ]

    return apply


@pytest.mark.parametrize(("first", "first_round", "later"), [(0, 0, 1), (1, 0, 0), (2, 1, 1), (-1, 1, 1)])
def test_the_first_round_counts_epochs_from_0_or_1(tmp_path: Path, first: int, first_round: int, later: int) -> None:
    path = write(tmp_path / "result_0.txt", numbered_from(first)(hpc_run()))
    assert len(found(path, "0.7.0", "epoch-numbers")) == first_round
    assert len(found(path, "1.0.0", "epoch-numbers")) == later


@pytest.mark.parametrize("skipped", [1, 3, 7])
def test_a_gap_after_epoch_0_is_found(tmp_path: Path, skipped: int) -> None:
    lines = chain(numbered_from(0), edit("epoch_start", skipped, meta={"epoch_num": skipped + 5}))(hpc_run())
    (message,) = found(write(tmp_path / "result_0.txt", lines), "0.7.0", "epoch-numbers")
    assert message == f"epoch_num {skipped + 5} where {skipped} is due"


def test_the_first_round_has_runs_without_status(tmp_path: Path) -> None:
    lines = hpc_run()
    path = write(tmp_path / "result_0.txt", [*lines[:-1], Line("run_stop", None, lines[-1].time_ms)])
    assert not found(path, "0.7.0", "run-status")
    assert found(path, "1.0.0", "run-status") == ["run_stop has no status"]
    banana = write(tmp_path / "result_1.txt", edit("run_stop", meta={"status": "banana"})(lines))
    assert found(banana, "0.7.0", "run-status")


# Clocks of several ranks


def late(key: str, seconds: float, occurrence: int = 0) -> Mutation:
    """Insert another rank's copy of an event, so much earlier, behind it."""

    def apply(lines: Lines) -> Lines:
        places = [index for index, line in enumerate(lines) if line.key == key]
        line = lines[places[occurrence]]
        copy = Line(line.key, line.value, line.time_ms - 1000 * seconds, line.metadata)
        return [*lines[: places[occurrence] + 1], copy, *lines[places[occurrence] + 1 :]]

    return apply


def before(key: str, milliseconds: float) -> Mutation:
    """Set the time of an event back behind the one before it."""

    def apply(lines: Lines) -> Lines:
        index = next(index for index, line in enumerate(lines) if line.key == key)
        line = lines[index]
        return [
            *lines[:index],
            Line(line.key, line.value, lines[index - 1].time_ms - milliseconds, line.metadata),
            *lines[index + 1 :],
        ]

    return apply


@pytest.mark.parametrize(
    ("legal", "mutation"),
    [
        (True, chain()),
        (True, late("init_start", 0.039)),
        (True, late("init_start", 3.0)),
        (True, late("opt_weight_decay", 7.4)),
        (True, late("global_batch_size", 0.1)),
        (True, late("epoch_start", 0.5, 3)),
        (True, late("cache_clear", 2.0)),
        (True, before("eval_start", 1)),
        (True, before("eval_start", 10)),
        (True, chain(late("init_start", 0.02), late("init_start", 0.03), late("init_start", 0.04))),
        (False, before("eval_start", 4000)),
        (False, before("epoch_stop", 3000)),
        (False, before("run_start", 2000)),
        (False, before("eval_error", 200)),
        (False, before("eval_stop", 30)),
        (False, before("run_stop", 20_000)),
        (False, before("staging_stop", 500)),
        (False, before("init_stop", 50)),
        (False, edit("epoch_start", 7, time_ms=1_695_000_030_000)),
        (False, edit("eval_error", 9, time_ms=1_695_000_040_000)),
    ],
)
def test_clocks_of_ranks_differ_and_the_clock_of_the_run_does_not_go_back(
    tmp_path: Path, legal: bool, mutation: Mutation
) -> None:
    path = write(tmp_path / "result_0.txt", mutation(hpc_run()))
    assert (not found(path, "3.0.0", "clock-order")) == legal


def test_one_rank_writes_our_logs_and_its_clock_is_judged_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "result_0.txt", before("seed", 1)(our_run()))
    assert found(path, "mlhpc-1.0", "clock-order")


# The metric


def also(key: str, value: float) -> Mutation:
    """A second metric beside the first, logged before it at every evaluation."""

    def apply(lines: Lines) -> Lines:
        with_second: list[Line] = []
        for line in lines:
            if line.key in ("eval_accuracy", "eval_error"):
                with_second.append(Line(key, value + 1e-6 * len(with_second), line.time_ms, line.metadata))
            with_second.append(line)
        return with_second

    return apply


@pytest.mark.parametrize(
    ("benchmark", "other", "value"),
    [("deepcam", "eval_error", 0.4), ("cosmoflow", "eval_accuracy", 0.9), ("openfold", "eval_error", 0.01)],
)
def test_a_log_with_both_metrics_is_judged_and_scored_by_its_own(
    tmp_path: Path, benchmark: str, other: str, value: float
) -> None:
    runs = {"deepcam": 5}.get(benchmark, 10)
    folder = results(
        tmp_path / "runs",
        runs,
        lambda n: also(other, value)(hpc_run(benchmark, seed=n + 1, start_ms=1_695_000_000_000 + n * 10**6)),
    )
    assert not [item for item in check([folder], "3.0.0").findings if item.severity == "error"]
    (scored,) = check([folder], "3.0.0").results
    assert scored.valid
    missed = write(tmp_path / "result_0.txt", chain(also(other, value), drop_reached(benchmark))(hpc_run(benchmark)))
    assert found(missed, "3.0.0", "target-missed")


def drop_reached(benchmark: str) -> Mutation:
    """Take the values that reach the target out."""
    metric = "eval_error" if benchmark == "cosmoflow" else "eval_accuracy"
    return edit(metric, 23, value=0.2 if benchmark == "cosmoflow" else 0.1)


def test_the_tables_take_the_benchmarks_metric_too(tmp_path: Path) -> None:
    path = write(tmp_path / "result_0.txt", also("eval_error", 0.4)(hpc_run("deepcam")))
    (file,), _ = find_logs([path])
    reading = read_log({}, {}, file)
    assert reading.record.metric_key == "eval_accuracy"
    assert reading.target is not None


@pytest.mark.parametrize("key", ["train_samples", "eval_samples"])
@pytest.mark.parametrize("benchmark", ["cosmoflow", "deepcam", "oc20", "openfold"])
def test_sample_counts_may_stand_after_run_start(tmp_path: Path, key: str, benchmark: str) -> None:
    lines = hpc_run(benchmark)
    line = next(item for item in lines if item.key == key)
    start = next(item for item in lines if item.key == "run_start")
    moved = [Line(item.key, item.value, start.time_ms, item.metadata) if item is line else item for item in lines]
    path = write(tmp_path / "result_0.txt", move(key, "epoch_start")(moved))
    assert not [item for item in check_log(path, read_ruleset("3.0.0")).findings if item.severity != "info"]


# Packages


@pytest.mark.parametrize(
    ("round_", "place", "legal"),
    [
        ("0.7", "cosmoflow", True),
        ("0.7", "strong/cosmoflow", False),
        ("3.0", "cosmoflow", False),
        ("3.0", "strong/cosmoflow", True),
    ],
)
def test_scenario_folders_came_with_the_second_round(tmp_path: Path, round_: str, place: str, legal: bool) -> None:
    verdict = check([hpc_package(tmp_path / f"hpc_results_v{round_}", place=place, start_ms=1_601_000_000_000)])
    assert ("results-layout" not in {item.rule for item in verdict.findings}) == legal


@pytest.mark.parametrize(
    ("folder", "stated", "org", "legal"),
    [
        ("Fujitsu+RIKEN", "Fujitsu/RIKEN", "Fujitsu", True),
        ("Fujitsu+RIKEN", "RIKEN/Fujitsu", "RIKEN", True),
        ("Fujitsu+RIKEN", "Fujitsu+RIKEN", "Fujitsu+RIKEN", True),
        ("Fujitsu+RIKEN", "Fujitsu & RIKEN", "Fujitsu, RIKEN", True),
        ("RIKEN", "Fujitsu/RIKEN", "Fujitsu", True),
        ("tacc", "TACC", "TACC", True),
        ("TACC", "tacc", "Tacc", True),
        ("Clemson", "Clemson University Research Computing and Data", "Clemson University", True),
        ("HPE+LBNL", "HPE+LBNL", "LBNL", True),
        ("HelmholtzAI", "HelmholtzAI", "HelmholtzAI", True),
        ("Fujitsu+RIKEN", "Fujitsu/RIKEN", "NVIDIA", False),
        ("LBNL", "LBNL", "NVIDIA", False),
        ("TACC", "TACC", "LBNL", False),
        ("NCSA", "NCSA", "Umbrella Corp.", False),
        ("NVIDIA", "NVIDIA", "SUBMISSION_ORG_PLACEHOLDER", False),
        ("RIKEN", "Fujitsu", "Fujitsu", False),
        ("TACC", "TACCO", "TACC", False),
        ("Dell", "Delling", "Dell", False),
        ("A", "/", "A", False),
        ("ACME", "", "ACME", False),
        ("ACME", "Other ACME", "ACME", False),
    ],
)
def test_names_of_one_submitter(tmp_path: Path, folder: str, stated: str, org: str, legal: bool) -> None:
    verdict = check([hpc_package(tmp_path / "hpc_results_v3.0", folder, org=org, submitter=stated)])
    assert ("submitter-agrees" not in {item.rule for item in verdict.findings}) == legal


FILLED = dict.fromkeys(SYSTEM_FIELDS, "x")


@pytest.mark.parametrize(
    ("empty", "named"),
    [
        ((), ()),
        (("hw_notes", "sw_notes"), ()),
        (("host_processor_caches", "host_processor_frequency", "host_processor_interconnect"), ()),
        (("accelerator_frequency", "accelerator_on-chip_memories", "accelerator_interconnect_topology"), ()),
        (("host_processor_vcpu_count",), ()),
        (("host_processor_core_count",), ()),
        (("host_processor_core_count", "host_processor_vcpu_count"), "all"),
        (("cooling",), "all"),
        (("host_storage_type", "host_storage_capacity"), "all"),
        (("accelerator_model_name", "accelerator_memory_capacity"), "all"),
        (("framework", "operating_system"), "all"),
        (("host_networking",), "all"),
    ],
)
def test_fields_of_a_system_that_need_a_meaningful_response(empty: Sequence[str], named: Sequence[str]) -> None:
    assert list_blank_fields(FILLED | dict.fromkeys(empty, " Unknown ")) == list(empty if named == "all" else named)


def test_a_system_without_accelerators_has_none_to_describe() -> None:
    empty = [name for name in SYSTEM_FIELDS if name.startswith("accelerator_")]
    assert not list_blank_fields(FILLED | dict.fromkeys(empty, "") | {"accelerators_per_node": "0"})
    assert "accelerator_model_name" in list_blank_fields(
        FILLED | dict.fromkeys(empty, "") | {"accelerators_per_node": "4"}
    )


def test_a_seed_is_asked_for_by_the_rounds_whose_tools_did(tmp_path: Path) -> None:
    path = write(tmp_path / "result_0.txt", drop("seed")(hpc_run()))
    severity = {
        name: next(
            item.severity for item in check_log(path, read_ruleset(name)).findings if item.rule == "seed-missing"
        )
        for name in ("0.7.0", "1.0.0", "3.0.0")
    }
    assert severity == {"0.7.0": "info", "1.0.0": "warning", "3.0.0": "warning"}


def test_what_is_inserted_twice_is_still_found(tmp_path: Path) -> None:
    lines = insert(Line("run_start", None, 1_695_000_200_000), before="run_stop")(hpc_run())
    assert found(write(tmp_path / "result_0.txt", lines), "3.0.0", "key-repeated")


# A run that diverges, and a run that goes on after the target


def diverged(key: str, after: int, value: object) -> Mutation:
    """Every value of the metric after the first ones is not a number, and the run is aborted."""

    def apply(lines: Lines) -> Lines:
        places = [index for index, line in enumerate(lines) if line.key == key][after:]
        changed = list(lines)
        for index in places:
            metadata = dict(lines[index].metadata or {})
            if "metrics" in metadata:
                metadata["metrics"] = {key: value}
            changed[index] = Line(key, value, lines[index].time_ms, metadata)
        return chain(drop("target_accuracy_reached"), edit("run_stop", meta={"status": "aborted"}))(changed)

    return apply


NAN = float("nan")


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf"), "nan", "inf"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_one_run_of_a_result_may_diverge_and_train_on(tmp_path: Path, after: int, value: object) -> None:
    hpc = results(
        tmp_path / "hpc", 10,
        lambda n: (diverged("eval_error", 8 * after, value) if n == 3 else chain())(
            hpc_run(seed=n + 1, start_ms=1_695_000_000_000 + n * 10**6, epoch_s=5 + 0.01 * n)),
    )  # fmt: skip
    ours = our_runs(tmp_path / "ours")
    long = our_run(seed=77, trial=2, values=(0.42, 0.41, 0.40, 0.38), start_ms=START_MS + 1)
    write(ours / "result_2.txt", diverged("eval_error", after, value)(long))
    for verdict in (check([hpc], "3.0.0"), check([ours])):
        assert verdict.compliant, [item for item in verdict.findings if item.severity == "error"]


@pytest.mark.parametrize(
    "mutation",
    [
        drop_one("eval_error", 1),
        drop_one("eval_error", 12),
        chain(drop_one("eval_error", 5), drop_one("eval_error", 5)),
        insert(Line("eval_error", NAN, metadata={"epoch_num": 3}), "eval_stop", 2),
        insert(Line("eval_error", 0.2, metadata={"epoch_num": 3}), "eval_stop", 2),
        edit("eval_error", 4, meta={"epoch_num": 3}),
        edit("eval_error", 4, value=NAN, meta={"epoch_num": 3}),
        edit("eval_error", 4, value=None),
        edit("eval_error", 4, value="none"),
        edit("eval_error", 4, value=[NAN]),
    ],
)
def test_an_evaluation_that_is_missing_or_there_twice_is_found(tmp_path: Path, mutation: Mutation) -> None:
    path = write(tmp_path / "result_0.txt", mutation(hpc_run()))
    assert found(path, "3.0.0", "eval-every-epoch")


@pytest.mark.parametrize("more", [1, 2, 5])
@pytest.mark.parametrize("last", [0.11, 0.2])
def test_a_run_may_go_on_after_the_target(tmp_path: Path, more: int, last: float) -> None:
    lines = chain(edit("eval_error", 23 - more, value=0.11), edit("eval_error", 23, value=last))(hpc_run())
    path = write(tmp_path / "result_0.txt", lines)
    assert check([path], "3.0.0").compliant
    assert bool(found(path, "3.0.0", "last-eval")) == (last > 0.124)
    (message,) = found(path, "3.0.0", "late-stop")
    assert message == f"the target was reached {more} evaluation{'s' * (more > 1)} before the run stopped"


@pytest.mark.parametrize("tail_s", [0.0, 0.3, 5.0])
def test_an_epoch_may_end_long_after_its_last_window(tmp_path: Path, tail_s: float) -> None:
    """By as much as the window's event waits for a slow disk. A time that was not there is an error."""
    lines = our_run(measured=True, tail_s=tail_s)
    assert found(write(tmp_path / "result_0.txt", lines), "mlhpc-1.0", "sums-agree") == []
    windows = [line.value for line in lines if line.key == "step_phases"]
    more = {name: value + (tail_s + 0.3) * (name in ("other", "step")) for name, value in windows[0].items()}
    for change in (more, {name: 0.9 * value for name, value in windows[0].items()}):
        path = write(tmp_path / "result_1.txt", edit("step_phases", value=change)(lines))
        assert any("rank 0" in message for message in found(path, "mlhpc-1.0", "sums-agree"))


def _code(text: str) -> Callable[[Path], object]:
    return lambda folder: next(folder.glob("benchmarks/*/implementations/*")).joinpath("train.py").write_text(text)


def _scaling(factor: float) -> Callable[[Path], object]:
    return lambda folder: (
        next(folder.glob("results/*/strong/*"))
        .joinpath("scaling.json")
        .write_text(json.dumps({"scaling_factor": factor}))
    )


@pytest.mark.parametrize(
    ("fields", "change", "damage", "rule"),
    [
        ({"status": "onprem"}, None, _code("COSMOFLOW = 1"), None),
        ({"status": "Available in cloud"}, None, None, None),
        ({"status": "preview"}, None, None, "division-agrees"),
        ({"status": "Research, Development, or Internal"}, None, None, "division-agrees"),
        ({"status": "Preview"}, edit("submission_status", value="preview"), None, None),
        ({}, edit("submission_status", value="preview"), None, "division-agrees"),
        ({"host_memory_capacity": "2.0 TB"}, None, None, None),
        ({"host_memory_capacity": "512 TB"}, None, None, "system-field"),
        ({"accelerator_memory_capacity": "80TiB HBM"}, None, None, "system-field"),
        ({"host_networking": "N/A"}, None, None, None),
        ({"host_networking": "None"}, None, None, "system-field"),
        ({}, edit("cache_clear", value=True), None, None),
        ({}, edit("cache_clear", value=False), None, "key-value"),
        ({}, insert(Line("target_accuracy_reached", 0.124, metadata={"epoch_num": 24}), "run_stop"), None, None),
        (
            {},
            insert(Line("target_accuracy_reached", 0.124, metadata={"epoch_num": 3}), "epoch_start", 3),
            None,
            "stated-twice",
        ),
        ({}, None, _code("log('deepcam')"), "benchmark-folder"),
        ({}, None, _code(""), "benchmark-folder"),
        ({}, None, _scaling(0.5), "scaling-true"),
    ],
)
def test_what_a_round_states_has_bounds(
    tmp_path: Path,
    fields: dict[str, str],
    change: Mutation | None,
    damage: Callable[[Path], object] | None,
    rule: str | None,
) -> None:
    folder = hpc_package(tmp_path / "hpc_results_v3.0", change=change, **fields)
    if damage is not None:
        damage(folder)
    found = [(item.rule, item.message) for item in check([folder]).findings if item.severity == "error"]
    assert ([] if rule is None else [rule]) == [*dict.fromkeys(name for name, _ in found)], found
