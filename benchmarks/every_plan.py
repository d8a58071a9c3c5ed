"""Every shipped plan of every workload on 2, 4 and 8 ranks against the unsplit run: 20 steps in float64, as a table.

    python benchmarks/every_plan.py --data DIR -o TABLE [--only WORKLOAD ...] [--plan PLAN ...]

DIR holds the generated data of size smoke, by name (moe_lm-smoke); what is missing is generated there. Each row is a run of
benchmarks/plans.py. A row is added to TABLE when it is done, and rows that are there are not run again. Exit code 1 if a loss is
above the limit of 1e-12, or if what a rank communicated is not what its plan says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mlhpc.suite.training.parallel.mesh import ranks_of

LIMIT = 1e-12
EXCHANGES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
SMALL_COSMOFLOW = (
    *("global_batch_size=8", "hyperparameters.conv_channels=[4,8]", "hyperparameters.input_size=16"),
    *("hyperparameters.input_norm=log1p", "hyperparameters.input_mean=null", "hyperparameters.input_std=null"),
)
SMALL_DEEPCAM = (
    "global_batch_size=8",
    "hyperparameters.height=32",
    "hyperparameters.width=48",
    "hyperparameters.middle_blocks=1",
)
ALIKE = (
    "hyperparameters.moe.balance=none",
    "hyperparameters.moe.z_coefficient=0",
)  # nothing depends on a rank's own samples
ROUTED_ALIKE = (
    "hyperparameters.moe.gate_noise=0",
    "hyperparameters.moe.dispatch=dropless",
    "hyperparameters.moe.capacity_factor=null",
)  # nor on how many samples a rank has
BOTH_ON_EIGHT = ("data=2,expert=2,tensor=2", "data=1,expert=4,tensor=2", "data=1,shard=2,expert=2,tensor=2")
NOTHING: tuple[str, ...] = ()
BATCH = ("global_batch_size=16",)
HEADER = (
    f"{'workload':<14} {'plan':<13} {'ranks':>5}  {'mesh':<30} {'loss':>8} {'gradient':>8} {'weight':>8} {'metric':>8}  planned  "
    + "".join(f"{name:>22}" for name in EXCHANGES)
    + "  began       load  with"
)


@dataclass(frozen=True)
class Case:
    """A plan on one mesh. ``same``: against a data-parallel run of as many ranks, else one rank. ``eps``: the optimizer's."""

    workload: str
    plan: str
    ranks: int
    mesh: str
    settings: tuple[str, ...]
    data: bool = True
    same: bool = False
    eps: float | None = None

    @property
    def begin(self) -> str:
        """What its row begins with."""
        return f"{self.workload:<14} {self.plan:<13} {self.ranks:>5}  {self.mesh:<30}"

    def command(self, data: Path) -> list[str]:
        """The command of benchmarks/plans.py."""
        given = ["--plan", self.plan, "--ranks", str(self.ranks), "--mesh", self.mesh, "--steps", "20"]
        given += ["--data", str(data / f"{self.workload}-smoke")] if self.data else []
        given += ["--reference", "same"] if self.same else []
        given += ["--eps", str(self.eps)] if self.eps is not None else []
        given += [part for setting in self.settings for part in ("--set", setting)]
        return [sys.executable, str(Path(__file__).with_name("plans.py")), self.workload, *given]


