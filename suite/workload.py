"""Defines the interface between workloads and harness: what a workload must implement. Imports no torch.

A workload is a folder whose ``__init__`` holds a `Descriptor`; the class that it names implements `Workload`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mlhpc.suite.descriptor import Descriptor, load_object
from mlhpc.suite.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn, optim

    from mlhpc.suite.config import RunConfig
    from mlhpc.suite.world import World

    Batch = Mapping[str, Tensor]


Slab = tuple[tuple[int, int], ...]  # of each dimension after the sample's: first position, one past the last


@dataclass(frozen=True)
class Work:
    """The work of training on one sample, or of one step if the name says so, by the workload's formulas.

    ``model_flops``: what the algorithm needs for forward and backward pass (2 per multiply-add). ``executed_flops``:
    what the code does, with recomputation and padding. ``algorithmic_bytes``: the compulsory traffic of all operators.
    ``forward_flops`` and ``forward_bytes`` are the forward pass's parts. ``forward_extra_flops``: executed
    minus model FLOPs of the forward pass; may be negative. ``algorithmic_bytes`` includes the optimizer's
    bytes, divided by the samples of a batch. The FLOPs here exclude the optimizer's, which are elementwise.

    ``all_reduce_bytes_per_step``: gradients of parameters that every rank holds. ``all_to_all_bytes``: one sample's
    rows in both expert all-to-alls, including rows that stay on their rank.
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
    forward_extra_flops: float = 0.0


# Elementwise FLOPs per parameter of an update: moments, bias correction, decay; LAMB adds its norms and their ratio
UPDATE_FLOPS = {"SGD": 4, "Adam": 12, "AdamW": 13, "LAMB": 20}
GRADIENT_BYTES = 4  # gradients are reduced in float32


@dataclass(frozen=True)
class Optimization:
    """An optimizer and its schedule. ``learning_rate(step, epoch)`` is pure; steps are global from 0, epochs from 1.

    With ``clip_norm`` gradients are scaled down to this L2 norm over all parameters. With ``ema_decay`` evaluation uses
    the exponential moving average of the weights. An optimizer that needs norms of whole tensors has an attribute
    ``norms``. It computes them from tensors and the parameter of each. The harness replaces it if ranks hold pieces.
    """

    optimizer: optim.Optimizer
    learning_rate: Callable[[int, int], float]
    clip_norm: float | None = None
    ema_decay: float | None = None


