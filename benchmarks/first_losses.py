"""How far the first losses and evaluations of a run move when only its rounding changes, and when something else does.

    python benchmarks/first_losses.py [WORKLOAD ...] [--data FOLDER] [--seeds 3] [--evaluations 4] [-o FILE]

Each workload's smoke run is repeated with the same seed under other roundings: two threads, vector instructions of AVX2 and of
SSE4, without oneDNN, initial weights one unit in the last place higher and lower. Of each step the largest relative difference
over seeds and roundings is printed: what the bounds of `mlhpc reproduce`, level 2, come from.
Beside it is what must not pass: another seed, rates and batches that are changed a little. FOLDER has <workload>-smoke.

With --evaluations N each run goes on to its N-th evaluation, on two ranks too, and with settings that the first losses hardly
show (SETTINGS). A further row of each variant and seed has the difference of each evaluation, and the first one over the largest
difference of the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.package.reproduction.judge import compute_relative_differences

WORKLOADS = ("cosmoflow", "deepcam", "open_catalyst", "openfold", "moe_lm", "swinv2_moe")
PRECISIONS = ("float32", "bfloat16")
STEPS = 20  # losses of a run that are logged one by one
RATE = {"cosmoflow": "base_learning_rate"}  # else learning_rate
ISAS: Mapping[str, Mapping[str, str]] = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "SSE4": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
CHANGED = {"rate 1 % higher": 1.01, "rate 10 % higher": 1.1}
# Settings that act little or not at all within the first 20 steps, which warm up
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "moe_lm": ("schedule_steps=400", "final_fraction=0.9", "weight_decay=0.3"),
    "cosmoflow": ("warmup_epochs=2", "decay_boundary_epochs=[3]", "decay_factors=[0.5]"),
    "open_catalyst": ("decay_boundary_steps=[120,330,420]", "decay_factor=0.25", "weight_decay=0.03"),
    "deepcam": ("t_max=120", "weight_decay=0.03", "warmup_steps=150"),
    "openfold": ("decay_steps=[320,896]", "warmup_steps=21"),
    "swinv2_moe": ("schedule_steps=500", "final_fraction=0.9", "weight_decay=0.15"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=WORKLOADS)
    parser.add_argument("--data", type=Path, help="[the usual place]")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument(
        "--evaluations", type=int, default=0, help="Go on to this evaluation. [the first 20 losses only]"
    )
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.workloads[0], args)
        return 0
    found_cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = found_cpu[1] if found_cpu else "?"
    load = os.getloadavg()[0]
    lines = [
        f"python benchmarks/first_losses.py, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {cpu}, load {load:.1f}"
    ]
    lines.append(
        f"{args.seeds} seeds of each smoke run. Largest relative difference by step 0, 1, 2, 4, 9 and 19, and up to each."
    )
    for workload in args.workloads:
        found = call(workload, args, "all", {})
        for isa, environ in () if args.evaluations else ISAS.items():
            for name, losses in call(workload, args, "base", environ).items():
                found[name.replace("base", isa)] = losses
        if args.evaluations:
            for name, losses in call(workload, args, "base", {}, ranks=2).items():
                found[name.replace("base", "two ranks")] = losses
        lines += table(workload, found, args.seeds)
        print("\n".join(lines), flush=True)
        if args.output:
            args.output.write_text("\n".join(lines) + "\n")
    return 0


def call(
    workload: str, args: argparse.Namespace, what: str, environ: Mapping[str, str], ranks: int = 1
) -> dict[str, list[float]]:
    """Losses, and evaluations after them, by run, "precision|variant|seed", of a process with an environment."""
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    words = [*launcher, sys.executable, __file__, workload, "--worker", what, "--seeds", str(args.seeds)]
    words += ["--evaluations", str(args.evaluations), "--precisions", *args.precisions]
    words += ["--data", str(args.data)] if args.data else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    losses: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return losses


def table(workload: str, found: Mapping[str, list[float]], seeds: int) -> list[str]:
    """A row for each precision and variant: the largest differences over seeds; of changes the smallest."""
    lines = []
    for precision in PRECISIONS:
        variants = list(dict.fromkeys(key.split("|")[1] for key in found if key.startswith(precision)))
        for variant in variants[1:]:
            rows = []
            for seed in range(1, seeds + 1):
                base = f"{precision}|base|{seed}"
                rows.append(compute_relative_differences(found[base], found[f"{precision}|{variant}|{seed}"]))
            pick = min if variant in {*CHANGED, *SETTINGS[workload], "another seed"} else max
            so_far = [pick(max(row[: step + 1]) for row in rows) for step in range(STEPS)]
            shown = " ".join(f"{so_far[step]:8.1e}" for step in (0, 1, 2, 4, 9, 19))
            start = f"{workload:14} {precision:9} {pick.__name__} {variant:17}"
            lines.append(f"{start} {shown}")
            lines += [
                f"{start} evaluations, seed {seed}: {text}" for seed, text in enumerate(map(_late, rows), 1) if text
            ]
    return lines


def _late(row: list[float]) -> str:
    """The differences of evaluations, and the first one as a multiple of the largest difference of the losses."""
    late, most = row[STEPS:], max(row[:STEPS])
    text = " ".join(f"{gap:8.1e}" for gap in late)
    return f"{text}, first over losses {late[0] / most:.2g}" if late and most else text


class Enough(Exception):
    """The losses of the first steps are there."""


def worker(workload: str, args: argparse.Namespace) -> None:
    """Print the losses and evaluations of every variant of one process, as the first of its ranks has them."""
    import torch

    from mlhpc.suite.world import World

    world = World.create()
    root = args.data / f"{workload}-smoke" if args.data else choose_default_data_root(workload, "smoke")
    rate = f"hyperparameters.{RATE.get(workload, 'learning_rate')}"
    found = {}
    for precision in args.precisions:
        for seed in range(1, args.seeds + 1):
            train = lambda name, at=seed, **how: found.update(  # noqa: E731
                {f"{precision}|{name}|{seed}": losses_of(workload, precision, root, at, world, args.evaluations, **how)}  # noqa: B023
            )
            train("base")
            if args.worker == "base":
                continue
            torch.set_num_threads(2)
            train("two threads", threads=2)
            if not args.evaluations:
                with torch.backends.mkldnn.flags(enabled=False):
                    train("without oneDNN")
            train("weights one up", edit=lambda weight: torch.nextafter(weight, weight.new_tensor(torch.inf)))
            train("weights one down", edit=lambda weight: torch.nextafter(weight, weight.new_tensor(-torch.inf)))
            train("another seed", at=seed + 100)
            for name, factor in CHANGED.items():
                train(name, scaled=(rate, factor))
            for setting in SETTINGS[workload] if args.evaluations else ():
                train(setting, setting=(f"hyperparameters.{setting}",))
    if world.is_first:
        print(json.dumps(found))


def losses_of(
    workload: str,
    precision: str,
    root: Path,
    seed: int,
    world: Any,
    evaluations: int,
    *,
    threads: int = 1,
    edit: Callable[[Any], Any] | None = None,
    scaled: tuple[str, float] | None = None,
    setting: tuple[str, ...] = (),
) -> list[float]:
    """The first losses of one run, and its first evaluations. ``edit`` changes each parameter, ``scaled`` multiplies a
    hyperparameter.
    """
    import torch
    from block import Head, open_workload, trainer

    from mlhpc.suite.log import mllog
    from mlhpc.suite.log.mllog import EventLog
    from mlhpc.suite.training.checkpoint import Position

    class Until(EventLog):
        def event(self, key: str, value: Any = None, **more: Any) -> None:
            if key == mllog.FIRST_LOSSES:
                losses.extend(value)
            if key in (mllog.EVAL_ERROR, mllog.EVAL_ACCURACY):
                losses.append(float(value))
            if len(losses) >= STEPS + evaluations:
                raise Enough

    losses: list[float] = []
    overrides = [f"precision={precision}", "choices.measure=false", "submission.division=open", *setting]
    opened, config = open_workload(workload, "smoke", overrides, world)
    if scaled is not None:
        value = getattr(config.hyperparameters, scaled[0].split(".")[1]) * scaled[1]
        opened, config = open_workload(workload, "smoke", [*overrides, f"{scaled[0]}={value!r}"], world)
    torch.set_num_threads(threads)
    whole = opened.dataset("train", root)
    prepared = trainer(
        opened, config, world, Until(None), Head(whole, len(whole)), opened.dataset("validation", root), seed
    )
    if edit is not None:
        with torch.no_grad():
            for weight in prepared.state.model.parameters():
                weight.copy_(edit(weight))
    try:
        prepared.run(Position(1, 0))
    except Enough:
        return losses
    raise SystemExit(f"{workload}: fewer than 20 steps")


if __name__ == "__main__":
    sys.exit(main())
