"""What is chosen to be fastest on this machine, beside every alternative measured at length: experts, dense FFN, skewed loads.

    python benchmarks/choices.py [--threads 1] [--device cpu] [--rounds 7] [--small] [--layouts]

For each shape the choice is made as before a run, without a cache. Then all back ends run the same layer as a run does (float32
parameters, autocast), interleaved, with a load that a random router makes and with an even one: "chosen / best" is the seconds of
the choice over those of the fastest back end. A choice that names one back end is that one, and not measured again.
"of dense" is the best dense FFN of equal active FLOPs (torch's, and on a processor oneDNN's) over the layer with the choice, gate
and permutations included. "padded / chosen" is under a load of which one expert has 21 times the mean. Seconds are the least of all
rounds, each of passes for 20 ms or more: of CPU time (one thread), of the wall clock (several), or between events of the device.
The last line has the largest "chosen / best" of all shapes and loads. Exit code 1: a shape could not be measured.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.machine.choice.chooser import ChoiceCache, Chooser, Question, make_clock
from mlhpc.suite.machine.choice.layout import use_onednn
from mlhpc.suite.machine.probes.processor import read_cpu
from mlhpc.suite.training.devices import keep_freed_memory
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World
from mlhpc.workloads.moe.backend_selection import ExpertShape, choose_backend
from mlhpc.workloads.moe.bench import DTYPES, DenseFFN, Shape, make_layer, make_training_pass
from mlhpc.workloads.moe.config import MoEConfig
from mlhpc.workloads.moe.experts import BACKENDS, SelectedBackend, Weights, run_experts

ON_CPU = (  # what: T, d, h, E, k, activation, dispatch, data type
    ("reference, E 64", 4096, 256, 1024, 64, 2, "relu", "dropless", "float32"),
    ("reference, E 8", 4096, 256, 1024, 8, 2, "relu", "dropless", "float32"),
    ("few rows, E 64", 512, 256, 1024, 64, 2, "relu", "dropless", "float32"),
    ("moe_lm mini", 1024, 128, 128, 8, 2, "gelu", "dropless", "float32"),
    ("moe_lm smoke", 1024, 64, 64, 4, 2, "gelu", "dropless", "float32"),
    ("capacity, E 16", 2048, 128, 256, 16, 2, "gelu", "capacity", "float32"),
)
ON_GPU = (
    ("reference, E 64", 4096, 256, 1024, 64, 2, "relu", "dropless", "float32"),
    ("reference, E 64", 4096, 256, 1024, 64, 2, "relu", "dropless", "bfloat16"),
    ("wide, E 8", 16384, 2048, 2048, 8, 2, "swiglu", "dropless", "bfloat16"),
    ("OLMoE, E 64", 16384, 2048, 1024, 64, 8, "swiglu", "dropless", "bfloat16"),
    ("capacity, E 64", 16384, 2048, 1024, 64, 2, "swiglu", "capacity", "bfloat16"),
    ("moe_lm mini", 1024, 128, 128, 8, 2, "gelu", "dropless", "float32"),
)


GOAL = 1.03  # of the seconds of the fastest back end
LEAST_S = 0.02  # that a measurement lasts: on a GPU launches of one pass vary


class AsRun(nn.Module):
    """A module as a run calls it: parameters of float32, and autocast for a shorter type."""

    def __init__(self, module: nn.Module, dtype: str) -> None:
        super().__init__()
        self.module, self.dtype = module, DTYPES[dtype]

    def forward(self, x: Tensor) -> object:
        """Call the module."""
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.module(x)


class OneExpert(nn.Module):
    """The dense FFN with oneDNN's products: one expert that gets every row."""

    def __init__(self, dense: DenseFFN) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(w.detach()[None].contiguous()) for w in (dense.up.weight, dense.down.weight.t())
        )
        self.gate = None if dense.gate is None else nn.Parameter(dense.gate.weight.detach()[None])
        self.activation = dense.activation

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, D) to (N, D)."""
        weights = Weights(self.up, self.down, self.gate)
        return run_experts(x, torch.tensor([len(x)]), weights, self.activation, "onednn")


def least(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Least seconds of each, called in turn in an order that alternates; each is called twice before it counts."""
    clock, found, repeats = make_clock(device), {name: [] for name in calls}, {}
    for name in list(calls):
        try:
            calls[name](), calls[name]()
            repeats[name] = min(50, math.ceil(LEAST_S / max(clock(calls[name], 1), 1e-6)))
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
            del calls[name]
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else list(reversed(calls)):
            found[name].append(clock(calls[name], repeats[name]))
    return {name: min(values) for name, values in found.items() if values}


