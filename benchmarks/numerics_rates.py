"""How often `mlhpc numerics reproduce` finds planted faults, names their module, and calls honest changes not rounding.

    python -m benchmarks.numerics_rates --data /data --draws 20 --honest 200 -o table.txt

Each draw plants one fault of `FAULTS` in a drawn place of a workload of `smoke` size and judges one training step
against float64. "named": the first tensor that differs is of that place, or inside of it. "smallest": the smallest size
that is found in 8 of 10 draws; on/off faults have none. Honest changes are those of `CHANGES`, and 20 steps of Adam at
a large rate with one and two threads, whose losses differ.
"""

from __future__ import annotations

import argparse
import copy
import platform
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlhpc.plugins.numerics.reproduce import CHANGES, Reference, make_reference, run_change
from mlhpc.plugins.numerics.step import Case, make_case, run_step
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.launcher import Launch
from mlhpc.suite.machine.choice.layout import keep_process_settings
from mlhpc.suite.workload import load_workload
from mlhpc.suite.world import World

RUNS, SAMPLES = 20, 4
FAULT_SEEDS, HONEST_SEEDS = 2, 7
WORKLOADS = ("cosmoflow", "deepcam", "swinv2_moe", "moe_lm")
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)
PRODUCTS = (nn.Conv2d, nn.Conv3d, nn.Linear)
DATA = Path("data")


