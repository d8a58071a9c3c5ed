"""The narrow waist: what a workload gives the harness. Importable without torch; the types of torch are names only.

A workload is a folder with a torch-free ``__init__`` that holds a `Descriptor`; the class it names implements `Workload`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn, optim

    from suite.config import RunConfig
    from suite.world import World

    Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Work:
    """Work of training, from the workload's own closed forms; of one sample, or of a step where the name says so.

    ``model_flops`` is what the algorithm asks (2 per multiply-add; forward, backward), ``executed_flops`` what the code
    does (recompute, padding), ``algorithmic_bytes`` the compulsory traffic of all operators, in bytes. ``forward_*`` is the
    forward pass's share of model FLOPs and of bytes; the optimizer's bytes are in ``algorithmic_bytes`` too, shared by
    the samples of a batch, its (elementwise) FLOPs in none.
    ``all_reduce_bytes_per_step`` is the message of the gradients of what every rank holds, ``all_to_all_bytes`` the rows that
    one sample has sent to experts and back, those for its own rank included, if experts are spread over ranks.
    """

    model_flops: float
    executed_flops: float
    algorithmic_bytes: float
    forward_flops: float
    forward_bytes: float
    optimizer_flops_per_step: float
    optimizer_bytes_per_step: float
    all_reduce_bytes_per_step: float
    all_to_all_bytes: float = 0.0


# Elementwise FLOPs per parameter of an update: moments, bias correction, decay; LAMB adds its norms and their ratio
UPDATE_FLOPS = {"SGD": 4, "Adam": 12, "AdamW": 13, "LAMB": 20}
GRADIENT_BYTES = 4  # gradients are reduced in float32


@dataclass(frozen=True)
class Optimization:
    """An optimizer and its schedule. ``learning_rate(step, epoch)`` is pure: 0-based global step, 1-based epoch.

    ``clip_norm``: gradients are scaled down to this L2 norm over all parameters. ``ema_decay``: evaluation uses the
    exponential moving average of the weights.
    """

    optimizer: optim.Optimizer
    learning_rate: Callable[[int, int], float]
    clip_norm: float | None = None
    ema_decay: float | None = None


class Dataset(Protocol):
    """Random access to the samples of one split; `load` is called from several threads at once."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def load(self, indices: Sequence[int] | NDArray[np.int64], *, seed: int, epoch: int) -> Batch:
        """Samples as CPU tensors, first dimension the sample.

        Random choices (augmentation) are a function of (seed, epoch, sample index) alone, so that a sample is the same on
        any rank and in any batch; ``epoch`` is 0 for evaluation, where nothing is random.
        """
        ...


class Workload(Protocol):
    """One benchmark at one size. Constructed by the harness as ``cls(config)`` with the resolved RunConfig.

    Implementations inherit from it: the methods at the end have a default that fits a data-parallel model.
    """

    config: RunConfig

    def dataset(self, split: str, root: Path) -> Dataset:
        """The ``"train"`` or ``"validation"`` split under a data root in the suite's sharded form. ValueError if damaged."""
        ...

    def build_model(self, world: World) -> nn.Module:
        """The model on CPU in float32, initialised from torch's current seed; the harness moves and wraps it."""
        ...

    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Optimizer and schedule for the config's global batch size."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scalar mean loss over the batch's samples, regularisation included."""
        ...

    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Additive sums and counts of a batch (float64 scalars): the harness adds over batches and ranks."""
        ...

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the summed statistics; the card's metric key is among them."""
        ...

    def hyperparameters(self) -> dict[str, Any]:
        """The MLLOG hyperparameter events of a run, key to value, in the order they are logged."""
        ...

    def work(self) -> Work:
        """Work of training on one sample at this size."""
        ...

    def baselines(self, root: Path) -> dict[str, float]:
        """The card's metric as trivial and analytic predictors reach it on the validation split: name to value."""
        ...

    def sharded_parameters(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """Parameters of which each rank holds its own share; the shares of all ranks together are the whole. None here.

        The backward pass must leave in their gradients the sum over the losses of all ranks. The harness makes it the mean
        that all other gradients are, reduces them no further, and saves a share with its rank.
        """
        return ()

    def before_evaluation(self, model: nn.Module, world: World) -> None:
        """Agree on what differed between ranks while training; every rank calls. Here: buffers become means over ranks."""
        from suite.world import average_buffers

        average_buffers(model, world)

    def window_stats(self, world: World) -> dict[str, Any]:
        """What is logged as ``window_stats`` of the steps since the last call; every rank calls, with every step_phases.

        Plain numbers, lists and mappings, the same on every rank or only right on rank 0. Nothing here.
        """
        return {}
