"""The back ends of experts by CPU time, to choose one where nothing was measured (`choose_unmeasured_backend`).

    python benchmarks/unmeasured_backends.py

Training passes on one thread, back ends by turns, least of three after a first one. Rows of experts grow linearly up to
``load`` times their mean. A number is the time over the best of the row; `auto` is that of the back end that the rule takes.
Kept bytes are those of activations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mlhpc.workloads.moe.config import Activation
from mlhpc.workloads.moe.experts import Experts, choose_unmeasured_backend, run_experts

SHAPES: tuple[tuple[int, int, int, int, int, Activation], ...] = (  # experts, k, tokens, width, hidden width
    (64, 2, 512, 128, 256, "relu"),
    (8, 2, 512, 128, 256, "relu"),
    (64, 2, 4096, 128, 256, "gelu"),
    (8, 2, 4096, 256, 1024, "gelu"),
    (8, 2, 512, 256, 1024, "swiglu"),
    (128, 2, 1024, 128, 64, "swiglu"),
    (128, 8, 512, 128, 64, "swiglu"),  # fine-grained, as SonicMoE's
)
LOADS = (1.0, 1.25, 1.5, 2.0)
NAMES = ("loop", "onednn", "bmm", "grouped_mm")


def count_kept_bytes(run: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward pass, each storage once, without weights."""
    known, kept = {each.untyped_storage().data_ptr() for each in weights}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()  # which must live while storages are told apart by their places
    del result
    return sum(kept.values())


def measure_seconds(runs: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """CPU time of forward and backward pass by name: by turns, least of three after a first one."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(4):
        for name, run in runs.items():
            begin = time.process_time()
            run().sum().backward()  # type: ignore[no-untyped-call]
            seconds[name].append(time.process_time() - begin)
    return {name: min(each[1:]) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="time nothing: the bytes alone")
    only_bytes = parser.parse_args().bytes
    torch.set_num_threads(1)
    what = ["kept bytes per token: " + ", ".join(NAMES)]
    what = what if only_bytes else [*NAMES, "auto", "best [ms]", *what]
    print("| experts | k | tokens | model | hidden | load |", " | ".join(what), "|")
    print("|" + " --- |" * (6 + len(what)))
    for experts, top_k, tokens, width, hidden, activation in SHAPES:
        weights = Experts(experts, width, hidden, activation, bias=False).weights()
        rows_ND = torch.randn(top_k * tokens, width)
        for load in LOADS:
            share_E = torch.linspace(2.0 - load, load, experts)
            rows_E = (share_E / share_E.sum() * len(rows_ND)).round().long()
            rows_E[-1] += len(rows_ND) - rows_E.sum()

            def run(name: str, rows_E: Tensor = rows_E, of: Any = (rows_ND, weights, activation)) -> Tensor:
                rows, own, act = of
                return run_experts(rows.clone().requires_grad_(), rows_E, own, act, name)  # type: ignore[arg-type]

            runs = {name: partial(run, name) for name in NAMES}
            own = [each for each in vars(weights).values() if isinstance(each, Tensor)]
            kept = ", ".join(f"{count_kept_bytes(each, own) / tokens:,.0f}" for each in runs.values())
            cells = [kept]
            if not only_bytes:
                least = measure_seconds(runs)
                best = min(least.values())
                auto = choose_unmeasured_backend(rows_ND, weights).for_load(rows_E, len(rows_ND))
                cells = [f"{least[name] / best:.2f}" for name in (*NAMES, auto)] + [f"{1e3 * best:.1f}", kept]
            print(
                f"| {experts} | {top_k} | {tokens} | {width} | {hidden} | {load} |", " | ".join(cells), "|", flush=True
            )


if __name__ == "__main__":
    main()