def cases() -> Iterator[Case]:
    """All of them."""
    spatial = {
        "cosmoflow": ("2x1x1", "2x2x1", "2x2x2"),
        "deepcam": ("2x1", "2x2", "4x2"),
    }
    for name, small in (("cosmoflow", SMALL_COSMOFLOW), ("deepcam", SMALL_DEEPCAM)):
        for parts in spatial[name]:
            ranks = ranks_of(f"spatial={parts}", rest=1)
            more = ("hyperparameters.height=64",) if parts == "4x2" else NOTHING  # a part of every layer for each rank
            yield Case(name, "spatial", ranks, f"data=1,spatial={parts}", small + more, data=False)
        for n in (2, 4, 8):
            more = ("hyperparameters.optimizer=LAMB",) if name == "deepcam" else NOTHING
            yield Case(name, "sharded", n, f"data=1,shard={n}", small + more, data=False, same=name == "deepcam")
    for name in ("open_catalyst", "moe_lm", "swinv2_moe", "openfold"):
        for n in (2, 4, 8):
            batch = ("global_batch_size=8",) if name == "openfold" else BATCH
            eps = 1e-3 if name == "swinv2_moe" else None
            yield Case(name, "sharded", n, f"data=1,shard={n}", batch, same=True, eps=eps)
    for n in (2, 4, 8):
        heads = ("hyperparameters.heads=8",) if n == 8 else NOTHING
        yield Case("moe_lm", "tensor", n, f"data=1,tensor={n}", heads)
        yield Case("moe_lm", "tensor_dense", n, f"data=1,tensor={n}", (*heads, "hyperparameters.dense=true"))
        yield Case("moe_lm", "experts", n, f"data=1,expert={n}", BATCH, same=True)
    for n in (4, 8):
        yield Case("moe_lm", "experts", n, f"data={n // 2},expert=2", (*BATCH, *ALIKE))
        yield Case("moe_lm", "experts", n, f"data={n // 4},shard=2,expert=2", BATCH, same=True)
        yield Case("swinv2_moe", "experts", n, f"data={n // 4},shard=2,expert=2", BATCH, same=True, eps=1e-3)
    for n, meshes in {4: ("data=1,expert=2,tensor=2",), 8: BOTH_ON_EIGHT}.items():
        for mesh in meshes:
            yield Case("moe_lm", "tensor", n, mesh, (*BATCH, *ALIKE))
            yield Case("swinv2_moe", "tensor", n, mesh, (*BATCH, *ALIKE, *ROUTED_ALIKE), eps=1e-3)
    every = ("hyperparameters.moe_every=1",)
    yield Case("moe_lm", "tensor_experts", 2, "data=1,tensor=2", (*BATCH, *every))
    yield Case("moe_lm", "tensor_experts", 4, "data=1,expert=2,tensor=2", (*BATCH, *ALIKE, *every))
    yield Case("moe_lm", "tensor_experts", 8, "data=2,expert=2,tensor=2", (*BATCH, *ALIKE, *every))
    wide = {
        2: NOTHING,
        4: ("hyperparameters.heads=[4,8]",),
        8: ("hyperparameters.embed=32", "hyperparameters.heads=[8,16]"),
    }
    for n in (2, 4, 8):
        yield Case("swinv2_moe", "tensor", n, f"data=1,tensor={n}", wide[n], eps=1e-3)
        yield Case("swinv2_moe", "experts", n, f"data={n // 2},expert=2", BATCH, same=True, eps=1e-3)
    for n in (2, 4, 8):
        rows = ("hyperparameters.max_msa_clusters=9",) if n == 8 else NOTHING
        yield Case("openfold", "axial", n, f"data=1,axial={n}", rows)


def row(case: Case, data: Path) -> tuple[str, bool]:
    """Run a case: its row, and whether it is within the limit and as planned."""
    began, load = datetime.now(UTC), os.getloadavg()[0]
    done = subprocess.run(
        case.command(data), capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    given = " ".join(setting.removeprefix("hyperparameters.") for setting in case.settings)
    against = ("as many ranks" if case.same else "one rank") + (f", eps={case.eps:g}" if case.eps is not None else "")
    if not found:
        return f"{case.begin} ended with {done.returncode}: {(done.stderr.splitlines() or ['no message'])[-1]}", False
    said = json.loads(found[-1])
    numbers = [said[name] for name in ("loss", "gradient", "weight", "metric")]
    sent = "".join(f"{_sent(said, name):>22}" for name in EXCHANGES)
    planned = said["planned_is_counted"]
    text = f"{case.begin} {' '.join(f'{number:8.1e}' for number in numbers)}  {'equal' if planned else 'NO':<7}  {sent}"
    return f"{text}  {began:%d %H:%M} {load:6.1f}  against {against}; {given}", planned and numbers[0] <= LIMIT


def _sent(said: dict[str, dict[str, float]], name: str) -> str:
    calls, given = (said["counted"].get(f"{name}_{what}", 0) for what in ("calls", "bytes"))
    return f"{calls:.0f} x {given:,.0f} B" if calls else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not in the table yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD")
    parser.add_argument("--plan", action="append", default=[], metavar="PLAN")
    args = parser.parse_args(arguments)
    there = args.output.read_text() if args.output.is_file() else ""
    chosen = (case for case in cases() if not args.only or case.workload in args.only)
    wanted = [case for case in chosen if not args.plan or case.plan in args.plan]
    for name in sorted({case.workload for case in wanted if case.data}):
        if not (args.data / f"{name}-smoke").exists():
            command = [sys.executable, "-m", "mlhpc", "data", "generate", name, "--size", "smoke", "-o"]
            subprocess.run([*command, str(args.data / f"{name}-smoke")], check=True)
    good = True
    with args.output.open("a") as table:
        if not there:
            print(HEADER, file=table, flush=True)
        for case in (case for case in wanted if case.begin not in there):
            text, within = row(case, args.data)
            good = good and within
            print(text, file=table, flush=True)
            print(text, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
