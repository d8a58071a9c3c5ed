"""`mlhpc profile`: the trace has the suite's names, time and FLOPs land on the layer that caused them, ranks are compared."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.profiler import profile as torch_profile

from mlhpc.suite.commands.machine.profile import profile, render_profile
from mlhpc.suite.performance.profiling import _name_layers, _Session, measure_layer_times
from mlhpc.suite.training.counts.flops import count
from mlhpc.suite.training.state import TrainingState
from mlhpc.suite.training.step_timing import PhaseTimer, make_device_clock
from mlhpc.suite.workload import Optimization
from mlhpc.suite.world import World
from tests.fixtures.warm import warm_python

ROOT = Path(__file__).resolve().parents[3]
ALONE = World.create()


class Slow(torch.autograd.Function):
    """Takes 20 ms backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        time.sleep(0.02)
        return gradient


class SlowLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x)


def test_backward_time_is_charged_to_the_layer_of_the_forward_operator() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(SlowLayer(), nn.ReLU()))
    x = torch.ones(2, 4)
    with _name_layers(model), torch_profile() as trace:
        for _ in range(2):
            model(x).sum().backward()
    layers = {
        layer.path: layer
        for layer in measure_layer_times(trace, model, count(lambda: model(x), model), 2, on_device=False)
    }
    assert list(layers) == ["(model)", "0", "1", "1.0", "1.1"]
    assert layers["1.0"].backward_s > 0.02
    assert layers["1.1"].backward_s < layers["1.0"].own_s
    assert layers["(model)"].backward_s >= layers["1"].backward_s >= layers["1.0"].backward_s
    assert layers["0"].forward_flops == 2 * 2 * 4 * 4
    assert {layer.calls for layer in layers.values()} == {1.0}


def test_a_profile_of_two_ranks(smoke_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLHPC_DATA", str(smoke_data))
    output = tmp_path / "p"
    words = [
        "profile",
        "cosmoflow",
        "--size",
        "smoke",
        "--ranks",
        "2",
        "--steps",
        "4",
        "--profiled-steps",
        "1",
        "-o",
        str(output),
    ]
    done = subprocess.run(
        [*warm_python(), "-m", "mlhpc", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((output / "profile.json").read_text())
    assert document["counted_flops_per_step"] == pytest.approx(document["stated_flops_per_step"], rel=1e-3)
    assert len(document["stragglers"]["own_s"]) == 2
    assert "by jitter alone" in render_profile(document)[-1]
    names = {event.get("name") for event in json.loads((output / "trace.json").read_text())["traceEvents"]}
    assert {"phase data_wait", "phase forward", "phase backward", "phase optimizer", "layer convolutions.0"} <= names
    assert (
        (output / "layers.csv")
        .read_text()
        .startswith("path,kind,depth,calls,forward_s,backward_s,own_s,forward_flops\n")
    )


@pytest.mark.parametrize("copies", [1, 4])
def test_a_profiled_step_does_what_a_trials_does(monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    """It clips by the norm of the whole model, of which ``copies`` ranks hold each share, and moves the average of the weights."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda square: square.mul_(copies))  # ranks with equal shares
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 10.0)
    optimization = Optimization(torch.optim.SGD(model.parameters()), lambda step, epoch: 1.0, 0.5, 0.75)
    workload = SimpleNamespace(
        build_optimizer=lambda model, steps: optimization,
        sharded_parameters=lambda model: [model.weight],
        share_places=lambda model: {},
        share_copy=lambda model: (0, copies),
        loss=lambda model, batch: model(batch).sum(),
    )
    state = TrainingState.create(workload, model, 1, 0)
    config, device = SimpleNamespace(precision="float32"), torch.device("cpu")
    timer = PhaseTimer(make_device_clock(device))
    session = _Session(workload, config, ALONE, device, model, state, timer, lambda: None)
    session.batches = iter([torch.full((1, 1), 3.0), torch.full((1, 1), 0.25)])
    session.step()
    assert model.weight.item() == pytest.approx(9.5), "a gradient of 3 becomes one of 0.5"
    session.step()
    assert model.weight.item() == pytest.approx(9.25), "one of 0.25 stays"
    assert state.averaged is not None
    assert state.averaged.weights["weight"].item() == pytest.approx(9.5 - 0.25 * 0.25)


def test_what_cannot_be_profiled_is_said_in_a_line(tmp_path: Path) -> None:
    missing = ["--set", f"data={tmp_path}/none", "-o", str(tmp_path / "p")]
    for words, said in ((["-o", str(tmp_path)], "exists already"), (missing, "mlhpc data generate")):
        result = CliRunner().invoke(profile, ["cosmoflow", *words])
        assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
        assert said in result.output
        result = CliRunner().invoke(profile, ["cosmoflow", "--ranks", "2", *words])
        assert said in str(result.exception)
