"""What the tables say of small logs with one trap each (published_results.md section 6)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mlhpc.analysis.tables.ingest import Tables, read_tables
from mlhpc.suite.card import Card
from mlhpc.suite.errors import InputError

Cards = dict[str, Card]
Build = Callable[..., Any]


def one(tmp_path: Path, text: Any, cards: Cards) -> dict[str, Any]:
    """The runs row of a single loose log."""
    tables = read_tables([text.write(tmp_path / "logs" / "result_0.txt")], cards)
    return tables.runs.iloc[0].to_dict()


def test_a_run_without_size_has_the_mlperf_size_and_target(tmp_path: Path, log: Build, cards: Cards) -> None:
    row = one(tmp_path, log(), cards)
    assert (row["size"], row["target"], row["required_runs"]) == ("full", 0.124, 10)
    assert row["outcome"] == "target reached"
    assert row["epochs_to_target"] == 3


def test_a_size_of_ours_is_judged_by_its_card(tmp_path: Path, log: Build, cards: Cards) -> None:
    row = one(tmp_path, log(size="mini", errors=(0.3, 0.19, 0.1)), cards)
    assert (row["target"], row["epochs_to_target"], row["reached_value"]) == (0.2, 2, 0.19)


def test_a_size_that_no_card_knows_has_no_target(tmp_path: Path, log: Build, cards: Cards) -> None:
    row = one(tmp_path, log(size="huge"), cards)
    assert row["outcome"] == "no target known"
    assert not row["converged"]


def test_parts_sum_to_the_run(tmp_path: Path, log: Build, cards: Cards) -> None:
    row = one(tmp_path, log(staging=(1.0, 5.0), train_s=10, eval_s=2, gap_s=1), cards)
    assert row["run_s"] == 44.0
    assert (row["staging_exposed_s"], row["train_s"], row["eval_s"], row["other_s"]) == (4.0, 30.0, 6.0, 4.0)


def test_staging_before_the_run_is_outside_it_and_counted_beside(tmp_path: Path, log: Build, cards: Cards) -> None:
    row = one(tmp_path, log(staging=(-9.0, -2.0)), cards)
    assert (row["staging_before_run_s"], row["staging_in_run_s"], row["staging_exposed_s"]) == (7.0, 0.0, 0.0)
    assert row["run_with_staging_s"] == row["run_s"] + 7.0
    assert row["staging_before_run"]


def test_a_killed_run_is_incomplete_with_all_its_evaluations(tmp_path: Path, log: Build, cards: Cards) -> None:
    tables = read_tables([log(stop=False).write(tmp_path / "logs" / "result_0.txt")], cards)
    row = tables.runs.iloc[0]
    assert row["outcome"] == "no run_stop"
    assert not row["converged"]
    assert pd.isna(row["run_s"])
    assert len(tables.evals) == 3


def test_success_below_target_is_a_miss(tmp_path: Path, log: Build, cards: Cards) -> None:
    row = one(tmp_path, log(errors=(0.5, 0.3)), cards)
    assert (row["status_logged"], row["outcome"], row["success_without_target"]) == ("success", "target missed", True)


def test_epochs_counted_from_zero_count_the_same(tmp_path: Path, log: Build, cards: Cards) -> None:
    row = one(tmp_path, log(first_epoch=0), cards)
    assert (row["epoch_num_zero_based"], row["epochs_to_target"]) == (True, 3)


FOUR = (0.5, 0.3, 0.2, 0.1)


@pytest.mark.parametrize(("errors", "first_extra_s", "found"), [
    (FOUR, 40.0, 40.0),
    (FOUR, 0.0, None),  # no longer than the others
    (FOUR[1:], 40.0, None),  # two later ones are few
])  # fmt: skip
def test_what_the_first_epoch_takes_longer_is_a_part_of_its_own(
    tmp_path: Path, log: Build, cards: Cards, errors: tuple[float, ...], first_extra_s: float, found: float | None
) -> None:
    row = one(tmp_path, log(errors=errors, first_extra_s=first_extra_s), cards)
    assert row["first_epoch_extra_s"] == found or (found is None and pd.isna(row["first_epoch_extra_s"]))


def test_convergence_is_the_first_evaluation_that_reaches(tmp_path: Path, log: Build, cards: Cards) -> None:
    row = one(tmp_path, log(errors=(0.5, 0.12, 0.3, 0.11)), cards)
    assert (row["epochs_to_target"], row["epochs_run"]) == (2, 4)


def test_what_stands_after_run_stop_does_not_count(tmp_path: Path, log: Build, cards: Cards) -> None:
    text = log(errors=(0.5, 0.3))
    text.event(500, "epoch_start", epoch_num=3)
    text.event(510, "eval_error", 0.1, epoch_num=3)
    row = one(tmp_path, text, cards)
    assert row["outcome"] == "target missed"
    assert row["events_after_run_stop_s"] > 400


def test_evaluation_beside_the_next_epoch_costs_no_time_and_is_flagged(
    tmp_path: Path, log: Build, cards: Cards
) -> None:
    text = log(errors=(), stop=False, staging=None)
    for epoch in (1, 2):
        text.event(10.0 * epoch - 10, "epoch_start", epoch_num=epoch)
        text.event(10.0 * epoch, "epoch_stop", epoch_num=epoch)
    text.event(12.0, "eval_start", epoch_num=1)
    text.event(18.0, "eval_stop", epoch_num=1)
    text.event(18.0, "eval_error", 0.1, epoch_num=1)
    text.event(20.0, "run_stop", status="success")
    row = one(tmp_path, text, cards)
    assert row["async_eval"]
    assert (row["train_s"], row["eval_s"], row["eval_hidden_s"], row["other_s"]) == (20.0, 0.0, 6.0, 0.0)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("samples", [1, 40])
def test_a_block_of_samples_that_run_stop_cuts_counts_as_far_as_it_came(
    tmp_path: Path, log: Build, cards: Cards, samples: int, closed: bool
) -> None:
    """Eos' OpenFold: the evaluation that meets the target overlaps a block, whose seconds are in the run."""
    text = log(errors=(), stop=False, staging=None)
    for block in (1, 2, 3):
        text.event(10.0 * block - 10, "epoch_start", epoch_num=samples * block)
        if block < 3:
            text.event(10.0 * block, "epoch_stop", epoch_num=samples * block)
    text.event(20.0, "eval_start", epoch_num=samples * 2)
    text.event(26.0, "eval_error", 0.1, epoch_num=samples * 2)
    text.event(26.0, "run_stop", status="success")
    if closed:
        text.event(32.0, "epoch_stop", epoch_num=samples * 3)
    row = one(tmp_path, text, cards)
    cut = 6 / 12 if closed else 6 / 10
    # Epochs that began are counted whole, as in the published analyses
    assert row["epochs_run"] == pytest.approx((2 + cut) * samples / 100 if samples > 1 else 3)


