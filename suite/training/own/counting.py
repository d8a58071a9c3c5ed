"""Counts, in an own loop's first step, the values that its card leaves at 0. Renders them as lines for the card."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from mlhpc.suite.card import SizeCard
from mlhpc.suite.training.counts.flops import FlopSum

FORWARD, TRAINING = "forward_flops_per_sample", "training_flops_per_sample"


class CardCounter:
    """Counts the FLOPs of a step and collects the lines that a card lacks.

    ``known``: counts that need no step; None if a count is not known. ``samples``: this rank's samples in a step.
    """

    def __init__(self, card: SizeCard, known: dict[str, float | None], model: nn.Module | None, samples: int) -> None:
        # A card states 0 for a value that is not counted yet.
        self._missing = [name for name in (*known, FORWARD, TRAINING) if not getattr(card, name)]
        self._found = {name: value for name, value in known.items() if value}
        self._model, self._samples = model, samples
        self._flops, self._forward, self._begun = FlopSum(), 0, 0
        self._stack = ExitStack()

    @property
    def must_end(self) -> bool:
        """True if the card says 0 parameters: nothing could judge a run by it."""
        return "model_parameters" in self._missing

    @property
    def needs_a_step(self) -> bool:
        """True if FLOPs are missing that a step can show."""
        return self._model is not None and bool({FORWARD, TRAINING} & {*self._missing})

    def begin(self) -> None:
        """Start to count, until `lines`."""
        if self._model is None:
            return

        # FLOPs between both hooks are those of the forward pass. With gradient accumulation the hooks run several
        # times.
        def enter(*_: object) -> None:
            self._begun = self._flops.flops

        def leave(*_: object) -> None:
            self._forward += self._flops.flops - self._begun

        for hook in (self._model.register_forward_pre_hook(enter), self._model.register_forward_hook(leave)):
            self._stack.callback(hook.remove)
        self._stack.enter_context(self._flops)

    def lines(self) -> list[str]:
        """Stop counting. Return the lines to paste into the card."""
        self.close()
        flops = {FORWARD: self._forward / self._samples, TRAINING: self._flops.flops / self._samples}
        found = self._found | {name: value for name, value in flops.items() if value}
        return [f"    {name}: {found[name]:.0f}" for name in self._missing if name in found]

    def close(self) -> None:
        """Stop counting."""
        self._stack.close()
