"""The moving average of the weights is torch's, bit for bit, and what a checkpoint has of it too."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mlhpc.suite.training.state import MovingAverage


def test_the_moving_average_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    update = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    wanted, found = AveragedModel(model, multi_avg_fn=update), MovingAverage(model, 0.9)
    for _ in range(4):
        model(torch.randn(5, 4))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        wanted.update_parameters(model)
        found.update()
        every = {"n_averaged": found.n_averaged}
        every |= {f"module.{name}": value for name, value in (found.weights | found.buffers).items()}
        assert every.keys() == wanted.state_dict().keys()
        for name, value in wanted.state_dict().items():
            assert torch.equal(every[name], value), name
