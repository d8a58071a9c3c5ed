"""The moving average of the weights is torch's, bit for bit, and what a checkpoint has of it too."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from suite.training.state import MovingAverage


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
        assert list(found.state_dict()) == list(wanted.state_dict())
        for name, value in wanted.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), name
