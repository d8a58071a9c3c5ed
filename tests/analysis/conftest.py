"""Small logs and package trees for the tests of analysis, written event by event as the rules have them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlhpc.suite.card import Card, OfficialRules, SizeCard, read_reference_courses
from mlhpc.suite.descriptor import load_descriptor

START_MS = 1_700_000_000_000


@dataclass
class LogText:
    """A log under construction; times are seconds after START_MS."""

    lines: list[str] = field(default_factory=list)

    def event(self, at_s: float, key: str, value: Any = None, **metadata: Any) -> None:
        record = {
            "namespace": "",
            "time_ms": START_MS + round(at_s * 1000),
            "event_type": "POINT_IN_TIME",
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        self.lines.append(f":::MLLOG {json.dumps(record)}\n")

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(self.lines), encoding="utf-8")
        return path


def log_text(
    *,
    errors: tuple[float, ...] = (0.5, 0.3, 0.1),
    benchmark: str = "cosmoflow",
    size: str | None = None,
    train_s: float = 10.0,
    eval_s: float = 2.0,
    gap_s: float = 1.0,
    staging: tuple[float, float] | None = (0.0, 5.0),
    start_s: float = 0.0,
    seed: int = 1,
    ranks: int = 4,
    first_epoch: int = 1,
    stop: bool = True,
    status: str = "success",
    ours: bool = False,
    platform: str = "testbed",
    phases: bool = False,
    extra: tuple[tuple[str, Any], ...] = (),
    others: float | None = None,
    first_extra_s: float = 0.0,
) -> LogText:
    """One run: staging (seconds from run_start), then per error one epoch of train_s, an evaluation and a gap.

    The first epoch takes ``first_extra_s`` longer.

    ``others``: the share of two CPUs that other work took.
    """
    log = LogText()
    log.event(start_s - 30, "init_start")
    for key, value in (
        ("submission_benchmark", benchmark),
        ("submission_org", "testers"),
        ("submission_division", "closed"),
        ("submission_status", "onprem"),
        ("submission_platform", platform),
        ("seed", seed),
        ("number_of_ranks", ranks),
        ("number_of_nodes", 2),
        ("accelerators_per_node", ranks // 2),
        ("global_batch_size", 8),
        ("train_samples", 100),
        ("eval_samples", 20),
        *extra,
    ):
        log.event(start_s - 29, key, value)
    if size is not None:
        log.event(start_s - 29, "benchmark_size", size)
    if ours:
        log.event(start_s - 29, "suite_version", "1.0.0")
        log.event(start_s - 29, "model_parameters", 1_000_000)
        work = {"model_flops": 2e9, "executed_flops": 2e9, "algorithmic_bytes": 0.5e9}
        log.event(start_s - 29, "work_per_sample", work)
        log.event(start_s - 29, "ruleset", "mlhpc-1.0")
        log.event(start_s - 29, "cache_state", "unverified")
        log.event(start_s - 29, "baseline", {"mean": 0.9})
        spread = {"min": 1.0, "median": 2.0, "max": 3.0}
        log.event(start_s - 29, "startup", {"interpreter": spread, "imports": spread, "init": spread})
    log.event(start_s - 12, "init_stop")
    if staging is not None and staging[0] < 0:
        log.event(start_s + staging[0], "staging_start")
        log.event(start_s + staging[1], "staging_stop")
    log.event(start_s, "run_start")
    now = start_s
    if staging is not None and staging[0] >= 0:
        log.event(start_s + staging[0], "staging_start")
        now = start_s + staging[1]
        log.event(now, "staging_stop")
    for epoch, error in enumerate(errors, start=first_epoch):
        log.event(now, "epoch_start", epoch_num=epoch)
        now += first_extra_s * (epoch == first_epoch)
        if phases:
            parts = {
                "data_wait": 1.0,
                "forward_backward": 6.0,
                "exposed_communication": 2.0,
                "optimizer": 0.6,
                "other": 0.4,
            }
            value = parts | {"step": sum(parts.values()), "overlapped_communication": 1.5}
            log.event(now + train_s, "step_phases", value, epoch_num=epoch, first_step=0, steps=10, loss=error)
            log.event(now + train_s, "rank_phases", value, epoch_num=epoch)
            tokens = {
                "tokens_per_expert": [30 - epoch, 10, 20],
                "drop_rate": 0.01,
                "needed_capacity": 1.5,
                "padding_waste": 0.2,
            }
            stats = {"load": {"blocks.1.ffn": tokens}, "efficiency": {"exposed_communication_s": 0.1}}
            log.event(now + train_s, "window_stats", stats, epoch_num=epoch, first_step=0, steps=10)
            counts = {"loader_bytes": 1e6, "storage_bytes": 0.0, "all_reduce_bytes": 4e7, "all_reduce_calls": 20.0}
            own = [8.0 + 0.4 * (rank == 1) for rank in range(ranks)]
            times = {"step_s": [10.0] * ranks, "exposed_communication_s": [10.0 - seconds for seconds in own]}
            log.event(now + train_s, "rank_stats", rank_stats(counts, times, ranks), epoch_num=epoch, steps=10)
        log.event(now + train_s, "eval_start", epoch_num=epoch)
        log.event(now + train_s + eval_s, "eval_error", error, epoch_num=epoch)
        log.event(now + train_s + eval_s, "eval_stop", epoch_num=epoch)
        log.event(now + train_s + eval_s, "epoch_stop", epoch_num=epoch)
        now += train_s + eval_s + gap_s
    if others is not None:
        seconds = now - start_s
        use = {"node": 0, "cpus": 2, "own_s": seconds, "other_s": 2 * others * seconds, "stolen_s": 0.0}
        log.event(now, "other_work", [use], seconds=seconds, nodes=1, absent={})
    if stop:
        log.event(now, "run_stop", status=status)
    return log


def rank_stats(counts: dict[str, float], times: dict[str, list[float]], ranks: int) -> dict[str, dict[str, Any]]:
    """The value of a rank_stats event: every rank has the same counts."""
    return {
        name: {
            "min": min(values),
            "median": sorted(values)[len(values) // 2],
            "mean": sum(values) / len(values),
            "max": max(values),
            "min_rank": values.index(min(values)),
            "max_rank": values.index(max(values)),
            "values": values,
        }
        for name, values in ({name: [count] * ranks for name, count in counts.items()} | times).items()
    }


def write_package(
    root: Path,
    *,
    submitter: str = "ACME",
    system: str = "sys1",
    benchmark: str = "cosmoflow",
    runs: int = 10,
    division: str = "closed",
    nodes: int = 2,
    step_s: float = 1.0,
    **options: Any,
) -> Path:
    """A package <root>/<submitter> with that many runs; run i takes i x ``step_s`` longer an epoch and has its own seed.

    Runs began in another order, so that their times have no trend.

    A given ``train_s`` is that of every run, unless ``step_s`` is given too.
    """
    package = root / submitter
    for trial in range(runs):
        given = {
            "train_s": 10.0 + trial,
            "seed": trial,
            "start_s": 1000.0 * (7 * trial % 10 + trial // 10 * 10),
        } | options
        if step_s != 1.0:
            given["train_s"] += step_s * trial
        text = log_text(benchmark=benchmark, **given)
        text.write(package / "results" / system / "strong" / benchmark / f"result_{trial}.txt")
    description = {
        "submitter": submitter,
        "division": division,
        "system_name": system,
        "number_of_nodes": str(nodes),
        "accelerators_per_node": "2",
        "host_processors_per_node": "1",
        "accelerator_model_name": "A1",
    }
    (package / "systems").mkdir(parents=True, exist_ok=True)
    (package / "systems" / f"{system}.json").write_text(json.dumps(description))
    return package


def small_card() -> Card:
    """A card of cosmoflow with sizes mini and other."""
    size = SizeCard(
        description="small",
        metric="eval_error",
        metric_name="mean absolute error",
        threshold=0.2,
        direction="min",
        required_runs=3,
        train_samples=100,
        eval_samples=20,
        model_parameters=10,
        forward_flops_per_sample=1.0,
        training_flops_per_sample=3.0,
        sample_bytes=4,
        official=OfficialRules(benchmark="cosmoflow", threshold=0.124, identical=False, required_runs=10),
        constraints={},
    )
    return Card(
        version=1,
        workload="cosmoflow",
        mlperf_name="cosmoflow",
        title="CosmoFlow",
        domain="cosmology",
        reference="none",
        sizes={"mini": size, "other": size},
    )


def write_ceilings(path: Path, system: str = "testbed", *, ranks: int = 4, faster: float = 1.0, **changes: Any) -> Path:
    """A ceilings file of a CPU host with three cache levels; per rank 100 GFLOP/s, 10 GB/s of memory, all-reduce at 1 GB/s."""

    def roof(resource: str, name: str, value: float, **more: Any) -> dict[str, Any]:
        unit = "FLOP/s" if resource == "compute" else "B/s"
        fixed = {"mode": None, "dtype": None, "n": 7, "spread": 0.02, "capacity_bytes": None, "library": "mkl"}
        return {
            "resource": resource,
            "name": name,
            "value": value * faster,
            "unit": unit,
            **fixed,
            "ranks": ranks,
        } | more

    sizes = (1e3, 1e5, 1e7)
    points = [{"x": x, "value": x / (1e-4 + x / 1e9), "n": 5, "seconds": (1e-4 + x / 1e9) / faster} for x in sizes]
    products = [{"x": x, "value": 1e9, "n": 5, "seconds": x * 1e-7} for x in (16, 1024)]
    document = {
        "version": 1,
        "kind": "ceilings",
        "system": system,
        "date": "2026-11-20T12:00:00Z",
        "ranks": ranks,
        "nodes": 2,
        "device": {"type": "cpu", "name": "Test CPU", "threads": 1},
        "versions": {"torch": "2.13.0"},
        "roofs": [
            roof("compute", "gemm", 100e9, mode="sustained", dtype="float32", shape=[1024, 1024, 1024]),
            roof("compute", "gemm", 110e9, mode="burst", dtype="float32"),
            roof("memory", "L1", 200e9, mode="read", capacity_bytes=32768),
            roof("memory", "L2", 60e9, mode="read", capacity_bytes=1 << 20),
            roof("memory", "dram", 9e9, mode="triad"),
            roof("memory", "dram", 10e9, mode="read"),
            roof("storage_read", "/scratch", 0.5e9, mode="cold"),
            roof("storage_read", "/scratch", 2e9, mode="warm"),
        ],
        "curves": [
            {"resource": "compute", "name": "gemm", "points": products},
            {
                "resource": "all_reduce",
                "name": "gloo",
                "dtype": "float32",
                "ranks": ranks,
                "nodes": 2,
                "points": points,
            },
        ],
        "not_measured": [{"resource": "host_link", "reason": "the device is the host"}],
    }
    path.write_text(json.dumps(document | changes))
    return path


def write_counters(path: Path, system: str = "testbed", size: str = "mini", **changes: Any) -> Path:
    """A counters file of twelve kernels over ten steps: convolutions that reuse caches, an element-wise one that streams."""
    kernels = [
        {
            "name": f"conv3d_{i}",
            "count": 10,
            "seconds": 0.5 / (i + 1),
            "flops": 8e9 / (i + 1),
            "bytes": {"L1": 4e9 / (i + 1), "L2": 1e9 / (i + 1), "dram": 0.3e9 / (i + 1)},
        }
        for i in range(11)
    ]
    kernels.append(
        {"name": "relu", "count": 30, "seconds": 0.2, "flops": 1e8, "bytes": {"L1": 1e9, "L2": 1e9, "dram": 1e9}}
    )
    document = {
        "version": 1,
        "kind": "counters",
        "system": system,
        "benchmark": "cosmoflow",
        "size": size,
        "tool": "a test",
        "steps": 10,
        "kernels": kernels,
    }
    path.write_text(json.dumps(document | changes))
    return path


def write_run_folder(root: Path, name: str = "run1", runs: int = 3, **options: Any) -> Path:
    """A run folder of ours below ``root``: run.json and logs with everything our runs log."""
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"version": 1}')
    for trial in range(runs):
        given = {"size": "mini", "ours": True, "phases": True, "train_s": 10.0 + trial, "seed": trial} | options
        text = log_text(**given)
        parts = {"useful_s": 70.0 + trial, "stalled_s": 2.0, "lost_s": 0.0, "starting_s": 20.0, "down_s": 0.0}
        spent = parts | {"wall_s": sum(parts.values()), "checkpoint": {"saves": 2}, "interruptions": []}
        text.event(1e4, "goodput", spent)
        text.write(folder / f"result_{trial}.txt")
    return folder


def write_course_runs(root: Path, workload: str = "swinv2_moe", runs: int = 3, last_metric: float = 1.0) -> Path:
    """A run folder of `smoke` with the losses and metrics of healthy runs of the card's reference course.

    ``last_metric``: times the metric after the last evaluation of the last run.
    """
    descriptor = load_descriptor(workload)
    (course,) = read_reference_courses(descriptor.folder, "smoke")
    folder = root / "runs" / workload
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"version": 1}')
    facts = {"submission_benchmark": descriptor.card().mlperf_name, "benchmark_size": "smoke"}
    facts |= {"train_samples": 100, "eval_samples": 20, "number_of_ranks": 1, "submission_platform": "workshop"}
    facts |= {"run_config": {"precision": course.precision}, **course.hyperparameters}
    last = max(name for name in course.values if name.startswith("eval_"))
    for number in range(runs):
        text, now = LogText(), 0.0
        for key, value in (facts | {"seed": number}).items():
            text.event(-1.0, key, value)
        text.event(0.0, "run_start")
        for name, values in course.values.items():
            value = values[number]
            if window := re.fullmatch(r"loss of epoch (\d+), steps (\d+) to (\d+)", name):
                epoch, first, end = map(int, window.groups())
                if first == 0:
                    text.event(now, "epoch_start", epoch_num=epoch)
                now += 1.0
                text.event(now, "step_phases", {}, epoch_num=epoch, first_step=first, steps=end - first + 1, loss=value)
            elif metric := re.fullmatch(r"(eval_\w+) after epoch (\d+)", name):
                value *= last_metric if name == last and number == runs - 1 else 1.0
                epoch = int(metric[2])
                text.event(now, "eval_start", epoch_num=epoch)
                now += 1.0
                for key, found in ((metric[1], value), ("eval_stop", None), ("epoch_stop", None)):
                    text.event(now, key, found, epoch_num=epoch)
        text.event(now + 1.0, "run_stop", status="success")
        text.write(folder / f"result_{number}.txt")
    return folder


@pytest.fixture(scope="session")
def log() -> Callable[..., LogText]:
    return log_text


@pytest.fixture(scope="session")
def package() -> Callable[..., Path]:
    return write_package


@pytest.fixture(scope="session")
def run_folder() -> Callable[..., Path]:
    return write_run_folder


@pytest.fixture(scope="session")
def ceilings() -> Callable[..., Path]:
    return write_ceilings


@pytest.fixture(scope="session")
def counters() -> Callable[..., Path]:
    return write_counters


@pytest.fixture(scope="session")
def cards() -> dict[str, Card]:
    return {"cosmoflow": small_card()}
