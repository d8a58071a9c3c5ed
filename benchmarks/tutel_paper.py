"""Compares numbers of Tutel's paper (arXiv:2206.03382) with the cost model. docs/moe.md states the errors.

python benchmarks/tutel_paper.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mlhpc.suite.performance.cost_model import (
    ALGORITHMS,
    AZURE_NDV4,
    LayerShape,
    Network,
    choose_r,
    compute_einsum_flops,
    predict_all_to_all,
    predict_pipelined_s,
)

MIB = 2**20  # bytes
# FIT: a parameter of AZURE_NDV4 was chosen from the number. PRED: none was. MISMATCH: the model contradicts the paper.
# OPEN: the paper does not say enough to compute the number.
Kind = Literal["FIT", "PRED", "MISMATCH", "OPEN"]


@dataclass(frozen=True)
class PaperRow:
    """One number of the paper and of the model; either may be unknown. ``remark`` gives the reason for ``kind``."""

    claim: str
    paper: float | None
    model: float | None
    kind: Kind
    remark: str = ""

    @property
    def error(self) -> float | None:
        """Model over paper, minus 1."""
        return None if self.model is None or self.paper is None else self.model / self.paper - 1


TABLE_2 = LayerShape(65536, 4096, 4096, 16, 2, element_bytes=4)  # float32 and top-2 inferred
TABLE_2_MS: tuple[tuple[int, float, Kind], ...] = ((16, 189.1, "PRED"), (64, 323.8, "FIT"), (256, 491.3, "FIT"))
FIGURE_14 = LayerShape(16384, 2048, 2048, 32, 2)  # 16,384 tokens per step, D = H = 2048, top-2
FIGURE_12_BASE = LayerShape(4096, 2048, 2048, 16, 1)
FIGURE_12_LARGE = LayerShape(1024, 2048, 32768, 16, 1)
PAPER_FFN_FLOPS, PAPER_EINSUM_FLOPS = 140e12, 220e12  # assumed, of 312 TFLOP/s
PAPER_QUICK_2DH_S = 9.5e-6  # per message, with the low-latency protocol that 2DH may choose


def paper_rows() -> list[PaperRow]:
    """List every number of the paper that the model was compared with, reproduced or not."""
    quick = replace(AZURE_NDV4, two_level_latency_s=PAPER_QUICK_2DH_S)
    layer_bytes = FIGURE_14.dispatch_bytes
    near = predict_all_to_all(AZURE_NDV4, 16, layer_bytes, "linear")
    once = FIGURE_14.forward_flops / PAPER_FFN_FLOPS
    masks = compute_einsum_flops(FIGURE_14.tokens, FIGURE_14.width, FIGURE_14.top_k) / PAPER_EINSUM_FLOPS
    # A step of the layer: three times the forward FLOPs, and dispatch and combine in both passes
    sparse = 3 * once + 4 * near.total_s
    slowest = 3 * once + 4 * predict_all_to_all(AZURE_NDV4, 2048, layer_bytes, "linear").total_s
    two_level = 3 * once + 4 * predict_all_to_all(AZURE_NDV4, 2048, layer_bytes, "2dh").total_s
    gains = {
        degree: predict_pipelined_s(once, near, 1) / predict_pipelined_s(once, near, degree) for degree in (2, 8, 16)
    }
    rows = []
    for ranks, paper, kind in TABLE_2_MS:
        model = 4e3 * predict_all_to_all(AZURE_NDV4, ranks, TABLE_2.dispatch_bytes, "linear").total_s
        rows.append(PaperRow(f"Table 2, all-to-all of a step on {ranks} GPUs [ms]", paper, model, kind))
    rows += [
        PaperRow("2DH against linear, 2,048 GPUs, 1 MiB assumed [x]", 20.7, _gain_of_2dh(quick, 2048, MIB), "FIT",
                 remark="cost per message 9.5 µs, its other protocol"),
        PaperRow("the same with one cost per message [x]", 20.7, _gain_of_2dh(AZURE_NDV4, 2048, MIB), "MISMATCH",
                 remark="bounded by about m = 8: 20.7x needs the other protocol"),
        PaperRow("2DH on the layer, 2,048 GPUs [x]", 4.25, slowest / two_level, "FIT"),
        PaperRow("sparse encode and decode on the layer, 16 GPUs [x]", 3.52, (sparse + masks) / sparse, "PRED"),
        PaperRow("pipelining on the layer, 16 GPUs [x]", 1.43, gains[2], "PRED"),
        PaperRow("degree 16 against 8 on that layer [x]", None, gains[16] / gains[8], "PRED",
                 remark="paper: degrees above 8 do not pay"),
    ]  # fmt: skip
    for ranks, remark in ((16, "paper: loses"), (64, "paper: loses at 128"), (256, "paper: wins")):
        model = _gain_of_2dh(AZURE_NDV4, ranks, 256 * MIB)
        rows.append(PaperRow(f"2DH at 256 MiB, {ranks} GPUs [x]", None, model, "PRED", remark))
    for name, shape in (("Base", FIGURE_12_BASE), ("Large", FIGURE_12_LARGE)):
        for load in (16, 8, 4, 2, 1):
            model = float(choose_r(replace(shape, capacity_factor=load), 64))
            remark = "paper: 0, then 1, then more as the capacity falls"
            rows.append(PaperRow(f"Fig. 12, {name}: r at k f = {load}", None, model, "PRED", remark))
    rows += [
        PaperRow("sparse encode and decode on the layer, 2,048 GPUs [x]", 1.04, (slowest + masks) / slowest, "MISMATCH",
                 remark="1.04x needs about 180 µs per peer, and then 2DH 6.9x"),
        PaperRow("parallelism, 1.74x; v2 up to 14.57x", None, None, "OPEN", "the configuration is not in the text"),
        PaperRow("pipelining, 2.00x", None, None, "OPEN",
                 "the bound of overlap where transfer and computation are equal; the configuration is not in the text"),
    ]  # fmt: skip
    return rows


def _gain_of_2dh(network: Network, ranks: int, size_bytes: float) -> float:
    linear, two_level = (predict_all_to_all(network, ranks, size_bytes, name).total_s for name in ALGORITHMS)
    return linear / two_level


def main() -> None:
    """Print the paper's numbers beside the model's as a table."""
    print(f"{'Tutel, arXiv:2206.03382':56s} {'paper':>8s} {'model':>8s} {'error':>7s}")
    for row in paper_rows():
        paper, model = ("–" if value is None else f"{value:.4g}" for value in (row.paper, row.model))
        error = "" if row.error is None else f"{100 * row.error:+.0f} %"
        print(f"{row.claim:56s} {paper:>8s} {model:>8s} {error:>7s} {row.kind:8s} {row.remark}".rstrip())


if __name__ == "__main__":
    main()
