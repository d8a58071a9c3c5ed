"""Runs forward and backward passes as CUDA graphs: one graph per shape of batch, launched by one call of the host.

Python runs while a pass is captured, not when it is replayed. What a pass changes on the host goes through
`after_pass`. The optimizer stays outside: its learning rate is a number of the host. Not seen on a GPU in this form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from torch import Tensor, nn

from mlhpc.suite.config import RunConfig
from mlhpc.suite.documents import convert_to_plain_data
from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.choice.chooser import Candidate, Chooser, Question, make_threshold_rule
from mlhpc.suite.machine.choice.precision import build_network
from mlhpc.suite.workload import Workload

if TYPE_CHECKING:
    from mlhpc.suite.workload import Batch

EAGER, GRAPH = "eager", "graph"
MAX_TIME_RATIO = 0.9  # of the time without a graph
WARM_UPS = 3  # training steps of a shape before its capture: tables are made, and Triton and cuDNN choose
MOST_GRAPHS = 8  # shapes; batches of further shapes are computed without a graph

Pass = Callable[["Batch"], Tensor]
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
Effect = tuple[Callable[..., None], tuple[Tensor, ...]]

_effects: list[Effect] | None = None  # of the pass that is being captured


def is_captured() -> bool:
    """Return True while a pass is captured, in autograd's thread too."""
    return _effects is not None


def after_pass(effect: Callable[..., None], *tensors: Tensor) -> None:
    """Call ``effect`` with tensors of a pass. If the pass is being captured: after each replay, with copies of them."""
    if _effects is None:
        effect(*tensors)
    else:
        _effects.append((effect, tensors))


@contextmanager
def _collecting() -> Iterator[list[Effect]]:
    """Collect the effects of the body, which is captured."""
    global _effects
    found: list[Effect] = []
    _effects = found
    try:
        yield found
    finally:
        _effects = None


class CudaCapture:
    """Captures work as CUDA graphs. They share their memory, so that of several only the last replay's results hold."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return the result's place, and the function that fills it. The work is only noted, not done."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: loader threads pin memory meanwhile, which the default forbids
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay


@dataclass(frozen=True)
class _Recorded:
    """A captured pass: where its loss and gradients lie, and what its replays change on the host."""

    replay: Callable[[], None]
    loss: Tensor
    gradients: Sequence[Tensor | None]
    effects: Sequence[Effect]

    def apply_effects(self) -> None:
        """Change the host's state after a replay."""
        places = [each for _, tensors in self.effects for each in tensors]
        copies = [torch.empty_like(each) for each in places]
        if copies:
            torch._foreach_copy_(copies, places)  # one launch if all are of one type
        left = iter(copies)
        for effect, tensors in self.effects:
            effect(*islice(left, len(tensors)))


class StepGraphs:
    """Computes loss and gradients of batches, by a graph from the fourth batch of a shape on.

    A batch must lie at the same place in memory each time (`BatchCopier` with ``fixed``). ``compute`` runs forward and
    backward pass. Gradients are overwritten, not added up.
    """

    def __init__(self, compute: Pass, parameters: Sequence[nn.Parameter], capture: Capture) -> None:
        self._compute, self._parameters, self._capture = compute, parameters, capture
        self._seen: dict[object, int] = {}
        self.recorded: dict[object, _Recorded] = {}
        self._last: _Recorded | None = None  # whose gradients the parameters have

    def run(self, batch: Batch) -> Tensor:
        """Compute a batch. Returns the loss, which later steps do not change."""
        # The address too: a batch that lies elsewhere would be taken for the one that was captured.
        key = tuple((name, each.data_ptr(), each.shape, each.dtype) for name, each in batch.items())
        recorded = self.recorded.get(key)
        if recorded is None:
            seen = self._seen[key] = self._seen.get(key, 0) + 1
            if seen <= WARM_UPS or len(self.recorded) == MOST_GRAPHS:
                return self.run_eagerly(batch)
            recorded = self.recorded[key] = self._record(batch)
        if recorded is not self._last:
            for parameter, gradient in zip(self._parameters, recorded.gradients, strict=True):
                parameter.grad = gradient
            self._last = recorded
        recorded.replay()
        recorded.apply_effects()
        return recorded.loss.clone()

    def run_eagerly(self, batch: Batch) -> Tensor:
        """Compute a batch without a graph."""
        self._drop_gradients()
        return self._compute(batch)

    def _record(self, batch: Batch) -> _Recorded:
        # Without gradients the pass makes its own, in the graph's memory, instead of adding to those of the last step.
        self._drop_gradients()
        try:
            with _collecting() as effects:
                loss, replay = self._capture(lambda: self._compute(batch))
        except RuntimeError as error:
            raise InputError(
                f"graphs: this step cannot be captured: {str(error).splitlines()[0]}; give --set graphs=false"
            ) from error
        return _Recorded(replay, loss, [parameter.grad for parameter in self._parameters], effects)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._last = None


