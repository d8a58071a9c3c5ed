"""Kernels of the backward pass: gradients of hidden rows, routing weights, experts' weights and biases. Imports Triton.

The gradient of a routing weight is the product of a hidden row with its gradient. So the rows from the down product
need not be kept (SonicMoE, arXiv:2512.14080). Legend and tiles: `products`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlhpc.workloads.moe.kernels.products import activated, halves, place_of, weight_block


@triton.jit
def activation_gradients(d_hidden: tl.tensor, up: tl.tensor, gate: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Compute the gradients of up and gate (the same twice without a gate). relu: ``up`` may be what it returned."""
    if ACTIVATION == "relu":
        d_up = tl.where(up > 0, d_hidden, 0.0)
        return d_up, d_up
    elif ACTIVATION == "gelu":
        # 1 / sqrt(2), and 1 / sqrt(2 pi) of the normal density
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
    d_hidden: tl.tensor, part: tl.tensor, weight: tl.tensor, m: tl.tensor, at: tl.tensor, inside: tl.tensor,
    H: tl.tensor,
    up_MH: tl.tensor, gate_MH: tl.tensor, hidden_MH: tl.tensor, d_up_MH: tl.tensor, d_gate_MH: tl.tensor,
    ACTIVATION: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Go back through the activation; return ``part`` with these columns' part of the routing weight's gradient.

    A few columns after the other: all at once do not fit in the registers.
    """
    if COLUMNS > 16:
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


@triton.jit(do_not_specialize=["P", "C"])
def hidden_gradient(
    d_out_TD: tl.tensor, tokens_N: tl.tensor, choices_N: tl.tensor, weights_R: tl.tensor, down_EHD: tl.tensor,
    up_NH: tl.tensor, gate_NH: tl.tensor, hidden_NH: tl.tensor, d_up_NH: tl.tensor, d_gate_NH: tl.tensor,
    parts_RC: tl.tensor, C: tl.tensor, tiles_P3: tl.tensor, P: tl.tensor, D: tl.tensor, H: tl.tensor,
    ACTIVATION: tl.constexpr, GATHER: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Gather the gradients of the rows' tokens, multiply by down transposed, and go back through the activation.

    Write the gradients of up and gate. Write also the hidden rows times their routing weight: the gradient of down
    needs them. For each column of tiles, write its part of the routing weight's gradient. There are C parts;
    `bias_share` may write the last. GATHER False: the rows are no tokens and have no weights.
    """
    tile, column = place_of(tl.program_id(0), P, tl.cdiv(H, BLOCK_N), GROUP)
    expert = tl.load(tiles_P3 + tile * 3)
    if expert < 0:
        return
    first, end = tl.load(tiles_P3 + tile * 3 + 1), tl.load(tiles_P3 + tile * 3 + 2)
    m = tl.arange(0, BLOCK_M)
    # beyond the tile its last row is read again, and nothing is written
    row = tl.minimum(first + m, end - 1).to(tl.int64)
    source = row
    if GATHER:
        source = tl.load(tokens_N + row)
    d = tl.arange(0, BLOCK_K)
    d_out = d_out_TD + source[:, None] * D + d[None, :]
    d_hidden = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, D, BLOCK_K):
        if EVEN:
            a = tl.load(d_out)
        else:
            a = tl.load(d_out, mask=d[None, :] < D - at, other=0.0)
        b = weight_block(down_EHD, expert, column * BLOCK_N, at, H, D, DESCRIBED, TURNED, EVEN, BLOCK_N, BLOCK_K)
        d_hidden = tl.dot(a, b.T, d_hidden, input_precision=PRECISION)
        d_out += BLOCK_K
    part = tl.zeros((BLOCK_M,), tl.float32)
    choice, weight = row, part
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
        tl.store(parts_RC + choice * C + column, part, mask=inside)