def layer_of(shape: Shape, backend: str | SelectedBackend, device: torch.device) -> tuple[nn.Module, Tensor]:
    """A layer with a back end, and its tokens; equal seeds give equal routing."""
    torch.manual_seed(0)
    layer, x = make_layer(replace(shape, dtype="float32"), None, 0, device)
    layer.backend = backend  # type: ignore[assignment]
    return AsRun(layer, shape.dtype), x


def one(row: tuple, device: torch.device, rounds: int) -> list[float]:
    """Choose for one shape, and measure what was not chosen too. Returns chosen / best of each load."""
    what, tokens, width, hidden, experts, top_k, activation, dispatch, dtype = row
    factor = 1.25 if dispatch == "capacity" else None
    config = MoEConfig(
        experts=experts, top_k=top_k, hidden=hidden, activation=activation, dispatch=dispatch, capacity_factor=factor,
        balance="none",
    )  # fmt: skip
    chooser = Chooser(World.create(None), device, measure=True, store=ChoiceCache(None))
    rows = tokens * top_k * (factor or 1.0)
    begin = time.perf_counter(), time.process_time()
    asked = ExpertShape.of(config, width, rows, DTYPES[dtype])
    chosen = choose_backend(chooser, asked)
    wall, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
    choice = chooser.choices[asked.name()]
    print(
        f"{what}: T {tokens}, d {width}, h {hidden}, k {top_k}, {activation}, {dispatch}, {dtype}: chosen {chosen}"
        f" in {wall:.2f} s ({cpu:.2f} CPU-s), bfloat16 product {choice.beside.get('bfloat16_product_speedup', '-')}x",
        flush=True,
    )
    print("    when choosing: " + ", ".join(f"{name} {1e3 * each:.3f} ms" for name, each in choice.seconds.items()))
    ratios = []
    for load in ("router", "uniform"):
        shape = Shape(tokens, width, config, load, dtype)
        ways: dict[str, str | SelectedBackend] = {name: name for name in BACKENDS if name in choice.seconds}
        if chosen.padded is not None:
            ways["chosen"] = chosen
        calls = {name: make_training_pass(*layer_of(shape, way, device)) for name, way in ways.items()}
        torch.manual_seed(0)
        dense = DenseFFN(shape).to(device)
        x_ND = torch.randn(int(tokens * top_k), width, device=device, dtype=DTYPES[dtype])
        calls["dense"] = make_training_pass(AsRun(dense, dtype), x_ND)
        if device.type == "cpu" and dtype == "float32":
            calls["dense, oneDNN"] = make_training_pass(OneExpert(dense), x_ND)
        found = least(calls, device, rounds)
        if chosen.padded is None:
            found["chosen"] = found[chosen.name]
        back_ends = {name: found[name] for name in BACKENDS if name in found}
        best, dense_s = min(back_ends, key=back_ends.__getitem__), min(v for k, v in found.items() if "dense" in k)
        ratios.append(found["chosen"] / back_ends[best])
        print(
            f"  {load:8} " + ", ".join(f"{name} {1e3 * each:.3f}" for name, each in found.items())
            + f" | chosen / best ({best}) {ratios[-1]:.3f}, of dense {dense_s / found['chosen']:.3f}",
            flush=True,
        )  # fmt: skip
    return ratios


