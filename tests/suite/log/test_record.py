"""What a log says about its run: times, evaluations, phases, and what is left out where a log lacks it."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.log.record import FACTS, RunRecord, find_first_on_target, summarise_log
from tests.fixtures.logs import SHORT, Line, Lines, append, at, chain, drop, edit, hpc_run, our_run, raw, write


def record(tmp_path: Path, lines: Lines) -> RunRecord:
    return summarise_log(read_events(write(tmp_path / "result_0.txt", lines)))


def test_a_run_is_summarised(tmp_path: Path) -> None:
    found = record(tmp_path, our_run(values=(0.42, 0.39, 0.355), epoch_s=2.0, seed=7))
    assert (found.benchmark, found.size, found.ruleset) == ("cosmoflow", "smoke", "mlhpc-1.0")
    assert (found.seed, found.nodes, found.ranks, found.accelerators_per_node) == (7, 1, 2, 0)
    assert found.compute_units == 1
    assert found.global_batch_size == 16
    assert found.status == "success"
    assert [item.value for item in found.evals] == [at(value) for value in (0.42, 0.39, 0.355)]
    assert [item.number for item in found.epochs] == [1, 2, 3]
    assert found.hyperparameters["opt_base_learning_rate"] == 0.01
    assert "run_config" not in found.hyperparameters
    assert "ruleset" not in found.hyperparameters


def test_the_parts_of_a_run_sum_to_its_time(tmp_path: Path) -> None:
    found = record(tmp_path, our_run(values=SHORT, epoch_s=2.0))
    shares = found.shares
    assert found.time_to_train_s == shares.run_s
    assert shares.train_s + shares.eval_s + shares.staging_exposed_s + shares.other_s == pytest.approx(shares.run_s)
    assert shares.train_s == pytest.approx(6.0, abs=0.05)
    assert shares.eval_s == pytest.approx(0.75, abs=0.02)
    assert shares.eval_hidden_s == 0.0
    assert sum(epoch.train_s for epoch in found.epochs) == pytest.approx(shares.train_s)


def test_phases_are_totals_over_the_run(tmp_path: Path) -> None:
    phases = record(tmp_path, our_run(values=SHORT, epoch_s=2.0)).phases
    parts = phases.data_wait_s + phases.forward_backward_s + phases.exposed_communication_s
    assert parts + phases.optimizer_s + phases.other_s == pytest.approx(phases.step_s) == pytest.approx(6.0)
    assert phases.overlapped_communication_s == pytest.approx(1.2, rel=0.01)  # windows differ a little


def test_staging_before_the_run_is_beside_the_time_and_staging_inside_is_in_it(tmp_path: Path) -> None:
    before = record(tmp_path, our_run(staging_s=3.0))
    assert before.staging_s == pytest.approx(3.0, abs=0.01)
    assert before.staging_in_run is False
    assert before.time_with_staging_s == pytest.approx((before.time_to_train_s or 0) + 3.0, abs=0.01)

    lines = our_run(staging_s=None)
    start = next(index for index, line in enumerate(lines) if line.key == "epoch_start")
    at = lines[start].time_ms
    inside = [*lines[:start], Line("staging_start", time_ms=at), Line("staging_stop", time_ms=at + 500), *lines[start:]]
    found = record(tmp_path, inside)
    assert found.staging_in_run is True
    assert found.time_with_staging_s == found.time_to_train_s
    assert record(tmp_path, our_run(staging_s=None)).staging_s is None


def test_what_follows_run_stop_is_ignored(tmp_path: Path) -> None:
    lines = our_run(values=SHORT)
    plain = record(tmp_path, lines)
    late = append(Line("epoch_start", metadata={"epoch_num": 4}), Line("eval_error", 0.9, metadata={"epoch_num": 4}))
    found = record(tmp_path, chain(late, append(Line("run_stop", metadata={"status": "aborted"})))(lines))
    assert found == plain


def test_an_epoch_cut_by_run_stop_ends_there(tmp_path: Path) -> None:
    lines = our_run(values=SHORT)
    last = max(index for index, line in enumerate(lines) if line.key == "epoch_stop")
    found = record(tmp_path, lines[:last] + lines[last + 1 :])
    assert [epoch.complete for epoch in found.epochs] == [True, True, False]
    assert found.epochs[-1].stop_s == found.time_to_train_s


def test_evaluation_beside_training_counts_once_and_the_parts_still_sum_to_the_run(tmp_path: Path) -> None:
    """As 25 published v3.0 logs have it: each evaluation runs through the next epoch. One clock once gave 184 % of the run."""
    lines = [Line("run_start", time_ms=1_700_000_000_000)]
    for epoch in (1, 2, 3):
        begin = 1_700_000_000_000 + (epoch - 1) * 10_000
        lines += [
            Line("epoch_start", time_ms=begin, metadata={"epoch_num": epoch}),
            Line("epoch_stop", time_ms=begin + 10_000, metadata={"epoch_num": epoch}),
            Line("eval_start", time_ms=begin + 10_000, metadata={"epoch_num": epoch}),
            Line("eval_error", 0.1, time_ms=begin + 19_000, metadata={"epoch_num": epoch}),
            Line("eval_stop", time_ms=begin + 19_000, metadata={"epoch_num": epoch}),
        ]
    lines.append(Line("run_stop", time_ms=1_700_000_039_500, metadata={"status": "success"}))
    start, *events, stop = lines
    shares = record(tmp_path, [start, *sorted(events, key=lambda line: line.time_ms or 0), stop]).shares
    assert (shares.run_s, shares.train_s) == (39.5, 30.0)
    assert (shares.eval_s, shares.eval_hidden_s) == (9.0, 18.0)  # training waited for the last one only
    assert shares.other_s == pytest.approx(0.5)


def test_traps_of_published_logs(tmp_path: Path) -> None:
    lines = hpc_run("openfold")
    mutated = chain(
        edit("seed", value="12345"),
        raw(b"0: noise without the token\n"),
        raw(b"  4: :::MLLOG {broken\n"),
        edit("cache_clear", value=True),
        drop("number_of_nodes", "staging_start", "staging_stop"),
    )(lines)
    found = record(tmp_path, mutated)
    assert found.seed == 12345
    assert found.nodes is None
    assert found.compute_units is None


def test_the_first_value_that_reaches_the_target_counts(tmp_path: Path) -> None:
    target = load_descriptor("cosmoflow").card().target("smoke")
    found = find_first_on_target(record(tmp_path, our_run(values=(0.4, 0.35, 0.38, 0.34))), target)
    assert found.epoch == 2
    assert find_first_on_target(record(tmp_path, our_run(values=(0.4, 0.39))), target) is None


def test_a_log_without_events_gives_the_record_that_is_made_without_a_log(tmp_path: Path) -> None:
    assert replace(record(tmp_path, []), path=None) == RunRecord()


def test_no_two_facts_have_one_column() -> None:
    columns = [column for fact in FACTS.values() for column in fact.columns]
    assert len(columns) == len(set(columns))


@pytest.mark.parametrize("lines", [[], [Line("run_stop")], [Line("run_start")], [Line("eval_error", "text")]])
def test_any_events_give_a_record(tmp_path: Path, lines: Lines) -> None:
    found = record(tmp_path, lines)
    assert found.time_to_train_s is None
    assert found.evals == ()
