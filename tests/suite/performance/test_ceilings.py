"""Ceilings: memory levels found in sweeps, bytes of collectives, storage that is really cold, a file never overwritten."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlhpc.suite.commands.machine.ceilings import ceilings
from mlhpc.suite.machine.probes.allowance import read_usable_resources
from mlhpc.suite.machine.probes.processor import CpuCache, list_data_caches
from mlhpc.suite.performance.ceilings import memory, sizes, storage
from mlhpc.suite.performance.ceilings.collectives import compute_bus_share, list_group_sizes
from mlhpc.suite.performance.ceilings.memory import CPU_KERNELS, Kernel
from mlhpc.suite.performance.ceilings.samples import QUICK, Effort, Samples, TimeLimit, measure_on_all_ranks
from mlhpc.suite.performance.ceilings.sizes import (
    PAGE,
    SHORTEST_SWEEP,
    SKEW,
    CacheShare,
    SweepPlan,
    compute_visiting_order,
    find_free_bytes,
    find_plateaus,
    list_sweep_sizes,
    make_level_names,
    may_allocate,
    merge_memory_plateaus,
    plan_sweep,
)
from mlhpc.suite.performance.ceilings_file import (
    Ceiling,
    Findings,
    NotMeasured,
    refuse_existing,
    render_json,
    write,
)
from mlhpc.suite.world import World
from tests.fixtures.warm import warm_python
from tests.fixtures.zoo import Machine, every_machine

KIB, MIB = 1024, 1024 * 1024
TINY = Effort(2, 1e-4, 0.5, 0.5, 0.0, 1, 1 << 16, 1 << 20)
ROOT = Path(__file__).resolve().parents[3]

# GB/s of the read kernel on one core of an EPYC (Zen 5; 48 KiB L1d, 1 MiB L2, 32 MiB L3), best of 11, in KiB
ZEN5 = {
    **{8: 217, 12: 222, 16: 229, 24: 231, 32: 234, 40: 233, 48: 229, 52: 187, 56: 186, 64: 179, 80: 184, 96: 185},
    **{128: 185, 192: 189, 256: 190, 384: 189, 512: 228, 768: 169, 1024: 138, 1536: 115, 2048: 106, 4096: 97},
    **{8192: 93, 16384: 113, 32768: 58, 65536: 43, 131072: 41},
}
ZEN5_CACHES = [CacheShare("L1", 48 * KIB), CacheShare("L2", 1024 * KIB), CacheShare("L3", 32768 * KIB)]


def test_the_levels_of_a_measured_sweep_are_the_caches_of_the_machine() -> None:
    sizes = [kib * KIB for kib in ZEN5]
    found = find_plateaus(sizes, list(ZEN5.values()))
    assert make_level_names(found, sizes[-1], ZEN5_CACHES) == ["L1", "L2", "L3", "dram"]
    for plateau, cache in zip(found, ZEN5_CACHES, strict=False):
        assert plateau.capacity is not None
        assert 0.5 <= plateau.capacity / cache.share_bytes <= 2


@pytest.mark.parametrize("seed", range(20))
def test_levels_are_found_through_noise(seed: int) -> None:
    import random

    draw = random.Random(seed)
    sizes = list_sweep_sizes(8 * KIB, 64 << 20, 3, 4096)
    truth = [(48 * KIB, 240.0), (1 << 20, 150.0), (16 << 20, 80.0), (1 << 40, 20.0)]
    rates = [next(rate for limit, rate in truth if size <= limit) * draw.uniform(0.97, 1.0) for size in sizes]
    found = find_plateaus(sizes, rates)
    assert len(found) == 4
    for plateau, (limit, _) in zip(found, truth[:-1], strict=False):
        assert plateau.capacity is not None
        assert 0.7 <= plateau.capacity / limit <= 1.0


def test_a_flat_sweep_has_one_level_and_slow_starts_are_no_level() -> None:
    sizes = list_sweep_sizes(8 * KIB, 1 << 20, 3, 4096)
    assert [p.capacity for p in find_plateaus(sizes, [100.0] * len(sizes))] == [None]
    ramp = [100 * size / (size + 8 * KIB) for size in sizes]  # a fixed cost per pass
    assert len(find_plateaus(sizes, ramp)) == 1


def test_the_last_plateau_is_main_memory_only_well_past_every_cache() -> None:
    sizes = list_sweep_sizes(8 * KIB, 1 << 20, 3, 4096)
    found = find_plateaus(sizes, [100.0] * len(sizes))
    assert make_level_names(found, sizes[-1], [CacheShare("L1", 48 * KIB)]) == ["dram"]
    assert make_level_names(found, sizes[-1], [CacheShare("L2", 512 * KIB)]) == ["level_1"]


def test_main_memory_is_one_level_however_uneven() -> None:
    sizes = list_sweep_sizes(8 * KIB, 64 << 20, 3, 4096)
    rates = [100.0 if size <= 1 << 20 else 20.0 if size < 16 << 20 else 14.0 for size in sizes]
    found = find_plateaus(sizes, rates)
    assert len(found) == 3
    merged = merge_memory_plateaus(found, [CacheShare("L2", 1 << 20)])
    assert make_level_names(merged, sizes[-1], [CacheShare("L2", 1 << 20)]) == ["L2", "dram"]
    assert merged[-1].last == len(sizes) - 1


def test_plateaus_refuse_what_is_no_sweep() -> None:
    with pytest.raises(ValueError, match="positive rate"):
        find_plateaus([1, 2], [1.0, 0.0])


@given(
    largest=st.integers(8 * KIB, 1 << 40) | st.sampled_from([150 * 8 * MIB, 12 * MIB, int(27.5 * MIB), 105 * MIB]),
    per_octave=st.integers(1, 8),
    multiple=st.sampled_from([64, 4096, 8192]),
)
def test_a_sweep_ends_at_its_largest_size_and_never_beyond(largest: int, per_octave: int, multiple: int) -> None:
    """Cache sizes that are no power of two (Xeon 8480+: 105 MiB) once gave a last size above the buffer."""
    sizes = list_sweep_sizes(8 * KIB, largest, per_octave, multiple)
    assert sizes[0] == 8 * KIB
    assert sizes[-1] == largest // multiple * multiple
    assert all(size % multiple == 0 for size in sizes)
    assert all(later / earlier <= 2 ** (1 / per_octave) + 2 * multiple / earlier for earlier, later in pairwise(sizes))


def test_a_sweep_between_sizes_that_make_no_range_is_refused() -> None:
    with pytest.raises(ValueError, match="smallest <= largest, got smallest 8192 and largest 4096"):
        list_sweep_sizes(8 * KIB, 4096, 3, 4096)


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_refuses_a_buffer_that_would_cut_its_working_set(kernel: Kernel) -> None:
    size = 6 * MIB + 4096
    call, moved = kernel.prepare(np.ones(size + SKEW, np.uint8), size, 3)
    call()
    assert moved > 0
    with pytest.raises(AssertionError, match="working set of"):
        kernel.prepare(np.ones(size // 2, np.uint8), size, 3)


@pytest.mark.parametrize("l3_kib", [300 * KIB, 105 * KIB, 27 * KIB + 512])
def test_every_cache_size_of_a_processor_can_be_swept(l3_kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine with 300 MiB of L3 cache on which the read kernel once met a buffer smaller than its last set."""
    monkeypatch.setattr(sizes, "SWEEP_END_FACTOR", 1 / 64)  # the whole path, with sets that a test can afford
    monkeypatch.setattr(sizes, "MIN_SWEEP_END", SHORTEST_SWEEP)
    caches = [CpuCache(3, "unified", l3_kib, "0")]
    sweep_plan = plan_sweep(caches, frozenset({0}), 1, 1, 8 << 30, TINY.points_per_octave)
    assert isinstance(sweep_plan, SweepPlan)
    found = memory.measure_cpu(World.create(), TINY, sweep_plan, TimeLimit(World.create(), None))
    assert max(point.x for curve in found.curves for point in curve.points) == (l3_kib << 10) // 64 // PAGE * PAGE


