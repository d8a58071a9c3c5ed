"""FLOPs and bytes of OpenFold in closed form, layer by layer. No torch; a test compares them with torch's counter."""

from __future__ import annotations

from dataclasses import dataclass

from mlhpc.suite.workload import GRADIENT_BYTES, UPDATE_FLOPS, Work
from mlhpc.workloads.openfold.config import OpenFoldConfig

# of a weight: gradient, weight, two moments and average are read; weight, moments, average and gradient are written
OPTIMIZER_ELEMENTS = 10
RIGID_GROUPS, GROUPS_WITH_ATOMS, ATOMS, SWAPPED_ATOMS = 8, 6, 14, 4  # of a residue
TEMPLATE_PAIR_FEATURES, TEMPLATE_ANGLE_FEATURES = 88, 57
TARGET_FEATURES, MSA_FEATURES, EXTRA_MSA_FEATURES, RECYCLED_BINS = 22, 49, 25, 15
PLDDT_BINS, DISTOGRAM_BINS, MSA_CLASSES, RESOLVED_ATOMS = 50, 64, 23, 37

FRAME = 3 * 3 * (3 + 1)  # multiply-adds of a rotation times a rotation and a vector
QUATERNION_ROTATION = 16 * 9  # of the rotation of a quaternion: products of its parts times a table


@dataclass
class LayerCounts:
    """Accumulates multiply-adds, elements read and written, and parameters of layers."""

    multiply_adds: float = 0.0
    elements: float = 0.0
    parameters: int = 0

    def linear(self, tokens: int, inputs: int, outputs: int, *, bias: bool = True) -> None:
        """Add a dense layer applied to ``tokens`` tokens."""
        self.multiply_adds += tokens * inputs * outputs
        self.elements += tokens * (inputs + outputs) + inputs * outputs
        self.parameters += inputs * outputs + outputs * bias

    def product(self, batch: int, rows: int, inner: int, columns: int) -> None:
        """Add matrix products."""
        self.multiply_adds += batch * rows * inner * columns
        self.elements += batch * (rows * inner + inner * columns + rows * columns)

    def norm(self, tokens: int, channels: int) -> None:
        """Add a layer norm."""
        self.elements += 2 * tokens * channels
        self.parameters += 2 * channels

    def add(self, other: LayerCounts, times: int = 1, *, shared: bool = False) -> None:
        """Add other counts several times; ``shared``: with the same weights each time."""
        self.multiply_adds += times * other.multiply_adds
        self.elements += times * other.elements
        self.parameters += (1 if shared else times) * other.parameters


def count_forward(config: OpenFoldConfig, *, residues: int) -> LayerCounts:
    """Compute one iteration of the network on one sample, heads included."""
    L, Z, M, S = residues, config.pair_channels, config.msa_channels, config.single_channels
    total = LayerCounts()
    for _ in range(2):
        total.linear(L, TARGET_FEATURES, Z)
    total.linear(L, TARGET_FEATURES, M)
    total.linear(config.max_msa_clusters * L, MSA_FEATURES, M)
    total.parameters += 65 * Z + Z  # relative positions: a table
    total.elements += L * L * Z
    total.linear(L * L, RECYCLED_BINS, Z)
    total.norm(L, M)
    total.norm(L * L, Z)
    if config.max_templates:
        total.add(_templates(config, L))
    total.linear(config.max_extra_msa * L, EXTRA_MSA_FEATURES, config.extra_msa_channels)
    total.add(_block(config, L, extra=True), config.extra_msa_blocks)
    total.add(_block(config, L, extra=False), config.evoformer_blocks)
    total.linear(L, M, S)
    total.add(_structure(config, L))
    total.norm(L, S)
    total.linear(L, S, config.plddt_channels)
    total.linear(L, config.plddt_channels, config.plddt_channels)
    total.linear(L, config.plddt_channels, PLDDT_BINS)
    total.linear(L * L, Z, DISTOGRAM_BINS)
    total.linear(config.max_msa_clusters * L, M, MSA_CLASSES)
    total.linear(L, S, RESOLVED_ATOMS)
    return total


def compute_work(config: OpenFoldConfig, *, global_batch_size: int, element_bytes: int) -> Work:
    """Compute the work of training on one sample: recycles without gradients, then forward and backward.

    A sample has half the maximum of recycles on average. Backward counts as twice forward. Executed in addition:
    frames, matrix products of the losses, with checkpointing the blocks' forward again. Not executed: gradients of
    features, and what only the first iteration of the structure module computes. The optimizer's traffic is divided by
    the batch size.
    """
    once = count_forward(config, residues=config.crop_size)
    flops = 2 * once.multiply_adds
    # recycles on average, then forward, and backward as two forward passes
    passes = config.num_recycling_iters / 2 + 3
    optimizer_bytes = OPTIMIZER_ELEMENTS * 4 * once.parameters
    averaging = 2 * bool(config.swa_decay_rate)
    return Work(
        model_flops=passes * flops,
        executed_flops=passes * flops + 2 * (_count_extra(config) + config.checkpointing * _count_recomputed(config)),
        algorithmic_bytes=passes * once.elements * element_bytes + optimizer_bytes / global_batch_size,
        forward_flops=(passes - 2) * flops,
        forward_extra_flops=2 * (passes - 2) * _count_forward_extra(config),
        forward_bytes=(passes - 2) * once.elements * element_bytes,
        optimizer_flops_per_step=(UPDATE_FLOPS["Adam"] + averaging) * once.parameters,
        optimizer_bytes_per_step=optimizer_bytes,
        all_reduce_bytes_per_step=GRADIENT_BYTES * once.parameters,
    )


