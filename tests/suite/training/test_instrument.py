"""What a rank counts of itself: collectives by kind and bytes, and energy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mlhpc.suite.machine.power.counters import CounterSum, EnergyCounter, EnergyReading, FoundCounters
from mlhpc.suite.training import instrument
from mlhpc.suite.training.instrument import (
    COLLECTIVES,
    CollectiveCounter,
    EnergyReader,
    count_collectives,
    make_counting_transport,
)
from mlhpc.suite.training.step_timing import PhaseTimer
from mlhpc.suite.transport import SingleProcessTransport, decode, encode
from mlhpc.suite.world import World


@pytest.fixture
def group(tmp_path: Path) -> object:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_collectives_are_counted_by_kind_with_the_bytes_given() -> None:
    ledger, x = CollectiveCounter(), torch.zeros(4, 2)
    before = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    with count_collectives(ledger):
        dist.all_reduce(x)
        dist.all_reduce(tensor=x.double())
        dist.all_to_all_single(torch.empty(4, 2), x)
        dist.all_gather([torch.empty(4, 2)], x)
        dist.reduce_scatter(torch.empty(4, 2), [x])
    dist.all_reduce(x)
    assert {name: getattr(dist, name) for name in before} == before
    assert ledger.take() == {
        **{"all_reduce_calls": 2, "all_reduce_bytes": 32 + 64},
        **{"all_to_all_calls": 1, "all_to_all_bytes": 32},
        **{"all_gather_calls": 1, "all_gather_bytes": 32},
        **{"reduce_scatter_calls": 1, "reduce_scatter_bytes": 32},
    }
    assert ledger.take() == {}


@pytest.mark.usefixtures("group")
def test_control_traffic_is_counted_once_whatever_carries_it() -> None:
    class ByTorch(SingleProcessTransport):
        def sum(self, values: np.ndarray) -> np.ndarray:
            dist.all_reduce(torch.from_numpy(values))
            return values

    ledger = CollectiveCounter()
    with count_collectives(ledger):
        make_counting_transport(ByTorch(), ledger).sum(np.zeros(3))
    assert ledger.take() == {"control_calls": 1, "control_bytes": 24}


def test_a_world_whose_traffic_is_counted_is_the_same_world() -> None:
    world, ledger = World.create(None), CollectiveCounter()
    counted = make_counting_transport(world.transport, ledger)
    assert (counted.rank, counted.size) == (0, 1)
    assert counted.allgather(b"abc") == [b"abc"]
    assert counted.broadcast(b"x", 0) == b"x"
    counted.barrier()
    assert ledger.take() == {"control_calls": 3.0, "control_bytes": 4.0}


def test_energy_is_summed_over_nodes_and_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(SingleProcessTransport):
        """A second node with the same counter, which fails there."""

        size = 2

        def allgather(self, data: bytes) -> list[bytes]:
            return [data] * 2

        def gather(self, data: bytes) -> list[bytes]:
            reading = decode(data, EnergyReading)
            return [data, encode(EnergyReading(reading.joules, {"rapl/package-1": "gone"}))]

    readings = iter([0.0, 4.0, 10.0])
    counter = EnergyCounter("rapl/package-0", lambda: next(readings))
    monkeypatch.setattr(
        "mlhpc.suite.training.instrument.find_node_counters",
        lambda root: FoundCounters([counter], {"pm_counters": "no such folder"}),
    )
    reader = EnergyReader(
        World("test", 0, 2, 0, 2, 0, 1, ("a", "b"), Two(), SingleProcessTransport()), torch.device("cpu")
    )
    reader.restart()
    used = reader.take()
    assert used.by_counter == {"rapl/package-0": CounterSum(joules=12.0, counters=2)}
    assert list(used.metadata()["scopes"]) == ["rapl"]
    assert used.metadata()["absent"] == {
        "pm_counters": "no such folder",
        "nvml": "the ranks use no GPU",
        "rapl/package-1 of rank 1": "gone",
    }


class Reducer:
    """What `ReducerTimes` reads of DDP: times on the wall clock, ns."""

    def __init__(self, computed: int, begin: int, end: int) -> None:
        self.ints_map = dict(zip(instrument.DDP_TIMES, (computed, begin, end), strict=True))
        self.ints_map |= {"total_parameter_size_bytes": 8, "num_buckets_reduced": 1}
        self.logger = self

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        pass

    def set_runtime_stats_and_log(self) -> None:
        pass

    def _get_ddp_logging_data(self) -> Reducer:
        return self


def exchange_phases(moments: Sequence[float], wall_s: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Phases of a step that computed until 109 s of the wall clock. ``moments``: what the monotonic clock shows, in turn."""
    shown = iter(moments)
    times = SimpleNamespace(perf_counter=lambda: next(shown), time_ns=lambda: wall_s * 10**9)
    monkeypatch.setattr(instrument, "time", times)
    timer = PhaseTimer(SimpleNamespace(stamp=times.perf_counter, seconds=lambda begin, end: end - begin))
    instrument.ReducerTimes(Reducer(109 * 10**9, 106 * 10**9, 110 * 10**9), timer, CollectiveCounter()).mark()
    return timer.flush()


def test_a_process_suspended_between_two_clocks_does_not_make_a_phase_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = exchange_phases([1.0, 10.0, 19.0, 19.0, 19.00001], 119, monkeypatch)
    assert phases["forward_backward"] == pytest.approx(8, abs=1e-4)  # from 1 s to 9 s
    assert phases["exposed_communication"] == pytest.approx(10, abs=1e-4)
    assert phases["overlapped_communication"] == pytest.approx(3, abs=1e-4)


@pytest.mark.parametrize("set_by_s", [-3600, -5, 5, 3600])
def test_a_wall_clock_that_is_set_in_a_step_does_not_make_a_phase_negative(
    set_by_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = exchange_phases([1.0, 11.0, 11.0], 111 + set_by_s, monkeypatch)
    assert phases["forward_backward"] >= 0
    assert phases["exposed_communication"] >= 0
    assert phases["forward_backward"] + phases["exposed_communication"] == pytest.approx(10)
    assert 0 <= phases["overlapped_communication"] <= phases["forward_backward"]