def test_epoch_numbers_that_are_samples_become_epochs(tmp_path: Path, log: Build, cards: Cards) -> None:
    text = log(errors=(), stop=False, staging=None)
    for block, error in ((40, 0.5), (80, 0.1)):
        text.event(block, "epoch_start", epoch_num=block)
        text.event(block + 20, "eval_start", epoch_num=block)
        text.event(block + 30, "eval_error", error, epoch_num=block)
        text.event(block + 30, "eval_stop", epoch_num=block)
        text.event(block + 30, "epoch_stop", epoch_num=block)
    text.event(120, "run_stop", status="success")
    row = one(tmp_path, text, cards)
    assert row["epoch_num_counts_samples"]
    assert row["epochs_to_target"] == pytest.approx(0.8)


def test_a_rank_prefix_a_shell_trace_and_a_torn_line_lose_nothing_else(
    tmp_path: Path, log: Build, cards: Cards
) -> None:
    text = log()
    text.lines = ["+ set -x\n", *(f"  4: {line}" for line in text.lines), ':::MLLOG {"key": "epoch_sta\n']
    row = one(tmp_path, text, cards)
    assert row["outcome"] == "target reached"
    assert row["damaged_lines"] == 1
    assert "not JSON" in row["damage"]


def test_events_of_all_ranks_make_one_run(tmp_path: Path, log: Build, cards: Cards) -> None:
    text = log()
    text.lines = [line for line in text.lines for _ in range(3 if "init_start" in line or "epoch_start" in line else 1)]
    row = one(tmp_path, text, cards)
    assert row["logged_by_all_ranks"]
    assert row["epochs_to_target"] == 3
    assert row["train_s"] == 30.0


def test_the_folder_and_the_system_file_decide_who_and_what(tmp_path: Path, package: Build, cards: Cards) -> None:
    package(tmp_path / "hpc_results_v9.1", runs=2, division="open")
    row = read_tables([tmp_path], cards).runs.iloc[0]
    assert (row["round"], row["submitter"], row["system"], row["mode"]) == ("v9.1", "ACME", "sys1", "strong")
    assert (row["org_logged"], row["division"], row["division_logged"]) == ("testers", "open", "closed")
    assert row["published"]


def test_pruned_and_resumed_runs_are_kept_and_named(
    tmp_path: Path, log: Build, cards: Cards, run_folder: Build
) -> None:
    base = tmp_path / "P" / "results" / "sys" / "weak" / "cosmoflow"
    log().write(base / "pruned_results" / "result_3.txt")
    log(seed=2, start_s=0.001).write(base / "result_1.txt")
    folder = run_folder(tmp_path, runs=1)
    log(size="mini", ours=True).write(folder / "resumed_0_1.txt")
    runs = read_tables([tmp_path], cards).runs
    assert runs["pruned"].sum() == 1
    assert (runs["outcome"] == "resumed").sum() == 1
    assert len(runs) == 4


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_published_twice_names_its_first_round(tmp_path: Path, package: Build, cards: Cards, ended: bool) -> None:
    package(tmp_path / "hpc_results_v1.0", runs=1, platform="before")
    package(tmp_path / "hpc_results_v2.0", submitter="Rebrand", runs=1, platform="before" if not ended else "after")
    if not ended:
        for path in tmp_path.rglob("result_*.txt"):
            path.write_text("".join(line for line in path.read_text().splitlines(True) if "run_stop" not in line))
    runs = read_tables([tmp_path], cards).runs.set_index("round")
    assert (runs["run_s"].notna() == ended).all()
    assert runs.loc["v2.0", "carried_over_from"] == "v1.0"
    assert pd.isna(runs.loc["v1.0", "carried_over_from"])


