"""Kernels of the forward pass: gathered tokens to hidden rows, hidden rows to rows, rows to tokens. Imports Triton.

Rows are sorted by expert. A tile is up to BLOCK_M rows of one expert. `locate_tiles` lists all tiles on the device, so
that the host needs no counts. The grid is the largest number of tiles that the rows could need. Sums are in float32 and
in one order, without atomics. So a second run gives the same bits. N rows, T tokens, K rows of a token, E experts, D
model width, H hidden width. Weights are (E, H, D).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["E", "P"])
def locate_tiles(
    rows_E: tl.tensor, tiles_P3: tl.tensor, E: tl.tensor, P: tl.tensor,
    M: tl.constexpr, E2: tl.constexpr, P2: tl.constexpr,
) -> None:  # fmt: skip
    """Write expert, first row and last row + 1 of each of P tiles of M rows. Expert -1: there is no such tile."""
    experts = tl.arange(0, E2)
    counts = tl.load(rows_E + experts, mask=experts < E, other=0).to(tl.int32)
    ends = tl.cumsum(counts, 0)
    tile_ends = tl.cumsum((counts + M - 1) // M, 0)
    tile = tl.program_id(0) * P2 + tl.arange(0, P2)
    # the expert of a tile: the number of experts that end before it
    before = (tile[:, None] >= tile_ends[None, :]) & (experts < E)[None, :]
    expert = tl.sum(before.to(tl.int32), 1)
    mine = expert[:, None] == experts[None, :]
    end = tl.sum(tl.where(mine, ends[None, :], 0), 1)
    count = tl.sum(tl.where(mine, counts[None, :], 0), 1)
    last_tile = tl.sum(tl.where(mine, tile_ends[None, :], 0), 1)
    tiles = (count + M - 1) // M
    first = end - count + (tile - last_tile + tiles) * M
    live = tile < P
    tl.store(tiles_P3 + tile * 3, tl.where(expert < E, expert, -1), mask=live)
    tl.store(tiles_P3 + tile * 3 + 1, first, mask=live)
    tl.store(tiles_P3 + tile * 3 + 2, tl.minimum(first + M, end), mask=live)


@triton.jit
def place_of(program: tl.tensor, tiles: tl.tensor, columns: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Compute tile and column of a program. GROUP tiles go through all columns together, to share them in the cache."""
    in_group = GROUP * columns
    first = program // in_group * GROUP
    size = tl.minimum(tiles - first, GROUP)
    within = program % in_group
    return first + within % size, within // size


