"""Which points can run and may run, and their closed forms: by prediction, nothing runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from mlhpc.plugins.tune import candidates
from mlhpc.plugins.tune.candidates import (
    Candidates,
    Limits,
    list_plan_values,
    read_references,
    refuse_inadmissible,
)
from mlhpc.plugins.tune.space import Space, build_space
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from tests.fixtures.wings import needs_axes

pytestmark = needs_axes
MOE = load_descriptor("moe_lm")
OWN = MOE.card().tunable
SPACE = build_space(OWN, places=4, cores=4, gpu=False, batch=16, plans=["sharded data=1,shard=2"])
GIB = 2**30
CANDIDATES = Candidates(MOE, "smoke", (), SPACE, Limits(4, GIB), "step-time")


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        ({"ranks": 4, "threads": 2}, "4 ranks of 2 threads need more than 4 cores"),
        ({"ranks": 3, "threads": 1}, "global_batch_size 16 cannot be split evenly over 3 ranks"),
        ({"ranks": 4, "threads": 1, "plan": "sharded data=1,shard=2"}, "2 ranks, the run has 4"),
        ({"ranks": 1, "threads": 1, "plan": "nowhere"}, "unknown plan 'nowhere'"),
        ({"ranks": 1, "threads": 1, "precision": "float12"}, "precision"),
        ({"ranks": 1, "threads": 1, "hyperparameters.moe.top_k": 1}, "moe_top_k = 1: expected 2 (rule key-value)"),
        ({"ranks": 1, "threads": 1}, ""),
        ({"ranks": 2, "threads": 2, "plan": "sharded data=1,shard=2"}, ""),
    ],
)
def test_what_cannot_run_or_may_not_has_a_reason(point: dict[str, object], reason: str) -> None:
    space = Space({**SPACE.tunables, "hyperparameters.moe.top_k": OWN["hyperparameters.moe.overlap_degree"]})
    found = replace(CANDIDATES, space=space).explain_refused(point)  # type: ignore[arg-type]
    assert reason in found
    assert bool(reason) == bool(found)
    assert "\n" not in found


def test_the_open_division_may_change_what_the_closed_one_fixes() -> None:
    space = Space({**SPACE.tunables, "hyperparameters.moe.top_k": OWN["hyperparameters.moe.overlap_degree"]})
    opened = replace(CANDIDATES, space=space, overrides=("submission.division=open",))
    assert opened.explain_refused({"ranks": 1, "threads": 1, "hyperparameters.moe.top_k": 1}) == ""
    refuse_inadmissible(["hyperparameters.learning_rate"], OWN, "open")
    refuse_inadmissible(["hyperparameters.moe.backend", "precision"], OWN, "closed")
    with pytest.raises(InputError, match=r"tunable hyperparameters.learning_rate: it may change the training"):
        refuse_inadmissible(["hyperparameters.learning_rate"], OWN, "closed")


def test_a_setting_that_the_checker_would_refuse_costs_no_time_and_what_the_person_chose_is_said_once() -> None:
    space = Space({**SPACE.tunables, "hyperparameters.moe.top_k": OWN["hyperparameters.moe.overlap_degree"]})
    point = {"ranks": 1, "threads": 1, "global_batch_size": 4096}
    assert "above all reference points" in replace(CANDIDATES, space=space).explain_refused(point)
    chosen = replace(CANDIDATES, space=space, overrides=("hyperparameters.moe.top_k=1",))
    assert "moe_top_k" in " ".join(chosen.standing)
    assert chosen.explain_refused({"ranks": 2, "threads": 2}) == ""
    assert "moe_top_k = 3" in chosen.explain_refused({"ranks": 1, "threads": 1, "hyperparameters.moe.top_k": 3})


def test_the_closed_division_compresses_no_gradients(tmp_path: Path) -> None:
    text = (MOE.folder / "plans" / "sharded.yaml").read_text()
    (tmp_path / "short.yaml").write_text(text + "\ncompress: {kind: bf16}\n")
    point = {"ranks": 2, "threads": 1, "plan": f"{tmp_path / 'short.yaml'} data=2"}
    assert "compresses gradients" in CANDIDATES.explain_refused(point)
    assert replace(CANDIDATES, overrides=("submission.division=open",)).explain_refused(point) == ""


def test_what_does_not_fit_in_memory_is_refused_with_the_prediction() -> None:
    point = {"ranks": 1, "threads": 1}
    needed = CANDIDATES.cost(point).memory  # type: ignore[union-attr]
    tight = replace(CANDIDATES, limits=Limits(4, needed))
    assert tight.explain_refused(point) == ""
    assert "(predicted)" in replace(CANDIDATES, limits=Limits(4, needed - 1)).explain_refused(point)
    assert not tight.fits_twice(point, point)
    assert CANDIDATES.fits_twice(point, point)
    # ranks on processors share the memory, GPUs have their own
    two = {"ranks": 2, "threads": 1}
    each = CANDIDATES.cost(two).memory  # type: ignore[union-attr]
    assert "(predicted)" in replace(CANDIDATES, limits=Limits(4, each)).explain_refused(two)
    assert replace(CANDIDATES, limits=Limits(4, each, shared=False)).explain_refused(two) == ""


def test_closed_forms_know_ranks_and_threads_and_nothing_of_the_loader() -> None:
    def form(candidates: Candidates = CANDIDATES, **point: object) -> float:
        return candidates.closed_form_s({"threads": 1, **point})  # type: ignore[dict-item]

    assert form(ranks=2) < form(ranks=1) < form(ranks=1, gradient_accumulation_steps=4) * 2
    assert form(ranks=1, threads=2) == pytest.approx(form(ranks=1) / 2)
    assert form(ranks=1, loader_threads=2, precision="bfloat16") == form(ranks=1)
    cpu = replace(CANDIDATES, objective="cpu-time")
    assert form(cpu, ranks=1, threads=2) == pytest.approx(form(cpu, ranks=1))
    assert form(ranks=2, plan="sharded data=1,shard=4") == math.inf


def test_shipped_plans_are_tried_with_every_mesh_that_uses_an_axis() -> None:
    found = list_plan_values(MOE, [2])
    assert "sharded data=1,shard=2" in found
    assert all("data=2" not in each.replace(",", " ").split()[1:] or "=2," in each for each in found)
    assert list_plan_values(MOE, []) == []


@pytest.mark.long
def test_time_to_quality_counts_the_epochs_of_reference_points_and_takes_no_other_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deepcam = load_descriptor("deepcam")
    of_8 = read_references(deepcam, "mini")[8]
    of_4 = structs.replace(of_8, global_batch_size=4, hyperparameters=of_8.hyperparameters | {"scheduler_t_max": 304})
    monkeypatch.setattr(candidates, "read_references", lambda *_: {4: of_4, 8: of_8})
    space = build_space({}, places=1, cores=1, gpu=False, batch=8, plans=[], batches=(4, 8))
    assert space.tunables["global_batch_size"].values == (4, 8)
    timed = Candidates(deepcam, "mini", (), space, Limits(1, None), "time-to-quality")
    point = {"ranks": 1, "threads": 1, "global_batch_size": 8}
    assert timed.explain_refused(point) == ""
    assert timed.count_steps(point) == pytest.approx(of_8.mean * 512 / 8)
    # The points of 4 have another schedule: their epochs are not those of this configuration.
    assert "scheduler_t_max = 152, but the reference points for a batch of 4 have 304" in timed.explain_refused(
        point | {"global_batch_size": 4}
    )
    other = replace(timed, overrides=("hyperparameters.t_max=304",))
    assert other.explain_refused(point | {"global_batch_size": 4}) == ""
    assert "16 is above all reference points" in timed.explain_refused(point | {"global_batch_size": 16})
    assert timed.count_steps(point | {"global_batch_size": 16}) == math.inf
    assert replace(timed, objective="step-time").count_steps(point) == 1.0
