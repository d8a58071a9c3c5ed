"""The fault campaign itself, and a part of it for `make test-long`; the whole one is a command (tests/faults/campaign.py)."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.faults import quota
from tests.faults.campaign import PLANS, SIGNALS, VICTIMS, Kill, Outcome, campaign, plan, table


def test_a_campaign_covers_every_victim_signal_and_phase() -> None:
    kills = plan(200, 50, random.Random(1))
    assert len(kills) == 200
    assert sum(kill.phase == "checkpoint" for kill in kills) == 50
    assert {(kill.victim, kill.signal) for kill in kills} == {(v, s) for v in VICTIMS for s in SIGNALS}
    assert {kill.phase for kill in kills} == {"start", "run", "checkpoint"}
    assert all(0.0 <= kill.moment < 1.0 for kill in kills)


def test_the_table_counts_kills_and_names_every_problem() -> None:
    kill = Kill("rank", signal.SIGKILL, "run", 0.5)
    fine, bad = Outcome(kill, "in the run", 0.5), Outcome(kill, "in the run", 1.5, ["2 processes were left after 60 s"])
    fine.recovery = {"queue_s": 2.0, "detection_s": None}
    text = table([fine, fine, bad])
    assert "| queue | 2 | 2.00 | 2.00 |\n" in text
    assert "detection" not in text  # nobody saw the ends
    assert "| rank | SIGKILL | in the run | 3 | 1 |" in text
    assert "3 kills, 1 with a problem." in text
    assert "n = 3, median 0.50 s, most 1.50 s" in text
    assert "- rank SIGKILL in the run: 2 processes were left after 60 s" in text


@pytest.mark.long
def test_forty_kills_of_a_local_run_lose_nothing(tmp_path: Path) -> None:
    outcomes = campaign(tmp_path, 40, 10, seed=11)
    assert len(outcomes) == 40
    assert not [(outcome.kill, outcome.problems) for outcome in outcomes if outcome.problems]


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_six_kills_under_a_parallel_plan_lose_nothing(tmp_path: Path, plan: str) -> None:
    outcomes = campaign(tmp_path, 6, 2, seed=11, parallel=plan, warm=True)
    assert len(outcomes) == 6
    assert not [(outcome.kill, outcome.problems) for outcome in outcomes if outcome.problems]


@pytest.mark.long
@pytest.mark.slurm
def test_ten_kills_under_slurm_lose_nothing(tmp_path: Path) -> None:
    from tests.faults.scheduled import campaign as slurm_campaign

    outcomes = slurm_campaign(tmp_path, 10, seed=11)
    assert len(outcomes) == 10
    assert not [(outcome.kill, outcome.problems) for outcome in outcomes if outcome.problems]


@pytest.mark.long
@pytest.mark.slurm
def test_a_preempted_job_goes_on_where_it_was(tmp_path: Path) -> None:
    from tests.faults.scheduled import campaign as slurm_campaign

    outcomes = slurm_campaign(tmp_path, 2, seed=11, preempted=True)
    assert len(outcomes) == 2
    assert not [(outcome.kill, outcome.problems) for outcome in outcomes if outcome.problems]


@pytest.mark.long
def test_full_disks_and_limited_memory_lose_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small disk and a control group need root")
    found = quota.campaign(tmp_path, 2, 2 * quota.GROUPS.is_dir(), seed=11)
    assert not [each for each in found if each[2]]


def test_the_table_of_quotas_names_every_problem() -> None:
    fine, bad = ("disk", "some were not written", []), ("disk", "some were not written", ["exit code 70"])
    text = quota.table([fine, bad])
    assert "| disk | some were not written | 2 | 1 |" in text
    assert "- disk, some were not written: exit code 70" in text
