"""Hyperparameters of an MoE layer and of training with it. Each idea of Tutel and MegaBlocks is one value. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from mlhpc.suite.config import Hyperparameters, RunConfig
from mlhpc.suite.errors import InputError

DEFAULT_CAPACITY_FACTOR = 1.0
LOAD_MARGIN = 2.0  # one expert may have the usual factors above 1
LARGE_ALIGNMENT, LARGE_STEP = 256, 128  # Tutel: an alignment above 256 becomes a multiple of 128

Activation = Literal["relu", "gelu", "silu", "swiglu"]
Algorithm = Literal["linear", "2dh"]
Backend = Literal["auto", "loop", "onednn", "bmm", "grouped_mm", "triton"]
Beta = Annotated[float, Meta(ge=0, lt=1)]  # of AdamW
DispatchMode = Literal["dropless", "capacity", "einsum"]


class Offload(Hyperparameters, frozen=True, kw_only=True):
    """Where the experts' weights and states of the optimizer lie while no layer needs them (docs/offload.md)."""

    tier: Annotated[Literal["host", "file"], "the host's memory, or safetensors files in folder"]
    folder: Annotated[Path | None, "file: each rank's files, which go with the run; one run at a time"] = None
    depth: Annotated[int, Meta(ge=0, le=64), "file: layers that are loaded ahead"] = 1
    cache: Annotated[int, Meta(ge=1), "file: bytes of memory that a rank may use for experts"] | None = None

    def __post_init__(self) -> None:
        if (self.tier == "file") != (self.folder is not None and self.cache is not None):
            raise InputError("offload: tier file needs folder and cache, for example /scratch/experts and 1000000000")


class MoEConfig(Hyperparameters, frozen=True, kw_only=True):
    """One MoE layer: first its mathematics, then its execution, which does not change the function computed.

    One exception, as in Tutel: capacity is rounded up to a multiple of (ranks per expert * overlap_degree).
    """

    experts: Annotated[int, Meta(ge=1, le=4096)]
    top_k: Annotated[int, Meta(ge=1)] = 2
    hidden: Annotated[int, Meta(ge=1), "hidden width of one expert"]
    activation: Activation = "swiglu"
    bias: bool = False
    router: Literal["softmax", "cosine"] = "softmax"
    normalise_gates: Annotated[bool, "weights of the K choices divided by their sum (K > 1)"] = True
    batch_prioritised: Annotated[bool, "queues in order of the best score, not of the token"] = False
    gate_noise: Annotated[float, Meta(ge=0), "training: logits += noise * normal / experts"] = 0.0
    balance: Literal["none", "gshard", "importance_load", "bias"] = "gshard"
    balance_coefficient: Annotated[float, Meta(ge=0), "of the auxiliary loss; bias: the step of the bias"] = 0.01
    z_coefficient: Annotated[float, Meta(ge=0), "of the mean squared logsumexp of the logits"] = 0.0
    dispatch: DispatchMode = "dropless"
    capacity_factor: Annotated[
        float | None, "capacity, einsum: > 0 Tutel's factor, 0 what is needed, < 0 needed up to -factor; null: 1.0"
    ] = None
    backend: Backend = "auto"
    expert_parallel: Annotated[bool, "experts spread over all ranks; else every rank has them all"] = False
    parallel_r: Annotated[int, Meta(ge=0), "0: gather weights, move no token; r: token copies per expert"] = 1
    overlap_degree: Annotated[int, Meta(ge=1), "chunks whose all-to-all and experts overlap"] = 1
    all_to_all: Algorithm = "linear"
    ranks_per_node: Annotated[int, Meta(ge=1), "2dh: ranks counted as one node; null: what the launch says"] | None = (
        None
    )
    autotune: Annotated[bool, "choose parallel_r, overlap_degree and all_to_all by model and trials"] = False
    offload: Annotated[Offload, "keep experts in a slower memory"] | None = None

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise InputError(f"top_k is {self.top_k}, expected at most the number of experts, {self.experts}")
        if self.balance == "importance_load" and self.gate_noise <= 0:
            raise InputError("balance importance_load needs gate_noise > 0: the load is a probability under that noise")
        if self.autotune and self.offload is not None:
            raise InputError(
                "autotune times layers outside of a step, where offload has no experts: leave one of them out"
            )
        if self.dispatch == "dropless" and self.capacity_factor is not None:
            raise InputError("capacity_factor belongs to dispatch capacity or einsum; dropless has no capacity")
        if self.capacity_factor is not None and abs(self.capacity_factor) > max(self.experts, LOAD_MARGIN):
            raise InputError(
                f"capacity_factor {self.capacity_factor:g} is more than the {self.experts} experts: with a factor of "
                f"{self.experts} every expert has room for every token"
            )


def list_valid_r(experts: int, ranks: int) -> tuple[int, ...]:
    """List the possible values of parallel_r: 0 and the divisors of the ranks per expert.

    InputError if neither of experts and ranks divides the other.
    """
    sharers = count_ranks_per_expert(experts, ranks)
    return (0, *(r for r in range(1, sharers + 1) if sharers % r == 0))


