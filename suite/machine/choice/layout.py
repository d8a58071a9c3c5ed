"""Chooses how a convolutional network is computed: memory format, library of convolutions on a processor, threads.

Results differ only in rounding. Measuring does not touch the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mlhpc.suite.machine.choice.chooser import Candidate, Question
from mlhpc.suite.workload import ChooserProtocol

if TYPE_CHECKING:
    from mlhpc.suite.config import RunConfig
    from mlhpc.suite.workload import Batch


class Layout(NamedTuple):
    """How convolutions are computed."""

    channels_last: bool
    onednn: bool


RULE = "channels_last"
LAYOUTS = {
    RULE: Layout(True, True),
    "contiguous": Layout(False, True),
    f"{RULE}, native convolution": Layout(True, False),
    "contiguous, native convolution": Layout(False, False),
}
MIN_SPEEDUP = 1.05  # by which fewer threads than allowed must be faster


class MemoryFormatModel(Protocol):
    """A network that can be laid out in either memory format."""

    def lay_out(self, channels_last: bool) -> None:
        """Convert the parameters, and from now on the input, to a memory format."""
        ...


def choose_layout(
    chooser: ChooserProtocol,
    model: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    batch: Batch,
    config: RunConfig,
) -> None:
    """Choose format, library and threads for a `MemoryFormatModel` model if ``channels_last`` is ``auto``, and set
    them.

    Every rank calls it. ``loss`` is computed with a copy of the model on ``batch``, which must be like a training
    batch.
    """
    if config.channels_last != "auto":
        return
    device, short = chooser.device, config.precision == "bfloat16"
    here = {name: each.to(device) for name, each in batch.items()}
    layouts = LAYOUTS if device.type == "cpu" else {text: how for text, how in LAYOUTS.items() if how.onednn}
    # In bfloat16 a training pass by torch's own convolutions takes minutes, one by oneDNN half a second. The user may
    # still pin them.
    timed = {text: how for text, how in layouts.items() if how.onednn or not short}
    shape: dict[str, Any] = {  # what the fastest layout depends on
        "workload": config.workload,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": config.precision,
        **{name: list(each.shape) for name, each in batch.items()},
    }
    with torch.random.fork_rng(devices=[device] if device.type != "cpu" else []):  # dropout of the trials draws numbers
        trials = _LayoutPasses(model, lambda copied: loss(copied, here), device, short)
        answer = chooser.choose(
            Question(
                name="layout",
                shape=shape,
                rule=RULE,
                ways=lambda: {text: partial(trials.run, how) for text, how in timed.items()},
                possible=layouts.__contains__,
            )
        )
        chosen = layouts[answer]
        convert_memory_format(model, chosen.channels_last)
        use_onednn(chosen.onednn)
        if device.type == "cpu" and chooser.threads > 1:
            answer = chooser.choose(_make_thread_question(chooser.threads, partial(trials.run, chosen), shape))
            if answer != str(chooser.threads):
                torch.set_num_threads(int(answer))


@dataclass
class _LayoutPasses:
    """Runs training passes of copies of a model, one copy per format. The model and its buffers do not change."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    device: torch.device
    short: bool
    copies: dict[bool, nn.Module] = field(default_factory=dict)

    def run(self, how: Layout) -> object:
        """Run forward and backward pass."""
        if how.channels_last not in self.copies:
            self.copies[how.channels_last] = copy.deepcopy(self.model).train()
            convert_memory_format(self.copies[how.channels_last], how.channels_last)
        copied = self.copies[how.channels_last]
        with keep_process_settings():
            use_onednn(how.onednn)
            return run_training_pass(copied, lambda: self.loss(copied), self.device, self.short)


def run_training_pass(model: nn.Module, loss: Callable[[], Tensor], device: torch.device, short: bool) -> object:
    """Return the gradients of a loss; with autocast to bfloat16 if ``short``. The model keeps none of them."""
    with torch.enable_grad():
        with torch.autocast(device.type, torch.bfloat16, enabled=short):
            value = loss()
        wanted = [each for each in model.parameters() if each.requires_grad]
        return torch.autograd.grad(value, wanted, allow_unused=True)


def convert_memory_format(model: nn.Module, channels_last: bool) -> None:
    """Convert a model to a memory format."""
    model.lay_out(channels_last)  # type: ignore[operator]


class ProcessSettings(NamedTuple):
    """The settings that `choose_layout` changes for the whole process, which several networks may share."""

    threads: int
    onednn: bool

    @staticmethod
    def now() -> ProcessSettings:
        """Return the present settings."""
        return ProcessSettings(torch.get_num_threads(), bool(torch._C._get_mkldnn_enabled()))

    def restore(self) -> None:
        """Set the process back to these settings."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        use_onednn(self.onednn)


@contextmanager
def keep_process_settings() -> Iterator[None]:
    """Restore at the end what the body sets for the whole process."""
    before = ProcessSettings.now()
    try:
        yield
    finally:
        before.restore()


def use_onednn(wanted: bool) -> None:
    """Compute convolutions on the processor by oneDNN, as torch does by default, or by torch's own code."""
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        torch._C._set_mkldnn_enabled(wanted)  # what torch.backends.mkldnn.flags sets, which warns of TF32


def _make_thread_question(most: int, way: Candidate, shape: Mapping[str, Any]) -> Question:
    """Ask for the number of threads: all that the rank may use, half of them, or one."""
    counts = list(dict.fromkeys((most, -(-most // 2), 1)))

    def run(count: int) -> object:
        with keep_process_settings():
            torch.set_num_threads(count)
            return way()

    def decide(seconds: Mapping[str, float]) -> str:
        best = min(seconds, key=seconds.__getitem__)
        return best if MIN_SPEEDUP * seconds[best] < seconds.get(str(most), math.inf) else str(most)

    return Question(
        name="threads",
        shape=shape,
        rule=str(most),
        ways=lambda: {str(count): partial(run, count) for count in counts},
        possible=lambda text: text.isdecimal() and len(text) < 6 and 1 <= int(text) <= most,
        decide=decide,
        wall=True,
    )


def compute_onednn_product(left: Tensor, right: Tensor) -> Tensor:
    """Compute left right^T of two float32 matrices on a processor by oneDNN. Each may be transposed in memory.

    torch calls Intel's MKL, which leaves half of the vector units of other makers' processors unused. Results differ
    only in rounding.
    """
    left, right = (
        each if each.is_contiguous() or each.t().is_contiguous() else each.contiguous() for each in (left, right)
    )
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")  # type: ignore[no-any-return]


def has_onednn() -> bool:
    """Return True if this torch has oneDNN's product."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