def _count_recomputed(config: OpenFoldConfig) -> float:
    """Compute the multiply-adds of the blocks that checkpointing computes again."""
    total = LayerCounts()
    total.add(_block(config, config.crop_size, extra=True), config.extra_msa_blocks)
    total.add(_block(config, config.crop_size, extra=False), config.evoformer_blocks)
    if config.max_templates:
        total.add(_template_block(config, config.crop_size), config.template_blocks * config.max_templates, shared=True)
    return total.multiply_adds


def _count_extra(config: OpenFoldConfig) -> float:
    """Compute a training sample's multiply-adds beyond three passes of the network, minus what the passes overcount."""
    L, T = config.crop_size, config.structure_iterations
    held, atoms = GROUPS_WITH_ATOMS * L, ATOMS * L
    backward = T * L * QUATERNION_ROTATION + 9 * 27 * L + 6 * 9 * L + RIGID_GROUPS * L * (3 * 27 + 2 * 9) + 9 * atoms
    sides = 3 * held * 7 * atoms + T * 3 * L * 7 * L  # FAPE: atoms seen from side-chain groups, CA from backbones
    means = held * atoms + T * L * L
    names = SWAPPED_ATOMS * L * atoms * (3 * (3 + 2) + 2)  # distances of atoms with two names, and sums over them
    losses = 3 * sides + 2 * means + names + _count_group_frames(L) + 2 * 9 * (held + T * L) * 2
    features = 2 * L * TARGET_FEATURES * config.pair_channels + L * TARGET_FEATURES * config.msa_channels
    features += (
        config.max_msa_clusters * L * MSA_FEATURES * config.msa_channels + L * L * RECYCLED_BINS * config.pair_channels
    )
    features += config.max_extra_msa * L * EXTRA_MSA_FEATURES * config.extra_msa_channels
    features += config.max_templates * L * TEMPLATE_ANGLE_FEATURES * config.msa_channels
    features += config.max_templates * L * L * TEMPLATE_PAIR_FEATURES * config.template_channels
    rows = config.extra_msa_blocks * config.max_extra_msa
    rows += config.evoformer_blocks * (config.max_msa_clusters + config.max_templates)
    masks = 2 * L * rows * L
    # rotations are detached: points pass them no gradient
    points = T * L * 9 * config.ipa_heads * (2 * config.ipa_query_points + 2 * config.ipa_value_points)
    passes = config.num_recycling_iters / 2 + 1  # forward; backward is twice a forward one
    return (
        passes * _count_forward_extra(config)
        - 2 * _count_overcounted(config)
        + backward
        + losses
        - features
        - masks
        - points
    )


def _count_forward_extra(config: OpenFoldConfig) -> float:
    """Compute the multiply-adds of a forward pass beyond the network's: frames and atoms, less `_count_overcounted`."""
    L = config.crop_size
    return (
        config.structure_iterations * L * (FRAME + QUATERNION_ROTATION)
        + _count_group_frames(L)
        + 9 * ATOMS * L
        - _count_overcounted(config)
    )


def _count_group_frames(L: int) -> int:
    """Compute the multiply-adds of the groups' frames: chi 2 to 4 follow chi 1; default frames, torsions, backbone."""
    return 3 * L * FRAME + RIGID_GROUPS * L * (2 * 27 + 9)


def _count_overcounted(config: OpenFoldConfig) -> float:
    """Compute the multiply-adds that `count_forward` counts too often.

    It counts them in every structure iteration, though only the first executes them.

    They are the bias of the pair map and the layer of the initial single representation.
    """
    L, again = config.crop_size, config.structure_iterations - 1
    return again * L * (L * config.pair_channels * config.ipa_heads + config.single_channels * config.angle_channels)


def _attention(
    groups: int, queries: int, keys: int, channels: tuple[int, int], head: int, heads: int, *, gated: bool = True
) -> LayerCounts:
    query_width, key_width = channels
    total, width = LayerCounts(), head * heads
    total.linear(groups * queries, query_width, width, bias=False)
    for _ in range(2):
        total.linear(groups * keys, key_width, width, bias=False)
    total.product(groups * heads, queries, head, keys)
    total.product(groups * heads, queries, keys, head)
    if gated:
        total.linear(groups * queries, query_width, width)
    total.linear(groups * queries, width, query_width)
    return total