@triton.jit
def activated(up: tl.tensor, gate: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Compute the activation in float32; swiglu is silu(gate) * up."""
    if ACTIVATION == "relu":
        return tl.maximum(up, 0.0)
    elif ACTIVATION == "gelu":
        return 0.5 * up * (1.0 + tl.math.erf(up * 0.7071067811865476))
    elif ACTIVATION == "silu":
        return up / (1.0 + tl.exp(-up))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def halves(block: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Return the left and right half of a block's columns."""
    return tl.split(tl.permute(tl.reshape(block, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def activate(
    up: tl.tensor, gate: tl.tensor, m: tl.tensor, at: tl.tensor, inside: tl.tensor, H: tl.tensor,
    bias_H: tl.tensor, up_MH: tl.tensor, gate_MH: tl.tensor, hidden_MH: tl.tensor,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Add the bias, activate and write, some columns at a time. All at once do not fit in the registers."""
    if COLUMNS > 64:
        up_left, up_right = halves(up, ROWS, COLUMNS)
        gate_left, gate_right = halves(gate, ROWS, COLUMNS)
        activate(
            up_left, gate_left, m, at, inside, H, bias_H, up_MH, gate_MH, hidden_MH,
            ACTIVATION, BIAS, KEEP, ROWS, COLUMNS // 2,
        )  # fmt: skip
        activate(
            up_right, gate_right, m, at + COLUMNS // 2, inside, H, bias_H, up_MH, gate_MH, hidden_MH,
            ACTIVATION, BIAS, KEEP, ROWS, COLUMNS // 2,
        )  # fmt: skip
    else:
        h = at + tl.arange(0, COLUMNS)
        if BIAS:
            up += tl.load(bias_H + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        out = m[:, None] * H + h[None, :]  # 64 bits only where they are needed: fewer registers
        live = inside[:, None] & (h < H)[None, :]
        kind = hidden_MH.dtype.element_ty
        if KEEP and ACTIVATION != "relu":  # the gradient of relu needs only what it returned
            tl.store(up_MH + out, up.to(kind), mask=live)
            if ACTIVATION == "swiglu":
                tl.store(gate_MH + out, gate.to(kind), mask=live)
        tl.store(hidden_MH + out, activated(up, gate, ACTIVATION).to(kind), mask=live)


@triton.jit
def weight_block(
    weight_EHD: tl.tensor, expert: tl.tensor, h: tl.tensor, d: tl.tensor, H: tl.tensor, D: tl.tensor,
    DESCRIBED: tl.constexpr, TURNED: tl.constexpr, EVEN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the block of an expert's (H, D) that begins at (h, d), with zeros beyond its ends. TURNED: (D, H) in memory.

    DESCRIBED: the weight is a descriptor of (1, BLOCK_H, BLOCK_D) blocks, loaded by a GPU's copy engine (Hopper on).
    EVEN: blocks end where the weight ends.
    """
    if DESCRIBED and TURNED:
        block = tl.reshape(weight_EHD.load([expert, d, h]), (BLOCK_D, BLOCK_H)).T
    elif DESCRIBED:
        block = tl.reshape(weight_EHD.load([expert, h, d]), (BLOCK_H, BLOCK_D))
    elif TURNED:
        hs, ds = h + tl.arange(0, BLOCK_H), d + tl.arange(0, BLOCK_D)
        at = weight_EHD + expert.to(tl.int64) * H * D + (ds[:, None] * H + hs[None, :])
        if EVEN:
            block = tl.load(at).T
        else:
            block = tl.load(at, mask=(ds < D)[:, None] & (hs < H)[None, :], other=0.0).T
    else:
        hs, ds = h + tl.arange(0, BLOCK_H), d + tl.arange(0, BLOCK_D)
        at = weight_EHD + expert.to(tl.int64) * H * D + (hs[:, None] * D + ds[None, :])
        if EVEN:
            block = tl.load(at)
        else:
            block = tl.load(at, mask=(hs < H)[:, None] & (ds < D)[None, :], other=0.0)
    return block


@triton.jit(do_not_specialize=["P"])
def hidden_rows(
    x_TD: tl.tensor, tokens_N: tl.tensor, up_EHD: tl.tensor, gate_EHD: tl.tensor, bias_EH: tl.tensor,
    up_NH: tl.tensor, gate_NH: tl.tensor, hidden_NH: tl.tensor, tiles_P3: tl.tensor,
    P: tl.tensor, D: tl.tensor, H: tl.tensor,
    ACTIVATION: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Gather the rows' tokens, multiply by up (and gate), add the bias, activate. KEEP writes the activation inputs."""
    tile, column = place_of(tl.program_id(0), P, tl.cdiv(H, BLOCK_N), GROUP)
    expert = tl.load(tiles_P3 + tile * 3)
    if expert < 0:
        return
    first, end = tl.load(tiles_P3 + tile * 3 + 1), tl.load(tiles_P3 + tile * 3 + 2)
    m = tl.arange(0, BLOCK_M)
    source = tl.minimum(first + m, end - 1).to(tl.int64)  # beyond the tile its last row is read, and nothing written
    if GATHER:
        source = tl.load(tokens_N + source)
    d = tl.arange(0, BLOCK_K)
    x = x_TD + source[:, None] * D + d[None, :]
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, D, BLOCK_K):
        if EVEN:
            a = tl.load(x)
        else:
            a = tl.load(x, mask=d[None, :] < D - at, other=0.0)
        b = weight_block(up_EHD, expert, column * BLOCK_N, at, H, D, DESCRIBED, TURNED, EVEN, BLOCK_N, BLOCK_K)
        up = tl.dot(a, b.T, up, input_precision=PRECISION)
        if ACTIVATION == "swiglu":
            c = weight_block(gate_EHD, expert, column * BLOCK_N, at, H, D, DESCRIBED, TURNED, EVEN, BLOCK_N, BLOCK_K)
            gate = tl.dot(a, c.T, gate, input_precision=PRECISION)
        x += BLOCK_K
    begin, base, inside = column * BLOCK_N, first.to(tl.int64) * H, first + m < end
    up_at, gate_at, hidden_at, bias_at = up_NH + base, gate_NH + base, hidden_NH + base, bias_EH + expert * H
    activate(
        up, gate, m, begin, inside, H, bias_at, up_at, gate_at, hidden_at, ACTIVATION, BIAS, KEEP, BLOCK_M, BLOCK_N
    )


@triton.jit
def times_weight(
    rows_NH: tl.tensor, weight_EHD: tl.tensor, sums: tl.tensor, row: tl.tensor, column: tl.tensor, first: tl.tensor,
    expert: tl.tensor, D: tl.tensor, H: tl.tensor, PRECISION: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add rows ``first + row`` of (N, H) times a column of blocks of one expert's (H, D) to ``sums``."""
    h = tl.arange(0, BLOCK_K)
    for at in range(0, H, BLOCK_K):
        if DESCRIBED:  # rows beyond the tile are those of the next, and nothing is written of them
            a = rows_NH.load([first, at])
        else:
            rows = rows_NH + first.to(tl.int64) * H + (row[:, None] * H + (at + h)[None, :])
            if EVEN:
                a = tl.load(rows)
            else:
                a = tl.load(rows, mask=h[None, :] < H - at, other=0.0)
        b = weight_block(weight_EHD, expert, at, column * BLOCK_N, H, D, DESCRIBED, False, EVEN, BLOCK_K, BLOCK_N)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["P"])
def wide_rows(
    one_NH: tl.tensor, two_NH: tl.tensor, one_EHD: tl.tensor, two_EHD: tl.tensor, bias_ED: tl.tensor, out_ND: tl.tensor,
    tiles_P3: tl.tensor, P: tl.tensor, D: tl.tensor, H: tl.tensor,
    TWO: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply hidden rows by (E, H, D) weights: down forward, up and gate backward. TWO adds a second product."""
    tile, column = place_of(tl.program_id(0), P, tl.cdiv(D, BLOCK_N), GROUP)
    expert = tl.load(tiles_P3 + tile * 3)
    if expert < 0:
        return
    first, end = tl.load(tiles_P3 + tile * 3 + 1), tl.load(tiles_P3 + tile * 3 + 2)
    m = tl.arange(0, BLOCK_M)
    row = tl.minimum(m, end - 1 - first)
    d = column * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sums = times_weight(
        one_NH, one_EHD, sums, row, column, first, expert, D, H, PRECISION, EVEN, DESCRIBED, BLOCK_N, BLOCK_K
    )
    if TWO:
        sums = times_weight(
            two_NH, two_EHD, sums, row, column, first, expert, D, H, PRECISION, EVEN, DESCRIBED, BLOCK_N, BLOCK_K
        )
    if BIAS:
        sums += tl.load(bias_ED + expert * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    out = out_ND + first.to(tl.int64) * D + (m[:, None] * D + d[None, :])
    tl.store(out, sums.to(out_ND.dtype.element_ty), mask=(first + m < end)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["T"])
def add_rows(
    rows_ND: tl.tensor, places_R: tl.tensor, weights_R: tl.tensor, out_TD: tl.tensor, T: tl.tensor, D: tl.tensor,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Add the K rows of each token in order of choice, in float32, each times its weight if WEIGHTED."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = (t < T)[:, None] & (d < D)[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in tl.static_range(K):
        choice = t.to(tl.int64) * K + k
        place = tl.load(places_R + choice, mask=t < T, other=0).to(tl.int64)
        row = tl.load(rows_ND + place[:, None] * D + d[None, :], mask=live, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_R + choice, mask=t < T, other=0.0).to(tl.float32)[:, None]
        sums += row
    out = out_TD + t.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out, sums.to(out_TD.dtype.element_ty), mask=live)