def find_graph_problem(
    config: RunConfig, ranks: int, workload: Workload, model: nn.Module, *, planned: bool
) -> str | None:
    """Find why passes of this run cannot be captured. None if nothing is known."""
    if ranks > 1:
        return f"{ranks} ranks exchange gradients within the backward pass"
    if planned:
        return "a parallel plan divides the model"
    if config.gradient_accumulation_steps > 1:
        return "gradient_accumulation_steps is above 1, and a graph overwrites gradients"
    if config.compile:
        return "compile is true"
    return workload.find_graph_problem(model)


def choose_graphs(
    chooser: Chooser,
    config: RunConfig,
    make: Callable[[RunConfig], Workload],
    problem: str | None,
    tick: Callable[[], None] = lambda: None,
    capture: Callable[[], Capture] | None = None,
) -> RunConfig:
    """Return the configuration with ``graphs: auto`` replaced by the choice. Every rank calls it after all others.

    It times passes of a network of its own with and without a graph, with the choices made so far. ``problem`` is why
    there can be no graph. On a processor there is none, and nothing is asked. ``capture``: in place of CUDA's.
    """
    if config.graphs != "auto":
        return config
    on_cpu = chooser.device.type == "cpu"
    if on_cpu and capture is None:
        return structs.replace(config, graphs=False)
    samples = config.samples_per_pass(chooser.ranks)
    batch = make(config).example(samples)

    def ways() -> Mapping[str, Candidate]:
        if batch is None:
            return {}
        return _make_candidates(chooser, config, make, batch, tick, (capture or CudaCapture)())

    shape = {
        **{"workload": config.workload, "samples": samples, "precision": config.precision},
        **{"network": convert_to_plain_data(config.hyperparameters), "pinned": config.choices.pinned},
    }
    question = Question(
        name="graphs",
        shape=shape,
        rule=EAGER,
        ways=ways,
        possible=lambda text: text == EAGER or (text == GRAPH and problem is None),
        decide=make_threshold_rule(GRAPH, EAGER, MAX_TIME_RATIO),
        unmeasured=problem or ("no batch is made up for it" if batch is None else ""),
    )
    with torch.random.fork_rng(devices=[] if on_cpu else [chooser.device]):  # dropout of the passes draws numbers
        return structs.replace(config, graphs=chooser.choose(question) == GRAPH)


def _make_candidates(
    chooser: Chooser,
    config: RunConfig,
    make: Callable[[RunConfig], Workload],
    batch: Batch,
    tick: Callable[[], None],
    capture: Capture,
) -> Mapping[str, Candidate]:
    """Build a network as the run's, and its pass with and without a graph."""
    # Without instrumentation: marks within a pass take time, which a graph does not have.
    alone, device = structs.replace(config, instrumentation=False), chooser.device
    made = {name: choice.value for name, choice in chooser.choices.items()}
    workload, model = build_network(chooser, alone, make, measure=False, pinned=made)
    here = {name: each.to(device) for name, each in batch.items()}

    def compute(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=alone.precision == "bfloat16"):
            loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    graphs = StepGraphs(compute, list(model.parameters()), capture)

    def run_graph() -> object:
        tick()
        # Only in the first call, which does not count.
        while not graphs.recorded:
            graphs.run(here)
        return graphs.run(here)

    def run_eagerly() -> object:
        tick()
        return graphs.run_eagerly(here)

    return {EAGER: run_eagerly, GRAPH: run_graph}