def test_an_instance_that_logs_the_whole_system_is_suspect(
    tmp_path: Path, log: Build, package: Build, cards: Cards
) -> None:
    made = package(tmp_path, runs=0)
    for trial in range(2):
        text = log(ranks=2, extra=(("number_of_nodes", 2),), start_s=trial / 1000, seed=trial)
        text.lines = [
            line.replace('"accelerators_per_node", "value": 1', '"accelerators_per_node", "value": 2')
            for line in text.lines
        ]
        text.write(made / "results" / "sys1" / "weak" / "cosmoflow" / f"result_{trial}.txt")
    runs = read_tables([made], cards).runs
    assert runs["scale_suspect"].all()
    assert set(runs["units"]) == {2}


def test_a_log_of_other_nodes_than_the_description_is_suspect(package: Build, tmp_path: Path, cards: Cards) -> None:
    """HAL, v0.7: the logs say 8 nodes of 8 accelerators, the description 16 of 4."""
    made = package(tmp_path, runs=1, nodes=16, extra=(("number_of_nodes", 8),))
    (described,) = (made / "systems").glob("*.json")
    described.write_text(described.read_text().replace('"accelerators_per_node": "2"', '"accelerators_per_node": "4"'))
    (log,) = made.rglob("result_0.txt")
    log.write_text(
        log.read_text().replace('"accelerators_per_node", "value": 1', '"accelerators_per_node", "value": 8')
    )
    (row,) = read_tables([made], cards).runs.to_dict("records")
    assert (row["units"], row["nodes"], row["scale_suspect"]) == (64, 16, True)


def test_two_run_folders_of_one_name_stay_apart(tmp_path: Path, log: Build, cards: Cards) -> None:
    for place in ("a", "b"):
        folder = tmp_path / place / "run1"
        log(size="mini", seed=ord(place), start_s=ord(place)).write(folder / "result_0.txt")
        (folder / "run.json").write_text("{}")
    runs = read_tables([tmp_path / "a", tmp_path / "b"], cards).runs
    assert runs["run"].nunique() == runs["group"].nunique() == 2


def test_a_path_without_logs_is_an_error_that_names_it(tmp_path: Path, cards: Cards) -> None:
    with pytest.raises(InputError, match=r"no result_\*.txt below"):
        read_tables([tmp_path], cards)
    with pytest.raises(InputError, match="no such file"):
        read_tables([tmp_path / "none"], cards)


@pytest.mark.parametrize("content", ["", "no log\n", ":::MLLOG\n", ':::MLLOG {"key": 1}\n', "\x00\xff"])
def test_a_log_without_events_is_a_row(tmp_path: Path, cards: Cards, content: str) -> None:
    (tmp_path / "result_0.txt").write_bytes(content.encode("latin-1"))
    tables: Tables = read_tables([tmp_path], cards)
    assert tables.runs.iloc[0]["outcome"] == "no run_stop"


def test_documented_columns_are_the_columns(tmp_path: Path, run_folder: Build, cards: Cards) -> None:
    text = (Path(__file__).parents[3] / "docs" / "tables.md").read_text()
    for name, table in read_tables([run_folder(tmp_path)], cards).named().items():
        documented = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        missing = [column for column in table.columns if f"`{column}`" not in documented]
        assert not missing, f"docs/tables.md, {name}: {missing}"


def test_many_logs_are_read_by_several_processes_in_the_same_order(
    tmp_path: Path, log: Build, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trial in range(6):
        log(seed=trial, start_s=1000.0 * trial).write(tmp_path / "logs" / f"result_{trial}.txt")
    alone = read_tables([tmp_path], cards)
    monkeypatch.setattr("mlhpc.analysis.tables.ingest.POOL_FROM_LOGS", 2)
    together = read_tables([tmp_path], cards)
    for name, table in alone.named().items():
        pd.testing.assert_frame_equal(table, together.named()[name])
    assert alone.records == together.records


def test_per_step_events_are_counted_and_not_kept(tmp_path: Path, log: Build, cards: Cards) -> None:
    plain = one(tmp_path, log(), cards)
    text = log()
    lines = text.lines
    steps = [line.replace('"epoch_start"', '"train_loss"') for line in lines if "epoch_start" in line] * 50
    text.lines = [*lines[:20], *steps, *lines[20:]]
    noisy = one(tmp_path / "noisy", text, cards)
    assert noisy["event_count"] == plain["event_count"] + len(steps)
    assert (noisy["train_s"], noisy["epochs_to_target"]) == (plain["train_s"], plain["epochs_to_target"])
