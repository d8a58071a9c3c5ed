"""Ratios of the MoE layer inside one run, one thread: against the dense FFN of equal FLOPs, and against padding under skew.

    python benchmarks/moe.py [--pairs 10]
    python benchmarks/moe.py --tables cuda -o moe-tables.json

Every variant runs in a forked child, so that its memory can be told: growth of the peak resident set over three passes.
Tutel's CPU layer (https://github.com/microsoft/tutel) is one more contestant where ``import tutel`` works, MegaBlocks' dropless
layer (https://github.com/databricks/megablocks) where MLHPC_REFERENCES has a clone.
Freed memory is kept by the process (mallopt), for the layer and the dense FFN alike: otherwise the kernel clears
128 MiB of fresh pages for the experts' gradients in every step. `--tables cuda` measures what needs a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path

from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.references import find_clone
from mlhpc.suite.training.devices import keep_freed_memory

SHAPE = {"tokens": 4096, "width": 256, "hidden": 1024, "experts": 64, "top_k": 2}
SMALL = {"tokens": 64, "width": 32, "hidden": 64, "experts": 4, "top_k": 2}
GPU_ROWS = (  # T, d, h, E, k, activation: docs/moe.md
    (32768, 4096, 1024, 128, 8, "swiglu"),
    (24576, 1536, 256, 128, 8, "swiglu"),
    (32768, 2048, 768, 128, 8, "swiglu"),
    (16384, 4096, 14336, 8, 2, "swiglu"),
    (16384, 2048, 2048, 32, 2, "relu"),
    (65536, 4096, 4096, 16, 2, "relu"),
)


def parts(load: str, backend: str, mode: str, factor: float | None, sizes: dict[str, int] = SHAPE):
    import torch

    from mlhpc.workloads.moe.bench import Shape, make_layer
    from mlhpc.workloads.moe.config import MoEConfig

    torch.set_num_threads(1)
    config = MoEConfig(
        experts=sizes["experts"],
        top_k=sizes["top_k"],
        hidden=sizes["hidden"],
        activation="relu",
        balance="none",
        dispatch=mode,
        capacity_factor=factor,
        backend=backend,
    )
    shape = Shape(sizes["tokens"], sizes["width"], config, load)
    return shape, *make_layer(shape, None, 0, torch.device("cpu"))


def pairs_with_dense(backend: str, pairs: int) -> dict:
    """Median over pairs of dense / layer, in wall time and in CPU time (what another process takes away does not count)."""
    import torch

    from mlhpc.workloads.moe.bench import DenseFFN, make_training_pass

    keep_freed_memory()
    shape, layer, x = parts("uniform", backend, "dropless", None)
    dense = DenseFFN(shape)
    rows_ND = torch.randn(SHAPE["tokens"] * SHAPE["top_k"], SHAPE["width"])
    modules = dense, _ProductsAlone(layer), _OneExpert(dense)
    calls = make_training_pass(layer, x), *(make_training_pass(module, rows_ND) for module in modules)
    rows = [[spent(call) for call in calls] for _ in range(2 + pairs)][2:]
    wall = [[part[0] for part in row] for row in rows]
    cpu = [[part[1] for part in row] for row in rows]
    return {
        "layer_ms": 1e3 * statistics.median(row[0] for row in wall),
        "dense_ms": 1e3 * statistics.median(row[1] for row in wall),
        "ratio": statistics.median(row[1] / row[0] for row in wall),
        "ratio_cpu": statistics.median(row[1] / row[0] for row in cpu),
        "ratio_cpu_of_least": min(row[1] for row in cpu) / min(row[0] for row in cpu),
        "ratio_cpu_low": min(row[1] / row[0] for row in cpu),
        "ratio_cpu_high": max(row[1] / row[0] for row in cpu),
        "experts_alone_ratio_cpu": statistics.median(row[1] / row[2] for row in cpu),
        "ratio_cpu_to_dense_with_onednn": statistics.median(row[3] / row[0] for row in cpu),
        "pairs": pairs,
    }


def pairs_with_tutel(backend: str, pairs: int) -> dict:
    """Tutel's CPU layer against ours, biases in both. Its capacity of factor 1 drops and pads nothing."""
    from torch import nn
    from tutel import moe as tutel_moe

    shape, ours, x = planted(backend, bias=True)
    config, own = shape.moe, ours.experts
    theirs = tutel_moe.moe_layer(
        gate_type={"type": "top", "k": config.top_k, "capacity_factor": 1.0},
        model_dim=shape.width,
        experts={
            "type": "ffn",
            "num_experts_per_device": config.experts,
            "hidden_size_per_expert": config.hidden,
            "activation_fn": nn.functional.relu,
        },
    )
    same = {
        theirs.gates[0].wg.weight: ours.router.gate.weight,
        theirs.experts.batched_fc1_w: own.up_EHD,
        theirs.experts.batched_fc2_w: own.down_EHD,
        theirs.experts.batched_fc1_bias: own.up_bias_EH,
        theirs.experts.batched_fc2_bias: own.down_bias_ED,
    }
    return beside(ours, theirs, same, x, pairs)


