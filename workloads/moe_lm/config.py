"""Hyperparameters of the language model, and its parameters, FLOPs and bytes in closed form. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from mlhpc.suite.config import RunConfig
from mlhpc.suite.errors import InputError
from mlhpc.suite.workload import GRADIENT_BYTES, UPDATE_FLOPS, Work
from mlhpc.workloads.moe.config import Layout, Training

# a pass is two products, scores and values; the backward pass does five: the scores again and four gradients
ATTENTION_PASSES = 3.5
VOCABULARY = 256  # bytes: no tokenizer, and bits per byte compare with any other model


class MoELMConfig(Training, frozen=True, kw_only=True):
    """A decoder of ``layers`` blocks. Every ``moe_every``-th has experts; others have a dense FFN of the active width.

    ``dense: true`` has that FFN in every block: its parameters and FLOPs are the active ones, without the router's.
    """

    layers: Annotated[int, Meta(ge=1, le=1000)]
    width: Annotated[int, Meta(ge=8)]
    heads: Annotated[int, Meta(ge=1)]
    context: Annotated[int, Meta(ge=8), "bytes a prediction may look back on; one sample predicts as many"]
    row_bytes: Annotated[int, Meta(ge=9), "bytes of a stored training sample; a random context + 1 of them is read"]
    moe_every: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise InputError(
                f"width is {self.width}, expected a multiple of {2 * self.heads}: 2 x the {self.heads} heads, because "
                "rotary positions turn pairs of numbers"
            )
        if self.row_bytes <= self.context:
            raise InputError(f"row_bytes is {self.row_bytes}, expected at least context + 1 = {self.context + 1}")

    @property
    def dense_hidden(self) -> int:
        """Return the hidden width of a dense FFN: the sum over the experts that one token uses."""
        return self.moe.top_k * self.moe.hidden

    def has_experts(self, layer: int) -> bool:
        """Return True if the 0-based block has experts: the last of every ``moe_every``."""
        return not self.dense and layer % self.moe_every == self.moe_every - 1

    def collect_logged(self, config: RunConfig, ranks: int = 1) -> dict[str, Any]:
        """Collect the hyperparameters that the log states: those of the model; MoE layers and training have their
        own.
        """
        return {
            "global_batch_size": config.global_batch_size,
            "max_sequence_length": self.context,
            **self.collect_training(config, ranks),
        }


def parameter_count(config: MoELMConfig, *, active: bool = False) -> int:
    """Count trainable parameters of the whole model, embeddings included.

    With ``active`` count the parameters that one token uses.
    """
    # embedding, head and last norm; two norms per block
    return config.width * (2 * VOCABULARY + 1) + sum(
        config.width * 2 + weights for weights in _block_matrices(config, active=active)
    )


def compute_work(
    config: MoELMConfig, *, global_batch_size: int, element_bytes: int, layout: Layout | None = None
) -> Work:
    """Compute FLOPs and compulsory bytes of training on one sample (docs/moe.md lists what is counted).

    Without ``layout``: one rank. Model FLOPs have causal attention over half the pairs. Executed FLOPs are the
    kernel's: all pairs on a CPU, and the scores once more for the gradient. With a capacity factor they include empty
    rows of the experts.
    """
    products = 2.0 * (config.width * VOCABULARY + sum(_block_matrices(config, active=True)))
    pairs = 4.0 * config.layers * config.context * config.width  # per position over a whole context: scores and values
    forward = config.context * (products + pairs / 2)
    executed = config.context * (products + ATTENTION_PASSES / 3 * pairs)
    layout = Layout(global_batch_size) if layout is None else layout
    experts = sum(config.has_experts(layer) for layer in range(config.layers))
    empty = layout.computed_rows(config.moe, config.context) - config.context * config.moe.top_k
    rows = 2.0 * experts * empty * _count_expert_weights(config)
    sums = 2.0 * experts * config.context * config.moe.top_k * config.width  # of each token's rows, weighted
    passes = 2 if config.moe.dispatch == "capacity" else 1  # there gradients of rows are summed with a mask, too
    executed += rows + passes * sums / 3
    activations = config.context * config.layers * (14 * config.width + 3 * config.dense_hidden)
    parameters = parameter_count(config)
    weights = experts * config.moe.experts * _count_expert_weights(config)
    optimizer = parameters * 4.0 * 9  # read w twice, g, m, v; write g, w, m, v
    sent = experts * layout.sent_rows(config.moe, config.context) * config.width
    return Work(
        model_flops=3 * forward,
        executed_flops=3 * executed,
        algorithmic_bytes=3.0 * element_bytes * activations + optimizer / global_batch_size + config.context,
        forward_flops=forward,
        forward_bytes=element_bytes * activations + config.context,
        optimizer_flops_per_step=UPDATE_FLOPS["AdamW"] * parameters,
        optimizer_bytes_per_step=optimizer,
        all_reduce_bytes_per_step=GRADIENT_BYTES * (parameters - weights + layout.summed_parameters(weights)),
        all_to_all_bytes=4.0 * element_bytes * sent,  # to the experts and back, values and gradients
        forward_extra_flops=config.context * pairs / 2 + rows + sums,
    )


def _block_matrices(config: MoELMConfig, *, active: bool) -> list[int]:
    moe, blocks = config.moe, []
    router = config.width * moe.experts
    for layer in range(config.layers):
        ffn = moe.top_k * _count_expert_weights(config)  # multiply-adds of a token, dense or not
        if config.has_experts(layer):
            ffn = (moe.top_k if active else moe.experts) * _count_expert_weights(config) + router
        blocks.append(4 * config.width**2 + ffn)
    return blocks


def _count_expert_weights(config: MoELMConfig) -> int:
    return (3 if config.moe.activation == "swiglu" else 2) * config.width * config.moe.hidden