CACHES = st.lists(
    st.builds(
        CpuCache,
        level=st.integers(1, 4),
        kind=st.sampled_from(["data", "unified"]),
        size_kib=st.integers(1, 2 << 20),
        shared_cpu_list=st.builds(
            lambda first, more: f"{first}-{first + more}", st.integers(0, 300), st.integers(0, 300)
        ),
    ),
    max_size=4,
)


@given(
    caches=CACHES,
    cpus=st.frozensets(st.integers(0, 511), min_size=1),
    threads=st.integers(1, 512),
    ranks=st.integers(1, 64),
    free=st.integers(0, 1 << 42),
)
def test_a_plan_never_takes_more_than_a_quarter_of_the_free_memory(
    caches: list[CpuCache], cpus: frozenset[int], threads: int, ranks: int, free: int
) -> None:
    found = plan_sweep(caches, cpus, threads, ranks, free, 3)
    if isinstance(found, str):
        assert free // 4 // (threads * ranks) < SHORTEST_SWEEP + SKEW + PAGE + PAGE, "a sweep would have fitted"
        assert "of memory that are free: too little for a sweep" in found
        return
    assert found.total_bytes <= free / 4
    assert SHORTEST_SWEEP <= found.sizes[-1] <= found.buffer_bytes - SKEW
    assert all(0 <= share.share_bytes <= cache.size_bytes for share, cache in zip(found.shares, caches, strict=True))
    wanted = max((5 * share.share_bytes for share in found.shares), default=64 * MIB)
    assert bool(found.cut) == (found.sizes[-1] < max(wanted, 8 * MIB) // PAGE * PAGE)


def test_memory_that_nobody_knows_is_taken_as_little() -> None:
    assert find_free_bytes([None, 8 << 30]) == 1 << 30
    assert find_free_bytes([5 << 20, 8 << 30]) == 5 << 20
    assert may_allocate(100, 2, 800)
    assert not may_allocate(101, 2, 800)


@given(st.integers(8 * KIB, 1 << 34))
def test_a_sweep_is_visited_from_coarse_to_fine(largest: int) -> None:
    sizes = list_sweep_sizes(8 * KIB, largest, 3, 4096)
    order = compute_visiting_order(sizes)
    assert sorted(order) == sizes
    ladder = order[: order.index(sizes[-1]) + 1]
    assert ladder == sorted(ladder)
    assert all(higher <= 8 * lower for lower, higher in pairwise(ladder))
    assert len(ladder) <= 3 + math.log(largest / 8192, 6)


class ModelledTeam:
    """Threads of a machine that is not here: a pass takes the bytes of all threads by the rate of the level they lie in."""

    def __init__(self, threads: int, size: int, *, machine: Machine, rate: float, start_s: float) -> None:
        self.buffers = [np.empty(0, np.uint8)] * threads
        self._shares = machine.expected["shares_kib"].values()
        self._rate, self._start_s, self._touched = rate, start_s, 0
        self.now = 0.0

    def touch(self, size: int) -> None:
        self.now += max(0, size - self._touched) * len(self.buffers) / self._rate
        self._touched = max(size, self._touched)

    def seconds(self, calls: list[Any]) -> float:
        size, moved = calls[0]
        level = sum(size > share * KIB for share in self._shares)
        factor = 2.0 ** (len(self._shares) - level) * (
            8 if level < len(self._shares) else 1
        )  # caches: 16 to 64 times memory
        took = moved * len(calls) / (self._rate * factor)
        self.now += took + self._start_s * len(calls)
        return took


def levels_of(found: Findings, largest: int) -> list[tuple[int, int]]:
    """The bounds of each level that was found, in bytes per thread: above the first, up to the second."""
    ends = [0, *(roof.capacity_bytes or largest for roof in found.roofs if roof.resource == "memory")]
    return list(pairwise(ends))


@pytest.mark.drawn(12)
@pytest.mark.parametrize("rate", [2e9, 20e9, 500e9], ids=["slow", "usual", "fast"])
@every_machine
def test_a_bounded_sweep_ends_in_time_on_every_machine(
    machine: Machine, rate: float, zoo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On machines whose main memory moves 2 to 500 GB/s, with all their threads, of which each takes 60 µs to start."""
    allowed = read_usable_resources(zoo_root)
    caches = list_data_caches(zoo_root, allowed.cpus)
    made = plan_sweep(
        caches, allowed.cpus, allowed.cores, 1, find_free_bytes([allowed.memory_free]), QUICK.points_per_octave
    )
    assert isinstance(made, SweepPlan)
    team = ModelledTeam(made.threads, made.buffer_bytes, machine=machine, rate=rate, start_s=60e-6)

    def prepare(buffer: object, size: int, passes: int) -> Any:
        return (size, size * passes), float(size * passes)

    kernels = tuple(Kernel(kernel.name, kernel.library, prepare, kernel.smallest) for kernel in CPU_KERNELS)
    monkeypatch.setattr(memory, "CPU_KERNELS", kernels)
    monkeypatch.setattr(memory, "ThreadTeam", lambda threads, size: team)
    said: list[str] = []
    budget = TimeLimit(World.create(), 12.5, said.append, lambda: team.now)
    found = memory.measure_cpu(World.create(), QUICK, made, budget)
    assert team.now <= 1.5 * 12.5, "what was begun is ended; a set is begun if it should fit"
    points = {curve.mode: [point.x for point in curve.points] for curve in found.curves}
    said_late = any("the time was over" in gap.reason for gap in found.not_measured)
    assert said_late or points["read"] == [*made.sizes], "what was left out is said"
    for kernel in kernels[1:]:
        for low, high in levels_of(found, made.sizes[-1]):
            sets = [size for size in points["read"] if low < size <= high and size >= kernel.smallest]
            assert said_late or not sets or set(points.get(kernel.name, ())) & set(sets), (
                f"{kernel.name}: {low} to {high}"
            )
    assert any(roof.name == "dram" for roof in found.roofs) or any(gap.name == "dram" for gap in found.not_measured)
    assert team.now < 5 or said, "progress is shown"


def test_bytes_of_collectives_are_those_a_rank_must_send() -> None:
    assert compute_bus_share("all_reduce", 2) == 1.0
    assert compute_bus_share("all_to_all", 4) == 0.75
    assert (list_group_sizes(2), list_group_sizes(6), list_group_sizes(8)) == ([2], [2, 4, 6], [2, 4, 8])


def test_statistics_of_ranks_name_the_slowest_and_ignore_ranks_that_took_no_part() -> None:
    samples = Samples(((1.0, 2.0, 3.0), (4.0, 4.0, 4.0), (6.0, 8.0, 9.0)))
    assert (samples.value, samples.slowest, samples.best, samples.n) == (4.0, 2.0, 4.0, 3)
    assert math.isclose(samples.spread, 0.5)


def test_storage_is_read_cold_or_said_not_to_be(tmp_path: Path) -> None:
    effort = SimpleNamespace(storage_bytes=8 << 20)
    found = storage.measure_storage(World.create(), effort, tmp_path, 1 << 30, TimeLimit(World.create(), None))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir()), "the file is removed"
    modes = {(roof.resource, roof.mode) for roof in found.roofs}
    assert {("storage_write", "fsync"), ("storage_read", "warm")} <= modes
    assert (("storage_read", "cold") in modes) != any(gap.name == "cold" for gap in found.not_measured)
    assert all(roof.value > 0 and roof.size_bytes == 8 << 20 for roof in found.roofs)


def test_the_page_cache_is_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert storage.measure_resident_share(path) == 1.0


def test_a_directory_that_is_not_there_is_not_measured(tmp_path: Path) -> None:
    found = storage.measure_storage(World.create(), QUICK, tmp_path / "none", 1 << 30, TimeLimit(World.create(), None))
    assert not found.roofs
    assert {gap.resource for gap in found.not_measured} == {"storage_read", "storage_write"}
    assert "is not a directory" in found.not_measured[0].reason


ROOF = Ceiling(
    resource="compute",
    name="gemm",
    mode="burst",
    value=2e11,
    unit="FLOP/s",
    slowest=1.9e11,
    best=2.1e11,
    n=7,
    spread=0.02,
    ranks=2,
    nodes=1,
    library="numpy openblas",
    dtype="float32",
    shape=(8, 8, 8),
)


def test_the_file_has_every_key_and_no_number_that_is_not_json() -> None:
    document = json.loads(render_json({"system": "here"}, Findings([ROOF], [], [NotMeasured("host_link", "cpu")])))
    assert (document["version"], document["kind"], document["system"]) == (1, "ceilings", "here")
    assert document["roofs"][0]["capacity_bytes"] is None
    assert document["roofs"][0]["shape"] == [8, 8, 8]
    with pytest.raises(ValueError, match="JSON"):
        render_json({"value": math.nan}, Findings())


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write(path, "one")
    with pytest.raises(ValueError, match="is not overwritten"):
        refuse_existing(path)
    with pytest.raises(ValueError, match="is not overwritten"):
        write(path, "two")
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    assert path.read_text() == "one"


def test_the_command_refuses_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("")
    for output, words in ((tmp_path / "c.json", "is not overwritten"), (tmp_path / "no" / "c.json", "does not exist")):
        result = CliRunner().invoke(ceilings, ["-o", str(output)])
        assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
        assert words in result.output
        result = CliRunner().invoke(ceilings, ["--ranks", "2", "-o", str(output)])
        assert words in str(result.exception)


def test_repetitions_are_gathered() -> None:
    rates = iter([1.0, 2.0])
    assert measure_on_all_ranks(World.create(), lambda: next(rates), 2).by_rank == ((1.0, 2.0),)


RESOURCES = {"compute", "memory", "host_link", "storage_read", "storage_write", "all_reduce", "all_to_all"}


def resources(document: dict[str, Any]) -> set[str]:
    """Every resource that a ceilings file has a roof for, or the reason why not."""
    return {item["resource"] for item in (*document["roofs"], *document["not_measured"])}


def test_two_ranks_measure_every_resource(tmp_path: Path) -> None:
    """With small sizes: this shows that the steps fit together, not how fast the machine is."""
    path = tmp_path / "ceilings.json"
    worker = [*warm_python(), str(Path(__file__).with_name("ceilings_worker.py")), "--directory", str(tmp_path)]
    command = [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", *worker, "-o", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert resources(document) == RESOURCES
    assert document["ranks"] == 2
    assert all(roof["value"] > 0 for roof in document["roofs"])
    assert f"{path}: {document['device']['name']}, 2 ranks" in done.stdout
    assert re.search(r"  all_reduce (gloo|mpi4py) ", done.stdout)  # whichever this machine chose


def test_the_command_starts_ranks_with_its_own_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    def start(words: list[str], ranks: int) -> int:
        started.extend([*words, ranks])
        return 1

    monkeypatch.setattr("mlhpc.suite.commands.machine.ceilings.start_ranks", start)
    path = str(tmp_path / "c.json")
    arguments = ["--ranks", "3", "--quick", "--directory", str(tmp_path), "--system", "bed", "-o", path]
    assert CliRunner().invoke(ceilings, arguments).exit_code == 1
    *words, ranks = started
    assert ranks == 3
    context = ceilings.make_context("ceilings", [str(word) for word in words[1:]])
    asked = ceilings.make_context("ceilings", ["--quick", "--directory", str(tmp_path), "--system", "bed", "-o", path])
    assert context.params == asked.params


@pytest.mark.long
def test_two_ranks_measure_this_machine_in_time(tmp_path: Path) -> None:
    """Memory levels within a factor of two of what the system says, collectives of two ranks, everything said or excused."""
    path = tmp_path / "c.json"
    command = [sys.executable, "-m", "mlhpc", "ceilings", "--quick", "--ranks", "2", "-o", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert resources(document) == RESOURCES
    assert document["ranks"] == 2
    for roof in document["roofs"]:
        if roof["name"] in {"L1", "L2"}:
            assert 0.5 <= roof["capacity_bytes"] / roof["system_capacity_bytes"] <= 2