class Dataset(Protocol):
    """Random access to the samples of one split; `load` is called from several threads at once."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def load(self, indices: Sequence[int] | NDArray[np.int64], *, seed: int, epoch: int) -> Batch:
        """Load samples as CPU tensors; the first dimension is the sample.

        Random choices (augmentation) depend only on seed, epoch and sample index. So a sample is the same on any rank
        and in any batch. ``epoch`` is 0 for evaluation, where nothing is random.
        """
        ...


@runtime_checkable
class SlabDataset(Dataset, Protocol):
    """A data set that can read a part of each sample and leave the rest in storage (docs/plans.md)."""

    def load_slab(
        self, indices: Sequence[int] | NDArray[np.int64], slabs: Mapping[str, Slab], *, seed: int, epoch: int
    ) -> Batch:
        """Load like `load`, but only these positions of the tensors in ``slabs``. The values are equal."""
        ...


class ChooserProtocol(Protocol):
    """Answers what is fastest on this machine, the same on all ranks: `mlhpc.suite.machine.choice.chooser.Chooser`."""

    device: torch.device
    threads: int  # of the rank that has fewest

    @property
    def ranks(self) -> int:
        """The number of ranks of the run."""
        ...

    def choose(self, question: Any) -> str:
        """Answer a `mlhpc.suite.machine.choice.chooser.Question`. Every rank asks the same ones in the same order."""
        ...


@dataclass(frozen=True)
class ExpertSpread:
    """How a plan's mesh spreads experts: over ``ranks`` ranks (0: the workload decides) of ``size`` in the run.

    ``sharing``: this many consecutive ranks have the same samples. Each of them shares experts with the ranks of its
    number in the next groups. ``note`` is for a dry run on tensors without memory: nothing is sent. It is called
    with axis, kind of collective, bytes that a rank gives, and number of ranks. ``replicas``: process group of the
    ranks with the same stage of a pipeline; None: all ranks.
    """

    ranks: int = 0
    size: int = 1
    sharing: int = 1
    note: Callable[[str, str, int, int], None] | None = None
    replicas: Any = None


@dataclass(frozen=True)
class ExpertLayer:
    """One layer's ``experts`` on this rank, with ``parameters`` each.

    ``tokens``: the rows for which an expert's parameters are used in one forward pass, if all experts get as many.
    """

    name: str
    experts: int
    parameters: int
    tokens: float


class Workload(Protocol):
    """One benchmark at one size. The harness constructs it as ``cls(config)`` with the resolved RunConfig.

    Implementations inherit from it. The methods at the end have defaults for a data-parallel model. A class that lacks
    one of the others is refused when it is loaded, and cannot be constructed.
    """

    config: RunConfig
    # True: `build_model` looks at no values and uses torch's operators alone, so that under a plan that shards states
    # the harness can note it and repeat it tensor by tensor; a test must show that the values are the same
    # (docs/plans.md)
    initialises_by_operators: bool = False
    spread: ExpertSpread = ExpertSpread()  # set before `build_model`
    offloads: bool = False  # True: tensors of the model may have no memory (docs/offload.md)

    @abstractmethod
    def dataset(self, split: str, root: Path) -> Dataset:
        """Open the ``"train"`` or ``"validation"`` split of a data set. InputError if it is damaged."""
        ...

    @abstractmethod
    def build_model(self, world: World) -> nn.Module:
        """Build the model on the CPU in float32, initialised from torch's current seed. The harness moves it."""
        ...

    @abstractmethod
    def build_optimizer(self, model: nn.Module, steps_per_epoch: int) -> Optimization:
        """Build optimizer and schedule for the config's global batch size."""
        ...

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the scalar mean loss over the batch's samples, with regularisation."""
        ...

    def model_input(self, batch: Batch) -> Tensor:
        """Return what `loss` and `eval_stats` pass to the model. Only a workload with stages needs it."""
        raise NotImplementedError

    @abstractmethod
    def eval_stats(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Compute sums and counts of a batch (float64 scalars), which the harness adds over batches and ranks."""
        ...

    @abstractmethod
    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Compute metrics from the summed statistics; the card's metric is among them."""
        ...

    @abstractmethod
    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters to log, key to value, in the order of their MLLOG events."""
        ...

    @abstractmethod
    def work(self) -> Work:
        """Compute the work of training on one sample at this size."""
        ...

    def work_of(self, batch: Batch) -> Work:
        """Compute `work` for the samples of this batch alone. Default: samples are of one size."""
        return self.work()

    def data_hyperparameters(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return hyperparameters to log that depend on the data, from the manifest's attributes. Default: none."""
        return {}

    def sharded_parameters(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """List the parameters that are split over ranks: all ranks' shares make the whole. Default: none.

        The backward pass must leave in their gradients the sum over the losses of all ranks. Ranks with the same share
        (`share_copy`) must have the same sum. The harness divides it by the number of ranks, as DDP does for other
        gradients. It does not reduce it over ranks, and saves each share.
        """
        return ()

    def share_places(self, model: nn.Module) -> Mapping[str, tuple[Sequence[int], Sequence[int]]]:
        """Return where this rank's shares lie. With it a checkpoint can be continued on another number of ranks.

        Maps names of `sharded_parameters` to the position of this rank's first value in the whole tensor, in each
        dimension, and the shape of the whole. Default: not known.
        """
        return {}

    def share_copy(self, model: nn.Module) -> tuple[int, int]:
        """Return this rank's number among the ranks with the same shares, and their number. Default: it alone."""
        return 0, 1

    def expert_layers(self, model: nn.Module) -> Sequence[ExpertLayer]:
        """List the layers with experts, in order, for `mlhpc plan --offload`. Default: none."""
        return ()

    def before_evaluation(self, model: nn.Module, world: World) -> None:
        """Make equal on all ranks what training left different. All ranks call it. Default: average buffers."""
        set_mean_buffers(model, world)

    def example(self, samples: int) -> Batch | None:
        """Return a made-up batch like those of training, to time a pass. Needs no data.

        None, the default: there is none, or a pass needs other ranks.
        """
        return None

    def choose(self, model: nn.Module, chooser: ChooserProtocol) -> None:
        """Choose by short measurements how the model on its device is computed. All ranks call it. Default: none."""

    def find_graph_problem(self, model: nn.Module) -> str | None:
        """Find why a training pass cannot be a CUDA graph. None, the default: nothing is known.

        In a graph shapes are fixed and the host reads nothing. Python does not run again, see `after_pass` in
        mlhpc.suite.training.cuda_graphs.
        """
        return None

    def window_stats(self, world: World) -> dict[str, Any]:
        """Return the ``window_stats`` since the last call. All ranks call it at each ``step_phases`` event.

        Returns plain numbers, lists and mappings; rank 0's are logged. Default: none.
        """
        return {}


def load_workload(descriptor: Descriptor) -> Callable[[RunConfig], Workload]:
    """Import a workload's implementation and torch. InputError names required methods that it lacks."""
    implementation = load_object(descriptor.code())
    required = [name for name, method in vars(Workload).items() if getattr(method, "__isabstractmethod__", False)]
    methods = {name: getattr(implementation, name, None) for name in required}
    missing = [name for name, method in methods.items() if not callable(method) or _is_abstract(method)]
    if missing:
        raise InputError(
            f"workload {descriptor.name!r}: {descriptor.implementation} "
            f"lacks the method{'s' * (len(missing) > 1)} {', '.join(missing)} "
            "(see mlhpc.suite.workload.Workload)"
        )
    return implementation  # type: ignore[no-any-return]


def _is_abstract(method: object) -> bool:
    return getattr(method, "__isabstractmethod__", False) is True


def set_mean_buffers(model: nn.Module, world: World) -> None:
    """Replace floating-point buffers (such as batch statistics) by their means over ranks, in float64."""
    import torch

    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if world.size == 1 or not buffers:
        return
    # One collective for all buffers: each one costs a latency.
    flat = torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers]).cpu().numpy()
    mean = torch.from_numpy(world.transport.sum(flat) / world.size)
    for buffer, values in zip(buffers, torch.split(mean, [buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))
