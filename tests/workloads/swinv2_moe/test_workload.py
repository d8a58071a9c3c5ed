"""SwinV2-MoE in the harness: card, metric, optimizer, the same losses on any ranks, and from data to a checked package."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mlhpc.suite.config import RunConfig, load_config
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.reader import read_events
from mlhpc.suite.world import World
from mlhpc.workloads.swinv2_moe import DESCRIPTOR
from mlhpc.workloads.swinv2_moe.config import SwinV2MoEConfig
from mlhpc.workloads.swinv2_moe.model import SwinV2MoE
from mlhpc.workloads.swinv2_moe.workload import SwinV2MoEWorkload

ROOT = Path(__file__).resolve().parents[3]
SIZES = ("smoke", "mini", "small", "full")


def config(*overrides: str) -> RunConfig:
    return load_config(DESCRIPTOR, "smoke", overrides)


def own(name: str) -> SwinV2MoEConfig:
    return load_config(DESCRIPTOR, name).hyperparameters  # type: ignore[return-value]


def batch(images: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "image": torch.randint(0, 256, (images, 32, 32), generator=random).byte(),
        "label": torch.arange(images).remainder(5).byte(),
    }


def test_accuracy_is_the_share_of_right_answers_of_all_and_of_each_class() -> None:
    workload = SwinV2MoEWorkload(config())
    model = SwinV2MoE(own("smoke")).eval()
    images = batch(20)
    with torch.no_grad():
        chosen = model(images["image"])[0].argmax(dim=1)
        totals = {name: float(value) for name, value in workload.eval_stats(model, images).items()}
    metrics = workload.metrics(totals)
    right = chosen == images["label"]
    assert metrics["eval_accuracy"] == pytest.approx(right.double().mean().item(), abs=1e-12)
    for number, name in enumerate(own("smoke").classes):
        assert metrics[f"accuracy_{name}"] == right[images["label"] == number].double().mean().item()
    assert totals["images"] == 20


@torch.no_grad()
def test_uniform_logits_cost_the_logarithm_of_the_classes() -> None:
    workload = SwinV2MoEWorkload(config())
    model = SwinV2MoE(own("smoke")).eval()
    torch.nn.init.zeros_(model.head.weight)
    stats = {name: float(value) for name, value in workload.eval_stats(model, batch(10)).items()}
    assert workload.metrics(stats)["cross_entropy"] == pytest.approx(math.log(5), abs=1e-5)


def test_only_matrices_decay() -> None:
    workload = SwinV2MoEWorkload(config())
    model = workload.build_model(World.create(None))
    optimization = workload.build_optimizer(model, 10)
    assert optimization.clip_norm == 5.0
    decayed = {id(p) for group in optimization.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    assert sum(len(group["params"]) for group in optimization.optimizer.param_groups) == len(list(model.parameters()))
    assert not [name for name in names if "bias" in name or "norm" in name or "scale" in name]
    assert {
        "patches.weight",
        "head.weight",
        "stages.1.1.ffn.experts.up_EHD",
        "stages.1.1.ffn.router.gate.weight",
    } < names


def test_a_few_steps_learn() -> None:
    workload = SwinV2MoEWorkload(config())
    torch.manual_seed(0)
    model = workload.build_model(World.create(None))
    optimizer = workload.build_optimizer(model, 30).optimizer
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = workload.loss(model, batch(20))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_channels_last_is_refused() -> None:
    with pytest.raises(InputError, match="channels_last"):
        SwinV2MoEWorkload(config("channels_last=true"))


@pytest.mark.long
def test_smoke_goes_from_data_to_a_package_without_findings(tmp_path: Path) -> None:
    def mlhpc(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "mlhpc", *arguments],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MLHPC_DATA": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = mlhpc("data", "generate", "swinv2_moe", "--size", "smoke", "--ranks", "2")
    assert "spectrum_quadratic" in said
    mlhpc("run", "swinv2_moe", "--size", "smoke", "--runs", "5", "--set", "submission.org=ACME", "-o", "runs/first")
    mlhpc("package", "runs/first", "--system", "laptop", "--submitter", "ACME", "-o", "packages/ACME")
    mlhpc("check", "packages/ACME")
    events = read_events(tmp_path / "runs/first/result_0.txt").events
    stats = [event.value for event in events if event.key == "window_stats"]
    assert set(stats[0]) == {"phases", "load", "efficiency"}
    (load,) = stats[0]["load"].values()
    assert sum(load["tokens_per_expert"]) == 50 * 20 * 16
    assert 1 <= load["imbalance"] < 4
    logged = {event.key: event.value for event in events if event.key.startswith(("moe_", "expert_"))}
    assert logged["expert_parallelism"] == 1
    assert (logged["moe_num_experts"], logged["moe_capacity_factor"]) == (4, 1.25)
    assert json.loads((tmp_path / "data/swinv2_moe-smoke/manifest.json").read_text())["splits"]["train"][0]["sha256"]