@triton.jit
def hidden_block(
    rows_NH: tl.tensor, first: tl.tensor, h: tl.tensor, live: tl.tensor, H: tl.tensor,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load BLOCK_K rows of (N, H) from ``first`` on, BLOCK_M columns from ``h`` on, turned.

    Zeros stand beyond H and, unless WHOLE, in rows that are not ``live``. DESCRIBED as in `weight_block`.
    """
    if DESCRIBED:
        block = rows_NH.load([first, h])
        if not WHOLE:
            block = tl.where(live[:, None], block, 0.0)
    else:
        n, hs = tl.arange(0, BLOCK_K), h + tl.arange(0, BLOCK_M)
        at = rows_NH + (first + n).to(tl.int64)[:, None] * H + hs[None, :]
        if not WHOLE:
            block = tl.load(at, mask=live[:, None] & (hs < H)[None, :], other=0.0)
        elif EVEN:
            block = tl.load(at)
        else:
            block = tl.load(at, mask=(hs < H)[None, :], other=0.0)
    return block.T


@triton.jit
def wide_block(
    wide_TD: tl.tensor, tokens_N: tl.tensor, first: tl.tensor, d: tl.tensor, live: tl.tensor, D: tl.tensor,
    GATHER: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the tokens of BLOCK_K rows from ``first`` on, BLOCK_N columns from ``d`` on; zeros as in `hidden_block`."""
    n, ds = first + tl.arange(0, BLOCK_K), d + tl.arange(0, BLOCK_N)
    source = n.to(tl.int64)
    if GATHER and WHOLE:
        source = tl.load(tokens_N + n)
    elif GATHER:
        source = tl.load(tokens_N + n, mask=live, other=0)
    at = wide_TD + source[:, None] * D + ds[None, :]
    if not WHOLE:
        block = tl.load(at, mask=live[:, None] & (ds < D)[None, :], other=0.0)
    elif EVEN:
        block = tl.load(at)
    else:
        block = tl.load(at, mask=(ds < D)[None, :], other=0.0)
    return block


@triton.jit
def weight_gradient(
    one_NH: tl.tensor, two_NH: tl.tensor, wide_TD: tl.tensor, tokens_N: tl.tensor, ends_E: tl.tensor,
    d_one_EHD: tl.tensor, d_two_EHD: tl.tensor, D: tl.tensor, H: tl.tensor,
    TWO: tl.constexpr, GATHER: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Sum over each expert's rows: (hidden row) x (its token's wide row), BLOCK_M of H by BLOCK_N of D.

    TWO does it for a second set of hidden rows with the same wide rows. ``ends_E``: the last row + 1 of each expert.
    """
    columns, bands = tl.cdiv(D, BLOCK_N), tl.cdiv(H, BLOCK_M)
    program = tl.program_id(0)
    expert = program // (columns * bands)
    band, column = place_of(program % (columns * bands), bands, columns, GROUP)
    first = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_E + expert)
    # whole steps need no mask over rows; what is left is one masked step
    last = first + (end - first) // BLOCK_K * BLOCK_K
    h, d = band * BLOCK_M, column * BLOCK_N
    live = last + tl.arange(0, BLOCK_K) < end
    one = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    two = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(first, last, BLOCK_K):
        wide = wide_block(wide_TD, tokens_N, at, d, live, D, GATHER, EVEN, True, BLOCK_N, BLOCK_K)
        a = hidden_block(one_NH, at, h, live, H, EVEN, DESCRIBED, True, BLOCK_M, BLOCK_K)
        one = tl.dot(a, wide, one, input_precision=PRECISION)
        if TWO:
            b = hidden_block(two_NH, at, h, live, H, EVEN, DESCRIBED, True, BLOCK_M, BLOCK_K)
            two = tl.dot(b, wide, two, input_precision=PRECISION)
    if last < end:
        wide = wide_block(wide_TD, tokens_N, last, d, live, D, GATHER, EVEN, False, BLOCK_N, BLOCK_K)
        a = hidden_block(one_NH, last, h, live, H, EVEN, DESCRIBED, False, BLOCK_M, BLOCK_K)
        one = tl.dot(a, wide, one, input_precision=PRECISION)
        if TWO:
            b = hidden_block(two_NH, last, h, live, H, EVEN, DESCRIBED, False, BLOCK_M, BLOCK_K)
            two = tl.dot(b, wide, two, input_precision=PRECISION)
    kind = d_one_EHD.dtype.element_ty
    hs, ds = h + tl.arange(0, BLOCK_M), d + tl.arange(0, BLOCK_N)
    base, out = expert.to(tl.int64) * H * D, hs[:, None] * D + ds[None, :]
    inside = (hs < H)[:, None] & (ds < D)[None, :]
    tl.store(d_one_EHD + base + out, one.to(kind), mask=inside)
    if TWO:
        tl.store(d_two_EHD + base + out, two.to(kind), mask=inside)


@triton.jit(do_not_specialize=["C"])
def bias_share(
    d_out_TD: tl.tensor, tokens_N: tl.tensor, choices_N: tl.tensor, bias_ED: tl.tensor, parts_RC: tl.tensor,
    tiles_P3: tl.tensor, D: tl.tensor, C: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Write the last part of the gradient of each routing weight.

    It is the token's gradient times the bias of its expert.
    """
    tile = tl.program_id(0)
    expert = tl.load(tiles_P3 + tile * 3)
    if expert < 0:
        return
    first, end = tl.load(tiles_P3 + tile * 3 + 1), tl.load(tiles_P3 + tile * 3 + 2)
    row = first + tl.arange(0, BLOCK_M)
    source = tl.load(tokens_N + row, mask=row < end, other=0)
    d = tl.arange(0, BLOCK_D)
    share = tl.zeros((BLOCK_M,), tl.float32)
    for at in range(0, D, BLOCK_D):
        live = (row < end)[:, None] & (at + d < D)[None, :]
        d_out = tl.load(d_out_TD + source[:, None] * D + (at + d)[None, :], mask=live, other=0.0).to(tl.float32)
        share += tl.sum(
            d_out * tl.load(bias_ED + expert * D + at + d, mask=at + d < D, other=0.0).to(tl.float32)[None, :], 1
        )
    choice = tl.load(choices_N + row, mask=row < end, other=0)
    tl.store(parts_RC + choice * C + C - 1, share, mask=row < end)


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
