"""Closed forms of the bytes that a layer without drops moves through memory: by the fused kernels, and without them. No torch.

Every kernel reads each of its inputs once and writes each of its outputs once; a gather reads a row for every row. What a cache
saves or misses is not in it, nor are indices, routing weights and biases, which are small. Without fusion a layer permutes tokens
to rows, multiplies by grouped products, activates, and adds up the rows; each is taken as one kernel, the best that can be.
N rows, T tokens, E experts, D model width, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlhpc.workloads.moe.config import Activation

KEPT = {"relu": 1, "gelu": 1, "silu": 1, "swiglu": 2}  # rows (N, H) that the backward pass reads of the forward pass


@dataclass(frozen=True)
class Traffic:
    """Bytes of one layer, forward and backward."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        """Bytes of a training pass."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Sizes:
    """The layer whose traffic is computed."""

    tokens: int
    rows: int
    experts: int
    width: int
    hidden: int
    activation: Activation
    element_bytes: int = 2

    @property
    def _units(self) -> tuple[int, int, int, int]:
        """Bytes of rows (N, D), of hidden rows (N, H), of tokens (T, D) and of one weight of all experts."""
        wide, b = self.width, self.element_bytes
        weight = self.experts * self.hidden * wide * b
        return self.rows * wide * b, self.rows * self.hidden * b, self.tokens * wide * b, weight

    def fused(self) -> Traffic:
        """Compute what the kernels move (`products`, `gradients`), in training."""
        rows, hidden, tokens, weight = self._units
        up = 2 if self.activation == "swiglu" else 1
        written = 1 + (0 if self.activation == "relu" else KEPT[self.activation])
        forward = (rows + up * weight + written * hidden) + (hidden + weight + rows) + (rows + tokens)
        d_hidden = rows + weight + KEPT[self.activation] * hidden + (1 + up) * hidden
        d_x = up * (hidden + weight) + rows + (rows + tokens)
        d_weights = (up * hidden + rows + up * weight) + (hidden + rows + weight)
        return Traffic(forward, d_hidden + d_x + d_weights)

    def separate(self) -> Traffic:
        """Compute what permuting, grouped products, activation and adding up move, each alone."""
        rows, hidden, tokens, weight = self._units
        up = 2 if self.activation == "swiglu" else 1
        product = rows + weight + hidden  # of all three: read two, write one, in either direction
        forward = 2 * rows + up * product + (up + 1) * hidden + product + (rows + tokens)
        d_rows = 3 * rows  # gathers the gradient, reads the rows for the routing weights' gradient, writes
        d_activation = (2 * up + 1) * hidden
        d_sum = 3 * rows if up == 2 else 0
        d_products = 2 * (1 + up) * product
        return Traffic(forward, d_rows + d_products + d_activation + d_sum + (rows + tokens))
