"""Kernels of the backward pass: gradients of hidden rows, routing weights, experts' weights and biases. Imports Triton.

The gradient of a routing weight is the product of a hidden row with its gradient, so the rows that the down product gave
need not be kept (SonicMoE, arXiv:2512.14080). Legend and tiles: `products`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workloads.moe.kernels.products import activated, halves, place_of, weight_block


@triton.jit
def activation_gradients(d_hidden: tl.tensor, up: tl.tensor, gate: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Compute the gradients of up and gate (the same twice without a gate). relu: ``up`` may be what it returned."""
    if ACTIVATION == "relu":
        d_up = tl.where(up > 0, d_hidden, 0.0)
        return d_up, d_up
    elif ACTIVATION == "gelu":
        slope = 0.5 * (1.0 + tl.math.erf(up * 0.7071067811865476))
        d_up = d_hidden * (slope + up * 0.3989422804014327 * tl.exp(-0.5 * up * up))
        return d_up, d_up
    elif ACTIVATION == "silu":
        share = 1.0 / (1.0 + tl.exp(-up))
        d_up = d_hidden * share * (1.0 + up * (1.0 - share))
        return d_up, d_up
    else:
        share = 1.0 / (1.0 + tl.exp(-gate))
        return d_hidden * share * gate, d_hidden * up * share * (1.0 + gate * (1.0 - share))