@dataclass(frozen=True)
class Planted:
    """A step with a fault: its case, what changes the model, the place, and the reference if it is another one."""

    place: str
    case: Case
    alter: Callable[[nn.Module], object] = lambda model: None
    reference: Reference | None = None


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of the first input of each module that is called."""
    found: dict[str, tuple[int, ...]] = {}
    calls: Counter[str] = Counter()

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
                calls[name] += 1
                found.setdefault(name, tuple(inputs[0].shape))

        return hook

    def alter(model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_pre_hook(note(name))

    run_step(case, alter=alter)
    norms = {name for name, module in case.model.named_modules() if hasattr(module, "eps")}  # probed once more
    return {name: shape for name, shape in found.items() if calls[name] == 1 + (name in norms)}


@cache
def reference(workload: str, seed: int, parts: int = 1) -> Reference:
    chosen = load_descriptor(workload)
    config = load_config(chosen, "smoke", ["instrumentation=false", "device=cpu"])
    made = load_workload(chosen)(config)
    batch = made.dataset("train", DATA / f"{workload}-smoke").load(
        range(SAMPLES * seed, SAMPLES * (seed + 1)), seed=0, epoch=1
    )
    case = make_case(made, World.create(Launch("none", 0, 1)), dict(batch), parts=parts, seed=seed)
    return make_reference(
        case, RUNS, ("float32", *(["bfloat16"] if seed == 0 and parts == 1 and "moe" in workload else []))
    )


@cache
def called(workload: str) -> dict[str, tuple[int, ...]]:
    return shapes(reference(workload, 0).case)


def modules(case: Case, kinds: Any) -> list[str]:
    names = called(case.workload.config.workload)
    return [name for name, module in case.model.named_modules() if name in names and isinstance(module, kinds)]


def on_input(place: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], object]:
    return lambda model: model.get_submodule(place).register_forward_pre_hook(
        lambda module, inputs: (change(inputs[0]), *inputs[1:])
    )


def keep_bits(value: Tensor, bits: float) -> Tensor:
    """Round the mantissa to so many bits."""
    mantissa, exponent = torch.frexp(value)
    scale = 2.0 ** (bits + 1)
    return value + (torch.ldexp((mantissa * scale).round() / scale, exponent) - value).detach()  # keeps the gradient


resized_references: dict[tuple[str, int, str], Reference] = {}


def resized_reference(case: Case, *key: Any) -> Reference:
    if key not in resized_references:
        resized_references[key] = make_reference(case, RUNS)
    return resized_references[key]


Fault = Callable[[Case, random.Random, float], Planted | None]


def other_filter(case: Case, draw: random.Random, size: float) -> Planted | None:
    name = {"swinv2_moe": "image", "deepcam": "x"}.get(case.workload.config.workload)
    if name is None:
        return None
    kinds = draw.sample(["bilinear", "bicubic", "area", "nearest"], 2)

    def resized(kind: str) -> Case:
        value = case.parts[0][name].float()
        planes = value[:, None] if value.ndim == 3 else value.permute(0, 3, 1, 2)
        large = F.interpolate(planes, scale_factor=1.5, mode="bicubic")
        small = F.interpolate(large, size=planes.shape[2:], mode=kind)
        small = small[:, 0] if value.ndim == 3 else small.permute(0, 2, 3, 1)
        back = small.round().clamp(0, 255) if name == "image" else small
        return replace(case, parts=({**case.parts[0], name: back.to(case.parts[0][name].dtype).contiguous()},))

    a, b = map(resized, kinds)
    return Planted(name, b, reference=resized_reference(a, case.workload.config.workload, case.seed, kinds[0]))


def mean_for_sum(case: Case, draw: random.Random, size: float) -> Planted | None:
    factor = 1 + size * (draw.choice([2, 4]) - 1)
    if draw.random() < 0.5:
        workload = copy.copy(case.workload)
        workload.loss = lambda model, batch: factor * type(workload).loss(workload, model, batch)  # type: ignore[method-assign]
        return Planted("loss", replace(case, workload=workload))
    name = draw.choice([name for name, _ in case.model.named_parameters()])

    def alter(model: nn.Module) -> None:
        model.get_parameter(name).register_hook(lambda gradient: factor * gradient)

    return Planted(name.rpartition(".")[0], case, alter)


def stale_statistic(case: Case, draw: random.Random, size: float) -> Planted | None:
    names = modules(case, nn.modules.batchnorm._BatchNorm)
    if not names:
        return None
    place = draw.choice(names)

    def alter(model: nn.Module) -> None:
        norm = model.get_submodule(place)
        if size < 1:
            norm.momentum *= 1 - size
        elif draw.random() < 0.5:
            norm.momentum = 0.0
        else:
            norm.eval()

    return Planted(place, case, alter)


def other_epsilon(case: Case, draw: random.Random, size: float) -> Planted | None:
    names = modules(case, NORMS)
    if not names:
        return None
    place = draw.choice(names)

    def alter(model: nn.Module) -> None:
        model.get_submodule(place).eps *= 1 - 0.9 * size

    return Planted(place, case, alter)


def short_product(case: Case, draw: random.Random, size: float) -> Planted | None:
    place, bits = draw.choice(modules(case, PRODUCTS)), 10 + 13 * (1 - size)

    def alter(model: nn.Module) -> None:
        module = model.get_submodule(place)
        with torch.no_grad():
            module.weight.copy_(keep_bits(module.weight, bits))
        module.register_forward_pre_hook(lambda module, inputs: (keep_bits(inputs[0], bits),))

    return Planted(place, case, alter)


def mirrored_axis(case: Case, draw: random.Random, size: float) -> Planted | None:
    names = {name: shape for name, shape in called(case.workload.config.workload).items() if len(shape) > 2 and name}
    place = draw.choice(sorted(names))
    axis = draw.choice([axis for axis, length in enumerate(names[place]) if axis and length > 1] or [0])
    return Planted(place, case, on_input(place, lambda value: value.flip(axis)))


def unnormalised_channel(case: Case, draw: random.Random, size: float) -> Planted | None:
    if case.workload.config.workload not in ("deepcam", "cosmoflow"):
        return None
    value = case.parts[0]["x"].clone()
    channel = draw.randrange(value.shape[-1])
    if case.workload.config.workload == "deepcam":
        value[..., channel] = value[..., channel] * (1 + 30 * size) - 3 * size
        return Planted("x", replace(case, parts=({**case.parts[0], "x": value},)))

    def alter(model: nn.Module) -> None:
        model.input_mean_C[channel] *= 1 - size
        model.input_factor_C[channel] += size * (1 - model.input_factor_C[channel])

    return Planted("convolutions.0", case, alter)


def stale_gradient(case: Case, draw: random.Random, size: float) -> Planted | None:
    parts = draw.choice([2, 4])
    own = reference(case.workload.config.workload, case.seed, parts)
    name = draw.choice([name for name, _ in case.model.named_parameters()])
    rank, calls, before = draw.randrange(parts), [0], copy.deepcopy(own.case.model)
    gradients = run_step(own.case)
    with torch.no_grad():  # the weights of the step before
        for key, weight in before.named_parameters():
            gradient = gradients[f"gradient {key}"].float()
            weight += size * 0.01 * weight.norm() * gradient / gradient.norm().clamp(min=1e-12)
    old = run_step(replace(own.case, model=before, parts=own.case.parts[rank : rank + 1], seed=case.seed + rank))
    stale = old[f"gradient {name}"].float() / parts

    def replaced(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return stale if calls[0] == rank + 1 else gradient

    def alter(model: nn.Module) -> None:
        model.get_parameter(name).register_hook(replaced)

    return Planted(name.rpartition(".")[0], own.case, alter, own)


def dropped_cast(case: Case, draw: random.Random, size: float) -> Planted | None:
    names = [
        name
        for name in called(case.workload.config.workload)
        if name and not list(case.model.get_submodule(name).children())
    ]
    place, bits = draw.choice(sorted(names)), 7 + 16 * (1 - size)

    def alter(model: nn.Module) -> None:
        model.get_submodule(place).register_forward_hook(
            lambda module, inputs, output: keep_bits(output, bits) if isinstance(output, Tensor) else output
        )

    return Planted(place, case, alter)


def other_padding(case: Case, draw: random.Random, size: float) -> Planted | None:
    names = [
        name
        for name in modules(case, (nn.Conv2d, nn.Conv3d))
        if any(case.model.get_submodule(name)._reversed_padding_repeated_twice)
    ]
    if not names:
        return None
    place, mode = draw.choice(names), draw.choice(["circular", "replicate", "reflect"])
    limits = called(case.workload.config.workload)[place][2:]
    padding = case.model.get_submodule(place)._reversed_padding_repeated_twice
    if mode != "replicate" and min(limits) <= max(padding):
        mode = "replicate"

    def alter(model: nn.Module) -> None:
        model.get_submodule(place).padding_mode = mode

    return Planted(place, case, alter)


def swapped_axis(case: Case, draw: random.Random, size: float) -> Planted | None:
    found = []
    for name, shape in called(case.workload.config.workload).items():
        pairs = [(a, b) for a in range(1, len(shape)) for b in range(a + 1, len(shape)) if shape[a] == shape[b] > 1]
        found += [(name, pair) for pair in pairs if name]
    if not found:
        return None
    place, (a, b) = draw.choice(sorted(found))
    return Planted(place, case, on_input(place, lambda value: value.transpose(a, b).contiguous()))


def late_schedule(case: Case, draw: random.Random, size: float) -> Planted | None:
    workload, steps, epochs = copy.copy(case.workload), *draw.choice([(1, 0), (-1, 0), (0, 1)])

    def build(model: nn.Module, per_epoch: int) -> Any:
        made = type(workload).build_optimizer(workload, model, per_epoch)
        return replace(made, learning_rate=lambda step, epoch: made.learning_rate(max(0, step + steps), epoch + epochs))

    workload.build_optimizer = build  # type: ignore[method-assign]
    rates = [workload.build_optimizer(case.model, 50).learning_rate(step, 1 + step // 50) for step in range(250)]
    honest = [case.workload.build_optimizer(case.model, 50).learning_rate(step, 1 + step // 50) for step in range(250)]
    return Planted("schedule", replace(case, workload=workload)) if rates != honest else None


FAULTS: dict[str, tuple[Fault, Sequence[float]]] = {  # and sizes, 1 the fault as named
    "another resize filter": (other_filter, ()),
    "mean for sum": (mean_for_sum, (1e-2, 1e-4, 1e-5, 1e-6, 3e-7, 1e-7)),
    "a stale statistic": (stale_statistic, (1e-2, 1e-4, 1e-5, 1e-6, 1e-7)),
    "another epsilon": (other_epsilon, (0.5, 0.2, 0.1, 0.03, 0.01)),
    "tf32 left on": (short_product, (9 / 13, 7 / 13, 5 / 13, 4 / 13, 3 / 13, 2 / 13)),
    "a mirrored axis": (mirrored_axis, ()),
    "an unnormalised channel": (unnormalised_channel, (1e-2, 1e-4, 1e-5, 1e-6, 1e-7)),
    "a one-rank stale gradient": (stale_gradient, (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)),
    "a dropped cast": (dropped_cast, (12 / 16, 10 / 16, 8 / 16, 6 / 16, 4 / 16, 3 / 16)),
    "padding of another kind": (other_padding, ()),
    "a swapped axis of equal length": (swapped_axis, ()),
    "an off-by-one in a schedule": (late_schedule, ()),
}


def draw_fault(fault: Fault, number: int, size: float) -> tuple[str, str, str, float]:
    """Outcome, place, named module and factor of one draw."""
    draw = random.Random(number)
    while True:
        own = reference(draw.choice(WORKLOADS), draw.randrange(FAULT_SEEDS))
        planted = fault(own.case, draw, size)
        if planted is not None:
            break
    used = planted.reference or own
    found = used.judge("planted", run_step(planted.case, alter=planted.alter))
    return found.outcome, planted.place, found.module, found.factor or float("nan")


def list_fault_rows(draws: int, only: Sequence[str], smallest_too: bool) -> Iterator[str]:
    yield f"{'fault':<32} {'draws':>5} {'not rounding':>13} {'named':>6} {'least factor':>13} {'smallest size':>14}"
    for name, (fault, sizes) in FAULTS.items():
        if only and name not in only:
            continue
        found = [draw_fault(fault, number, 1.0) for number in range(draws)]
        hits = [each for each in found if each[0] == "not rounding"]
        named = [each for each in hits if each[2] == each[1] or each[2].startswith(f"{each[1]}.")]
        smallest = 1.0 if sizes else None
        for size in sizes if smallest_too else ():
            seen = sum(draw_fault(fault, 1000 + number, size)[0] == "not rounding" for number in range(10))
            if seen < 8:
                break
            smallest = size
        least = min((each[3] for each in hits), default=float("nan"))
        shown = "on/off" if smallest is None else f"{smallest:.3g}" if smallest_too else "not drawn"
        yield f"{name:<32} {draws:>5} {len(hits):>13} {len(named):>6} {least:>13.3g} {shown:>14}"
        for outcome, place, module, factor in found:
            if outcome != "not rounding" or (module != place and not module.startswith(f"{place}.")):
                yield f"    {outcome}: planted in {place}, named {module}, factor {factor:.3g}"


def regrouped(case: Case) -> dict[str, Case]:
    """The same samples in another order, and in two parts, for models that treat each alone."""
    if case.workload.config.workload != "cosmoflow":
        return {}
    part = case.parts[0]
    halves = tuple({name: value[half::2] for name, value in part.items()} for half in (0, 1))
    return {
        "samples in reverse": replace(case, parts=({name: value.flip(0) for name, value in part.items()},)),
        "accumulated in halves": replace(case, parts=halves),
    }


def train_large_rate(case: Case, threads: int) -> float:
    """The loss after 20 steps of Adam at a large rate."""
    with keep_process_settings():
        torch.set_num_threads(threads)
        model = copy.deepcopy(case.model).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(20):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = case.workload.loss(model, case.parts[0])
            loss.backward()
            optimizer.step()
    return float(loss)


def list_honest_rows(runs: int, compiled: bool, first: int = 0) -> Iterator[str]:
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    largest: dict[str, float] = defaultdict(float)
    done, number = 0, first
    while done < runs:
        for workload in WORKLOADS:
            own = reference(workload, number % HONEST_SEEDS)
            for name in CHANGES:
                if name == "compiled" and (number or not compiled):  # minutes each
                    continue
                if CHANGES[name].precision not in own.bounds:
                    continue
                row = run_change(own, name, case=replace(own.case))
                if row.why:
                    continue
                outcomes[name][row.outcome] += 1
                largest[name] = max(largest[name], row.factor or 0.0)
                done += 1
                if row.outcome == "not rounding":
                    print(f"    {workload} seed {number % HONEST_SEEDS}: {row.render()}", flush=True)
            for name, case in regrouped(own.case).items():
                trace = {key: value for key, value in run_step(case).items() if key.split()[0] in ("loss", "gradient")}
                row = own.judge(name, trace)
                outcomes[name][row.outcome] += 1
                largest[name] = max(largest[name], row.factor or 0.0)
                done += 1
            parted = reference(workload, number % HONEST_SEEDS, 2)
            row = parted.judge("2 parts", run_step(parted.case))
            outcomes["2 parts of the batch"][row.outcome] += 1
            largest["2 parts of the batch"] = max(largest["2 parts of the batch"], row.factor or 0.0)
            done += 1
        number += 1
        print(f"    {done} runs: {dict(sum(outcomes.values(), Counter()))}", flush=True)
        if number >= HONEST_SEEDS:
            break
    yield f"{'honest change':<26} {'runs':>5} {'rounding':>9} {'inconclusive':>13} {'not rounding':>13} {'largest factor':>15}"
    for name, counts in outcomes.items():
        yield (
            f"{name:<26} {counts.total():>5} {counts['rounding']:>9} {counts['inconclusive']:>13} "
            f"{counts['not rounding']:>13} {largest[name]:>15.3g}"
        )
    for workload in () if first else ("cosmoflow", "deepcam"):  # of seed 0
        own = reference(workload, 0)
        losses = [train_large_rate(own.case, threads) for threads in (1, 2)]
        row = run_change(own, "other number of threads")
        yield (
            f"Adam at rate 0.1, 20 steps, {workload}: losses {losses[0]:.6g} and {losses[1]:.6g} with 1 and 2 threads; "
            f"step 1: {row.outcome}, factor {row.factor:.3g}"
        )


def main() -> None:
    global DATA
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--compiled", action="store_true", help="also compile, which takes minutes")
    parser.add_argument("--fault", choices=FAULTS, action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--no-smallest", action="store_true", help="do not look for the smallest size")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--honest", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed that honest runs begin with")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    DATA = options.data
    warnings.simplefilter("ignore")
    lines = [
        f"# python -m benchmarks.numerics_rates --draws {options.draws} --honest {options.honest}",
        f"# {platform.machine()}, torch {torch.__version__}, {RUNS} perturbed runs, {SAMPLES} samples, smoke",
    ]
    for part in (
        list_honest_rows(options.honest, options.compiled, options.first) if options.honest else (),
        list_fault_rows(options.draws, options.fault, not options.no_smallest) if options.draws else (),
    ):
        for line in part:
            print(line, flush=True)
            lines.append(line)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
