"""Normalisation over a group of ranks is that of one big batch, on CPU; ranks agree on statistics before they evaluate."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mlhpc.suite.errors import InputError
from mlhpc.suite.training.parallel.batch_norm import GroupBatchNorm2d
from mlhpc.suite.world import World
from mlhpc.workloads.deepcam.model import group_ranks, join_groups
from tests.fixtures.warm import warm_python

MPIEXEC = Path(sys.executable).parent / "mpiexec"
TESTS = Path(__file__).parent
needs_mpi = pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside python: pip install mpich")

START = """
import torch
from torch import nn
from mlhpc.suite.world import World
torch.set_num_threads(1)
world = World.create()
world.init_torch(torch.device("cpu"))
"""


def on_ranks(ranks: int, program: str) -> None:
    """Run a program on several ranks; every rank ends without an error."""
    command = [MPIEXEC, "-n", str(ranks), *warm_python(), "-c", START + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("fine") == ranks, done.stdout + done.stderr


LAYER = """
from mlhpc.suite.training.parallel.batch_norm import GroupBatchNorm2d
from mlhpc.workloads.deepcam.model import join_groups
generator = torch.Generator().manual_seed(0)
x = (100 + torch.randn(5, 4, 6, 7, generator=generator)).double()   # a mean far above the spread: no cancellation
target = torch.randn(5, 4, 6, 7, generator=generator).double()
def layer():
    norm = GroupBatchNorm2d(4).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0, 0.5]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, 3.0, -2.0]))
    return norm
one = layer()
whole = x.clone().requires_grad_()
expected = one(whole)
((expected - target) ** 2).sum().backward()
mine = slice(0, 2) if world.rank == 0 else slice(2, 5)
two = layer()
join_groups(two, world, 2)
part = x[mine].clone().requires_grad_()
found = two(part)
((found - target[mine]) ** 2).sum().backward()
close = dict(rtol=1e-9, atol=1e-9)
torch.testing.assert_close(found, expected[mine], **close)
torch.testing.assert_close(part.grad, whole.grad[mine], **close)
for name in ("weight", "bias"):
    local = getattr(two, name).grad.numpy()
    total = torch.from_numpy(world.transport.sum(local))
    torch.testing.assert_close(total, getattr(one, name).grad, **close)
torch.testing.assert_close(two.running_mean, one.running_mean, **close)
torch.testing.assert_close(two.running_var, one.running_var, **close)
two.eval(), one.eval()
torch.testing.assert_close(two(x), one(x), **close)
"""

NETWORK = f"""
import dataclasses
import sys
import numpy as np
sys.path.insert(0, {str(TESTS)!r})
from conftest import make_tiny_config as tiny_config
from mlhpc.suite.transport import SingleProcessTransport
from mlhpc.suite.training.step_timing import PhaseTimer
from mlhpc.suite.training.parallel.ddp import wrap
from mlhpc.suite.training.step_timing import make_device_clock
from mlhpc.workloads.deepcam.workload import DeepCam
generator = torch.Generator().manual_seed(0)
x = torch.rand(4, 16, 32, 16, generator=generator).double()
y = torch.randint(3, (4, 16, 32), generator=generator, dtype=torch.uint8)
cpu = torch.device("cpu")
def trained(group_size, ranks, mine, steps=4):
    workload = DeepCam(tiny_config(f"hyperparameters.batchnorm_group_size={{group_size}}"))
    torch.manual_seed(0)
    model = workload.build_model(ranks).double()
    optimization = workload.build_optimizer(model, 1)
    wrapped = wrap(model, (), ranks, cpu)
    losses = []
    for step in range(steps):
        for group in optimization.optimizer.param_groups:
            group["lr"] = optimization.learning_rate(step, 1)
        optimization.optimizer.zero_grad()
        loss = workload.loss(wrapped, {{"x": x[mine], "y": y[mine]}})
        loss.backward()
        optimization.optimizer.step()
        losses.append(loss.item())
    return (ranks.transport.sum(np.array(losses)) / ranks.size).tolist(), model
def metric(model):
    workload = DeepCam(tiny_config())
    with torch.no_grad():
        stats = workload.eval_stats(model, {{"x": x, "y": y}})
    return workload.metrics({{name: value.item() for name, value in stats.items()}})["eval_accuracy"]
alone = dataclasses.replace(world, rank=0, size=1, transport=SingleProcessTransport(), peers=SingleProcessTransport())
mine = slice(world.rank, None, 2)
losses, model = trained(2, world, mine)
expected, one = trained(1, alone, slice(None))
assert max(abs(a - b) / b for a, b in zip(losses, expected)) < 1e-6, (losses, expected)
DeepCam(tiny_config()).before_evaluation(model, world)
model.eval(), one.eval()
for (name, a), (_, b) in zip(model.named_buffers(), one.named_buffers()):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
assert abs(metric(model) - metric(one)) < 1e-4

apart, model = trained(1, world, mine, steps=2)
statistic = model.encoder.stem[0][1].running_mean
before = world.allgather(statistic.tolist())
assert before[0] != before[1]
assert max(abs(a - b) / b for a, b in zip(apart, expected)) > 1e-6
DeepCam(tiny_config()).before_evaluation(model, world)
after = world.allgather(statistic.tolist())
assert after[0] == after[1]
torch.testing.assert_close(torch.tensor(after[0]), torch.tensor(before).mean(dim=0))
print("fine")
"""


@needs_mpi
def test_two_ranks_normalise_and_train_as_one_and_agree_on_statistics_before_they_evaluate() -> None:
    """LAYER: output, all three gradients and running statistics, with different numbers of samples on the ranks.

    NETWORK: under the harness's DDP wrapping, four AdamW steps in float64; in float32 rounding alone grows a thousandfold.
    DDP by default overwrites every rank's buffers with rank 0's before each step: then only rank 0's samples would count.
    """
    on_ranks(2, LAYER + NETWORK)


def test_groups_are_of_consecutive_ranks_and_must_divide_the_world() -> None:
    assert group_ranks(4, 2) == [[0, 1], [2, 3]]
    assert group_ranks(3, 1) == [[0], [1], [2]]
    assert group_ranks(4, 4) == [[0, 1, 2, 3]]
    with pytest.raises(InputError, match="batchnorm_group_size is 3, expected a divisor of the 4 ranks"):
        group_ranks(4, 3)


def test_alone_it_is_batch_normalisation(world: World) -> None:
    mine, theirs = GroupBatchNorm2d(3), nn.BatchNorm2d(3)
    join_groups(mine, world, 1)
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mine(x), theirs(x))
    assert torch.equal(mine.running_var, theirs.running_var)
    with pytest.raises(InputError, match="batchnorm_group_size is 2, expected a divisor of the 1 ranks"):
        join_groups(mine, world, 2)