def pairs_with_megablocks(products: str, backend: str, pairs: int) -> dict:
    """MegaBlocks' dropless layer with grouped products against ours, no biases. What its kernels are here: megablocks_layer."""
    from benchmarks.megablocks_layer import REPOSITORY, layer

    shape, ours, x = planted(backend, bias=False)
    config, own = shape.moe, ours.experts
    theirs = layer(find_clone(REPOSITORY), shape.width, config.hidden, config.experts, config.top_k, products)
    same = {
        theirs.router.layer.weight: ours.router.gate.weight,
        theirs.experts.mlp.w1: own.up_EHD,
        theirs.experts.mlp.w2: own.down_EHD,
    }
    return beside(ours, theirs, same, x, pairs)


def planted(backend: str, bias: bool):
    """Shape, our layer and tokens, planted so that every expert is chosen equally often by the same gate in both codes."""
    import torch

    from mlhpc.workloads.moe.bench import choose_fixed_experts, make_layer

    keep_freed_memory()
    shape, _, x = parts("uniform", backend, "dropless", None)
    config = structs.replace(shape.moe, bias=bias)
    shape = dataclasses.replace(shape, moe=config, load="router")
    ours, _ = make_layer(shape, None, 0, torch.device("cpu"))
    chosen_TK = choose_fixed_experts(dataclasses.replace(shape, load="uniform"), torch.Generator().manual_seed(0))
    wanted_TK = torch.tensor([1.0, 0.5]).expand_as(chosen_TK)
    with torch.no_grad():
        x[:, : config.experts] = torch.zeros(len(x), config.experts).scatter(1, chosen_TK, wanted_TK)
        ours.router.gate.weight.copy_(4.0 * torch.eye(config.experts, shape.width))
    return shape, ours, x


def beside(ours, theirs, same: dict, x, pairs: int) -> dict:
    """Another code's layer against ours in interleaved pairs, with ``same`` weights. Outputs and gradients are compared
    first, the gradients of each weight by the norm of their difference over their own.
    """
    import torch

    from mlhpc.workloads.moe.bench import make_training_pass

    with torch.no_grad():
        for there, here in same.items():
            there.copy_(here.view_as(there))
    here_TD, there_TD = ours(x).y_TD, theirs(x)
    here_TD.square().sum().backward()
    there_TD.square().sum().backward()
    apart = [float((a.grad.view_as(b) - b.grad).norm() / b.grad.norm()) for b, a in same.items()]
    difference = float((here_TD - there_TD).detach().abs().max())
    calls = make_training_pass(ours, x), make_training_pass(theirs, x)
    rows = [[spent(call) for call in calls] for _ in range(2 + pairs)][2:]
    cpu = [[part[1] for part in row] for row in rows]
    return {
        "ours_cpu_ms": 1e3 * statistics.median(row[0] for row in cpu),
        "theirs_cpu_ms": 1e3 * statistics.median(row[1] for row in cpu),
        "ratio": statistics.median(row[1][0] / row[0][0] for row in rows),
        "ratio_cpu": statistics.median(row[1] / row[0] for row in cpu),
        "ratio_cpu_low": min(row[1] / row[0] for row in cpu),
        "ratio_cpu_high": max(row[1] / row[0] for row in cpu),
        "largest_difference": difference,
        "largest_of_gradients": max(apart),
        "pairs": pairs,
    }