def skewed(chosen_for: tuple, device: torch.device, rounds: int) -> None:
    """The layer under a skewed load, padded and with the choice."""
    _, tokens, width, hidden, experts, top_k, activation, _, dtype = chosen_for
    config = MoEConfig(experts=experts, top_k=top_k, hidden=hidden, activation=activation, balance="none")
    padded = structs.replace(config, dispatch="capacity", capacity_factor=0.0)
    chooser = Chooser(World.create(None), device, measure=True, store=ChoiceCache(None))
    chosen = choose_backend(chooser, ExpertShape.of(config, width, tokens * top_k, DTYPES[dtype]))
    calls = {
        "chosen": make_training_pass(*layer_of(Shape(tokens, width, config, "skewed", dtype), chosen, device)),
        "padded": make_training_pass(*layer_of(Shape(tokens, width, padded, "skewed", dtype), "bmm", device)),
    }
    layer, x = layer_of(Shape(tokens, width, config, "skewed", dtype), chosen, device)
    layer(x)
    imbalance = layer.module.load.read().report()["imbalance"]
    found = least(calls, device, max(2, rounds // 3))
    if len(found) == len(calls):
        times = found["padded"] / found["chosen"]
        print(
            f"skewed, max / mean {imbalance:.1f}, E {experts}, {dtype}: chosen {chosen} "
            f"{1e3 * found['chosen']:.2f} ms, padded {1e3 * found['padded']:.2f} ms, padded / chosen {times:.1f}",
            flush=True,
        )


def layouts(device: torch.device, rounds: int) -> None:
    """Memory format, convolutions and threads of the networks with convolutions, chosen and measured at length."""
    sizes = ["mini"] if device.type == "cpu" else ["mini", "small"]
    rows = [(name, size, list[str]()) for name in ("cosmoflow", "deepcam") for size in sizes]
    if device.type == "cpu":
        rows.append(("deepcam", "mini", ["hyperparameters.channel_divisor=1"]))  # as wide as the full network
    for name, size, wide in rows:
        precisions = ("float32",) if device.type == "cpu" else ("float32", "bfloat16")
        for precision in precisions:
            chosen, threads = load_descriptor(name), torch.get_num_threads()
            sets = [f"precision={precision}", *wide, *(["global_batch_size=4"] if size == "small" else [])]
            config = load_config(chosen, size, sets)
            workload = load_workload(chosen)(config)
            world = World.create(None)
            model = workload.build_model(world).to(device)
            asked = Recording(world, device, measure=True, store=ChoiceCache(None))
            begin = time.process_time()
            workload.choose(model, asked)
            spent = time.process_time() - begin
            for question in asked.asked:
                torch.set_num_threads(threads)
                found = least(dict(question.ways()), device, rounds)
                answer = asked.choices[question.name].value
                print(
                    f"{name} {size}{' at full width' if wide else ''}, {precision}, {question.name}: chosen {answer}; "
                    + ", ".join(f"{way} {1e3 * each:.3f} ms" for way, each in found.items())
                    + f" | chosen / best {found[answer] / min(found.values()):.3f}; {spent:.1f} CPU-s to choose",
                    flush=True,
                )  # fmt: skip
            torch.set_num_threads(threads)
            use_onednn(True)


class Recording(Chooser):
    """Keeps the questions, so that what was not chosen can be measured too."""

    def __init__(self, *arguments: object, **names: object) -> None:
        super().__init__(*arguments, **names)  # type: ignore[arg-type]
        self.asked: list[Question] = []

    def choose(self, question: Question) -> str:
        """Answer, and keep the question."""
        self.asked.append(question)
        return super().choose(question)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="only the shapes of the workloads, and no skewed load")
    parser.add_argument("--layouts", action="store_true", help="only memory format, convolutions, threads of networks")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} thread(s)"
    cpu = read_cpu(Path("/"))
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; {cpu.model or platform.machine()}, {', '.join(cpu.simd)}; {name}; "
        f"torch {torch.__version__}; load average {os.getloadavg()[0]:.1f}; back ends {', '.join(BACKENDS)}",
        flush=True,
    )
    if args.layouts:
        layouts(device, args.rounds)
        return 0
    rows = ON_GPU if args.device == "cuda" else ON_CPU
    ratios, failed = [], False
    for row in rows[3:] if args.small else rows:
        try:
            ratios += one(row, device, args.rounds)
        except Exception as error:  # one shape that fails leaves the others
            failed = True
            print(f"{row[0]}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    if not args.small:
        skewed(rows[0], device, args.rounds)
    within = sum(each <= GOAL for each in ratios)
    print(f"chosen / best: at most {max(ratios, default=math.nan):.3f}, {within} of {len(ratios)} at most {GOAL:g}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
