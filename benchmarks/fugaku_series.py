"""The published Fugaku series of CosmoFlow v0.7 beside `mlhpc plan`: 512 nodes, and hybrid runs on 8,192 and 16,384.

    python benchmarks/fugaku_series.py > benchmarks/results/DATE-fugaku_series.txt

Bytes, collectives and memory are those of `mlhpc plan` at size full; FLOPs and traffic are v0.7's (convolutions of 2^3, not 3^3),
from analysis/roofline/published.yaml, divided over the ranks of a sample; rates are the vendor's in that file. Nothing was measured
here. The latency of a message is not in the packages: a span is taken. No step reaches the roof of its processor, so the part that
is reached is also a span: from what the run on 512 nodes reached, by its own step, to all of it.

The gain of a step is that of samples per second between two runs. Its interval is over all corners of the spans, the same in both
runs, gradients and halos hidden behind computing or not. Times published: analysis' table of the first round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product

from mlhpc.analysis.roofline.bounds import read_roofs
from mlhpc.plugins.axes.predict import GRADIENTS, Cost, predict_largest_cost
from mlhpc.plugins.axes.step_time import Estimate, Machine, make_uniform_network, predict_time
from mlhpc.suite.config import load_config
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.training.parallel.parallel_dims import Parallel

LATENCY_S = (0.5e-6, 5e-6)  # a put of TofuD by its designers; an MPI message of the same link with its software


@dataclass(frozen=True)
class Published:
    """One submission: nodes, batch, mesh, and training samples/s of a node (reference outputs of the first round)."""

    nodes: int
    batch: int
    mesh: str
    per_node: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, evaluation left out."""
        return self.batch / self.nodes / self.per_node


SERIES = (
    Published(512, 512, "data=512,spatial=1x1x1", 4.014),
    Published(8192, 512, "data=512,spatial=4x4x1", 0.658),  # depth x rows, 16 nodes a sample
    Published(16384, 4096, "data=4096,spatial=2x2x1", 1.991),  # 4 nodes a sample; how they were split is not published
)


def cost_of(run: Published) -> Cost:
    """What a rank does under the plan, with v0.7's FLOPs, traffic and gradients."""
    chosen, work = load_descriptor("cosmoflow"), read_roofs().work["cosmoflow v0.7"]
    settings = [f"global_batch_size={run.batch}", "precision=float32", "plan=spatial", f"mesh={run.mesh}"]
    config = load_config(chosen, "full", settings)
    found = predict_largest_cost(chosen, config, Parallel.of(config, chosen, 0, run.nodes))
    share = run.batch / run.nodes
    exchanges = tuple(
        replace(each, bytes=work.parameters * 4) if each.axis == GRADIENTS else each for each in found.exchanges
    )
    return replace(found, flops=work.flops * share, traffic=work.bytes[4] * share, exchanges=exchanges)


def machines(reached: float) -> Iterator[tuple[str, Machine]]:
    """The corners: latency, and part of the compute roof."""
    file = read_roofs()
    device, network = file.devices["A64FX"], next(each.network for each in file.machines if each.machine == "Fugaku")
    assert network is not None
    for latency_s, part in product(LATENCY_S, (reached, 1.0)):
        rate, memory = device.compute.per_s * part, device.memory.per_s * part
        links = make_uniform_network(network.per_s, latency_s)
        name = f"latency {latency_s * 1e6:g} us, {part:.1%} of the roofs"
        yield name, Machine(Estimate(rate, rate, rate), links, memory=Estimate(memory, memory, memory))


def main() -> None:
    """Print the table and the gains."""
    print(
        f"{datetime.now(UTC):%Y-%m-%d}; modelled, nothing measured here; published steps: training samples/s of the first round\n"
    )
    costs = [cost_of(run) for run in SERIES]
    roofs = dict(machines(1.0))
    alone = predict_time(next(iter(roofs.values())), costs[0])
    reached = max(alone.compute_s, alone.memory_s or 0.0) / SERIES[0].step_s
    print(f"{'nodes':>6} {'batch':>6} {'mesh':<26} {'halos':>12} {'gradients':>12} {'published step':>15}")
    for run, cost in zip(SERIES, costs, strict=True):
        halos = sum(each.bytes for each in cost.exchanges if each.axis != GRADIENTS)
        given = sum(each.bytes for each in cost.exchanges if each.axis == GRADIENTS)
        print(f"{run.nodes:>6} {run.batch:>6} {cost.mesh:<26} {halos:>12,} {given:>12,} {run.step_s * 1e3:>12.1f} ms")
    print(f"\n512 nodes reach {reached:.2%} of the roofs, by their step.\n")
    gains: dict[tuple[int, int], list[float]] = {}
    for name, machine in machines(reached):
        times = [predict_time(machine, cost) for cost in costs]
        for run, time in zip(SERIES, times, strict=True):
            print(f"{name:<42} {run.nodes:>6} nodes: {time.text()}")
        for hidden in (False, True):
            steps = [time.low_s if hidden else time.total_s for time in times]
            rates = [run.batch / step for run, step in zip(SERIES, steps, strict=True)]
            for a, b in ((0, 1), (1, 2), (0, 2)):
                gains.setdefault((a, b), []).append(rates[b] / rates[a])
    print(f"\n{'gain of samples/s':<20} {'published':>10} {'predicted':>26} {'inside':>7} {'sign':>30}")
    for (a, b), found in gains.items():
        rates = [SERIES[i].batch / SERIES[i].step_s for i in (a, b)]
        seen, low, high = rates[1] / rates[0], min(found), max(found)
        sign = "more, in all cases" if low > 1 else f"more in {sum(gain > 1 for gain in found)} of {len(found)} cases"
        kept = found[0]  # what 512 nodes reached, shortest latency, nothing hidden
        print(
            f"{SERIES[a].nodes:>6} -> {SERIES[b].nodes:<10} {seen:>10.2f} {kept:>8.2f} ({low:>6.2f} to {high:>6.2f}) "
            f"{'yes' if low <= seen <= high else 'no':>7} {sign:>30}"
        )


if __name__ == "__main__":
    main()