def _ProductsAlone(layer):
    """The experts on rows that already lie sorted: the layer without gate, permutation and scaling."""
    import torch
    from torch import nn

    from mlhpc.workloads.moe.experts import run_experts

    class ProductsAlone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = layer.experts
            self.rows_E = torch.full((SHAPE["experts"],), SHAPE["tokens"] * SHAPE["top_k"] // SHAPE["experts"])

        def forward(self, x):
            return run_experts(x, self.rows_E, self.experts.weights(), "relu", layer.config.backend)

    return ProductsAlone()


def _OneExpert(dense):
    """The dense FFN with oneDNN's products: one expert that gets every row. torch's own use another library."""
    import torch
    from torch import nn

    from mlhpc.workloads.moe.experts import Weights, run_experts

    class OneExpert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(dense.up.weight.detach()[None])
            self.down = nn.Parameter(dense.down.weight.detach().t()[None].contiguous())

        def forward(self, x):
            return run_experts(x, torch.tensor([len(x)]), Weights(self.up, self.down), "relu", "onednn")

    return OneExpert()


def spent(call) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def skewed(backend: str, mode: str, factor: float | None, repeats: int) -> dict:
    from mlhpc.workloads.moe.bench import make_training_pass

    make_training_pass(
        *parts("skewed", backend, mode, factor, SMALL)[1:]
    )()  # code of the libraries is not the layer's memory
    _, layer, x = parts("skewed", backend, mode, factor)
    call = make_training_pass(layer, x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [spent(call) for _ in range(repeats)]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "wall_ms": 1e3 * min(wall for wall, _ in times),
        "cpu_ms": 1e3 * min(cpu for _, cpu in times),
        "memory_mib": (after - before) / 1024,
        "imbalance": layer.load.read().report()["imbalance"],
    }


def in_child(function, *arguments) -> dict:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(there, function, arguments))
    child.start()
    there.close()
    result = here.recv()
    child.join()
    return result


def _send(pipe, function, arguments) -> None:
    pipe.send(function(*arguments))