def _transition(tokens: int, channels: int, factor: int) -> LayerCounts:
    total = LayerCounts()
    total.norm(tokens, channels)
    total.linear(tokens, channels, factor * channels)
    total.linear(tokens, factor * channels, channels)
    return total


def _pair_block(L: int, Z: int, hidden: int, head: int, heads: int, factor: int) -> LayerCounts:
    total, pairs = LayerCounts(), L * L
    for _ in range(2):
        total.norm(pairs, Z)
        for _ in range(4):
            total.linear(pairs, Z, hidden)
        total.product(hidden, L, L, L)
        total.norm(pairs, hidden)
        total.linear(pairs, hidden, Z)
        total.linear(pairs, Z, Z)
    for _ in range(2):
        total.norm(pairs, Z)
        total.linear(pairs, Z, heads, bias=False)
        total.add(_attention(L, L, L, (Z, Z), head, heads))
    total.add(_transition(pairs, Z, factor))
    return total


def _block(config: OpenFoldConfig, L: int, *, extra: bool) -> LayerCounts:
    M = config.extra_msa_channels if extra else config.msa_channels
    head = config.extra_msa_head_channels if extra else config.msa_head_channels
    rows = config.max_extra_msa if extra else config.max_msa_clusters + config.max_templates
    Z, H, C = config.pair_channels, config.msa_heads, config.outer_channels
    total = LayerCounts()
    total.norm(rows * L, M)
    total.norm(L * L, Z)
    total.linear(L * L, Z, H, bias=False)
    total.add(_attention(rows, L, L, (M, M), head, H))
    total.norm(rows * L, M)
    if extra:
        total.linear(L, M, head * H, bias=False)
        for _ in range(2):
            total.linear(rows * L, M, head, bias=False)
        total.product(L, H, head, rows)
        total.product(L, H, rows, head)
        total.linear(rows * L, M, head * H)
        total.linear(rows * L, head * H, M)
    else:
        total.add(_attention(L, rows, rows, (M, M), head, H))
    total.add(_transition(rows * L, M, config.transition_factor))
    total.norm(rows * L, M)
    for _ in range(2):
        total.linear(rows * L, M, C)
    total.product(1, L * C, rows, L * C)
    total.product(1, L, rows, L)
    total.linear(L * L, C * C, Z)
    total.add(_pair_block(L, Z, Z, config.pair_head_channels, config.pair_heads, config.transition_factor))
    return total


def _templates(config: OpenFoldConfig, L: int) -> LayerCounts:
    C, T, M = config.template_channels, config.max_templates, config.msa_channels
    total = LayerCounts()
    total.linear(T * L, TEMPLATE_ANGLE_FEATURES, M)
    total.linear(T * L, M, M)
    per_template = LayerCounts()
    per_template.add(_template_block(config, L), config.template_blocks)
    per_template.linear(L * L, TEMPLATE_PAIR_FEATURES, C)
    per_template.norm(L * L, C)
    total.add(per_template, T, shared=True)
    channels = (config.pair_channels, C)
    total.add(_attention(L * L, 1, T, channels, config.template_head_channels, config.pair_heads, gated=False))
    return total


def _template_block(config: OpenFoldConfig, L: int) -> LayerCounts:
    C = config.template_channels
    return _pair_block(L, C, C, config.template_head_channels, config.pair_heads, config.template_transition_factor)


def _structure(config: OpenFoldConfig, L: int) -> LayerCounts:
    S, Z, H, C = config.single_channels, config.pair_channels, config.ipa_heads, config.ipa_channels
    Q, V, A = config.ipa_query_points, config.ipa_value_points, config.angle_channels
    once = LayerCounts()
    once.linear(L, S, H * C)
    once.linear(L, S, 2 * H * C)
    once.linear(L, S, 3 * H * Q)
    once.linear(L, S, 3 * H * (Q + V))
    once.linear(L * L, Z, H)
    once.parameters += H
    once.product(H, L, C, L)
    once.product(H, L, L, C + 3 * V)
    once.product(L, H, L, Z)
    once.multiply_adds += L * 9 * H * (2 * Q + 2 * V)  # points into the frames and back
    once.linear(L, H * (Z + C + 4 * V), S)
    for _ in range(2):
        once.norm(L, S)
    for _ in range(3):
        once.linear(L, S, S)
    once.linear(L, S, 6)
    for inputs, outputs in ((S, A), (S, A), (A, A), (A, A), (A, A), (A, A), (A, 14)):
        once.linear(L, inputs, outputs)
    total = LayerCounts()
    total.norm(L, S)
    total.norm(L * L, Z)
    total.linear(L, S, S)
    total.add(once, config.structure_iterations, shared=True)
    return total