@triton.jit
def finish(
    d_hidden: tl.tensor, part: tl.tensor, weight: tl.tensor, m: tl.tensor, at: tl.tensor, inside: tl.tensor, H: tl.tensor,
    up_MH: tl.tensor, gate_MH: tl.tensor, hidden_MH: tl.tensor, d_up_MH: tl.tensor, d_gate_MH: tl.tensor,
    ACTIVATION: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Go back through the activation; return ``part`` with these columns' part of the routing weight's gradient.

    A few columns after the other: all at once do not fit in the registers.
    """
    if COLUMNS > 32:
        left, right = halves(d_hidden, ROWS, COLUMNS)
        part = finish(
            left, part, weight, m, at, inside, H, up_MH, gate_MH, hidden_MH, d_up_MH, d_gate_MH,
            ACTIVATION, GATHER, ROWS, COLUMNS // 2,
        )  # fmt: skip
        part = finish(
            right, part, weight, m, at + COLUMNS // 2, inside, H, up_MH, gate_MH, hidden_MH, d_up_MH, d_gate_MH,
            ACTIVATION, GATHER, ROWS, COLUMNS // 2,
        )  # fmt: skip
    else:
        h = at + tl.arange(0, COLUMNS)
        out = m[:, None] * H + h[None, :]
        live = inside[:, None] & (h < H)[None, :]
        kind = d_up_MH.dtype.element_ty
        up = tl.load(up_MH + out, mask=live, other=0.0).to(tl.float32)
        gate = up
        if ACTIVATION == "swiglu":
            gate = tl.load(gate_MH + out, mask=live, other=0.0).to(tl.float32)
        hidden = activated(up, gate, ACTIVATION)
        if GATHER:
            part += tl.sum(hidden * d_hidden, 1)
            d_hidden *= weight[:, None]
            hidden *= weight[:, None]
        if GATHER or ACTIVATION != "relu":
            tl.store(hidden_MH + out, hidden.to(kind), mask=live)
        d_up, d_gate = activation_gradients(d_hidden, up, gate, ACTIVATION)
        tl.store(d_up_MH + out, d_up.to(kind), mask=live)
        if ACTIVATION == "swiglu":
            tl.store(d_gate_MH + out, d_gate.to(kind), mask=live)
    return part


@triton.jit(do_not_specialize=["P"])
def hidden_gradient(
    d_out_TD: tl.tensor, tokens_N: tl.tensor, choices_N: tl.tensor, weights_R: tl.tensor, down_EHD: tl.tensor,
    bias_ED: tl.tensor, up_NH: tl.tensor, gate_NH: tl.tensor, hidden_NH: tl.tensor, d_up_NH: tl.tensor,
    d_gate_NH: tl.tensor, parts_RC: tl.tensor, tiles_P3: tl.tensor, P: tl.tensor, D: tl.tensor, H: tl.tensor,
    ACTIVATION: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Gather the gradients of the rows' tokens, multiply by down transposed, and go back through the activation.

    Writes the gradients of up and gate; the hidden rows times their routing weight, which the gradient of down needs; and for
    each column of tiles its part of the gradient of the routing weight. GATHER False: rows of their own, without weights.
    """
    tile, column = place_of(tl.program_id(0), P, tl.cdiv(H, BLOCK_N), GROUP)
    expert = tl.load(tiles_P3 + tile * 3)
    if expert < 0:
        return
    first, end = tl.load(tiles_P3 + tile * 3 + 1), tl.load(tiles_P3 + tile * 3 + 2)
    m = tl.arange(0, BLOCK_M)
    row = tl.minimum(first + m, end - 1).to(tl.int64)
    source = row
    if GATHER:
        source = tl.load(tokens_N + row)
    d = tl.arange(0, BLOCK_K)
    d_out = d_out_TD + source[:, None] * D + d[None, :]
    d_hidden = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    from_bias = tl.zeros((BLOCK_M,), tl.float32)
    for at in range(0, D, BLOCK_K):
        if EVEN:
            a = tl.load(d_out)
        else:
            a = tl.load(d_out, mask=d[None, :] < D - at, other=0.0)
        b = weight_block(down_EHD, expert, column * BLOCK_N, at, H, D, DESCRIBED, EVEN, BLOCK_N, BLOCK_K)
        d_hidden = tl.dot(a, b.T, d_hidden, input_precision=PRECISION)
        if BIAS and GATHER:
            bias = tl.load(bias_ED + expert * D + at + d, mask=d < D - at, other=0.0).to(tl.float32)
            from_bias += tl.sum(a.to(tl.float32) * bias[None, :], 1)
        d_out += BLOCK_K
    part = from_bias * tl.where(column == 0, 1.0, 0.0)
    choice, weight = row, from_bias
    if GATHER:
        choice = tl.load(choices_N + row)
        weight = tl.load(weights_R + choice).to(tl.float32)
    begin, base, inside = column * BLOCK_N, first.to(tl.int64) * H, first + m < end
    up_at, gate_at, hidden_at = up_NH + base, gate_NH + base, hidden_NH + base
    d_up_at, d_gate_at = d_up_NH + base, d_gate_NH + base
    part = finish(
        d_hidden, part, weight, m, begin, inside, H, up_at, gate_at, hidden_at, d_up_at, d_gate_at,
        ACTIVATION, GATHER, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if GATHER:
        tl.store(parts_RC + choice * tl.cdiv(H, BLOCK_N) + column, part, mask=inside)


@triton.jit
def weight_gradient(
    one_NH: tl.tensor, two_NH: tl.tensor, wide_TD: tl.tensor, tokens_N: tl.tensor, ends_E: tl.tensor,
    d_one_EHD: tl.tensor, d_two_EHD: tl.tensor, D: tl.tensor, H: tl.tensor,
    TWO: tl.constexpr, GATHER: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Sum over each expert's rows: (hidden row) x (its token's wide row), BLOCK_M of H by BLOCK_N of D; zeros without rows.

    TWO does it for a second set of hidden rows with the same wide rows. ``ends_E``: the last row + 1 of each expert.
    """
    columns, bands = tl.cdiv(D, BLOCK_N), tl.cdiv(H, BLOCK_M)
    program = tl.program_id(0)
    expert = program // (columns * bands)
    band, column = place_of(program % (columns * bands), bands, columns, GROUP)
    first = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
    rows = tl.load(ends_E + expert) - first
    h = band * BLOCK_M + tl.arange(0, BLOCK_M)
    d = column * BLOCK_N + tl.arange(0, BLOCK_N)
    here_h, here_d = h < H, d < D
    n = tl.arange(0, BLOCK_K)
    hidden = first.to(tl.int64) * H + (n[None, :] * H + h[:, None])
    one_at, two_at, source_at = one_NH + hidden, two_NH + hidden, tokens_N + first + n
    one = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    two = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, rows, BLOCK_K):
        live = n < rows - at
        if GATHER:
            source = tl.load(source_at, mask=live, other=0)
        else:
            source = (first + at + n).to(tl.int64)
        wide = tl.load(wide_TD + source[:, None] * D + d[None, :], mask=live[:, None] & here_d[None, :], other=0.0)
        a = tl.load(one_at, mask=live[None, :] & here_h[:, None], other=0.0)
        one = tl.dot(a, wide, one, input_precision=PRECISION)
        if TWO:
            b = tl.load(two_at, mask=live[None, :] & here_h[:, None], other=0.0)
            two = tl.dot(b, wide, two, input_precision=PRECISION)
        one_at += BLOCK_K * H
        two_at += BLOCK_K * H
        source_at += BLOCK_K
    kind = d_one_EHD.dtype.element_ty
    base, out = expert.to(tl.int64) * H * D, h[:, None] * D + d[None, :]
    tl.store(d_one_EHD + base + out, one.to(kind), mask=here_h[:, None] & here_d[None, :])
    if TWO:
        tl.store(d_two_EHD + base + out, two.to(kind), mask=here_h[:, None] & here_d[None, :])


@triton.jit
def bias_gradient(
    rows_TX: tl.tensor, tokens_N: tl.tensor, choices_N: tl.tensor, weights_R: tl.tensor, ends_E: tl.tensor,
    d_bias_EX: tl.tensor, X: tl.tensor, GATHER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr,
) -> None:  # fmt: skip
    """Sum over each expert's rows; GATHER: the rows of their tokens, each times its routing weight."""
    expert = tl.program_id(0)
    first = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_E + expert)
    x = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    sums = tl.zeros((BLOCK_X,), tl.float32)
    for at in range(first, end, BLOCK_N):
        row = (at + tl.arange(0, BLOCK_N)).to(tl.int64)
        live = row < end
        source, weight = row, tl.where(live, 1.0, 0.0)
        if GATHER:
            source = tl.load(tokens_N + row, mask=live, other=0)
            weight = tl.load(weights_R + tl.load(choices_N + row, mask=live, other=0), mask=live, other=0.0).to(
                tl.float32
            )
        part = tl.load(rows_TX + source[:, None] * X + x[None, :], mask=live[:, None] & (x < X)[None, :], other=0.0)
        sums += tl.sum(part.to(tl.float32) * weight[:, None], 0)
    tl.store(d_bias_EX + expert * X + x, sums.to(d_bias_EX.dtype.element_ty), mask=x < X)