def tables(device_type: str, output: Path | None) -> None:
    """Dense sweep, grouped_mm sweep, then the rows of the reference with their phases, all beside a dense FFN in the same run.

    On a CPU: the same code on small shapes, to see that it runs.
    """
    import torch

    from mlhpc.suite.world import World
    from mlhpc.workloads.moe.bench import Shape, measure
    from mlhpc.workloads.moe.config import MoEConfig

    world, device = World.create(None), torch.device(device_type)
    cuda = device.type == "cuda"
    dtype, scale = ("bfloat16", 1) if cuda else ("float32", 64)
    found: dict[str, list] = {"dense": [], "grouped_mm": [], "rows": []}

    def keep(table: str, row: dict) -> None:
        found[table].append(row)
        print(table, json.dumps(row), flush=True)

    for size in (1024, 2048, 4096, 8192):
        n = size // scale
        a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
        seconds = _median_s(lambda a=a, b=b: a @ b, device)
        keep("dense", {"m = n = k": n, "tflops": 2e-12 * n**3 / seconds})
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        experts, width = 16, 2048 // scale
        config = MoEConfig(
            experts=experts, top_k=1, hidden=width, activation="relu", backend="grouped_mm", balance="none"
        )
        shape = Shape(max(experts, tokens * experts // scale), width, config, "uniform", dtype)
        result = measure(shape, world, device, 10)
        keep("grouped_mm", {"tokens per expert": tokens // scale, "width": width, **_short(result)})
    for tokens, width, hidden, experts, top_k, activation in GPU_ROWS:
        config = MoEConfig(
            experts=experts,
            top_k=top_k,
            hidden=hidden // scale,
            activation=activation,
            backend="grouped_mm",
            balance="none",
        )
        shape = Shape(tokens // scale, width // scale, config, "uniform", dtype)
        result = measure(shape, world, device, 10)
        floor, goal = (0.30, 0.40) if hidden < 1024 else (0.55, 0.65)
        judged = {"floor": floor, "goal": goal, "reached": result.ratio >= goal} if cuda and width >= 1536 else {}
        sizes = {"T": shape.tokens, "d": shape.width, "h": config.hidden, "E": experts, "k": top_k}
        keep("rows", {**sizes, "activation": activation, **_short(result), **judged, "phases_s": result.phases_s})
    if output is not None:
        name = torch.cuda.get_device_name(device) if cuda else "cpu"
        output.write_text(json.dumps({"version": 1, "device": name, "dtype": dtype, **found}, indent=1) + "\n")


def _short(result) -> dict:
    return {
        "layer_s": result.layer_s,
        "dense_s": result.dense_s,
        "ratio": result.ratio,
        "ratio_low": result.ratio_low,
        "ratio_high": result.ratio_high,
        "n": len(result.pairs_s),
        "useful_tflops": result.useful_tflops,
    }


def _median_s(call, device, repeats: int = 10) -> float:
    from mlhpc.workloads.moe.bench import measure_calls

    return statistics.median(measure_calls([call] * (2 + repeats), None, device)[2:])


def beside_others(pairs: int) -> None:
    from benchmarks.megablocks_layer import REPOSITORY

    contests = {}
    if importlib.util.find_spec("tutel") is None:
        print("Tutel's CPU layer: not installed, not compared", flush=True)
    else:
        contests |= {("Tutel", each): (pairs_with_tutel, each) for each in ("onednn", "loop")}
    if find_clone(REPOSITORY) is None:
        print("MegaBlocks' layer: no clone in MLHPC_REFERENCES, not compared", flush=True)
    else:
        for products in ("loop", "grouped_mm"):
            for each in ("onednn", "loop", "grouped_mm"):
                contests[f"MegaBlocks ({products})", each] = (pairs_with_megablocks, products, each)
    for (name, backend), call in contests.items():
        found = in_child(*call, pairs)
        print(f"balanced, {name} / {backend}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--others", action="store_true", help="only the comparison with Tutel's and MegaBlocks' layers")
    parser.add_argument("--tables", choices=["cuda", "cpu"])
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    if chosen.tables:
        tables(chosen.tables, chosen.output)
        return
    beside_others(chosen.pairs)
    if chosen.others:
        return
    for backend in ("onednn", "loop", "grouped_mm"):
        found = in_child(pairs_with_dense, backend, chosen.pairs)
        print(f"balanced dropless, {backend}: " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)
    rows = {
        name: in_child(skewed, *arguments, chosen.repeats)
        for name, arguments in {
            "padded dropless": ("bmm", "capacity", 0.0),
            "onednn": ("onednn", "dropless", None),
            "loop": ("loop", "dropless", None),
            "grouped_mm": ("grouped_mm", "dropless", None),
        }.items()
    }
    padded = rows["padded dropless"]
    for name, row in rows.items():
        print(
            f"skewed (max/mean {row['imbalance']:.1f}), {name}: {row['cpu_ms']:.0f} CPU-ms, {row['wall_ms']:.0f} ms, "
            f"{row['memory_mib']:.0f} MiB; padded takes {padded['cpu_ms'] / row['cpu_ms']:.1f}x the time, "
            f"{padded['memory_mib'] / max(row['memory_mib'], 1e-9):.1f}x the memory",
            flush=True,
        )


if __name__ == "__main__":
    main()
