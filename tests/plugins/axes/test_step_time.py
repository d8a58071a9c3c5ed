"""Predicted times: closed forms, the interval around them, what bounds a step, and files that are damaged."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mlhpc.plugins.axes.predict import Cost, Exchange
from mlhpc.plugins.axes.step_time import Estimate, Machine, make_uniform_network, predict_time, read_machine
from mlhpc.suite.errors import InputError
from mlhpc.suite.performance.cost_model import Network, predict_all_reduce
from tests.fixtures.sweeps import MACHINE as SWEPT

LINKS = make_uniform_network(1e9, 1e-6)
MACHINE = Machine(Estimate(1e12, 2e12, 4e12), LINKS, memory=Estimate(1e11, 1e11, 1e11), storage=Estimate(1e9, 1e9, 1e9))
COST = Cost(
    plan="spatial",
    mesh="data=2,spatial=2", ranks=4, samples=1, parameters=0, gradients=0, gathered=0, optimizer=0, activations=0, peak=0,
    inputs=0, ahead=0, reads=10**6, flops=4e9, traffic=1e8, exchanges=(),
)  # fmt: skip


def with_exchange(kind: str, ranks: int, calls: int, given: int) -> Cost:
    return replace(COST, exchanges=(Exchange("d", kind, ranks, calls, given),))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_to_all", 2 * (1e-6 + 1e6 / 1e9)),  # neighbours, at once
        ("all_gather", 2 * 3 * (1e-6 + 1e6 / 1e9)),  # a rank passes on what each of the three others gave
        ("reduce_scatter", 2 * 3 * (1e-6 + 0.25e6 / 1e9)),  # what is given has a part for each rank
        ("all_reduce", 2 * 2 * 3 * (1e-6 + 0.25e6 / 1e9)),
    ],
)
def test_exchanges_take_what_their_closed_forms_say(kind: str, expected: float) -> None:
    assert predict_time(MACHINE, with_exchange(kind, 4, 2, 2 * 10**6)).exchange_s == pytest.approx(expected)


def test_ranks_of_one_node_exchange_inside_it() -> None:
    links = replace(LINKS, ranks_per_node=4, intra_bandwidth=1e11, intra_latency_s=0.0)
    for kind in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
        inside = predict_time(replace(MACHINE, network=links), with_exchange(kind, 4, 1, 10**6)).exchange_s
        across = predict_time(replace(MACHINE, network=links), with_exchange(kind, 5, 1, 10**6)).exchange_s
        assert inside < across / 20


def test_the_interval_goes_from_all_at_once_at_best_to_one_after_another_at_worst() -> None:
    time = predict_time(replace(MACHINE, network_factor=1.5), with_exchange("all_to_all", 2, 1, 10**6))
    assert time.total_s == pytest.approx(2e-3 + 1.001e-3)
    assert time.low_s == pytest.approx(max(1e-3, 1.001e-3 / 1.5, 1e-3))
    assert time.high_s == pytest.approx(4e-3 + 1e-3 + 1.5 * 1.001e-3 + 1e-3)
    assert time.low_s < time.total_s < time.high_s


def test_rings_are_as_far_off_as_all_reduces_were_where_those_were_measured() -> None:
    both = replace(
        COST, exchanges=(Exchange("d", "all_to_all", 2, 1, 10**6), Exchange("gradients", "all_reduce", 2, 1, 10**6))
    )
    ring = 2 * (1e-6 + 0.5e-3)
    known = predict_time(replace(MACHINE, network_factor=1.5, ring_factor=10.0), both)
    alike = predict_time(replace(MACHINE, network_factor=1.5), both)
    assert known.total_s == alike.total_s
    assert known.high_s is not None
    assert alike.high_s is not None
    assert known.high_s - alike.high_s == pytest.approx(ring * 8.5)
    slow = replace(both, flops=0.0, traffic=0.0, reads=0)
    assert predict_time(replace(MACHINE, network_factor=1.5, ring_factor=10.0), slow).low_s == pytest.approx(
        1.001e-3 / 1.5 + ring / 10
    )


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"flops": 1e13}, "computing"),
        ({"traffic": 1e10}, "memory"),
        ({"reads": 10**9}, "reading"),
        ({"exchanges": (Exchange("d", "all_to_all", 2, 1, 10**9),)}, "exchange"),
        ({"exchanges": (Exchange("gradients", "all_reduce", 4, 1, 10**9),)}, "gradients"),
    ],
)
def test_what_takes_longest_bounds_the_step(change: dict[str, Any], bound: str) -> None:
    time = predict_time(MACHINE, replace(COST, **change))
    assert time.bound == bound
    assert f"bound by {bound}" in time.text()


def test_an_upper_end_that_is_not_known_is_told_with_the_reason() -> None:
    exchange = with_exchange("all_reduce", 64, 1, 10**6)
    roof = predict_time(replace(MACHINE, is_reached=False), exchange)
    far = predict_time(replace(MACHINE, measured_ranks=3), exchange)
    near = predict_time(replace(MACHINE, measured_ranks=4), exchange)
    alone = predict_time(replace(MACHINE, measured_ranks=3), COST)
    assert roof.high_s is far.high_s is None
    assert "what part of the compute roof" in roof.text()
    assert "not less than" in far.text()
    assert "the network was measured on at most 3 ranks" in far.text()
    assert near.high_s is not None
    assert alone.high_s is not None  # nothing is sent


def roof(resource: str, value: float, **more: Any) -> dict[str, Any]:
    rates = {"value": value, "slowest": value * 0.8, "best": value * 1.1}
    return {"resource": resource, "name": "x", "mode": "sustained", "unit": "FLOP/s", "n": 3, **rates, **more}


CEILINGS = {
    "version": 1, "kind": "ceilings", "system": "here", "date": "2026-11-23", "ranks": 2, "nodes": 1,
    "device": {"type": "cpu", "name": "x"},
    "roofs": [
        roof("compute", 2e12, dtype="float32"), roof("compute", 3e12, dtype="float32", mode="burst"),
        roof("compute", 9e12, dtype="bfloat16"), roof("memory", 1e11), roof("memory", 9e11, capacity_bytes=4096),
        roof("storage_read", 1e9, mode="cold"), roof("storage_read", 5e9, mode="warm"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    """What is read of the output of `mlhpc moe fit`; tests/plugins/network reads the output itself."""
    links = asdict(SWEPT) | {"rendezvous_from": None}
    errors = [{"of": "fitted", "algorithm": "linear", "median": 0.01, "largest": 0.04, "n": 48}]
    return {"version": 1, "fits": [{"sweep": "machine", "ranks": 16, "network": links, "errors": errors}]}


def files(folder: Path, fitted: Any, *, ceilings: Any = CEILINGS) -> tuple[Path, Path]:
    (folder / "ceilings.json").write_text(json.dumps(ceilings))
    (folder / "network.json").write_text(json.dumps(fitted))
    return folder / "ceilings.json", folder / "network.json"


def test_a_machine_is_read_from_its_ceilings_and_the_fit_of_its_network(fitted: Any, tmp_path: Path) -> None:
    paths = files(tmp_path, fitted)
    machine = read_machine(*paths, "float32", None)
    assert (machine.flops.low, machine.flops.value, machine.flops.high) == pytest.approx((1.6e12, 2e12, 3.3e12))
    assert machine.memory is not None
    assert machine.storage is not None
    assert (machine.memory.value, machine.storage.value) == (1e11, 1e9)  # the last level; from the device
    links = fitted["fits"][0]["network"]
    assert machine.network == Network(**{name: value for name, value in links.items() if value is not None})
    assert machine.measured_ranks == 16  # no upper end beyond: a switch level may begin there
    assert 1 < machine.network_factor < 1.2
    assert not machine.is_reached
    half = read_machine(*paths, "float32", Estimate.of(0.25, 0.5))
    assert (half.flops.low, half.flops.high) == pytest.approx((0.4e12, 1.65e12))
    assert half.is_reached


def test_measured_all_reduces_say_how_far_off_rings_are(fitted: Any, tmp_path: Path) -> None:
    links = {name: value for name, value in fitted["fits"][0]["network"].items() if value is not None}
    network = Network(**links)

    def factor(resource: str, ranks: int, nodes: int, times: float) -> float | None:
        points = [
            {"x": x, "value": 1e9, "seconds": times * predict_all_reduce(network, ranks, x).total_s}
            for x in (4096, 1 << 20)
        ]
        curve = {"resource": resource, "name": "x", "ranks": ranks, "nodes": nodes, "points": points}
        paths = files(tmp_path, fitted, ceilings=CEILINGS | {"curves": [curve]})
        return read_machine(*paths, "float32", None).ring_factor

    per_node = network.ranks_per_node
    assert factor("all_reduce", 4 * per_node, 4, 3.0) == pytest.approx(3)
    assert factor("all_reduce", 4 * per_node, 4, 0.25) == pytest.approx(4)
    assert factor("all_to_all", 4 * per_node, 4, 3.0) is None
    assert factor("all_reduce", 2 * per_node, 1, 3.0) is None  # one node of more ranks than the fit's has no such links
    if per_node > 1:
        assert factor("all_reduce", per_node, 1, 3.0) == pytest.approx(3)
        assert factor("all_reduce", per_node, 2, 3.0) is None


@pytest.mark.parametrize(
    ("ceilings", "network", "reason"),
    [
        ([], None, "expected ceilings of version 1"),
        (CEILINGS | {"version": 2}, None, "expected ceilings of version 1, found 2"),
        (CEILINGS | {"kind": "counters"}, None, "kind"),
        (CEILINGS | {"roofs": [roof("compute", 1e12, dtype="float64")]}, None, "no compute roof in float32, only in float64"),
        (CEILINGS | {"roofs": []}, None, "only in none"),
        (CEILINGS | {"roofs": [roof("compute", -1.0, dtype="float32")]}, None, "roofs.0.value"),
        (CEILINGS, lambda f: f | {"version": 3}, "expected output of mlhpc moe fit"),
        (CEILINGS, lambda f: f | {"fits": []}, "fits"),
        (CEILINGS, lambda f: f | {"fits": f["fits"] * 2}, "fits"),
        (CEILINGS, lambda f: {"version": 1, "fits": [f["fits"][0] | {"network": {"speed": 1}}]}, "fit the sweep again"),
        (CEILINGS, lambda f: {"version": 1, "fits": [f["fits"][0] | {"errors": []}]}, "fits.0.errors"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_in_one_line(
    ceilings: Any, network: Any, reason: str, fitted: Any, tmp_path: Path
) -> None:
    paths = files(tmp_path, fitted if network is None else network(fitted), ceilings=ceilings)
    with pytest.raises(InputError, match=reason) as told:
        read_machine(*paths, "float32", None)
    assert "\n" not in str(told.value)
