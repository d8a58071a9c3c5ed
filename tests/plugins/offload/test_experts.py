"""Training with offload has the same losses, weights and states bit for bit, and its checkpoint is that of a run without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from mlhpc.plugins.offload import experts
from mlhpc.suite.data.lock import LockedError
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.training.checkpoint import Checkpoint
from mlhpc.suite.training.parallel.apply import check_model
from mlhpc.suite.training.parallel.meta_init import build_on_meta
from mlhpc.suite.training.parallel.parallel_dims import Parallel
from tests.fixtures.wings import needs_axes
from tests.plugins.offload.conftest import assert_equal, configure, in_files

STEPS = 4
FORMS = {
    "swiglu": ("activation=swiglu", "top_k=1"),
    "odd sizes": ("bias=true", "activation=relu", "hyperparameters.width=12", "hidden=7", "backend=loop"),
    "capacity": ("dispatch=capacity", "capacity_factor=0.5", "activation=silu"),
    "batched": ("backend=bmm", "activation=gelu", "top_k=1"),
    "parts": ("gradient_accumulation_steps=2", "balance=bias", "balance_coefficient=0.001"),
}


@pytest.mark.parametrize("form", FORMS)
def test_files_change_nothing(start: Any, tmp_path: Path, form: str) -> None:
    without = start("moe_lm", *FORMS[form]).train(0, STEPS)
    with pytest.raises(InputError, match="one layer needs") as found:
        start("moe_lm", *FORMS[form], *in_files(tmp_path / "tier", cache=1))
    least = int(str(found.value).rpartition(" ")[2])
    run = start("moe_lm", *FORMS[form], *in_files(tmp_path / "tier", cache=least)).train(0, STEPS)
    assert without.evaluate() == run.evaluate()
    stats = run.keeper.flush(run.world)
    assert least >= stats["peak_bytes"] > 0
    assert_equal(without, run)
    assert stats["bytes_read"] > 0
    assert len(list((tmp_path / "tier").iterdir())) == 2  # a folder and its lock
    run.keeper.close()
    assert not list((tmp_path / "tier").iterdir())


def test_the_hosts_memory_changes_nothing(start: Any) -> None:
    assert_equal(start("moe_lm").train(0, STEPS), start("moe_lm", "offload.tier=host").train(0, STEPS))


@pytest.mark.parametrize("tier", ["host", "file"])
def test_clipping_by_the_norm_of_all_gradients_changes_nothing(start: Any, tmp_path: Path, tier: str) -> None:
    away = in_files(tmp_path) if tier == "file" else ("offload.tier=host",)
    without = start("swinv2_moe", "hyperparameters.clip_norm=0.05").train(0, 3)
    assert_equal(without, start("swinv2_moe", "hyperparameters.clip_norm=0.05", *away).train(0, 3))


@pytest.mark.parametrize("tier", ["host", "file"])
def test_a_checkpoint_fits_runs_with_and_without(start: Any, tmp_path: Path, tier: str) -> None:
    away = in_files(tmp_path / "tier") if tier == "file" else ("offload.tier=host",)
    without, run = start("moe_lm").train(0, 2), start("moe_lm", *away).train(0, 2)
    without.save(tmp_path / "a" / "trial_0.pt")
    run.save(tmp_path / "b" / "trial_0.pt")
    saved = [Checkpoint(tmp_path / name / "trial_0.pt", {}).open() for name in "ab"]
    assert saved[0].tensors.keys() == saved[1].tensors.keys()
    whole = without.train(2, 4)
    for path, settings in (("a", away), ("b", ()), ("b", away)):
        torch.manual_seed(5)
        after = start("moe_lm", *settings)
        Checkpoint(tmp_path / path / "trial_0.pt", {}).load(after.world, after.state)
        after.train(2, 4)
        assert after.losses == whole.losses[2:]
        after.losses[:0] = whole.losses[:2]
        assert_equal(whole, after)


def test_a_checkpoint_has_the_values_of_its_step_although_training_goes_on(start: Any, tmp_path: Path) -> None:
    run = start("moe_lm", *in_files(tmp_path / "tier")).train(0, 2)
    before = {name: value.clone() for name, value in run.values().items()}
    held = run.state.hold(0, run.state.moments())
    copied = {name: each.copied() for name, each in held.items()}
    run.train(2, 4)
    name = "blocks.0.ffn.experts.up_EHD"
    for label, key in ((f"model {name}", name), (f"optimizer {name} exp_avg", f"{name} exp_avg")):
        (part,) = copied[label].parts.values()
        assert torch.equal(part._mlhpc_away.read(), before[key])
        assert not torch.equal(run.values()[key], before[key])
    files = len(list(run.keeper.tier.folder.iterdir()))
    del copied, part
    run.train(4, 5).keeper.cache.settle()
    assert len(list(run.keeper.tier.folder.iterdir())) < files


def test_settings_that_do_not_fit_are_one_line(start: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tier file needs folder and cache"):
        start("moe_lm", "offload.tier=file")
    with pytest.raises(InputError, match="autotune times layers outside of a step"):
        start("moe_lm", "offload.tier=host", "autotune=true")
    with pytest.raises(InputError, match=r"offload.cache is 1000 bytes, and one layer needs .*: give at least \d+"):
        start("moe_lm", *in_files(tmp_path, cache=1000))


@needs_axes
def test_what_cannot_follow_offload_is_refused_and_a_dry_run_makes_no_folder(start: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="torch's compiler cannot follow"):
        start("moe_lm", "offload.tier=host", "compile=true")
    config = configure("moe_lm", *in_files(tmp_path / "tier"), "global_batch_size=8")
    for mesh, plan in (("shard=2", "sharded"), ("tensor=2", "tensor_experts")):
        planned = structs.replace(config, mesh=mesh, plan=Path(plan))
        parallel = Parallel.of(planned, load_descriptor("moe_lm"), 0, 2)
        workload, model = build_on_meta(load_descriptor("moe_lm"), planned)
        with pytest.raises(InputError, match="it may have the axes data and expert alone"):
            check_model(parallel, model, workload)
        workload.build_optimizer(model, 1)
    assert not (tmp_path / "tier").exists()


def test_a_second_run_with_the_folder_is_one_line(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise LockedError("held by another")

    monkeypatch.setattr(experts, "FileTier", refuse)
    with pytest.raises(InputError, match="held by another") as found:
        start("moe_lm", *in_files(tmp_path))
    assert not isinstance(found.value, LockedError)