class Training(Hyperparameters, frozen=True, kw_only=True):
    """Hyperparameters common to workloads with experts: the layer, AdamW, warm-up and cosine.

    ``dense: true`` trains the dense FFN of equal FLOPs instead.
    """

    dense: bool = False
    moe: MoEConfig
    learning_rate: Annotated[float, Meta(gt=0)]
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
    schedule_steps: Annotated[int, Meta(ge=1), "cosine from the peak to final_fraction of it, then constant"]
    final_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.1
    weight_decay: Annotated[float, Meta(ge=0), "of matrices; not of norms"] = 0.1
    adam_betas: tuple[Beta, Beta] = (0.9, 0.95)

    def collect_training(self, config: RunConfig, ranks: int) -> dict[str, Any]:
        """Collect what the log states of optimizer, schedule and MoE layers."""
        return {
            "opt_name": "adamw",
            "opt_base_learning_rate": self.learning_rate,
            "opt_learning_rate_warmup_steps": self.warmup_steps,
            "opt_learning_rate_decay_steps": self.schedule_steps,
            "opt_end_learning_rate": self.learning_rate * self.final_fraction,
            "opt_adamw_beta_1": self.adam_betas[0],
            "opt_adamw_beta_2": self.adam_betas[1],
            "opt_adamw_weight_decay": self.weight_decay,
            **build_hyperparameter_events(self.moe, dense=self.dense, precision=config.precision, ranks=ranks),
        }


def build_hyperparameter_events(moe: MoEConfig, *, dense: bool, precision: str, ranks: int) -> dict[str, Any]:
    """Build the hyperparameter events of MoE layers: MLPerf Training's names where they exist, else prefix ``moe_``.

    ``ranks``: number of ranks that share the experts; 1 if every rank has all. Rows are sent at the precision they are
    computed in, gradients in float32.
    """
    auxiliary = moe.balance in ("gshard", "importance_load") and not dense
    computed = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bfloat16"}[precision]
    sent = "bfloat16" if precision == "bfloat16" else "fp32"
    return {
        "lowest_numerical_precision_in_linear": computed,
        "lowest_numerical_precision_in_attn": computed,
        "lowest_numerical_precision_in_comm": sent if ranks > 1 else "fp32",
        "expert_parallelism": ranks,
        "moe_aux_loss_coeff": moe.balance_coefficient if auxiliary else 0.0,
        "moe_balance": "none" if dense else moe.balance,
        "moe_num_experts": 0 if dense else moe.experts,
        "moe_top_k": 0 if dense else moe.top_k,
        "moe_dispatch_mode": "none" if dense else moe.dispatch,
        "moe_capacity_factor": None if dense else moe.capacity_factor,
        "moe_a2a_algo": moe.all_to_all,
        "moe_parallel_r": moe.parallel_r,
        "moe_overlap_degree": moe.overlap_degree,
    }


def count_ranks_per_expert(experts: int, ranks: int) -> int:
    """Compute how many ranks share one expert's hidden width.

    It is 1 if there are at least as many experts as ranks. InputError if neither number divides the other.
    """
    if experts % ranks == 0:
        return 1
    if ranks % experts == 0:
        return ranks // experts
    raise InputError(f"experts is {experts} on {ranks} ranks: one of the two numbers must divide the other")


def compute_capacity(
    factor: float | None, tokens: int, experts: int, top_k: int, needed: int = 0, alignment: int = 1
) -> int:
    """Compute Tutel's capacity. ``needed``, the longest queue over all ranks, is used for factors of zero and below.

    A factor > 0 gives top_k * int(factor * ceil(tokens / experts)), truncated before the product. A factor of 0 gives
    ``needed``. A factor < 0 gives ``needed``, but at most what -factor gives. None means the default factor, because 0
    has a meaning.
    """
    factor = DEFAULT_CAPACITY_FACTOR if factor is None else factor
    # -(-a // b) rounds a / b up
    bound = top_k * int(abs(factor) * -(-tokens // experts))
    capacity = bound if factor > 0 else needed if factor == 0 else min(needed, bound)
    if alignment > LARGE_ALIGNMENT:
        alignment = -(-alignment // LARGE_STEP) * LARGE_STEP
    return -(-capacity // alignment) * alignment


@dataclass(frozen=True)
class Layout:
    """How a training batch is distributed: ``samples`` in one forward pass of a rank.

    ``spread``: ranks that share the experts (1: every rank has all). ``hops``: all-to-alls from a token to its expert
    (two with 2dh on several nodes and devices). ``copies``: meshes of ``spread`` ranks in the run.
    """

    samples: float
    spread: int = 1
    hops: int = 1
    copies: int = 1

    def summed_parameters(self, experts: float) -> float:
        """Compute of how many parameters, of all ``experts``, a rank sums the gradients over other ranks."""
        return experts if self.spread == 1 else experts / self.spread if self.copies > 1 else 0.0

    def computed_rows(self, moe: MoEConfig, tokens: int) -> float:
        """Compute the rows that experts compute for one sample of ``tokens`` tokens, empty ones included.

        With a capacity factor of zero or below they depend on the routing. Then it counts the rows with a token, as if
        none dropped.
        """
        factor = DEFAULT_CAPACITY_FACTOR if moe.capacity_factor is None else moe.capacity_factor
        if moe.dispatch == "dropless" or factor <= 0:
            return float(tokens * moe.top_k)
        alignment = count_ranks_per_expert(moe.experts, self.spread) * moe.overlap_degree
        # capacity is of a whole pass, with all its samples' tokens, and rounded up once
        capacity = compute_capacity(factor, round(tokens * self.samples), moe.experts, moe.top_k, alignment=alignment)
        return moe.experts * capacity / self.samples

    def sent_rows(self, moe: MoEConfig, tokens: int) -> float:
        """Compute the rows that one sample sends to the experts of one layer, in the forward pass.

        Rows for its own rank count, a row counts once per hop, and the way back does not count. ``tokens``: of the
        sample in this layer.
        """
        if self.spread == 1:
            return 0.0
        return self.computed_rows(moe, tokens) * moe.parallel_r * self.hops
